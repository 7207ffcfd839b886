"""Networks in the test's process, as users have them, and comparisons of their state."""

import copy

import timm
import torch

from camserve_server.models.hooks import hook_count
from camserve_server.models.source import IMAGENET_MEAN, IMAGENET_STD


def trained():
    """Return a network in the middle of its training: one layer frozen, one in evaluation mode."""
    torch.manual_seed(0)
    module = timm.create_model("test_resnet", num_classes=5)
    module.layer1.requires_grad_(requires_grad=False)
    module.layer2.eval()
    return module


def state_of(module):
    """Return everything that serving might change in a network."""
    return {
        "modes": {name: part.training for name, part in module.named_modules()},
        "gradients": {name: (parameter.requires_grad, parameter.grad) for name, parameter in module.named_parameters()},
        "addresses": {name: tensor.data_ptr() for name, tensor in module.state_dict(keep_vars=True).items()},
        "values": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "hooks": [(name, list(part._forward_hooks.values())) for name, part in module.named_modules()],
        "count": hook_count(module),
    }


def changes(before, after):
    """Return the names of the values that differ between two states of a network."""
    values = [name for name, value in before["values"].items() if not torch.equal(value, after["values"][name])]
    return values + [key for key in before if key != "values" and before[key] != after[key]]


def gradcam(module, image):
    """Return Grad-CAM of class 3 at layer4, computed with one of torch's hooks, as the expected value."""
    module, outputs = copy.deepcopy(module).eval(), []
    module.layer4.register_forward_hook(lambda _module, _args, output: outputs.append(output) or output.retain_grad())
    mean, std = (torch.tensor(values, dtype=image.dtype)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
    module(((image / 255 - mean) / std)[None].requires_grad_())[0, 3].backward()
    return (outputs[0].grad.mean((2, 3), keepdim=True) * outputs[0]).sum(1)[0].detach().numpy()

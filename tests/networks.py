"""Networks of the test's own process, as a data scientist holds them, and what of them may change."""

import copy

import torch
from torchvision.models import resnet18

from camserve_server.models.hooks import hook_count
from camserve_server.models.sources import IMAGENET_MEAN, IMAGENET_STD


def trained():
    """A network in the middle of its training: one part frozen, a hook of its own, batch norms in training mode."""
    torch.manual_seed(0)
    module = resnet18(num_classes=5)
    module.layer1.requires_grad_(requires_grad=False)
    module.layer2.eval()
    return module


def state_of(module):
    """Everything that serving might change in a network."""
    return {
        "modes": {name: one.training for name, one in module.named_modules()},
        "gradients": {name: (one.requires_grad, one.grad) for name, one in module.named_parameters()},
        "places": {name: one.data_ptr() for name, one in module.state_dict(keep_vars=True).items()},
        "values": {name: one.clone() for name, one in module.state_dict().items()},
        "hooks": [(name, list(one._forward_hooks.values())) for name, one in module.named_modules()],
        "count": hook_count(module),
    }


def changes(before, after):
    """Name what is not the same in two states of a network."""
    values = [name for name, one in before["values"].items() if not torch.equal(one, after["values"][name])]
    return values + [key for key in before if key != "values" and before[key] != after[key]]


def gradcam(module, image):
    """Grad-CAM of class 3 at layer4, by a hook of torch's own: the oracle."""
    module, kept = copy.deepcopy(module).eval(), []
    module.layer4.register_forward_hook(lambda _module, _args, output: kept.append(output) or output.retain_grad())
    mean, std = (torch.tensor(one, dtype=image.dtype)[:, None, None] for one in (IMAGENET_MEAN, IMAGENET_STD))
    module(((image / 255 - mean) / std)[None].requires_grad_())[0, 3].backward()
    return (kept[0].grad.mean((2, 3), keepdim=True) * kept[0]).sum(1)[0].detach().numpy()

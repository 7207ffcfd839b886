"""From the image that a model sees to the input that it gets: normalised, viewed, edited."""

import torch
from torch import Tensor
from torch.nn import functional

from camserve_server.types import Edit, Preprocess, View


def normalise(images: Tensor, preprocess: Preprocess) -> Tensor:
    """Turn uint8 images [B,h,w,3] into the model's input [B,3,h,w], float32."""
    mean = torch.tensor(preprocess.mean, device=images.device)
    std = torch.tensor(preprocess.std, device=images.device)
    # In place: three more images of float32 would cost as much as half of a small model.
    return images.float().div_(255).sub_(mean).div_(std).permute(0, 3, 1, 2)


def viewed(image: Tensor, view: View) -> Tensor:
    """Return a view of a normalised input [3,H,W]."""
    if view.scale != 1:
        height, width = image.shape[1:]
        size = view.enlarged(height, width)
        large = functional.interpolate(image[None], size, mode="bilinear", align_corners=False)[0]
        image = large[:, view.top : view.top + height, view.left : view.left + width]
    if view.noise:
        generator = torch.Generator().manual_seed(view.seed)
        image = image + view.noise * torch.randn(image.shape, generator=generator).to(image)
    image = image * view.gain
    return image.flip(-1) if view.mirrored else image


def edited(image: Tensor, edit: Edit) -> Tensor:
    """Return an edit of a normalised input [3,H,W]: keep · x + (1 − keep) · fill."""
    if edit.keep is None:
        return image if edit.fill is None else torch.from_numpy(edit.fill).to(image)
    keep = torch.from_numpy(edit.keep).to(image)
    if edit.fill is None:
        return keep * image
    return torch.lerp(torch.from_numpy(edit.fill).to(image), image, keep)

"""A TorchServe handler that answers a photo with a Grad-CAM overlay, as one who knows PyTorch well would write it.

It runs inside TorchServe's worker. One forward pass for the whole batch, and one backward pass that ends at the layer:
with its parameters frozen, the model keeps no graph of what lies before it. `by: captum` in the archive's configuration
takes the map from Captum's `LayerGradCam` instead, the library that TorchServe's own explanations use.
"""

import io
from typing import Any, TypeAlias

import cv2
import numpy as np
import torch
from captum.attr import LayerGradCam
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torchvision.models import ResNet50_Weights
from ts.torch_handler.base_handler import BaseHandler

QUALITY, ALPHA = 90, 0.5


Photo: TypeAlias = NDArray[np.uint8]
Maps: TypeAlias = NDArray[np.float32]


class GradCam(BaseHandler):
    """Explain the most probable class of each photo at the last stage of a ResNet."""

    def initialize(self, context: Any) -> None:
        """Load the model, and listen to its last stage."""
        super().initialize(context)
        self.transforms = ResNet50_Weights.IMAGENET1K_V2.transforms()
        self.by_captum = self.model_yaml_config["by"] == "captum"
        self.captum = LayerGradCam(self.model, self.model.layer4)
        if not self.by_captum:
            self.model.requires_grad_(requires_grad=False)
            self.model.layer4.register_forward_hook(self._keep)
        print("torch threads:", torch.get_num_threads())

    def _keep(self, _layer: nn.Module, _inputs: object, output: Tensor) -> None:
        self.activations = output.requires_grad_()

    def preprocess(self, data: list[dict[str, Any]]) -> tuple[list[Photo], Tensor]:
        """Decode the photos, RGB, and resize, crop and normalise them to float32 [B, 3, 224, 224]."""
        images = [Image.open(io.BytesIO(row.get("data") or row["body"])).convert("RGB") for row in data]
        batch = torch.stack([self.transforms(image) for image in images])
        return [np.asarray(image) for image in images], batch

    def inference(self, data: tuple[list[Photo], Tensor], *_args: Any, **_kwargs: Any) -> tuple[list[Photo], Maps]:
        """Return the photos and their maps, float32 [B, 7, 7], 0 to 1."""
        photos, batch = data
        maps = (self._by_captum(batch) if self.by_captum else self._by_hooks(batch)).clamp(min=0)
        return photos, (maps / maps.amax((1, 2), keepdim=True).clamp(min=1e-30)).numpy()

    def _by_hooks(self, batch: Tensor) -> Tensor:
        score = self.model(batch).amax(1).sum()
        (gradients,) = torch.autograd.grad(score, self.activations)
        return (gradients.mean((2, 3), keepdim=True) * self.activations).sum(1).detach()

    def _by_captum(self, batch: Tensor) -> Tensor:
        with torch.inference_mode():
            classes = self.model(batch).argmax(1)
        maps: Tensor = self.captum.attribute(batch, classes.clone())
        return maps[:, 0].detach()

    def postprocess(self, data: tuple[list[Photo], Maps]) -> list[bytes]:
        """Draw the maps over the photos, and pack them as JPEGs."""
        return [self._overlay(photo, heat) for photo, heat in zip(*data, strict=True)]

    def _overlay(self, photo: Photo, heat: NDArray[np.float32]) -> bytes:
        """Draw a map over the part of the photo that the centre crop left."""
        height, width = photo.shape[:2]
        side = round(min(height, width) * self.transforms.crop_size[0] / self.transforms.resize_size[0])
        top, left = (height - side) // 2, (width - side) // 2
        grey = (cv2.resize(heat, (side, side), interpolation=cv2.INTER_LINEAR) * 255).astype(np.uint8)
        picture = cv2.cvtColor(photo, cv2.COLOR_RGB2BGR)
        seen = picture[top : top + side, left : left + side]
        coloured = cv2.applyColorMap(grey, cv2.COLORMAP_JET)
        cv2.addWeighted(seen, 1 - ALPHA, coloured, ALPHA, 0, dst=seen)
        return bytes(cv2.imencode(".jpg", picture, (cv2.IMWRITE_JPEG_QUALITY, QUALITY))[1])

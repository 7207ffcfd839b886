"""A detector of Ultralytics: YOLOv5u, v8 or 11. Its licence, the AGPL-3.0, and the usage are in docs/yolo.md.

From this folder: YOLO_MODEL=yolo11n.pt camserve-server serve --model yolo=yolo:build
"""

import os
from typing import Any

from torch import Tensor, nn
from torchvision.ops import batched_nms, box_convert
from ultralytics import YOLO

from camserve_server.models import KeepAspect, Preprocess, Source


class Detector(nn.Module):
    """A network of Ultralytics with the output of torchvision's detectors: boxes, labels and scores of each image."""

    score_thresh, overlap, objects = 0.25, 0.7, 300  # as in Ultralytics' predict

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network, self.num_classes = network, len(network.names)
        self.backbone = nn.Identity()  # camserve's default layer is the last one that all its outputs depend on
        network.model[-1].register_forward_pre_hook(self._show_scales)
        network.model[-1].dynamic = True  # otherwise the head keeps the anchors of the last input's size

    def _show_scales(self, _head: nn.Module, args: Any) -> Any:
        return self.backbone(args[0])

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        """Detect objects in images [B,3,H,W]."""
        (_, raw), head = self.network(images), self.network.model[-1]
        # Boxes are decoded apart from the scores. Then both share only the layers before the head: camserve's pyramid.
        boxes = head.decode_bboxes(head.dfl(raw["boxes"]), head.anchors[None]) * head.strides
        corners = box_convert(boxes.mT, "cxcywh", "xyxy")
        return [self._objects(*image) for image in zip(corners, raw["scores"].sigmoid().mT, strict=True)]

    def _objects(self, boxes: Tensor, probabilities: Tensor) -> dict[str, Tensor]:
        scores, labels = probabilities.max(1)
        sure = scores > self.score_thresh
        found = {"boxes": boxes, "labels": labels, "scores": scores, "class_scores": probabilities}
        found = {name: values[sure] for name, values in found.items()}
        kept = batched_nms(found["boxes"], found["scores"], found["labels"], self.overlap)[: self.objects]
        return {name: values[kept] for name, values in found.items()}


def build() -> Source:
    """Load the model; its photos keep their proportions, with grey borders, as in Ultralytics' predict."""
    network = YOLO(os.environ.get("YOLO_MODEL", "yolo11n.pt")).model.float()
    letterbox = KeepAspect(640, 640, multiple=32, fit="pad")
    preprocess = Preprocess(letterbox.largest, letterbox, "linear", (0, 0, 0), (1, 1, 1), fill=114)
    return Source(Detector(network), preprocess, tuple(network.names.values()))

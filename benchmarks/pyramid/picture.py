"""Picture of small and large objects, explained on one layer and on all scales."""

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from benchmarks.pyramid import measure, toy
from camserve_server import Explainer

CELL = 144  # pixels


def draw(path: Path, network: toy.Detector, scenes: int = 2, method: str = "layercam") -> None:
    """Write a picture with two columns for each object: its overlay on the default layer, and that of the pyramid.

    There is a row for each scene, with the first small and the first large object that the detector finds in it. The
    first column of each object is the scene with the object's box.

    Args:
        path: the file to write.
        network: a trained detector.
        scenes: the number of scenes.
        method: the method.
    """
    rows = []
    with Explainer(network, **toy.options()) as explainer:
        layers = [explainer.model().default_layer], ["pyramid"]
        for scene in toy.scenes(scenes, 31):
            cells = []
            objects = measure.found_objects(explainer, scene)
            for found in [next(each for each in objects if each.small is small) for small in (True, False)]:
                cells.append(_with_box(scene.photo, found.box))
                for chosen in layers:
                    result = explainer.explain(
                        scene.photo, methods=method, targets=[found.target], layers=chosen, overlay="png"
                    )
                    cells.append(np.asarray(result.explanations[0].image.convert("RGB")))
            rows.append(np.hstack([cv2.resize(each, (CELL, CELL), interpolation=cv2.INTER_CUBIC) for each in cells]))
    cv2.imwrite(str(path), cv2.cvtColor(np.vstack(rows), cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 85])


def _with_box(photo: toy.Photo, box: NDArray[np.float32]) -> toy.Photo:
    left, top, right, bottom = (round(float(edge)) for edge in box)
    boxed = photo.copy()
    cv2.rectangle(boxed, (left - 1, top - 1), (right, bottom), (255, 255, 255), 1)
    return boxed

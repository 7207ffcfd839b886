"""The recorded calls of a client, and their photo. A change here needs new records."""

import functools
import io
import tempfile
from pathlib import Path

import numpy as np
from google.protobuf import descriptor_pool, message_factory
from PIL import Image

import camserve

ROWS, COLUMNS = np.mgrid[:16, :24]
PIXELS = np.stack([COLUMNS * 10, ROWS * 15, ROWS * COLUMNS * 7 % 256], -1).astype(np.uint8)
"""A photo as high as the models' input, so that it is not resized."""

MIRRORED = PIXELS[:, ::-1].copy()
SLOW = {"kernel_shap", "lime"}  # both import scikit-learn
ATTENTION = {"attention_rollout", "gradient_rollout", "chefer", "legrad", "gradeclip"}  # no network here has attention
FEW = {"samples": 4, "steps": 4, "scales": 3}
BARE = {"overlay": None, "max_predictions": 0}


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@functools.cache
def photo_file():
    """Return the path of the photo as a file."""
    path = Path(tempfile.mkdtemp()) / "photo.png"
    path.write_bytes(png(PIXELS))
    return path


def explain(**options):
    return "explain", (png(PIXELS),), options


def methods(known):
    """Return a call for each method that works on a network without attention.

    Args:
        known: The names of the parameters of each method, by its name.
    """
    return {
        f"method {name}": explain(methods=(name, {key: FEW[key] for key in sorted(FEW.keys() & known[name])}), **BARE)
        for name in sorted(known.keys() - SLOW - ATTENTION)
    }


OPTIONS = {
    "defaults": explain(),
    "a path": ("explain", (photo_file(),), {}),
    "a path as text": ("explain", (str(photo_file()),), {}),
    "a PIL image": ("explain", (Image.fromarray(PIXELS),), {}),
    "an array": ("explain", (PIXELS,), {}),
    "top_k": explain(top_k=3, overlay=None),
    "several methods, layers and targets": explain(
        methods=["gradcam", "layercam"], layers=["1", "3"], targets=["red fox", 2], **BARE
    ),
    "a method's modifiers": explain(
        methods=camserve.Method("layercam", augmentation_smoothing=True, eigen_smoothing=True), **BARE
    ),
    "a parameter that is a word": explain(methods=("gradcam_plus_plus", {"variant": "official"}), **BARE),
    "fusion mean": explain(layers=["1", "3"], fusion="mean", **BARE),
    "fusion max": explain(layers=["1", "3"], fusion="max", **BARE),
    "fusion product": explain(layers=["1", "3"], fusion="product", **BARE),
    "a PNG": explain(overlay="png", heatmap_image="png", colormap="viridis", alpha=0.25, heatmap=False),
    "a WebP": explain(overlay="webp", heatmap_image="webp", quality=75, max_side=16),
    "progress": ("explain", (png(PIXELS),), {"on_progress": lambda _done, _total: None, **BARE}),
    "a photo seen upright": ("explain", (png(PIXELS.transpose(1, 0, 2).copy()),), BARE),
} | {
    f"profile {name}": explain(profile=name, intensity=True, overlay="png")
    for name in ("paper", "grad-cam", "torchcam", "captum")
}

TARGETS = {
    "a class": explain(targets=4, **BARE),
    "a label": explain(targets="Tabby_cat", **BARE),
    "contrast": explain(targets=camserve.contrast("red fox", 1), **BARE),
    "probability": explain(targets=camserve.probability("red fox"), **BARE),
    "finer": explain(targets=camserve.finer(3), **BARE),
    "finer against": explain(targets=camserve.finer(3, "red fox", 1, weight=0.5), **BARE),
    "similarity to a classifier": explain(targets=camserve.similarity(png(MIRRORED)), **BARE),
    "similarity": explain(model="embedder", targets=camserve.similarity(png(MIRRORED)), overlay=None),
    "segment": explain(model="segmenter", targets=camserve.segment("fox"), overlay=None),
    "segment of a region": explain(model="segmenter", targets=camserve.segment(2, (4, 0, 12, 9)), **BARE),
    "detection": explain(model="detector", targets=camserve.detection("frog"), overlay=None),
    "detection in a box": explain(
        model="detector", targets=camserve.detection(1, camserve.Box(5.0, 2.0, 14.0, 9.0)), **BARE
    ),
}

OTHERS = {
    "health": ("health", (), {}),
    "models": ("models", (), {}),
    "model": ("model", ("classifier",), {}),
    "default model": ("model", (), {}),
    "layers": ("layers", ("segmenter",), {}),
    "methods": ("methods", (), {}),
    "metrics": ("metrics", (), {}),
    "inspect": ("inspect", (png(PIXELS),), {}),
    "inspect some layers": (
        "inspect",
        (png(PIXELS),),
        {"model": "classifier", "layers": ["0", "2"], "target": camserve.contrast(0, 1)},
    ),
    "features": ("features", (png(PIXELS),), {"picture": None}),
    "features as a picture": ("features", (png(PIXELS),), {"maps": False, "picture": "webp", "top": 1}),
    "features by gradient": (
        "features",
        (png(PIXELS),),
        {"layer": "1", "rank": "gradient", "top": 2, "target": "grey seal", "picture": None},
    ),
    "features of a segmentation": (
        "features",
        (png(PIXELS),),
        {"model": "segmenter", "maps": False, "picture": "jpeg", "top": 1, "colormap": "jet"},
    ),
    "evaluate": ("evaluate", (png(PIXELS),), {"methods": ["gradcam", "saliency"], **BARE}),
    "evaluate in a box": (
        "evaluate",
        (png(PIXELS),),
        {"metrics": ["pointing_game", ("deletion", {"steps": 4})], "box": (4, 2, 20, 14), **BARE},
    ),
    "evaluate by the other metrics": (
        "evaluate",
        (png(PIXELS),),
        {
            "metrics": [
                "road",
                "average_drop",
                "increase",
                ("max_sensitivity", {"samples": 2}),
                "randomisation",
                "sparseness",
                "complexity",
                "energy_in_box",
            ],
            "box": camserve.Box(4.0, 2.0, 20.0, 14.0),
            **BARE,
        },
    ),
    "stream": ("explain_many", ([png(PIXELS), png(MIRRORED), PIXELS],), {"top_k": 2, **BARE}),
    "stream with an error": (
        "explain_many",
        ([png(PIXELS), b"no photo", png(MIRRORED)],),
        {"on_error": "return", "in_flight": 2, **BARE},
    ),
}

REFUSED = {
    "no such model": explain(model="absent"),
    "no such label": explain(targets="absent"),
    "no such method": explain(methods="absent"),
    "no such layer": explain(layers="absent"),
    "a parameter out of range": explain(methods=("smoothgrad", {"samples": 0})),
    "a layer without a grid": explain(layers="6"),
    "an unreadable photo": ("explain", (b"no photo",), {}),
    "a target that does not fit": explain(targets=camserve.segment("red fox")),
    "no such metric": ("evaluate", (png(PIXELS),), {"metrics": "absent"}),
    "no such service": ("health", ("absent",), {}),
    "an unknown model to load": ("load_model", ("absent",), {}),
}

LOADING = {
    "unload": ("unload_model", ("embedder",), {}),
    "an unloaded model": explain(model="embedder"),
    "load": ("load_model", ("embedder",), {}),
}


def inference(kind, **fields):
    """Return a message of the Open Inference Protocol."""
    descriptor = descriptor_pool.Default().FindMessageTypeByName(f"open_inference.v2.{kind}")
    return message_factory.GetMessageClass(descriptor)(**fields)


def inference_calls():
    """Return RPCs and requests of the Open Inference Protocol, by name."""
    photo = png(PIXELS)
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1]}
    image = {**tensor, "contents": {"bytes_contents": [photo]}}
    typed = inference("ModelInferRequest", model_name="classifier", id="7", inputs=[image])
    raw = inference("ModelInferRequest", model_name="classifier", inputs=[tensor])
    raw.raw_input_contents.append(len(photo).to_bytes(4, "little") + photo)
    with_parameters = inference("ModelInferRequest", model_name="classifier", inputs=[image])
    with_parameters.parameters["method"].string_param = "layercam"
    with_parameters.outputs.add(name="heatmap")
    return {
        "live": ("ServerLive", inference("ServerLiveRequest")),
        "ready": ("ServerReady", inference("ServerReadyRequest")),
        "model ready": ("ModelReady", inference("ModelReadyRequest", name="classifier")),
        "server metadata": ("ServerMetadata", inference("ServerMetadataRequest")),
        "model metadata": ("ModelMetadata", inference("ModelMetadataRequest", name="classifier")),
        "model configuration": ("ModelConfig", inference("ModelConfigRequest", name="classifier")),
        "models": ("RepositoryIndex", inference("RepositoryIndexRequest")),
        "infer": ("ModelInfer", typed),
        "infer from raw contents": ("ModelInfer", raw),
        "infer with parameters": ("ModelInfer", with_parameters),
        "infer of an unknown model": ("ModelInfer", inference("ModelInferRequest", model_name="absent")),
        "stream": ("ModelStreamInfer", typed),
    }


def everything(known):
    """Return every call but those of `LOADING`, by name; for the parameter see `methods`."""
    return {**OPTIONS, **methods(known), **TARGETS, **OTHERS, **REFUSED}

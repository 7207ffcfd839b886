"""Valid images and messages, and random mutants of them; the same seed gives the same mutants."""

import io
import random

import numpy as np
from PIL import Image

from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2
from camserve_server.api.oip.v2 import inference_pb2
from robustness import raster_files

INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
MAX_MUTANT = 1 << 16  # bytes


def picture(width=40, height=32):
    """Return a picture with flat parts, edges, a ramp and noise."""
    random_numbers = np.random.default_rng(7)
    image = np.zeros((height, width, 3), np.uint8)
    image[:, :, 0] = np.linspace(0, 255, width, dtype=np.uint8)
    image[8:20, 8:20] = (20, 200, 90)
    image[20:] = random_numbers.integers(0, 255, (height - 20, width, 3))
    return Image.fromarray(image)


def encode(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def photos():
    """Return valid files of six formats by name, several of most, for a model of RGB; the server refuses GIF."""
    whole = picture()
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "jpeg": encode(whole, "JPEG", quality=80),
        "progressive.jpeg": encode(whole, "JPEG", quality=70, progressive=True, exif=exif),
        "cmyk.jpeg": encode(whole.convert("CMYK"), "JPEG"),
        "png": encode(whole, "PNG"),
        "palette.png": encode(whole.quantize(16), "PNG", transparency=0),
        "deep.png": encode(Image.fromarray(np.asarray(whole.convert("L"), np.uint16) * 257), "PNG"),
        "animated.png": encode(whole, "PNG", save_all=True, append_images=[whole.rotate(90)]),
        "webp": encode(whole, "WEBP", quality=70),
        "lossless.webp": encode(whole.convert("RGBA"), "WEBP", lossless=True),
        "animated.webp": encode(whole, "WEBP", save_all=True, append_images=[whole.rotate(90)]),
        "gif": encode(whole.quantize(16), "GIF"),
        "bmp": encode(whole, "BMP"),
        "palette.bmp": encode(whole.quantize(16), "BMP"),
        "tiff": encode(whole, "TIFF", compression="tiff_lzw"),
    }


def valid_images():
    """Return all valid files, each with the name of a model that takes it."""
    return [("tiny", data) for data in photos().values()] + [
        (name.partition("-")[0], data) for name, data in raster_files.files().items()
    ]


def requests():
    """Return valid requests of every RPC that has fields, each as the RPC's name and bytes."""
    image = photos()["jpeg"]
    name = explain_pb2.ClassName(class_index=1)
    rendering = explain_pb2.Rendering(overlay=1, heatmap=True, heatmap_image=2, alpha=0.3, max_side=32, quality=50)
    plain = explain_pb2.ExplainRequest(model="tiny", image=image, top_k=2, layers=["1"], rendering=rendering)
    methods = explain_pb2.ExplainRequest(
        image=image,
        methods=[
            explain_pb2.Method(name="smoothgrad", parameters={"samples": explain_pb2.Parameter(number=4)}),
            explain_pb2.Method(name="gradcam_plus_plus", parameters={"variant": explain_pb2.Parameter(text="paper")}),
            explain_pb2.Method(name="layercam", augmentation_smoothing=True),
        ],
        layers=["0", "1"],
        fusion=1,
        max_predictions=3,
    )
    targets = explain_pb2.ExplainRequest(
        image=image,
        targets=[
            explain_pb2.Target(class_index=1, softmax=True),
            explain_pb2.Target(contrast=explain_pb2.Contrast(why=name, why_not=explain_pb2.ClassName(class_index=2))),
            explain_pb2.Target(finer=explain_pb2.Finer(why=name, weight=0.5)),
            explain_pb2.Target(similarity=explain_pb2.Similarity(image=image)),
        ],
    )
    evaluation = evaluate_pb2.EvaluateRequest(
        explain=plain,
        metrics=[evaluate_pb2.Metric(name="deletion", parameters={"steps": explain_pb2.Parameter(number=4)})],
        box=explain_pb2.Box(left=1, top=1, right=20, bottom=20),
    )
    inspection = explain_pb2.InspectLayersRequest(
        model="tiny", image=image, layers=["0", "1"], target={"class_index": 1}
    )
    extraction = explain_pb2.ExtractFeaturesRequest(image=image, layer="1", rank=2, top=3, raw=True, picture=1)
    regions = explain_pb2.RegionOptions(quantile=0.8, max_regions=3, masks=True, draw=True)
    rendering = explain_pb2.Rendering(
        overlay=2, profile="PROFILE_SIGNED", contour_lines=3, color_bar=True, threshold_quantile=0.5, regions=regions
    )
    drawn = explain_pb2.ExplainRequest(image=image, rendering=rendering, class_map=True)
    changes = _interventions()
    changed = explain_pb2.ExplainRequest(model="tiny", image=image, interventions=changes)
    item = explain_pb2.ExplainStreamRequest(request_id="one", request=plain)
    messages = {
        "Explain": (plain, methods, targets, drawn, changed, _deep_photo()),
        "ExplainStream": (item,),
        "EstimateCost": (explain_pb2.EstimateCostRequest(explain=methods),),
        "Evaluate": (evaluation,),
        "InspectLayers": (inspection,),
        "ExtractFeatures": (extraction, *_extractions(image)),
        "GetModel": (models_pb2.GetModelRequest(name="tiny"),),
        "ListLayers": (models_pb2.ListLayersRequest(model="tiny"),),
        "LoadModel": (models_pb2.LoadModelRequest(name="tiny", weights="tiny.safetensors", sha256="0" * 64),),
        "UnloadModel": (models_pb2.UnloadModelRequest(name="tiny"),),
    }
    messages |= _inferences(image)
    return [(rpc, message.SerializeToString()) for rpc, group in messages.items() for message in group]


def _interventions():
    """Return an intervention of each kind."""
    intervention = explain_pb2.Intervention
    return [
        intervention(layer="0", channels=[1, 2], silence=True),
        intervention(layer="0", channels=[0], scale=0.5),
        intervention(layer="1", clamp=explain_pb2.Clamp(minimum=0, maximum=6), input=True),
        intervention(layer="1", channels=[3], replace_mean=True),
        intervention(layer="1", clip_gradient=1),
    ]


def _deep_photo():
    """Return a request with a photo of 12 channels, and what says how its values are read and shown."""
    return explain_pb2.ExplainRequest(
        model="bands",
        image=raster_files.small_photo(),
        value_range={"minimum": 0, "maximum": 4095},
        methods=[explain_pb2.Method(name="saliency", per_channel=True, input_channels=[0, 11])],
        rendering=explain_pb2.Rendering(overlay=2, bands=[3, 2, 1], window={"centre": 2000, "width": 500}),
    )


def _extractions(image):
    """Return requests of components, concepts and heads."""
    numbers = np.arange(8, dtype="<f4")
    basis = explain_pb2.FeatureBasis(
        mean=numbers[:4].tobytes(), vectors=numbers[:4].tobytes(), shares=numbers[:1].tobytes(), ranges=bytes(8)
    )
    request, pca = explain_pb2.ExtractFeaturesRequest, explain_pb2.CHANNEL_RANK_PCA
    return (
        request(image=image, layer="1", rank=pca, fit_images=[image], foreground=True, picture=2),
        request(image=image, layer="1", rank=pca, basis=basis, raw=True),
        request(
            image=image, layer="1", rank=explain_pb2.CHANNEL_RANK_FACTORS, raw=True, interventions=_interventions()
        ),
        request(image=image, model="attention", rank=explain_pb2.CHANNEL_RANK_HEADS, raw=True),
        request(image=image, layer="1", value_range={"minimum": 1, "maximum": 9}, colormap="jet", picture=1),
    )


def _inferences(image):
    """Return valid requests of the Open Inference Protocol: files and pixels, as raw and as typed contents."""
    infer, parameter = inference_pb2.ModelInferRequest, inference_pb2.InferParameter
    files = infer(model_name="tiny", id="one", outputs=[{"name": "overlay"}, {"name": "heatmap"}])
    files.inputs.add(name="image", datatype="BYTES", shape=[2, 1])
    files.raw_input_contents.append((len(image).to_bytes(4, "little") + image) * 2)
    pixels = infer(parameters={"method": parameter(string_param="smoothgrad"), "samples": parameter(int64_param=3)})
    pixels.inputs.add(name="image", datatype="UINT8", shape=[12, 10, 3])
    pixels.raw_input_contents.append(bytes(range(180)) * 2)
    floats = infer(parameters={"target": parameter(string_param="1 vs 2"), "alpha": parameter(double_param=0.3)})
    tensor = floats.inputs.add(name="image", datatype="FP32", shape=[1, 3, 4, 5])
    tensor.contents.fp32_contents.extend([0.5] * 60)
    model_rpcs = ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
    messages = {rpc: (getattr(inference_pb2, f"{rpc}Request")(name="tiny", version="1"),) for rpc in model_rpcs}
    load = inference_pb2.RepositoryModelLoadRequest(model_name="tiny")
    load.parameters["weights"].string_param = "tiny.safetensors"
    return messages | {
        "ModelInfer": (files, pixels, floats),
        "RepositoryIndex": (inference_pb2.RepositoryIndexRequest(ready=True),),
        "RepositoryModelLoad": (load,),
        "RepositoryModelUnload": (inference_pb2.RepositoryModelUnloadRequest(model_name="tiny"),),
    }


def _flip(chance, data):
    for _ in range(chance.choice((1, 1, 2, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _write(chance, data):
    size = chance.choice((1, 2, 4))
    number = chance.choice(INTERESTING) % (1 << 8 * size)
    at = chance.randrange(len(data))
    data[at : at + size] = number.to_bytes(size, chance.choice(("little", "big")))


def _change_header(chance, data):
    """Change one of the first 64 bytes, where headers are."""
    data[chance.randrange(min(64, len(data)))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))


def _cut(chance, data):
    del data[chance.randrange(len(data)) :]


def _remove(chance, data):
    at = chance.randrange(len(data))
    del data[at : at + chance.choice((1, 2, 4, 16, 64))]


def _repeat(chance, data):
    at, length = chance.randrange(len(data)), chance.choice((1, 4, 16, 64, 256))
    data[at:at] = data[at : at + length] * chance.choice((1, 2, 16))


def _insert(chance, data):
    at = chance.randrange(len(data))
    data[at:at] = chance.randbytes(chance.choice((1, 4, 16, 64)))


MUTATIONS = (_flip, _flip, _write, _write, _change_header, _change_header, _cut, _remove, _repeat, _insert)


def mutate(chance, data, others):
    """Return data with random mutations; one in ten continues with the bytes of another."""
    changed = bytearray(data)
    if chance.random() < 0.8 and raster_files.mutate(chance, changed):
        return bytes(changed)
    if chance.random() < 0.1:
        other = chance.choice(others)
        changed[chance.randrange(len(changed)) :] = other[chance.randrange(len(other)) :]
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        if changed:
            chance.choice(MUTATIONS)(chance, changed)
    return bytes(changed[:MAX_MUTANT])


def images(count, seed=1):
    """Yield `count` mutants of the files, each with the name of a model that takes the file."""
    chance, valid = random.Random(seed), valid_images()
    others = [data for _, data in valid]
    for number in range(count):
        model, data = valid[number % len(valid)]
        yield model, mutate(chance, data, others)


def messages(count, seed=2):
    """Yield `count` mutants of the requests, each with its RPC."""
    chance, valid = random.Random(seed), requests()
    others = [data for _, data in valid]
    for number in range(count):
        rpc, data = valid[number % len(valid)]
        yield rpc, mutate(chance, _without_image(chance, data), others)


def _without_image(chance, data):
    """Replace the image by zeros in seven of ten requests: mutations should change the other fields too."""
    jpeg = photos_jpeg()
    return data if chance.random() < 0.3 else data.replace(jpeg, jpeg[:8].ljust(len(jpeg), b"\0"))


_JPEG = []


def photos_jpeg():
    """Return the photo of every request, encoded once."""
    if not _JPEG:
        _JPEG.append(photos()["jpeg"])
    return _JPEG[0]

"""Layer inspection by a server: statistics of layers, ranked channels, their picture, and refusals."""

import asyncio
import copy
import io
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import torch
from google.rpc import error_details_pb2, status_pb2
from PIL import Image
from pytorch_grad_cam import DeepFeatureFactorization
from pytorch_grad_cam.utils.image import scale_cam_image

import camserve
from camserve.v1 import explain_pb2, explain_pb2_grpc, models_pb2, models_pb2_grpc
from camserve_server import Explainer
from camserve_server.api import codec
from camserve_server.core.limits import Limits
from camserve_server.imaging import fitting, render, tiles
from camserve_server.serving import channels
from camserve_server.serving.requests import FeaturesRequest
from methods.tools import doubled, error_ratio, inputs
from support import PHOTOS, jpeg, rows_waiting, serving, wait_until

SMALL = "small=torchvision:mobilenet_v3_small?weights=none&size=64"
PHOTO = PHOTOS["chelsea"].read_bytes()
GRID, DEEP, HEAD = "features.1", "features", "classifier.3"


@pytest.fixture(scope="module")
def served():
    with serving(models=(SMALL, "efficientnet_lite0"), device="cpu", threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def stub(served):
    with grpc.insecure_channel(served.address) as channel:
        yield explain_pb2_grpc.ExplainServiceStub(channel)


@pytest.fixture
def inspect(stub):
    return lambda **fields: stub.InspectLayers(explain_pb2.InspectLayersRequest(**{"image": PHOTO, **fields}))


@pytest.fixture
def extract(stub):
    def call(**fields):
        return stub.ExtractFeatures(explain_pb2.ExtractFeaturesRequest(**{"image": PHOTO, "raw": True, **fields}))

    return call


def maps(reply):
    return np.frombuffer(reply.maps, "<f4").reshape(len(reply.channels), reply.grid_height, reply.grid_width)


def target(index):
    return explain_pb2.Target(class_index=index)


# -------------------------------------------------------------------------------------------------------- InspectLayers


def test_layers_are_inspected_in_the_order_in_which_they_run(served, inspect):
    with grpc.insecure_channel(served.address) as channel:
        listed = models_pb2_grpc.ModelServiceStub(channel).ListLayers(models_pb2.ListLayersRequest()).layers
    reply = inspect()

    assert reply.model == "small"
    assert [layer.name for layer in reply.layers] == [each.name for each in listed]
    assert [list(layer.output_shape) for layer in reply.layers] == [list(each.output_shape) for each in listed]
    assert [layer.type for layer in reply.layers] == [each.type for each in listed]
    assert [layer.elements for layer in reply.layers] == [np.prod(layer.output_shape) for layer in reply.layers]
    assert reply.timing.compute_ms > 0


def test_containers_are_distinguished_from_their_layers(inspect):
    kinds = {layer.name: layer.container for layer in inspect(layers=["features.0.0", "features.0", DEEP, HEAD]).layers}

    assert kinds == {"features.0.0": False, "features.0": True, DEEP: True, HEAD: False}


def test_only_named_layers_are_inspected_in_the_order_of_the_request(inspect):
    reply = inspect(layers=[DEEP, HEAD, GRID])

    assert [layer.name for layer in reply.layers] == [DEEP, HEAD, GRID]


def test_predicted_class_is_differentiated_unless_another_target_is_named(inspect):
    predicted = inspect(layers=[HEAD])
    other = inspect(layers=[HEAD], target=target(7))
    against = inspect(
        layers=[HEAD],
        target=explain_pb2.Target(
            contrast=explain_pb2.Contrast(
                why=explain_pb2.ClassName(class_index=7), why_not=explain_pb2.ClassName(class_index=8)
            )
        ),
    )

    assert predicted.score == pytest.approx(predicted.layers[0].activation.maximum)
    assert predicted.score == pytest.approx(predicted.target.score)
    assert not predicted.HasField("contrast")
    assert other.target.class_index == 7
    assert (against.target.class_index, against.contrast.class_index) == (7, 8)
    # The gradient of a logit at the logits is 1 there and 0 elsewhere; of a difference of two, 1 and -1.
    assert other.layers[0].gradient.norm == 1
    assert other.layers[0].gradient.zeros == pytest.approx(0.999)
    assert against.layers[0].gradient.norm == pytest.approx(np.sqrt(2))
    assert against.layers[0].gradient.minimum == -1


def test_statistics_of_a_layer_equal_those_of_its_raw_maps(inspect, extract):
    (layer,) = inspect(layers=[GRID]).layers
    raw = maps(extract(layer=GRID, top=256)).astype(np.float64)

    assert layer.elements == raw.size
    assert layer.activation.mean == pytest.approx(raw.mean(), rel=1e-5)
    assert layer.activation.std == pytest.approx(raw.std(), rel=1e-5)
    assert (layer.activation.minimum, layer.activation.maximum) == pytest.approx((raw.min(), raw.max()), rel=1e-5)
    assert layer.activation.norm == pytest.approx(np.linalg.norm(raw), rel=1e-5)
    assert layer.activation.zeros == (raw == 0).mean()
    assert layer.activation.non_finite == 0


@pytest.mark.parametrize("rpc", ["InspectLayers", "ExtractFeatures"])
def test_response_has_the_callers_request_id(stub, rpc):
    request = {
        "InspectLayers": explain_pb2.InspectLayersRequest(image=PHOTO, layers=[HEAD]),
        "ExtractFeatures": explain_pb2.ExtractFeaturesRequest(image=PHOTO, raw=True, top=1),
    }[rpc]
    reply, call = getattr(stub, rpc).with_call(request, metadata=[("x-request-id", "call-7")])

    assert reply.request_id == "call-7"
    assert dict(call.trailing_metadata())["x-request-id"] == "call-7"


@pytest.fixture
def batches(served, monkeypatch):
    """Kind and number of rows of each batch."""
    found, worker = [], served.pipeline.batcher._workers[0]
    plain = worker.run

    def noted(pass_, rows):
        found.append((pass_.kind, len(rows)))
        return plain(pass_, rows)

    monkeypatch.setattr(worker, "run", noted)
    return found


def test_inspections_share_a_batch_and_explanations_run_between_them(served, stub, inspect, batches):
    batcher = served.pipeline.batcher
    served.do(batcher.pause)
    with ThreadPoolExecutor(4) as pool:
        try:
            calls = [pool.submit(inspect) for _ in range(3)]
            calls.append(pool.submit(stub.Explain, explain_pb2.ExplainRequest(image=PHOTO)))
            wait_until(lambda: rows_waiting(served) == 4)
        finally:
            served.do(batcher.resume)
        replies = [call.result(60) for call in calls]

    assert sorted(batches) == [("cam", 1), ("inspect", 3)]
    assert replies[0].layers == replies[1].layers == replies[2].layers


# ------------------------------------------------------------------------------------------------------ ExtractFeatures


@pytest.mark.parametrize("layer", ["", GRID, DEEP])
def test_channels_are_ranked_by_mean_activation_with_their_raw_maps(extract, layer):
    reply = extract(layer=layer, top=8)
    every = maps(extract(layer=layer, top=256)) if layer == GRID else None
    means = [channel.mean_activation for channel in reply.channels]

    assert reply.layer == (layer or DEEP)
    assert len(reply.channels) == 8 < reply.channel_count
    assert means == sorted(means, reverse=True)
    assert means == pytest.approx(maps(reply).mean((1, 2)).tolist(), rel=1e-5, abs=1e-7)
    if every is not None:
        assert np.sort(every.mean((1, 2)))[::-1][:8] == pytest.approx(means, rel=1e-5)


def test_channels_are_ranked_by_the_magnitude_of_their_gradient_weight(extract):
    reply = extract(layer=DEEP, top=256, rank=explain_pb2.CHANNEL_RANK_GRADIENT)
    weights = np.array([channel.gradient_weight for channel in reply.channels])

    assert list(np.abs(weights)) == sorted(np.abs(weights), reverse=True)
    assert weights.min() < 0 < weights.max()
    assert len({channel.index for channel in reply.channels}) == 256


def test_map_of_a_channel_is_the_same_in_either_rank(extract):
    by_activation, by_gradient = (extract(layer=GRID, top=256, rank=rank) for rank in (1, 2))
    activation_maps, gradient_maps = (
        {c.index: m for c, m in zip(r.channels, maps(r), strict=True)} for r in (by_activation, by_gradient)
    )

    assert by_activation.channel_count == len(activation_maps) == len(gradient_maps)  # fewer than were asked for
    assert [c.index for c in by_activation.channels] != [c.index for c in by_gradient.channels]
    assert all(np.allclose(activation_maps[index], gradient_maps[index], atol=1e-6) for index in activation_maps)


def test_weights_times_maps_add_up_to_gradcam(stub, extract):
    """Grad-CAM is the weighted sum of the maps."""
    reply = extract(model="efficientnet_lite0", layer="blocks.2", top=256, rank=explain_pb2.CHANNEL_RANK_GRADIENT)
    weights = np.array([channel.gradient_weight for channel in reply.channels])
    explained = stub.Explain(
        explain_pb2.ExplainRequest(
            image=PHOTO,
            model="efficientnet_lite0",
            layers=["blocks.2"],
            rendering=explain_pb2.Rendering(heatmap=True),
        )
    ).explanations[0]
    gradcam = np.frombuffer(explained.heatmap.data, "<f4").reshape(explained.heatmap.height, explained.heatmap.width)

    assert len(weights) == reply.channel_count
    assert explained.target.class_index == reply.target.class_index
    assert np.abs(np.einsum("k,khw", weights, maps(reply)) - gradcam).max() <= 1e-5 * np.abs(gradcam).max()


def order(rank, top):
    result = object.__new__(FeaturesRequest)
    object.__setattr__(result, "rank", rank)
    object.__setattr__(result, "top", top)
    return result


def test_equal_channels_are_ordered_by_index_and_non_finite_ones_are_last():
    values = np.array([1, np.nan, 3, 3, -5], np.float32)
    ones = values[:, None, None] * np.ones((5, 2, 2), np.float32)

    assert [channel.index for channel in channels.rank_channels(ones, values, order("activation", 5))] == [
        2,
        3,
        0,
        4,
        1,
    ]
    assert [channel.index for channel in channels.rank_channels(ones, values, order("gradient", 5))] == [
        4,
        2,
        3,
        0,
        1,
    ]
    assert [channel.index for channel in channels.rank_channels(ones, values, order("gradient", 2))] == [4, 2]


@pytest.mark.parametrize(("kind", "name"), [(1, "JPEG"), (2, "PNG"), (3, "WEBP")])
def test_picture_has_the_stated_format_and_size(extract, kind, name):
    reply = extract(picture=kind, raw=False, top=5)

    with Image.open(io.BytesIO(reply.picture.data)) as picture:
        assert picture.format == name
        assert picture.size == (reply.picture.width, reply.picture.height)
    assert reply.picture.format == kind
    assert reply.maps == b""
    assert (reply.photo.width, reply.photo.height) == (451, 300)


# ---------------------------------------------------------------------------------------------------------------- tiles


def drawn(*heatmaps, image=None, titles=("a",)):
    """Return the pixels of a picture of tiles."""
    shown = [tiles.Tile(f"#{k}", 1.0, np.asarray(each, np.float32)) for k, each in enumerate(heatmaps)]
    image = np.full((8, 8, 3), (255, 0, 0), np.uint8) if image is None else image
    picture = tiles.draw(image, shown, titles, render.colormap("viridis"), "png")
    return np.asarray(Image.open(io.BytesIO(picture.data)))


def cell(pixels, tile, row, column, cells=2):
    """Return the middle of one cell of a tile in the first row, where there is no text."""
    left = tiles.GAP + tile * (tiles.SIDE + tiles.GAP)
    top = 2 * tiles.GAP + tiles.TITLE
    step = tiles.SIDE // cells
    return tuple(pixels[top + row * step + step // 2, left + column * step + step // 2])


def test_tile_is_coloured_from_its_lowest_to_its_highest_value():
    pixels = drawn([[-4, 0], [-2, 4]], [[1000, 3000], [1000, 1000]])
    colours = render.colormap("viridis")

    assert cell(pixels, 0, 1, 1) == (255, 0, 0)  # what the model saw comes first
    assert cell(pixels, 1, 0, 0) == cell(pixels, 2, 0, 0) == tuple(colours[0])
    assert cell(pixels, 1, 1, 1) == cell(pixels, 2, 0, 1) == tuple(colours[255])
    assert cell(pixels, 1, 1, 0) == tuple(colours[64])


def test_constant_tile_has_the_lowest_colour_and_non_finite_cells_are_grey():
    pixels = drawn([[5, 5], [5, 5]], [[np.nan, 1], [np.inf, 2]])

    assert cell(pixels, 1, 1, 1) == tuple(render.colormap("viridis")[0])
    assert cell(pixels, 2, 1, 0) == (128, 128, 128)
    assert cell(pixels, 2, 1, 1) == tuple(render.colormap("viridis")[255])


@pytest.mark.parametrize("grid", [(1, 1), (7, 7), (3, 50), (50, 3), (112, 112), (300, 200)])
@pytest.mark.parametrize("count", [1, 2, 3, 9, pytest.param(256, marks=pytest.mark.slow)])
def test_tiles_of_any_grid_and_number_fit_the_picture(grid, count):
    heatmap = np.arange(grid[0] * grid[1], dtype=np.float32).reshape(grid)
    height, width = tiles._tile_size(heatmap)
    picture = drawn(*[heatmap] * count)

    assert max(height, width) <= tiles.SIDE
    assert (height % grid[0], width % grid[1]) == (0, 0) or max(grid) > tiles.SIDE
    columns = (picture.shape[1] - tiles.GAP) // (width + tiles.GAP)
    rows = (picture.shape[0] - 2 * tiles.GAP - tiles.TITLE) // (height + tiles.LABEL + tiles.GAP)
    assert columns * rows >= count + 1
    assert picture.shape[1] == columns * (width + tiles.GAP) + tiles.GAP


def test_long_title_is_clipped_at_the_edge():
    pixels = drawn([[0, 1], [2, 3]], titles=("long " * 60, "x"))
    ground = np.array(tiles._BACKGROUND[::-1])

    assert (pixels[:, -tiles.GAP :] == ground).all()
    assert (pixels[: tiles.GAP + tiles.TITLE, -60 : -tiles.GAP] != ground).any()


# --------------------------------------------------------------------------------------------------------------- errors


def refusal(call, **fields):
    with pytest.raises(grpc.RpcError) as caught:
        call(**fields)
    status = status_pb2.Status.FromString(dict(caught.value.trailing_metadata())["grpc-status-details-bin"])
    fault = error_details_pb2.BadRequest()
    assert any(detail.Unpack(fault) for detail in status.details)
    return caught.value.code().name, fault.field_violations[0].field, caught.value.details()


COMMON = [
    ({"model": "smalls"}, "NOT_FOUND", "model", 'did you mean "small"'),
    ({"image": b""}, "INVALID_ARGUMENT", "image", "empty"),
    ({"image": PHOTO[:600]}, "INVALID_ARGUMENT", "image", "broken"),
    ({"target": explain_pb2.Target()}, "INVALID_ARGUMENT", "target", "set class_index"),
    ({"target": target(1000)}, "NOT_FOUND", "target.class_index", "1000"),
    ({"target": explain_pb2.Target(label="taby")}, "NOT_FOUND", "target.label", "did you mean"),
]


@pytest.mark.parametrize(
    ("fields", "code", "field", "words"),
    [
        *COMMON,
        ({"layers": ["features.99"]}, "NOT_FOUND", "layers[0]", "did you mean"),
        ({"layers": [GRID, DEEP, GRID]}, "INVALID_ARGUMENT", "layers", "twice"),
    ],
)
def test_invalid_inspection_is_refused_with_the_name_of_its_field(served, inspect, fields, code, field, words):
    rows = served.pipeline.batcher.stats.rows
    result = refusal(inspect, **fields)

    assert result[:2] == (code, field)
    assert words in result[2]
    assert (served.pipeline.batcher.stats.rows, served.pipeline.batcher.admitted) == (rows, 0)


@pytest.mark.parametrize(
    ("fields", "code", "field", "words"),
    [
        *COMMON,
        ({"layer": "features.99"}, "NOT_FOUND", "layer", "did you mean"),
        ({"layer": HEAD}, "FAILED_PRECONDITION", "layer", f'the default is "{DEEP}"'),
        ({"top": 0}, "INVALID_ARGUMENT", "top", "1 to 256"),
        ({"top": 257}, "INVALID_ARGUMENT", "top", "1 to 256"),
        ({"rank": 9}, "INVALID_ARGUMENT", "rank", "unknown rank 9"),
        ({"picture": 9}, "INVALID_ARGUMENT", "picture", "unknown image format 9"),
        ({"raw": False}, "INVALID_ARGUMENT", "picture", "request a picture, raw maps"),
        ({"colormap": "virids"}, "INVALID_ARGUMENT", "colormap", 'did you mean "viridis"'),
    ],
)
def test_invalid_extraction_is_refused_with_the_name_of_its_field(served, extract, fields, code, field, words):
    rows = served.pipeline.batcher.stats.rows
    result = refusal(extract, **fields)

    assert result[:2] == (code, field)
    assert words in result[2]
    assert (served.pipeline.batcher.stats.rows, served.pipeline.batcher.admitted) == (rows, 0)


def test_raw_maps_beyond_the_limit_are_refused_with_the_number_that_fits(extract, monkeypatch):
    whole = extract(layer=GRID, top=16)
    bytes_per_map = 4 * whole.grid_height * whole.grid_width
    read = codec.read_extraction
    monkeypatch.setattr(codec, "read_extraction", lambda *given: read(*given[:2], Limits(raw_bytes=7 * bytes_per_map)))
    code, field, words = refusal(extract, layer=GRID, top=8)

    assert (code, field) == ("INVALID_ARGUMENT", "top")
    assert words.endswith("request at most 7")
    assert len(extract(layer=GRID, top=7).maps) == 7 * bytes_per_map
    assert len(extract(layer=GRID, top=8, raw=False, picture=1).picture.data) > 0


# ------------------------------------------------------------------------------------- components, concepts and heads


def test_components_in_the_basis_of_a_response_are_the_same_bit_for_bit(extract):
    other = PHOTOS["coffee"].read_bytes()
    first = extract(layer=GRID, rank=3, fit_images=[other], foreground=True, picture=2)
    again = extract(layer=GRID, rank=3, basis=first.basis)
    second = extract(layer=GRID, rank=3, basis=first.basis, image=other)

    assert again.maps == first.maps
    assert again.basis == first.basis == second.basis
    assert [channel.share for channel in first.channels] == sorted((c.share for c in first.channels), reverse=True)
    assert np.isnan(maps(first)).any()
    assert (first.picture.width, first.picture.height) == (451, 300)


def test_concepts_have_shares_and_the_nearest_classes(extract):
    reply = extract(model="efficientnet_lite0", rank=4, top=3, picture=2)

    assert sum(channel.share for channel in reply.channels) == pytest.approx(1)
    assert {"Egyptian cat", "tiger cat", "tabby", "lynx"} >= {each.nearest[0].label for each in reply.channels}
    assert not any(
        channel.nearest for channel in extract(model="efficientnet_lite0", rank=4, layer="blocks.4").channels
    )


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"rank": 4, "top": 33}, "top", "1 to 32"),
        ({"rank": 1, "foreground": True}, "foreground", "CHANNEL_RANK_PCA"),
        ({"rank": 3, "fit_images": [PHOTO] * 16}, "fit_images", "15 is the limit"),
        ({"rank": 3, "fit_images": [PHOTO, b"x"]}, "fit_images[1]", "not a JPEG"),
        ({"rank": 3, "basis": explain_pb2.FeatureBasis(vectors=b"1234")}, "basis.vectors", "expected"),
    ],
)
def test_invalid_decomposition_is_refused_with_the_name_of_its_field(extract, fields, field, words):
    code, named, message = refusal(extract, **fields)

    assert (code, named) == ("INVALID_ARGUMENT", field)
    assert words in message


def test_heads_of_a_model_without_attention_are_refused(extract):
    assert refusal(extract, rank=5)[:2] == ("FAILED_PRECONDITION", "layer")


@pytest.mark.slow
def test_concepts_and_their_labels_equal_those_of_pytorch_grad_cam(extract, lite0):
    reply = extract(model="efficientnet_lite0", rank=4, top=3)
    photo = np.asarray(Image.open(io.BytesIO(PHOTO)).convert("RGB"))
    seen = inputs(lite0, fitting.fit(photo, lite0.info.preprocess)[0])
    strengths, labels = [], []
    for module, dtype in ((copy.deepcopy(lite0.module), torch.float32), (doubled(lite0.module), torch.float64)):
        classify = module.classifier.to(torch.float32)  # pytorch-grad-cam's concepts are always float32
        module.classifier = torch.nn.Identity()
        with torch.no_grad():
            _, (explanations,), outputs = DeepFeatureFactorization(
                module, module.bn2, computation_on_concepts=classify
            )(seen.to(dtype), 3)
        strengths.append(explanations)
        labels.append(outputs.argmax(1))
    found = scale_cam_image(maps(reply), (224, 224))
    order = [int(np.abs(strengths[1] - each).mean((1, 2)).argmin()) for each in found]

    assert sorted(order) == [0, 1, 2]
    assert error_ratio(found, strengths[0][order], strengths[1][order]) <= 1
    assert [each.nearest[0].class_index for each in reply.channels] == [labels[1][k] for k in order]


RED_AND_GREEN = np.zeros((48, 48, 3), np.uint8)
RED_AND_GREEN[:, :36, 0] = RED_AND_GREEN[:, 36:, 1] = 255


def test_nearest_class_of_a_planted_concept_is_its_own():
    """Three quarters of the photo are red, the rest is green; each class is the mean brightness of its own colour."""
    colours, classes = torch.nn.Conv2d(3, 3, 1, bias=False), torch.nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        colours.weight.copy_(torch.eye(3)[..., None, None])
        classes.weight.copy_(5 * torch.eye(3)[[2, 0, 1]])
    net = torch.nn.Sequential(colours, torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), classes)
    labels = ("blue things", "red things", "green things")
    options = {"size": 48, "crop": "whole", "mean": (0, 0, 0), "std": (1, 1, 1), "labels": labels}
    with Explainer(net, **options) as explainer:
        found = explainer.features(RED_AND_GREEN, rank="factors", top=2, layer="1")
        first, mirrored = explainer.features_many([RED_AND_GREEN, RED_AND_GREEN[:, ::-1]], layer="1", top=1)

    assert [each.nearest[0].label for each in found.channels] == ["red things", "green things"]
    assert [each.share for each in found.channels] == pytest.approx([0.75, 0.25], abs=1e-4)
    assert [each.nearest[0].score for each in found.channels] == pytest.approx([5, 5], rel=1e-4)
    assert found.maps[0, :, :36].min() > 100 * found.maps[0, :, 36:].max()
    assert np.array_equal(first.maps[:, :, ::-1], mirrored.maps)
    assert len(np.unique(first.maps)) == 2


@pytest.mark.parametrize("rank", [3, 4], ids=["components", "factors"])
def test_neighbours_in_a_batch_never_change_components_or_factors(served, extract, rank, batches):
    def beside(neighbour, **fields):
        served.do(served.pipeline.batcher.pause)
        with ThreadPoolExecutor(2) as pool:
            try:
                mine = pool.submit(extract, layer=GRID, rank=rank, **fields)
                wait_until(lambda: rows_waiting(served) == 1 + len(fields.get("fit_images", ())))
                rows = rows_waiting(served)
                pool.submit(extract, layer=GRID, rank=rank, image=PHOTOS[neighbour].read_bytes())
                wait_until(lambda: rows_waiting(served) == rows + 1)
            finally:
                served.do(served.pipeline.batcher.resume)
        return mine.result(60)

    further = {"fit_images": [PHOTOS["flower"].read_bytes()], "foreground": True} if rank == 3 else {}
    one, other = (beside(neighbour, **further) for neighbour in ("coffee", "astronaut"))

    assert [each for each in batches if each[0] == "features"] == [("features", 3 if further else 2)] * 2
    assert one.maps == other.maps
    assert one.channels == other.channels
    assert one.basis == other.basis


async def test_photos_of_features_many_have_one_basis_in_both_clients(served):
    photos = [PHOTOS[name] for name in ("chelsea", "coffee", "flower")]
    options = {"layer": GRID, "top": 4, "picture": None}
    async with camserve.AsyncClient(served.address) as client:
        found = await client.features_many(photos, **options)
        whole = [await client.features(photo, layer=GRID, top=256) for photo in photos]
    with camserve.Client(served.address) as client:
        same = await asyncio.to_thread(client.features_many, photos, **options)
    basis = found[0].basis
    for each, other, raw in zip(found, same, whole, strict=True):
        cells = raw.maps[np.argsort([channel.index for channel in raw.channels])].reshape(16, -1).T
        plain, truth = ((cells.astype(kind) - basis.mean) @ basis.vectors.T.astype(kind) for kind in ("f4", "f8"))

        assert (each.rank, each.maps.shape) == ("pca", (4, *each.grid))
        assert np.array_equal(each.basis.vectors, basis.vectors)
        assert np.array_equal(each.maps, other.maps)
        assert error_ratio(each.maps.reshape(4, -1).T, plain, truth) <= 1


def basis_of(count, channels=16, **fields):
    sizes = {"mean": channels, "vectors": count * channels, "shares": count, "ranges": 2 * count}
    given = {name: np.ones(size, "<f4").tobytes() for name, size in sizes.items()}
    return {"rank": 3, "layer": GRID, "basis": explain_pb2.FeatureBasis(**given | fields)}


LARGE_GRID = {"model": "efficientnet_lite0", "layer": "blocks.1.0.conv_pw", "raw": False, "picture": 1}
TINY = jpeg(np.zeros((8, 8, 3), np.uint8))


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (
            {**LARGE_GRID, "rank": 3, "fit_images": [TINY] * 15},
            "layer",
            "200,704 cells of 96 channels are more than 8,388,608",
        ),
        ({**LARGE_GRID, "rank": 4, "top": 32}, "layer", "12,544 cells of 96 channels are more than 1,048,576 values"),
        ({"rank": 3, "top": 257}, "top", "1 to 256"),
        (basis_of(257), "basis.vectors", "expected 16 for each of 1 to 256 components"),
        (basis_of(2, 15), "basis.vectors", "expected 16 for each"),
        (basis_of(2, mean=b"1234"), "basis.mean", "has 4 bytes, and 64 are expected"),
        (basis_of(2, ranges=b""), "basis.ranges", "16 are expected"),
        (basis_of(2, shares=np.full(2, np.nan, "<f4").tobytes()), "basis.shares", "not finite"),
        (basis_of(2, background_mean=bytes(64)), "basis.background_vector", "64 are expected"),
        ({**basis_of(2), "fit_images": [TINY]}, "fit_images", "no further photos are used"),
        ({**basis_of(2), "foreground": True}, "foreground", "computed with the background"),
    ],
)
def test_decomposition_that_is_too_large_or_in_no_basis_is_refused(served, extract, fields, field, words):
    rows = served.pipeline.batcher.stats.rows
    code, named, message = refusal(extract, **fields)

    assert (code, named) == ("INVALID_ARGUMENT", field)
    assert words in message
    assert (served.pipeline.batcher.stats.rows, served.pipeline.batcher.admitted) == (rows, 0)


def test_largest_basis_is_accepted(extract):
    reply = extract(**basis_of(256))

    assert len(reply.channels) == 256
    assert (maps(reply) == maps(reply)[0]).all()

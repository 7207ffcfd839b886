"""Layer inspection in the client: requests, responses, tables and plots."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import camserve
from camserve._codec.inspection import decode_inspection
from camserve._show.plots import norms
from camserve.v1 import explain_pb2


@pytest.fixture
async def inspection(client: Any) -> Any:
    return await client.inspect(b"\x07")


@pytest.fixture
async def features(client: Any) -> Any:
    return await client.features(b"\x07")


@pytest.fixture
def photo(tmp_path: Any) -> Any:
    path = tmp_path / "cat.jpg"
    path.write_bytes(b"\xff\xd8\xff\x07")
    return path


async def test_inspect_sends_an_image_and_returns_readings(client: Any, server: Any) -> None:
    result = await client.inspect(b"\x07", model="large", target="tabby", layers="stem", timeout=600)

    asked = server.calls[0].request
    assert (asked.image, asked.model, asked.target.label, list(asked.layers)) == (b"\x07", "large", "tabby", ["stem"])
    assert 60 < server.calls[0].time_remaining < 610
    assert (result.model, result.target.label, result.score, result.contrast) == ("large", "tabby", 2.5, None)
    assert result.timing == camserve.Timing(1, 2, 3, 4, 5)
    assert result.layers == (
        camserve.LayerReading(
            name="stem",
            type="Conv2d",
            output_shape=(1, 2, 2, 2),
            elements=8,
            activation=camserve.Statistics(0.5, 1, -1, 3, 0.25, 20, 0),
            gradient=camserve.Statistics(0, 0.1, -0.1, 0.1, 0, 0.02, 0),
            container=False,
        ),
    )


async def test_absent_options_are_left_to_the_server(client: Any, server: Any) -> None:
    await client.inspect(b"\x07")
    await client.features(b"\x07")

    assert server.calls[0].request == explain_pb2.InspectLayersRequest(image=b"\x07")
    assert server.calls[1].request == explain_pb2.ExtractFeaturesRequest(
        image=b"\x07", top=16, raw=True, picture=explain_pb2.IMAGE_FORMAT_PNG, rank=explain_pb2.CHANNEL_RANK_ACTIVATION
    )


async def test_features_have_channels_maps_and_tiles(client: Any, server: Any) -> None:
    against = camserve.contrast("tabby", "tiger cat")
    result = await client.features(
        b"\x07", layer="stem", model="large", target=against, rank="gradient", top=2, picture="jpeg", colormap="magma"
    )

    asked = server.calls[0].request
    assert (asked.layer, asked.model, asked.rank, asked.top, asked.colormap) == ("stem", "large", 2, 2, "magma")
    assert result.channels == (camserve.Channel(5, 2, -0.5), camserve.Channel(0, 1, 0.25))
    np.testing.assert_array_equal(result.maps, [[[0, 1]], [[2, 3]]])
    assert result.maps.dtype == np.float32
    assert (result.image.size, result.picture.format) == ((6, 4), "jpeg")
    assert (result.contrast.label, result.channel_count, result.grid) == ("tiger cat", 8, (1, 2))
    assert (result.photo.width, result.photo.height) == (6, 4)


async def test_features_without_a_score_have_no_target(client: Any, server: Any) -> None:
    whole = server.extraction

    def embedding(request: Any) -> Any:
        response = whole(request)
        response.ClearField("target")
        return response

    server.extraction = embedding
    result = await client.features(b"\x07", rank="pca")

    assert (result.target, result.rank) == (None, "pca")
    assert result._repr_html_().endswith("<small>components: 2, of 8 channels</small></figcaption></figure>")


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        ("gradient", "2 of 8 channels · tabby"),
        ("factors", "concepts: 2, in 8 channels · tabby"),
        ("heads", "2 of 8 heads"),
    ],
)
async def test_notebook_says_what_the_rank_shows(client: Any, rank: str, words: str) -> None:
    html = (await client.features(b"\x07", rank=rank))._repr_html_()

    assert f"<small>{words}</small>" in html


async def test_error_for_a_missing_part_names_the_option(client: Any, tmp_path: Any) -> None:
    result = await client.features(b"\x07", maps=False, picture=None)

    assert result.maps is None
    with pytest.raises(camserve.FailedPrecondition, match="picture="):
        _ = result.image
    with pytest.raises(camserve.FailedPrecondition, match="maps=True"):
        result.save(tmp_path / "a.npy")
    assert "no overlay" in result._repr_html_()


async def test_maps_of_a_wrong_size_raise_internal(client: Any, server: Any) -> None:
    whole = server.extraction
    server.extraction = lambda request: explain_pb2.ExtractFeaturesResponse(
        channels=whole(request).channels, grid_height=9, grid_width=9, maps=b"1234"
    )

    with pytest.raises(camserve.Internal, match="2 × 9 × 9 values"):
        await client.features(b"\x07")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top": 0}, "top"),
        ({"top": 257}, "top"),
        ({"rank": "size"}, "rank"),
        ({"picture": "gif"}, "picture"),
        ({"target": -1}, "target"),
    ],
)
async def test_invalid_inspection_is_not_sent(client: Any, server: Any, options: Any, field: str) -> None:
    with pytest.raises(camserve.InvalidArgument) as caught:
        await client.features(b"\x07", **options)

    assert list(caught.value.fields) == [field]
    assert server.calls == []


async def test_options_of_a_wrong_type_are_not_sent(client: Any, server: Any) -> None:
    for call, options in ((client.inspect, {"model": 7}), (client.features, {"top": "many"})):
        with pytest.raises(camserve.InvalidArgument, match="has the wrong type"):
            await call(b"\x07", **options)

    assert server.calls == []


def test_problems_of_a_layer_are_described(inspection: Any) -> None:
    assert {each.name: each.trouble for each in inspection.layers} == {
        "stem": "",
        "body": "",
        "dead": "dead: all zeros",
        "wild": "3 non-finite",
        "cut": "zero gradient",
        "words": "no numeric output",
    }


def test_leaves_are_the_measured_layers_without_children(inspection: Any) -> None:
    assert [each.name for each in inspection.leaves] == ["stem", "dead", "wild", "cut"]


def test_table_has_a_line_for_every_layer(inspection: Any) -> None:
    lines = inspection.table().splitlines()

    assert len(lines) == 7
    assert lines[0].split()[:3] == ["layer", "type", "output"]
    assert lines[1].split() == ["stem", "Conv2d", "1×2×2×2", "0.5", "1", "-1", "3", "25.0%", "20", "0.02"]
    assert lines[6].endswith("no numeric output")


def colours(image: Image.Image) -> set[Any]:
    return {pixel for _, pixel in image.getcolors(1 << 24)}


def rgb(name: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(name[1:]))


def test_name_of_a_megabyte_does_not_widen_every_line() -> None:
    layers = [explain_pb2.LayerReading(name="x" * 1_000_000), *[explain_pb2.LayerReading(name="y", type="t")] * 99]

    lines = decode_inspection(explain_pb2.InspectLayersResponse(layers=layers)).table().splitlines()

    assert len(lines) == 101
    assert lines[1].startswith("x" * 4000 + "…")
    assert max(map(len, lines[2:])) < 400


def test_more_layers_than_a_model_has_raise_internal() -> None:
    message = explain_pb2.InspectLayersResponse(layers=[explain_pb2.LayerReading()] * 100_001)

    with pytest.raises(camserve.Internal, match="100,001 layers; the limit is 100,000"):
        decode_inspection(message)


VALID = {"mean": 3, "vectors": 6, "shares": 2, "ranges": 4}  # numbers in each part


@pytest.mark.parametrize(
    "change",
    [
        dict.fromkeys(VALID, 0),
        {"mean": 0},
        {"mean": 0.75},
        {"vectors": 5},
        {"shares": 0},
        {"ranges": 3},
        {"background_mean": 2},
        {"background_vector": 4},
    ],
)
async def test_basis_whose_parts_do_not_fit_raises_internal(client: Any, server: Any, change: Any) -> None:
    parts = {name: b"\0" * int(4 * count) for name, count in (VALID | change).items()}
    response = explain_pb2.ExtractFeaturesResponse(basis=explain_pb2.FeatureBasis(**parts))
    server.extraction = lambda _request: response

    with pytest.raises(camserve.Internal, match="basis whose parts do not fit"):
        await client.features(b"\x07", rank="pca")


def test_plot_marks_only_problems_in_red(inspection: Any) -> None:
    healthy = colours(replace(inspection, layers=inspection.layers[:1]).plot())
    red = rgb(norms.PROBLEM_COLOR)

    assert red in colours(inspection.plot())
    assert red not in healthy
    assert set(map(rgb, norms.SERIES_COLORS.values())) <= healthy


def test_bars_of_norms_have_a_logarithmic_scale(inspection: Any) -> None:
    stem = inspection.layers[0]
    steps = [replace(stem, activation=replace(stem.activation, norm=norm)) for norm in (0.1, 1.0, 10.0, 100.0)]
    pixels = np.asarray(replace(inspection, layers=tuple(steps)).plot())
    blue = (pixels == rgb(norms.SERIES_COLORS["activation norm"])).all(2)
    lengths = [
        int(blue[norms.HEADER_HEIGHT + k * norms.MAX_ROW_HEIGHT + norms.MAX_ROW_HEIGHT // 2].sum()) for k in range(4)
    ]

    assert np.diff(lengths[1:]) == pytest.approx(np.diff(lengths[1:]).mean(), abs=1)
    assert lengths[0] < lengths[1]


@pytest.mark.parametrize("count", [1, 50, 400, pytest.param(5000, marks=pytest.mark.slow)])
def test_height_of_a_plot_is_limited(inspection: Any, count: int) -> None:
    image = replace(inspection, layers=inspection.layers[:1] * count).plot()

    assert image.width == norms.WIDTH
    assert image.height <= norms.MAX_ROWS_HEIGHT + norms.HEADER_HEIGHT + norms.FOOTER_HEIGHT


def test_long_name_is_shortened_at_its_start() -> None:
    fitted = norms._truncate_start("encoder." * 30 + "norm", 200)

    assert fitted.startswith("…")
    assert fitted.endswith("norm")


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.WEBP"])
def test_plots_and_tiles_are_saved_by_their_suffix(inspection: Any, features: Any, tmp_path: Any, name: str) -> None:
    for each in (inspection, features):
        with Image.open(each.save(tmp_path / name)) as saved:
            assert saved.format in ("PNG", "JPEG", "WEBP")


def test_table_and_the_maps_are_saved_too(inspection: Any, features: Any, tmp_path: Any) -> None:
    assert inspection.save(tmp_path / "a.txt").read_text() == inspection.table() + "\n"
    np.testing.assert_array_equal(np.load(features.save(tmp_path / "a.npy")), features.maps)


def test_another_suffix_is_refused(inspection: Any, features: Any, tmp_path: Any) -> None:
    with pytest.raises(camserve.InvalidArgument, match=r"'\.gif': the suffix must be one of .*\.txt"):
        inspection.save(tmp_path / "a.gif")
    with pytest.raises(camserve.InvalidArgument, match=r"'a': the suffix must be one of .*\.npy"):
        features.save(tmp_path / "a")


def test_notebook_shows_the_plot_and_the_tiles(inspection: Any, features: Any) -> None:
    assert 'src="data:image/png;base64,' in inspection._repr_html_()
    assert "tiny · tabby" in inspection._repr_html_()
    assert "2 of 8 channels · tabby" in features._repr_html_()


def test_inspection_without_leaves_has_a_table_and_no_plot(inspection: Any) -> None:
    odd = replace(inspection, layers=(replace(inspection.layers[-1], name="<b>"),))

    assert "&lt;b&gt;" in odd._repr_html_()
    with pytest.raises(camserve.FailedPrecondition, match="nothing to plot"):
        odd.plot()


def test_inspect_command_prints_and_draws_readings(run: Any, server: Any, photo: Any, tmp_path: Any) -> None:
    done = run(
        "inspect", photo, "--target", "tabby vs 8", "--layer", "stem", "--layer", "dead", "--plot", tmp_path / "p.png"
    )

    assert done.exit_code == 0, done.output
    assert {"stem", "Conv2d", "25.0%", "dead:"} <= set(done.stdout.split())
    assert list(server.calls[0].request.layers) == ["stem", "dead"]
    assert server.calls[0].request.target.contrast.why_not.class_index == 8
    with Image.open(tmp_path / "p.png") as plot:
        assert plot.width == norms.WIDTH


def test_inspect_command_prints_readings_as_json(run: Any, photo: Any) -> None:
    readings = json.loads(run("inspect", photo, "--json").stdout)

    assert [each["name"] for each in readings] == ["stem", "body", "dead", "wild", "cut", "words"]
    assert readings[0]["gradient"]["norm"] == 0.02


def test_features_command_writes_tiles_or_raw_maps(run: Any, server: Any, photo: Any, tmp_path: Any) -> None:
    done = run("features", photo, "--layer", "stem", "--rank", "gradient", "--top", 2, "-o", tmp_path / "f.png")
    raw = run("features", photo, "-o", tmp_path / "f.npy", "--json")

    assert (done.exit_code, raw.exit_code) == (0, 0), done.output + raw.output
    assert {"channel", "5", "-0.5"} <= set(done.stdout.split())
    expected = {"index": 5, "mean_activation": 2, "gradient_weight": -0.5, "share": 0, "nearest": []}
    assert json.loads(raw.stdout)[0] == expected
    assert [call.request.raw for call in server.calls] == [False, True]
    assert np.load(tmp_path / "f.npy").shape == (2, 1, 2)


def with_basis(whole: Any) -> Any:
    """Return a function that adds a basis of one component, and shares and classes of the channels, to responses."""

    def respond(request: Any) -> Any:
        response, ones = whole(request), np.ones(8, "<f4").tobytes()
        response.basis.CopyFrom(explain_pb2.FeatureBasis(mean=ones, vectors=ones, shares=ones[:4], ranges=ones[:8]))
        response.channels[0].share = 0.75
        response.channels[0].nearest.add(label="tabby", class_index=7)
        return response

    return respond


async def test_features_many_fits_all_photos_and_sends_the_basis_with_the_others(client: Any, server: Any) -> None:
    server.extraction = with_basis(server.extraction)
    photos = (bytes([photo]) for photo in (1, 2, 3))
    results = await client.features_many(photos, layer="stem", foreground=True)
    first, *others = [call.request for call in server.calls]

    assert [each.rank for each in results] == ["pca"] * 3
    assert (first.image, list(first.fit_images), first.HasField("basis")) == (b"\x01", [b"\x02", b"\x03"], False)
    assert [each.image for each in others] == [b"\x02", b"\x03"]
    assert all(each.HasField("basis") and not each.fit_images for each in others)
    assert all(
        (each.rank, each.layer, each.foreground, each.HasField("top")) == (3, "stem", True, False)
        for each in [first, *others]
    )
    np.testing.assert_array_equal(results[0].basis.vectors, np.ones((1, 8)))


async def test_features_many_without_photos_or_with_a_basis_is_not_sent(client: Any, server: Any) -> None:
    with pytest.raises(camserve.InvalidArgument, match="images"):
        await client.features_many([])
    with pytest.raises(camserve.InvalidArgument, match="features_many takes several images; features takes one"):
        await client.features_many("cat.jpg")
    server.extraction = with_basis(server.extraction)
    basis = (await client.features(b"\x01", rank="pca")).basis
    with pytest.raises(camserve.InvalidArgument, match="basis"):
        await client.features_many([b"\x01"], basis=basis)

    assert len(server.calls) == 1


def test_features_command_fits_further_photos(run: Any, server: Any, photo: Any, tmp_path: Any) -> None:
    other = tmp_path / "dog.jpg"
    other.write_bytes(b"\xff\xd8\xff\x08")
    done = run("features", photo, "--rank", "pca", "--fit", other, "--foreground", "-o", tmp_path / "f.png")
    asked = server.calls[0].request

    assert done.exit_code == 0, done.output
    assert (asked.rank, asked.HasField("top"), list(asked.fit_images)) == (3, False, [other.read_bytes()])
    assert asked.foreground
    assert {"component", "share"} <= set(done.stdout.split())


def test_features_command_prints_concepts_and_heads(run: Any, server: Any, photo: Any, tmp_path: Any) -> None:
    server.extraction = with_basis(server.extraction)
    concepts = run("features", photo, "--rank", "factors", "--top", 5, "-o", tmp_path / "f.png")
    heads = run("features", photo, "--rank", "heads", "--layer", "stem", "-o", tmp_path / "f.npy")

    assert [(call.request.rank, call.request.top) for call in server.calls] == [(4, 5), (5, 0)]
    assert {"concept", "share", "nearest", "75.0%", "tabby"} <= set(concepts.stdout.split())
    assert {"head", "share", "75.0%"} <= set(heads.stdout.split())
    assert "nearest" not in heads.stdout

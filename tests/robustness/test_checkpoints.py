"""Untrusted weights files: valid ones are read, others are refused with a reason, and no code in them is run."""

import functools
import hashlib
import io
import json
import os
import pickle
import random
import re
import struct
import zipfile
from collections import OrderedDict
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torchvision
from torch import nn

import camserve_server
from camserve_server import models
from camserve_server.core.errors import ConfigError
from camserve_server.models import checkpoint
from camserve_server.models.checkpoint import SizeBudget
from camserve_server.models.pickles import CorruptFileError
from camserve_server.models.weights import _check_finite
from robustness import nets, process_audit

MIB = 2**20
BUDGET = SizeBudget(MIB, MIB, 64 * MIB)


class Runs:
    """An object whose pickle creates a file when it is executed."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def trained():
    torch.manual_seed(99)
    return torchvision.models.squeezenet1_1(weights=None, num_classes=7)


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def safe(header, numbers=b""):
    packed_header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(packed_header)) + packed_header + numbers


def declared(shape, *span, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def packed(description, numbers=b"\0" * 16, method=zipfile.ZIP_STORED):
    """Return an archive in the form of torch.save, around any description."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method, compresslevel=1) as archive:
        archive.writestr("archive/data.pkl", description, zipfile.ZIP_STORED)
        archive.writestr("archive/byteorder", "little", zipfile.ZIP_STORED)
        archive.writestr("archive/version", "3\n", zipfile.ZIP_STORED)
        archive.writestr("archive/data/0", numbers)
    return file.getvalue()


def text(value):
    return b"X" + struct.pack("<i", len(value)) + value.encode()


FIRST = text("0")


def described(numel, shape, stride, key=FIRST):
    """Return the pickle that torch.save writes for {"w": a tensor}, with any shape, stride and key."""

    def number(n):
        return b"J" + struct.pack("<i", n) if n < 2**31 else b"\x8a\x08" + struct.pack("<q", n)

    def tuple_of(numbers):
        return b"(" + b"".join(map(number, numbers)) + b"t"

    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + key + text("cpu") + number(numel) + b"tQ"
    tensor = storage + number(0) + tuple_of(shape) + tuple_of(stride) + b"\x89ccollections\nOrderedDict\n)Rt"
    return b"\x80\2}X\1\0\0\0wctorch._utils\n_rebuild_tensor_v2\n(" + tensor + b"Rs."


@functools.cache
def inflating():
    return packed(described(65_536_000, [65_536_000], [1]), bytes(250 * MIB), zipfile.ZIP_DEFLATED)


def archive_with_wrong_size():
    """Return an archive whose description inflates to 150 MB, but whose headers say 700 bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("archive/data.pkl", b"N" * (150 * MIB))
    data, true = bytearray(file.getvalue()), struct.pack("<I", 150 * MIB)
    while (at := data.find(true)) >= 0:
        data[at : at + 4] = struct.pack("<I", 700)
    return bytes(data)


def truncated(data, share=0.5):
    return data[: int(len(data) * share)]


def with_nan(state):
    state["classifier.1.bias"][3] = torch.nan
    return state


def flip_bit(data, at, bit=3):
    data = bytearray(data)
    data[at] ^= 1 << bit
    return bytes(data)


def many_members(count):
    """Return an archive whose table has many members, of which the first is there."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data/00000", b"")
    data = file.getvalue()
    start = data.find(b"PK\1\2")
    entry = data[start : data.find(b"PK\5\6")]
    table = b"".join(entry.replace(b"00000", b"%05d" % number) for number in range(count))
    return data[:start] + table + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(table), start, 0)


def scripted():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("net/data.pkl", b"\x80\2}.")
        archive.writestr("net/constants.pkl", b"\x80\2).")
    return file.getvalue()


STATE = trained().state_dict()
SMALL = "robustness.nets:tiny?size=32"
SMALL_STATE = {name: 1 + tensor for name, tensor in nets.tiny().state_dict().items()}
VALID_TORCH, VALID_SAFETENSORS = saved(STATE), safetensors.torch.save(STATE)
EMPTY = json.dumps(declared([0], 0, 0)).encode()


def doubling(times):
    """Return the opcodes of nested tuples, each of which has the next one twice."""
    return b")q\0" + b"h\0\x86q\0" * times


def legacy_file(key):
    """Return a file in the format before torch 1.6 whose storages have this key."""
    preamble = (checkpoint.LEGACY_MAGIC, checkpoint.LEGACY_VERSION, {"little_endian": True})
    head = b"".join(pickle.dumps(value, protocol=2) for value in preamble)
    return head + described(4, [4], [1]) + b"\x80\2]" + key + b"a." + bytes(24)


def many_references(items):
    """Return a pickle with 20,000 references to storages, each a list with this number of items."""
    reference = b"](" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\4"
    return packed(b"\x80\2" + reference + b"N" * items + b"eq\0" + b"h\0Q" * 20_000 + b".")


HOSTILE = {
    "a header of 25 MB.safetensors": lambda _: safe(
        b"{" + b",".join(b'"%050d":%s' % (n, EMPTY) for n in range(230_000)) + b"}"
    ),
    "a header longer than the file.safetensors": lambda _: struct.pack("<Q", 2**63) + b"{}",
    "a header nested deeply.safetensors": lambda _: safe(b'{"a":' * 40_000 + b"1" + b"}" * 40_000),
    "a header that is no table.safetensors": lambda _: safe(b"[1, 2]"),
    "a million tensors.safetensors": lambda _: safe(b"{" + b",".join(b'"%d":1' % n for n in range(1_000_000)) + b"}"),
    "tensors that overlap.safetensors": lambda _: safe(
        {"a": declared([4], 0, 16), "b": declared([4], 8, 24)}, b"\0" * 24
    ),
    "a gap between tensors.safetensors": lambda _: safe(
        {"a": declared([2], 0, 8), "b": declared([2], 16, 24)}, b"\0" * 24
    ),
    "a tensor beyond the end.safetensors": lambda _: safe({"a": declared([10**12], 0, 4 * 10**12)}, b"\0" * 16),
    "a shape of 60,000 axes.safetensors": lambda _: safe({"a": declared([99] * 60_000, 0, 16)}, b"\0" * 16),
    "a shape of words.safetensors": lambda _: safe({"a": declared(["ab", 10**9], 0, 16)}, b"\0" * 16),
    "a shape that is too short.safetensors": lambda _: safe({"a": declared([3], 0, 16)}, b"\0" * 16),
    "numbers of no known kind.safetensors": lambda _: safe({"a": declared([4], 0, 16, dtype="\33[2JX9")}, b"\0" * 16),
    "a shape of 60,000 ones.safetensors": lambda _: safe(
        {"features.0.weight": declared([1] * 60_000, 0, 4)}, b"\0" * 4
    ),
    "numbers of eight bits.safetensors": lambda _: safetensors.torch.save(
        {name: tensor.to(torch.float8_e4m3fn) for name, tensor in STATE.items()}
    ),
    "numbers of four bits.safetensors": lambda _: safe({"a": declared([4], 0, 2, dtype="F4")}, b"\0" * 2),
    "more numbers than the model.safetensors": lambda _: safe(
        {"a": declared([5_000_000], 0, 20_000_000)}, bytes(20_000_000)
    ),
    "a header of 80,000 lists.safetensors": lambda _: safe(b'{"a":[' + b"[0]," * 80_000 + b"1]}"),
    "metadata that is no text.safetensors": lambda _: safe(b'{"__metadata__":{"a":1}}'),
    "a name with two tensors.safetensors": lambda _: safe(
        b'{"a":%s,"a":%s}' % tuple(json.dumps(declared([2], at, at + 8)).encode() for at in (0, 8)), b"\0" * 16
    ),
    "cut short.safetensors": lambda _: truncated(VALID_SAFETENSORS),
    "one bit flipped, pinned.safetensors": lambda _: flip_bit(VALID_SAFETENSORS, len(VALID_SAFETENSORS) - 999),
    "a weight that is no number.safetensors": lambda _: safetensors.torch.save(with_nan(trained().state_dict())),
    "numbers that inflate to 250 MB.pth": lambda _: inflating(),
    "a description that inflates to 150 MB.pth": lambda _: archive_with_wrong_size(),
    "packed as torch.save does not.pth": lambda _: packed(described(4, [4], [1]), method=zipfile.ZIP_LZMA),
    "a table of 40,000 members.pth": lambda _: many_members(40_000),
    "a command.pth": lambda canary: saved({"state_dict": Runs(canary)}),
    "a command beside the weights.pth": lambda canary: saved({"state_dict": STATE, "epoch": Runs(canary)}),
    "a command in an old file.pth": lambda canary: saved({"model": Runs(canary)}, _use_new_zipfile_serialization=False),
    "a bare pickle of a command.pth": lambda canary: pickle.dumps(Runs(canary), protocol=2),
    "a command of a new protocol.pth": lambda canary: packed(pickle.dumps(Runs(canary), protocol=5)),
    "a pickle in a pickle.pth": lambda canary: saved({"a": saved({"b": Runs(canary)}).decode("latin-1")}),
    "two gigabytes of nothing.pth": lambda _: packed(b"\x80\2cbuiltins\nbytearray\nJ\x00\x94\x35\x77\x85R."),
    "tuples nested deeply.pth": lambda _: packed(b"\x80\2})" + b"\x85" * 350_000 + b"K\1s."),
    "tuples that double 60 times.pth": lambda _: packed(b"\x80\2}" + doubling(60) + b"K\1s."),
    "350,000 empty tables.pth": lambda _: packed(b"\x80\2(" + b"}" * 350_000 + b"t."),
    "90,000 tuples in tuples.pth": lambda _: packed(b"\x80\2})" + b"\x85" * 90_000 + b"K\1s."),
    "90,000 tables.pth": lambda _: packed(b"\x80\2(" + b"}" * 90_000 + b"t."),
    "a description of 30 MB.pth": lambda _: packed(b"\x80\2]" + b"Na" * (15 * MIB) + b"."),
    "a tensor of a billion numbers.pth": lambda _: packed(described(10**9, [10**9], [1])),
    "a tensor that looks beyond its numbers.pth": lambda _: packed(described(4, [64, 64], [64, 1])),
    "numbers that are not there.pth": lambda _: packed(described(4, [4], [1], key=text("7"))),
    "a key that doubles 24 times.pth": lambda _: packed(described(4, [4], [1], key=doubling(24))),
    "a key nested deeply.pth": lambda _: packed(described(4, [4], [1], key=b")" + b"\x85" * 90_000)),
    "a key that is a number.pth": lambda _: packed(described(4, [4], [1], key=b"K\0")),
    "a key that doubles 60 times, old.pth": lambda _: legacy_file(doubling(60)),
    "20,000 references of 60,000 items.pth": lambda _: many_references(60_000),
    "a whole module.pth": lambda _: saved(nn.Linear(2, 2)),
    "a program.pth": lambda _: scripted(),
    "other shapes.pth": lambda _: saved(torchvision.models.squeezenet1_1(num_classes=9).state_dict()),
    "cut short.pth": lambda _: truncated(VALID_TORCH),
    "cut short, old.pth": lambda _: truncated(saved(STATE, _use_new_zipfile_serialization=False)),
    "one bit flipped.pth": lambda _: flip_bit(VALID_TORCH, len(VALID_TORCH) // 2),
    "a weight that is no number.pth": lambda _: saved(with_nan(trained().state_dict())),
    "zeros.pth": lambda _: bytes(1000),
}

SPECIAL = ("a device.pth", "a pipe.pth", "a folder.pth", "no end to it.pth", "nowhere.pth")
NAMES = (*HOSTILE, *SPECIAL)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    canary = folder / "canary"
    for name in ("hostile", "control"):
        (folder / name).mkdir()
    for name, make in HOSTILE.items():
        (folder / "hostile" / name).write_bytes(make(canary))
    (folder / "hostile" / "a device.pth").symlink_to("/dev/zero")
    (folder / "hostile" / "nowhere.pth").symlink_to(folder / "gone.pth")
    (folder / "hostile" / "a folder.pth").mkdir()
    os.mkfifo(folder / "hostile" / "a pipe.pth")
    with (folder / "hostile" / "no end to it.pth").open("wb") as file:
        file.truncate(2**40)
    (folder / "sound.pth").write_bytes(saved(trained().state_dict()))
    whole = hashlib.sha256(safetensors.torch.save(trained().state_dict())).hexdigest()
    (folder / "pins.json").write_text(json.dumps({"one bit flipped, pinned.safetensors": whole}))
    (folder / "control" / "a command.pickle").write_bytes(saved(Runs(folder / "controls-canary")))
    (folder / "control" / "inflating.pth").write_bytes(inflating())
    return process_audit.run_module("loading", folder) | {"folder": folder}


@pytest.mark.parametrize("name", NAMES)
def test_hostile_file_is_refused_with_a_reason_and_costs_little(outcomes, name):
    outcome = outcomes[name]
    assert outcome["error"] == "ConfigError"
    assert len(outcome["message"]) <= 512
    assert outcome["message"].isprintable()
    assert str(outcomes["folder"]) not in outcome["message"]
    assert outcome["mb"] <= 100


@pytest.mark.parametrize("name", NAMES)
def test_hostile_file_opens_no_other_file_and_starts_no_process(outcomes, name):
    path = str(outcomes["folder"] / "hostile" / name)
    assert set(outcomes[name]["opened"]) <= {path}
    assert outcomes[name]["others"] == []


def test_no_command_in_a_file_was_run(outcomes):
    assert not (outcomes["folder"] / "canary").exists()


def test_detectors_see_a_command_and_an_inflated_file(outcomes):
    """Both detectors are triggered on purpose, through torch.load."""
    assert (outcomes["folder"] / "controls-canary").exists()
    assert any(event == "os.system" for event, _ in outcomes["a command.pickle"]["others"])
    assert outcomes["inflating.pth"]["mb"] > 200


def test_valid_file_is_read_in_the_same_process(outcomes):
    assert outcomes["sound"]["error"] == ""


# --- valid files are read as torch and safetensors read them ---


def training_checkpoint():
    """Return a training script's checkpoint: weights, moments, a schedule, and other values."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    optimiser = torch.optim.Adam(net.parameters())
    net(torch.zeros(1, 3, 4, 6)).sum().backward()
    optimiser.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, [3, 5])
    metadata = {
        "set": {1, 2},
        "bytes": b"ab",
        "shape": torch.Size([1]),
        "kind": torch.float16,
        "large": 2**70,
        "none": None,
    }
    return {
        "model": net.state_dict(),
        "optimiser": optimiser.state_dict(),
        "s": schedule.state_dict(),
        "metadata": metadata,
    }


def tensors():
    """Return tensors of every type and layout that torch.save writes as plain values."""
    torch.manual_seed(0)
    table = torch.randn(6, 8)
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8)
    plain = {str(kind).partition(".")[2]: torch.randn(3, 5).abs().to(kind) for kind in kinds}
    return plain | {
        "complex": torch.randn(3, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "nothing": torch.empty(0, 4),
        "one number": torch.tensor(2.5),
        "a parameter": nn.Parameter(torch.randn(4)),
        "turned": table.T,
        "a part": table[1:4, ::3],
        "spread": torch.randn(1, 4).expand(3, 4),
        "the same again": table,
    }


VALID_FILES = {
    "plain": tensors,
    "ordered": lambda: OrderedDict(tensors()),
    "of a module": lambda: trained().state_dict(),
    "of a script": training_checkpoint,
}


@pytest.mark.parametrize("kind", VALID_FILES)
@pytest.mark.parametrize("old", [False, True])
def test_torch_file_is_read_as_torch_reads_it(tmp_path, kind, old):
    path, value = tmp_path / "w.pth", VALID_FILES[kind]()
    torch.save(value, path, _use_new_zipfile_serialization=not old)
    expected = torch.load(path, weights_only=True)
    expected = expected.get("model", expected)
    loaded_tensors = checkpoint.load(path, SizeBudget(16 * MIB, MIB, 64 * MIB))
    assert list(loaded_tensors) == list(expected)
    for name, tensor in expected.items():
        assert (loaded_tensors[name].dtype, loaded_tensors[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(loaded_tensors[name], tensor), name


PREFIXES = ("model.", "module.", "_orig_mod.", "model.module.", "module._orig_mod.")


@pytest.mark.parametrize("wrapper", ["", "state_dict", "model_state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", *PREFIXES])
def test_weights_with_a_training_tools_prefix_are_loaded(tmp_path, wrapper, prefix):
    state = {prefix + name: tensor for name, tensor in SMALL_STATE.items()}
    torch.save({wrapper: state, "epoch": 3} if wrapper else state, tmp_path / "w.pth")
    assert_loaded(tmp_path / "w.pth")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixed_names_in_safetensors_are_loaded(tmp_path, prefix):
    state = {prefix + name: tensor for name, tensor in SMALL_STATE.items()}
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    assert_loaded(tmp_path / "w.safetensors")


def assert_loaded(path):
    module = models.load(models.parse(f"small={SMALL}&weights={path}")).module
    assert all(torch.equal(tensor, SMALL_STATE[name]) for name, tensor in module.state_dict().items())


def test_error_names_the_removed_prefix(tmp_path):
    torch.save({f"module.{name}": tensor for name, tensor in list(SMALL_STATE.items())[1:]}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match=r"also without the prefix 'module\.'.*Missing key.*0\.weight"):
        assert_loaded(tmp_path / "w.pth")


def test_recompressed_archive_is_read(tmp_path):
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(VALID_TORCH)) as source,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    (tmp_path / "w.pth").write_bytes(file.getvalue())
    loaded_tensors = checkpoint.load(tmp_path / "w.pth", SizeBudget.of(trained()))
    assert all(torch.equal(loaded_tensors[name], tensor) for name, tensor in STATE.items())


def test_safetensors_file_is_read_as_it_was_saved(tmp_path):
    saved_tensors = {
        name: tensor.contiguous().clone()
        for name, tensor in tensors().items()
        if tensor.dtype in checkpoint.SAFETENSORS
    }
    safetensors.torch.save_file(saved_tensors, tmp_path / "w.safetensors", metadata={"format": "pt"})
    loaded_tensors = checkpoint.load(tmp_path / "w.safetensors", BUDGET)
    assert len(loaded_tensors) >= 12
    assert list(loaded_tensors) == sorted(saved_tensors)
    assert all(loaded_tensors[name].dtype == tensor.dtype for name, tensor in saved_tensors.items())
    assert all(torch.equal(loaded_tensors[name], tensor) for name, tensor in saved_tensors.items())


@pytest.mark.parametrize("spaces", range(8))
def test_tensors_are_aligned_at_any_header_length(tmp_path, spaces):
    numbers, path = torch.randn(6, dtype=torch.float64), tmp_path / "w.safetensors"
    header = json.dumps({"w": declared([6], 0, 48, dtype="F64")}) + " " * spaces
    path.write_bytes(safe(header.encode(), numbers.numpy().tobytes()))
    tensor = checkpoint.load(path, BUDGET)["w"]
    assert tensor.data_ptr() % 8 == 0
    assert torch.equal(tensor, numbers)


@pytest.mark.parametrize("kind", ["C64", "F4", "F6_E2M3", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U16", "U32", "U64"])
def test_unsupported_safetensors_types_are_refused(tmp_path, kind):
    bits = int(re.search(r"\d+", kind)[0])
    path = tmp_path / "w.safetensors"
    path.write_bytes(safe({"w": declared([8], 0, bits, dtype=kind)}, bytes(bits)))
    with pytest.raises(CorruptFileError, match=r"tensors of type .* are not supported"):
        checkpoint.load(path, BUDGET)


@pytest.mark.parametrize("lacking", ["tensor_bytes", "metadata_bytes"])
def test_safetensors_file_may_fill_its_budget_exactly(tmp_path, lacking):
    data, path = safetensors.torch.save({"w": torch.ones(1000)}), tmp_path / "w.safetensors"
    path.write_bytes(data)
    (length,) = struct.unpack_from("<Q", data)
    just = {"tensor_bytes": len(data) - length, "metadata_bytes": length, "file_bytes": 0}
    assert torch.equal(checkpoint.load(path, SizeBudget(**just))["w"], torch.ones(1000))

    just[lacking] -= 1
    just["tensor_bytes"] += lacking == "metadata_bytes"  # the file as a whole is still within the budget
    words = {"tensor_bytes": "the file is larger than", "metadata_bytes": "the limit for this model is"}[lacking]
    with pytest.raises(CorruptFileError, match=words):
        checkpoint.load(path, SizeBudget(**just))


def test_file_truncated_while_it_is_read_is_read_whole(tmp_path, monkeypatch):
    """It is read into memory: a mapped file, as with `safe_open`, would end this process with SIGBUS."""
    path, reading = tmp_path / "w.safetensors", safetensors.torch.load
    path.write_bytes(VALID_SAFETENSORS)

    def cut_and_read(data):
        os.truncate(path, 100)
        return reading(data)

    monkeypatch.setattr(checkpoint, "load_safetensors", cut_and_read)
    loaded_tensors = checkpoint.load(path, SizeBudget.of(trained()))
    assert path.stat().st_size == 100
    assert all(torch.equal(loaded_tensors[name], tensor) for name, tensor in STATE.items())


def test_broken_headers_are_refused_or_describe_every_byte(tmp_path):
    chance, path = random.Random(5), tmp_path / "w.safetensors"
    sound = safetensors.torch.save(nn.Linear(16, 16).state_dict())
    (length,) = struct.unpack_from("<Q", sound)
    refused = 0
    for _ in range(500):
        path.write_bytes(flip_bit(sound, chance.randrange(8 + length), chance.randrange(8)))
        try:
            loaded_tensors = checkpoint.load(path, BUDGET)
            assert sum(tensor.nbytes for tensor in loaded_tensors.values()) == len(sound) - 8 - length
        except CorruptFileError:
            refused += 1
    assert refused > 250


def test_shared_storage_is_read_once(tmp_path):
    table = torch.randn(6, 8)
    torch.save({"a": table, "b": table[2:]}, tmp_path / "w.pth")
    loaded_tensors = checkpoint.load(tmp_path / "w.pth", BUDGET)
    assert loaded_tensors["a"].untyped_storage().data_ptr() == loaded_tensors["b"].untyped_storage().data_ptr()


@pytest.mark.parametrize("number", [-torch.inf, torch.nan])
def test_mask_may_be_minus_infinity_but_not_nan(number):
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.tensor([0.0, number]))
    refusal = pytest.raises(CorruptFileError, match="mask is not finite") if number != number else nullcontext()  # noqa: PLR0124
    with refusal:
        _check_finite(module)


def test_no_flipped_bit_in_300_files_goes_unnoticed(tmp_path):
    """torch.load accepts many of them silently, because it does not check the checksums of an archive."""
    chance, path, state = random.Random(5), tmp_path / "w.pth", nn.Linear(16, 16).state_dict()
    sound = saved(state)
    silent, refused, missed_by_torch = 0, 0, 0
    for _ in range(300):
        path.write_bytes(flip_bit(sound, chance.randrange(len(sound)), chance.randrange(8)))
        try:
            loaded_tensors = checkpoint.load(path, BUDGET)
            silent += any(not torch.equal(loaded_tensors[name], tensor) for name, tensor in state.items())
        except CorruptFileError:
            refused += 1
        with suppress(Exception):
            loaded_tensors = torch.load(path, weights_only=True)
            missed_by_torch += any(not torch.equal(loaded_tensors[name], tensor) for name, tensor in state.items())
    assert silent == 0
    assert refused > 100
    assert missed_by_torch > 10


def test_loaded_bytes_are_the_hashed_bytes(tmp_path, monkeypatch):
    path, other = tmp_path / "w.safetensors", safetensors.torch.save({"w": torch.zeros(4)})
    path.write_bytes(safetensors.torch.save({"w": torch.ones(4)}))
    right, hashing = hashlib.sha256(path.read_bytes()).hexdigest(), hashlib.sha256

    def hash_and_change(data):
        path.write_bytes(other)
        return hashing(data)

    monkeypatch.setattr(checkpoint.hashlib, "sha256", hash_and_change)
    assert torch.equal(checkpoint.load(path, BUDGET, right)["w"], torch.ones(4))
    assert path.read_bytes() == other


@pytest.mark.parametrize("link", ["w.safetensors", "inner", "inner/w.safetensors"])
def test_link_below_the_model_folder_is_not_followed(tmp_path, link):
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for directory in (folder / "inner", outside / "inner"):
        directory.mkdir(parents=True)
    for path in (folder / "w.safetensors", folder / "inner/w.safetensors", outside / "w.safetensors"):
        path.write_bytes(safetensors.torch.save({"w": torch.ones(4)}))
    named_path = folder / ("inner/w.safetensors" if link == "inner" else link)
    assert checkpoint.load(named_path, BUDGET, folder=str(folder))
    (folder / link).rename(tmp_path / "moved")
    (folder / link).symlink_to(outside if link == "inner" else outside / "w.safetensors")

    assert checkpoint.load(named_path, BUDGET)
    with pytest.raises(CorruptFileError, match=r"cannot be opened|not a regular file"):
        checkpoint.load(named_path, BUDGET, folder=str(folder))


def test_pipe_in_place_of_a_file_is_refused_without_waiting(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "w.pth")
    regular = Path(__file__).stat()
    monkeypatch.setattr(checkpoint.Path, "stat", lambda _: regular)
    with pytest.raises(CorruptFileError, match="not a regular file"):
        checkpoint.load(tmp_path / "w.pth", BUDGET)


def test_no_module_of_the_server_unpickles_files():
    """Files are parsed with pickletools, which executes nothing, and never with torch.load, even with weights_only.

    The only exception is the private socket between a server and its worker processes.
    """
    runs = re.compile(
        r"torch\.load\(|import pickle\b|pickle\.loads?|Unpickler\(|weights_only|torch\.jit\.load|import dill"
    )
    folder = Path(camserve_server.__file__).parent
    sources = {path: path.read_text() for path in folder.rglob("*.py")}
    code = {path: re.sub(r'"""(.|\n)*?"""', "", text) for path, text in sources.items()}
    assert len(code) > 50
    assert [str(path.relative_to(folder)) for path, text in code.items() if runs.search(text)] == [
        "workers/messages.py"
    ]

"""Tokenizers of unknown origin: bombs, nonsense and code are refused with a reason, before the library reads them."""

import base64
import json
import os
import shutil
import string
import struct

import pytest
import safetensors.torch
import torch

import needs
from camserve_server import models
from camserve_server.core.errors import ConfigError, FailedPrecondition
from camserve_server.models import parse, sources
from camserve_server.models.huggingface import tokenizer
from camserve_server.models.huggingface.tokenizer import FolderTokenizer, regex_fault
from models.image_text_folders import KINDS, TOKENS, save

hf = pytest.importorskip("transformers", reason=needs.TRANSFORMERS)

pytestmark = pytest.mark.slow  # hostile folders of models without a tokenizer are in test_hostile_model_folders

FILE, SETTINGS, CONFIG = "tokenizer.json", "tokenizer_config.json", "config.json"
PUNCTUATION = "".join(map("\\{}".format, string.punctuation))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return save(hf, "clip", tmp_path_factory.mktemp("original") / "clip")


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "clip")


def edited(name, **changes):
    """Return a function that changes a JSON file of a folder; a key with dots is a path."""

    def spoil(folder):
        content = json.loads((folder / name).read_text())
        for path, value in changes.items():
            *outer, last = path.split("__")
            inner = content
            for key in outer:
                inner = inner[key]
            inner[last] = value
        (folder / name).write_text(json.dumps(content))

    return spoil


def written(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def grown(size):
    """Return a function that makes the tokenizer a file of this size, without its disk space."""

    def spoil(folder):
        with (folder / FILE).open("r+b") as file:
            file.truncate(size)

    return spoil


def replaced(folder):
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)


def parts(*names, **content):
    return {"type": "Sequence", "normalizers": [{"type": name, **content} for name in names]}


def replacing(pattern, content=" "):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def mapped(size, char="a"):
    """Return a normalizer that puts a text of this size in the place of a character."""
    trie, leaf = [0] * 1024, 0x300
    trie[0], trie[leaf] = 256 << 10, 1 << 31
    trie[256 ^ ord(char)] = ord(char) | 1 << 8 | (256 ^ ord(char) ^ leaf) << 10
    content = struct.pack("<1025I", 4096, *trie) + b"x" * size + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def template(single, ids=(1,)):
    special = {"x": {"id": "x", "ids": list(ids), "tokens": ["a"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}


SPOILED = {
    "no tokenizer": (lambda folder: (folder / FILE).unlink(), "has no tokenizer.json"),
    "only a vocabulary": (
        lambda folder: (folder / FILE).rename(folder / "vocab.json"), "a vocab.json alone is not read here"
    ),
    "a pipe": (replaced, "has no tokenizer.json"),
    "too large": (grown(tokenizer.MAX_FILE + 1), "67,108,864 is the limit"),
    "no JSON": (written(FILE, b"\x80\x04cposix\nsystem\n"), "is not valid JSON"),
    "a list": (written(FILE, b"[]"), "is not a JSON object"),
    "nested": (written(FILE, b"[" * 200_000 + b"]" * 200_000), "is not valid JSON"),
    "many values": (written(FILE, b"[" + b"[],"  * 3_100_000 + b"0]"), "6,000,000 values"),
    "no model": (edited(FILE, model=None), "has no model"),
    "unknown model": (edited(FILE, model__type="Pickle"), "has no model that is one of BPE"),
    "no vocabulary": (edited(FILE, model__vocab=7), "has no vocabulary"),
    "random tokens": (edited(FILE, model__dropout=0.5), "at random"),
    "number beyond the model": (edited(FILE, model__vocab={"a": 10**6}), "has a token with the number 1000000"),
    "negative number": (edited(FILE, model__vocab={"a": -1}), "has a token with the number -1"),
    "added number": (edited(FILE, added_tokens=[{"id": 2**40, "content": "x"}]), "has a token with the number 10995"),
    "added nonsense": (edited(FILE, added_tokens=[7]), "added tokens that are no objects"),
    "many added": (edited(FILE, added_tokens=[{"id": 1, "content": "x"}] * 20_001), "20,001 added tokens"),
    "unknown part": (edited(FILE, normalizer={"type": "Script", "code": "x"}), 'a part of the type "Script"'),
    "many parts": (edited(FILE, normalizer=parts(*["NFC"] * 17)), "more than 16 parts"),
    "doubling": (
        edited(FILE, normalizer=parts(*["Replace"] * 5, pattern={"String": ""}, content="a")), "4 that insert text"
    ),
    "long replacement": (edited(FILE, normalizer=replacing("a", "b" * 1000)), "inserts more than 1 in one place"),
    "long prefix": (edited(FILE, normalizer={"type": "Prepend", "prepend": "b" * 1000}), "inserts more than 1"),
    "slow expression": (edited(FILE, normalizer=replacing("(a+)+$")), "has groups or references"),
    "expression in the middle": (
        edited(FILE, pre_tokenizer={"type": "Split", "pattern": {"Regex": r".*.*.*x"}, "behavior": "Isolated",
                                    "invert": False}),
        "repeats more than one thing",
    ),
    "long template": (
        edited(FILE, post_processor=template([{"Sequence": {"id": "A", "type_id": 0}}] * 9)), "inserts more than 8"
    ),
    "many tokens in one": (edited(FILE, post_processor=template([], range(1000))), "inserts more than 1"),
    "broken character map": (
        edited(FILE, normalizer={"type": "Precompiled", "precompiled_charsmap": "AQIDBAUGBwgJ"}), "cannot be used"
    ),
    "map to a long text": (edited(FILE, normalizer=mapped(65)), "a character map that inserts more than 64 bytes"),
    "two maps": (edited(FILE, normalizer={"type": "Sequence", "normalizers": [mapped(64)] * 2}), "more than one char"),
    "no map": (edited(FILE, normalizer={"type": "Precompiled", "precompiled_charsmap": "?"}), "is not base64"),
    "large text side": (
        edited(CONFIG, text_config__intermediate_size=200_000), "describes a network of 26,057,774 numbers"
    ),
    "long prefix of a part": (edited(FILE, model__continuing_subword_prefix="#" * 17), "more than 16 characters"),
    "long end of a word": (edited(FILE, model__end_of_word_suffix="#" * 17), "more than 16 characters"),
    "long words": (edited(FILE, model__max_input_chars_per_word=201), "201 as its max_input_chars_per_word"),
    "long token": (edited(FILE, model__vocab={"a" * 1001: 0}), "a text of more than 1,000 characters"),
    "long added token": (edited(FILE, added_tokens=[{"id": 1, "content": "a" * 1001}]), "more than 1,000 characters"),
    "long separator": (
        edited(FILE, post_processor={"type": "RobertaProcessing", "sep": ["a" * 1001, 1], "cls": ["a", 1]}),
        "more than 1,000 characters",
    ),
    "wrong types": (edited(FILE, model__merges=[[1, 2, 3]]), "cannot be used"),
    "settings without JSON": (written(SETTINGS, b"{"), "tokenizer_config.json is not valid JSON"),
    "large settings": (written(SETTINGS, b" " * (4 * 2**20 + 1)), "4,194,304 is the limit"),
    "unknown padding": (edited(SETTINGS, pad_token="nowhere"), "name the token 'nowhere', which it does not have"),
    "no settings": (lambda folder: (folder / SETTINGS).unlink(), "name no token for padding"),
    "unknown end": (edited(SETTINGS, add_eos_token=True, eos_token="nowhere"), "name the token 'nowhere'"),
    "NaFlex": (edited(CONFIG, model_type="siglip2", architectures=["Siglip2Model"]), "takes lists of patches"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_unusable_tokenizer_is_refused_with_a_reason(folder, what):
    spoil, words = SPOILED[what]
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        models.load(parse(f"hf:{folder}"))

    assert words in str(caught.value)
    assert len(str(caught.value)) < 700


def test_vocabulary_is_limited_before_the_library_reads_it(folder, monkeypatch):
    monkeypatch.setattr(tokenizer, "MAX_VOCABULARY", 100)
    with pytest.raises(ConfigError, match="100 and 4,000,000 are the limits"):
        models.load(parse(f"hf:{folder}"))


def test_check_names_a_missing_tokenizer_without_loading_the_model(folder):
    models.check(parse(f"hf:{folder}"))
    (folder / FILE).unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        models.check(parse(f"hf:{folder}"))


@pytest.mark.parametrize("name", [CONFIG, SETTINGS, "processor_config.json"])
def test_code_named_in_a_folder_is_never_run(folder, tmp_path, name, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\nclass Evil: pass\n")
    kinds = ("AutoModel", "AutoConfig", "AutoTokenizer", "AutoProcessor", "AutoImageProcessor")
    edited(name, auto_map=dict.fromkeys(kinds, "evil.Evil"), tokenizer_class="evil.Evil")(folder)
    try:
        sources.build(parse(f"hf:{folder}"))  # nothing later reads the folder
    except ConfigError as error:
        assert "trust_remote_code" in str(error) or "processor" in str(error)  # noqa: PT017 -- either is right

    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_expressions_of_real_tokenizers_are_allowed(kind, tmp_path):
    content = json.loads((save(hf, kind, tmp_path / kind) / FILE).read_text())
    found = [part["pattern"]["Regex"] for part in walk(content) if "Regex" in (part.get("pattern") or {})]

    assert len(found) == {"clip": 2, "siglip": 2, "siglip2": 0}[kind]
    assert all(not regex_fault(pattern) for pattern in found)


def walk(value):
    """Yield every object in a JSON value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from walk(item)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|a)*",
        "a*a*b",
        r"(\w+\s?)*$",
        r"(a)\1",
        "a{2,}b+",
        "(?<=a+)b",
        "(?=.*x)",
        r"\k<a>",
        "x" * 1001,
        "a?a?a",
        "a{3}a{3}",
        "a{,9}b?",
    ],
)
def test_expression_that_may_take_long_is_found(pattern):
    assert regex_fault(pattern)


@pytest.mark.parametrize("pattern", [" {2,}", r"\s+", f"[{PUNCTUATION}]", "a|b+|[c]*"])
def test_expression_that_is_always_fast_is_allowed(pattern):
    assert regex_fault(pattern) == ""


def test_short_replacements_of_a_character_map_are_made(folder):
    edited(FILE, normalizer=mapped(64))(folder)
    tokenizer = FolderTokenizer(folder, "clip", TOKENS, hf.AutoConfig.from_pretrained(folder).text_config.vocab_size)

    assert tokenizer._tokenizer.normalizer.normalize_str("bab") == "b" + "x" * 64 + "b"


@pytest.mark.parametrize("kind", KINDS)
def test_longest_texts_have_the_length_of_all_others(kind, tmp_path):
    folder = save(hf, kind, tmp_path / kind)
    config = hf.AutoConfig.from_pretrained(folder).text_config
    texts = ["a" * 1000, " " * 1000, "ﷺ" * 1000, "👩‍👩‍👧‍👦" * 140, "\x00" * 1000, "<|endoftext|>" * 76]
    ids, mask = FolderTokenizer(folder, kind, TOKENS, config.vocab_size)(texts)

    assert ids.shape == (len(texts), TOKENS)
    assert mask is None or mask.shape == ids.shape
    assert int(ids.max()) < config.vocab_size


def test_panic_of_the_library_is_an_error_of_the_request(original):
    config = hf.AutoConfig.from_pretrained(original).text_config
    broken = FolderTokenizer(original, "clip", TOKENS, config.vocab_size)
    panic = type("PanicException", (BaseException,), {})

    class Library:
        def encode(self, text):
            raise panic(f"index out of bounds: {text}")

    broken._tokenizer = Library()
    with pytest.raises(FailedPrecondition, match="the tokenizer of clip fails: index out of bounds: cat"):
        broken(["cat"])


def test_settings_that_add_an_end_go_before_the_template(folder):
    edited(FILE, post_processor=None)(folder)
    edited(SETTINGS, add_bos_token=True, add_eos_token=True)(folder)
    config = hf.AutoConfig.from_pretrained(folder).text_config
    ids, _ = FolderTokenizer(folder, "clip", TOKENS, config.vocab_size)(["cat"])

    assert (ids[0, 0], ids[0, 2]) == (config.bos_token_id, config.eos_token_id)
    assert torch.equal(ids[0, 2:], torch.full((TOKENS - 2,), config.eos_token_id))


@pytest.mark.parametrize(
    ("name", "words"),
    [("logit_scale", "must be finite numbers"), ("text_projection.weight", "the embedding of a text is not finite")],
)
def test_damaged_weights_of_the_text_side_are_found(folder, name, words):
    state = safetensors.torch.load_file(folder / "model.safetensors")
    state[name].fill_(torch.nan)
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=words):
        models.load(parse(f"hf:{folder}"))

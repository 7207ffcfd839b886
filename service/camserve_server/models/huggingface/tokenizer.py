"""Tokenizers that transformers saved in a folder: tokenizer.json, run by the `tokenizers` library.

Nothing in the folder is executed. The file is of unknown origin, so its size, its vocabulary and its parts are limited
before the library reads it: a part may repeat or multiply text, or search it with a regular expression.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from camserve_server.core.errors import ConfigError, FailedPrecondition
from camserve_server.models.huggingface.folder import TOKENIZER, read_file

T = TypeVar("T")

FILE, SETTINGS = TOKENIZER

MAX_FILE = 64 * 2**20  # bytes; Gemma's, with a vocabulary of 256,000 tokens, has 34 MiB
MAX_SETTINGS = 4 * 2**20  # bytes; Gemma's has 46 KiB
MAX_VALUES = 6_000_000  # lists, objects and items; Gemma's has 2 million. Each takes up to 100 bytes once it is read
MAX_VOCABULARY = 1_000_000
MAX_MERGES = 4 * MAX_VOCABULARY
MAX_ADDED = 20_000  # tokens that are searched for in every text; Gemma's has 6,400
MAX_PARTS = 16  # normalizers, pre-tokenizers and post-processors
MAX_REPLACEMENTS = 4  # of them: each can double the length of a text
MAX_TEMPLATE = 8  # tokens that are added in one place
MAX_MAPPED = 64  # bytes that a character map puts in the place of a character; SentencePiece's have 33
MAX_TOKEN = 1000  # characters of a token or of another text in a part: each may be copied for every word of a text
MAX_AFFIX = 16  # characters of what is added to the parts of words, such as "##" and "</w>"
MAX_DEPTH = 5  # lists and objects around a text in a part
MAX_WORD = 200  # characters of a word that WordPiece divides, in steps that grow with their square; BERT's has 100

CHARACTERS = "precompiled_charsmap"  # the key of a character map

MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")
PARTS = (
    "Sequence", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt", "Replace", "Prepend",
    "Precompiled", "BertNormalizer", "Split", "ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "Punctuation",
    "Digits", "BertPreTokenizer", "TemplateProcessing", "RobertaProcessing", "BertProcessing",
)  # fmt: skip
"""Types of a tokenizer's parts, besides its model and its decoder."""

LEFT = ("GemmaTokenizer", "GemmaTokenizerFast", "Siglip2Tokenizer")
"""Classes of transformers that pad on the left, unless their settings say otherwise."""


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Settings of a tokenizer besides the rules by which it divides a text.

    Attributes:
        length: the number of tokens of every text: longer ones are cut, shorter ones padded.
        pad: the token that is appended or prepended.
        left: True to pad on the left.
        masks: True if the model receives a mask of the padding.
        eos: the token that ends a text, as in the settings of transformers; empty if unknown.
        bos: the token that begins a text, likewise.
        adds: which of these two the settings say are added; None for those of the tokenizer's own template.
    """

    length: int
    pad: str
    left: bool
    masks: bool
    eos: str = ""
    bos: str = ""
    adds: tuple[bool, bool] | None = None


class FolderTokenizer:
    """The tokenizer of a folder.

    Args:
        folder: the folder.
        origin: the model's name, for errors.
        length: the number of tokens that the text side takes.
        vocabulary: the number of different tokens that it knows.

    Attributes:
        digest: SHA-256 of the file and of its settings.

    Raises:
        ConfigError: there is no tokenizer.json, it is too large or invalid, or has a part that is not allowed.
    """

    def __init__(self, folder: Path, origin: str, length: int, vocabulary: int) -> None:
        data = _read(folder / FILE, MAX_FILE, origin)
        _check(_parse(data, FILE, origin), origin, vocabulary)
        config = _read_settings(folder, origin)
        self._settings = settings = _settings_of(config, length)
        self._origin = origin
        self._tokenizer = _guarded(lambda: _build(data, settings), f"{origin}: its {FILE} cannot be used", ConfigError)
        self.digest = hashlib.sha256(data + repr(settings).encode()).digest()

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Return the tokens of texts [n,length], and 1 for those that are no padding, if the model takes that.

        Raises:
            FailedPrecondition: the tokenizer fails.
        """
        # One by one: `encode_batch` would start threads of its own.
        words = f"the tokenizer of {self._origin} fails"
        encodings = _guarded(lambda: [self._tokenizer.encode(text) for text in texts], words, FailedPrecondition)
        ids = torch.tensor([encoding.ids for encoding in encodings])
        masks = torch.tensor([encoding.attention_mask for encoding in encodings])
        return ids, masks if self._settings.masks else None


def check_file(folder: Path, origin: str) -> None:
    """Check that a folder has a tokenizer of a possible size.

    Raises:
        ConfigError: it has none, or one that is too large.
    """
    _size(folder / FILE, MAX_FILE, origin)


def _guarded(function: Callable[[], T], words: str, kind: type[Exception]) -> T:
    """Call a function of the library; turn every error, also a panic of its native code, into one of our own."""
    try:
        return function()
    except Exception as error:
        raise kind(f"{words}: {_one_line(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which derives from BaseException
            raise
        raise kind(f"{words}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# --- reading ---


def _size(path: Path, limit: int, origin: str) -> None:
    if not path.is_file():
        raise ConfigError(
            f"{origin} has no {path.name}, and a model that compares images with texts needs its tokenizer: save it "
            "with AutoProcessor's save_pretrained; a spiece.model or a vocab.json alone is not read here"
        )
    if (size := path.stat().st_size) > limit:
        raise ConfigError(f"{origin}: its {path.name} has {size:,} bytes, and {limit:,} is the limit")


def _read(path: Path, limit: int, origin: str) -> bytes:
    _size(path, limit, origin)
    return read_file(path, limit, origin)


def _parse(data: bytes, name: str, origin: str) -> dict[str, Any]:
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ConfigError(f"{origin}: its {name} has more than {MAX_VALUES:,} values, which is the limit")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: its {name} is not valid JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{origin}: its {name} is not a JSON object")
    return value


def _read_settings(folder: Path, origin: str) -> dict[str, Any]:
    path = folder / SETTINGS
    return _parse(_read(path, MAX_SETTINGS, origin), SETTINGS, origin) if path.exists() else {}


def _settings_of(config: Mapping[str, Any], length: int) -> TokenSettings:
    """Return the settings as transformers reads them, with the length that the text side takes."""
    adds = config.keys() & {"add_bos_token", "add_eos_token"}
    names = config.get("model_input_names")
    return TokenSettings(
        length=length,
        pad=_token(config.get("pad_token")),
        left=(config.get("padding_side") or ("left" if config.get("tokenizer_class") in LEFT else "right")) == "left",
        masks="attention_mask" in names if isinstance(names, list) else True,
        eos=_token(config.get("eos_token")),
        bos=_token(config.get("bos_token")),
        adds=(bool(config.get("add_bos_token")), bool(config.get("add_eos_token"))) if adds else None,
    )


def _token(value: Any) -> str:
    """Return a special token, which is a string or an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _build(data: bytes, settings: TokenSettings) -> Any:
    from tokenizers import Tokenizer, processors  # noqa: PLC0415 -- an optional dependency

    tokenizer = Tokenizer.from_buffer(data)
    if settings.adds is not None:  # the settings go before the template of the file
        before, after = (
            [token] if add else [] for add, token in zip(settings.adds, (settings.bos, settings.eos), strict=True)
        )
        special = [(token, _id(tokenizer, token)) for token in (*before, *after)]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=special)
    pad = settings.pad or settings.eos
    tokenizer.enable_truncation(settings.length)
    side = "left" if settings.left else "right"
    tokenizer.enable_padding(direction=side, pad_id=_id(tokenizer, pad), pad_token=pad, length=settings.length)
    return tokenizer


def _id(tokenizer: Any, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        named = f"name the token {token[:50]!r}, which it does not have" if token else "name no token for padding"
        raise ValueError(f"its settings {named}")
    return cast("int", found)


# --- checks before the library reads the file ---


def _check(tokenizer: Mapping[str, Any], origin: str, vocabulary: int) -> None:
    for fault in (*_model_faults(tokenizer.get("model"), vocabulary), *_token_faults(tokenizer, vocabulary)):
        raise ConfigError(f"{origin}: its {FILE} {fault}")
    parts = [part for name in ("normalizer", "pre_tokenizer", "post_processor") for part in _parts(tokenizer.get(name))]
    for fault in _part_faults(parts):
        raise ConfigError(f"{origin}: its {FILE} {fault}")


def _model_faults(model: Any, vocabulary: int) -> Iterator[str]:
    if not isinstance(model, dict) or model.get("type", "BPE") not in MODELS:
        yield f"has no model that is one of {', '.join(MODELS)}"
        return
    words, merges = model.get("vocab"), model.get("merges") or []
    if not isinstance(words, dict | list) or not isinstance(merges, list):
        yield "has no vocabulary"
        return
    if len(words) > MAX_VOCABULARY or len(merges) > MAX_MERGES:
        limits = f"{MAX_VOCABULARY:,} and {MAX_MERGES:,} are the limits"
        yield f"has {len(words):,} tokens and {len(merges):,} merges, and {limits}"
    if model.get("dropout"):
        yield "draws tokens at random (dropout)"
    ids = words.values() if isinstance(words, dict) else range(len(words))
    yield from _id_faults(ids, vocabulary)
    yield from _length_faults(list(words))
    yield from _word_faults(model)


def _word_faults(model: Mapping[str, Any]) -> Iterator[str]:
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(str(model.get(name) or "")) > MAX_AFFIX:
            yield f"has a {name} of more than {MAX_AFFIX} characters"
    longest = model.get("max_input_chars_per_word") or 0
    if type(longest) is not int or longest > MAX_WORD:
        yield f"has {str(longest)[:20]} as its max_input_chars_per_word, and {MAX_WORD} is the limit"


def _length_faults(value: Any) -> Iterator[str]:
    if any(len(text) > MAX_TOKEN for text in _texts(value)):
        yield f"has a text of more than {MAX_TOKEN:,} characters"


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the texts in a value, without keys and character maps; the library reads none at a greater depth."""
    if isinstance(value, str):
        yield value
    elif depth <= MAX_DEPTH:
        inner = [item for key, item in value.items() if key != CHARACTERS] if isinstance(value, dict) else value
        for item in inner if isinstance(inner, Iterable) else ():
            yield from _texts(item, depth + 1)


def _token_faults(tokenizer: Mapping[str, Any], vocabulary: int) -> Iterator[str]:
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        yield "has added tokens that are no objects"
    elif len(added) > MAX_ADDED:
        yield f"has {len(added):,} added tokens, and {MAX_ADDED:,} is the limit"
    else:
        yield from _id_faults((token.get("id") for token in added), vocabulary)
        yield from _length_faults(added)


def _id_faults(ids: Any, vocabulary: int) -> Iterator[str]:
    for number in ids:
        if type(number) is not int or not 0 <= number < vocabulary:
            yield f"has a token with the number {str(number)[:20]}, and the model has {vocabulary:,} tokens, from 0"
            return


def _parts(value: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield a part of a tokenizer, and those inside it."""
    if not isinstance(value, dict) or depth > MAX_PARTS:
        return
    yield value
    for name in ("normalizers", "pretokenizers", "processors"):
        for inner in value.get(name) or ():
            yield from _parts(inner, depth + 1)


def _part_faults(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    kinds = [str(part.get("type"))[:50] for part in parts]
    if unknown := [kind for kind in kinds if kind not in PARTS]:
        yield f'has a part of the type "{unknown[0]}", which is not allowed here: {", ".join(PARTS)}'
    if len(parts) > MAX_PARTS or sum(kind in ("Replace", "Prepend") for kind in kinds) > MAX_REPLACEMENTS:
        yield f"has more than {MAX_PARTS} parts, or more than {MAX_REPLACEMENTS} that insert text"
    if kinds.count("Precompiled") > 1:
        yield "has more than one character map"
    for part in parts:
        yield from _length_faults(part)
        yield from _map_faults(part.get(CHARACTERS))
        lengths = {"content": 1, "prepend": 1, "single": MAX_TEMPLATE, "special_tokens": MAX_TEMPLATE}
        special = part.get("special_tokens")
        ids = (
            [token.get("ids") for token in special.values() if isinstance(token, dict)]
            if isinstance(special, dict)
            else []
        )
        inserted = [(part.get(name), limit) for name, limit in lengths.items()] + [(each, 1) for each in ids]
        for value, limit in inserted:
            if isinstance(value, str | list | dict) and len(value) > limit:
                yield f'has a part "{part.get("type")}" that inserts more than {limit} in one place'
        pattern = part.get("pattern")
        if isinstance(pattern, dict) and (reason := regex_fault(str(pattern.get("Regex") or ""))):
            yield f"has the regular expression {str(pattern['Regex'])[:80]!r}, which {reason}"


def _map_faults(characters: Any) -> Iterator[str]:
    """Yield the fault of a character map: the length of a trie, the trie, and replacements that end with a NUL."""
    try:
        data = base64.b64decode(characters or "", validate=True)
    except (TypeError, ValueError):
        yield "has a character map that is not base64"
        return
    replacements = data[4 + int.from_bytes(data[:4], "little") // 4 * 4 :]
    if max(map(len, replacements.split(b"\0"))) > MAX_MAPPED:
        yield f"has a character map that inserts more than {MAX_MAPPED} bytes in one place"


def regex_fault(pattern: str) -> str:
    """Return why a regular expression might take very long for a short text; empty if it cannot.

    Alternatives of characters, classes and escapes are allowed, with one repetition each: for n characters
    such a search takes n² steps at most. Those of CLIP and of SentencePiece have this form.
    """
    if len(pattern) > 1000:  # noqa: PLR2004 -- of CLIP: 110
        return "is too long"
    plain = re.sub(r"\\[pP]\{[^}]*\}|\\[^0-9kgG]", "a", pattern)
    plain = re.sub(r"\[\^?\]?[^\]\[]*\]", "a", plain)
    if re.search(r"[\\(\[]", plain):
        return "has groups or references"
    if any(len(re.findall(r"[*+?]|\{\d*,?\d*\}", branch)) > 1 for branch in plain.split("|")):
        return "repeats more than one thing"
    return ""

"""Small random CLIP, SigLIP and SigLIP 2 models, saved in folders with their processors as transformers saves them."""

import string

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

TOKENS = 24  # the number of tokens that the text sides take
SIDE = 48
TEXTS = (
    "a photo of a cat",
    "A Photo, of a DOG!",
    "",
    "   ",
    "a dog that is longer than all other texts, and is therefore cut: naïve café " * 3,
    "крокодил と 猫 ☕",
    "👩‍👩‍👧‍👦 family",
    "tab\tand\nnewline  twice",
    "don't <|endoftext|> </s> <eos> stop",
    "ﬁ ligature é e\u0301 \u202e\x00 end",
)
"""Texts on which tokenizers differ: empty, long, with emoji, other scripts, special tokens and odd spaces."""

_VISION = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "image_size": SIDE,
    "patch_size": 8,
}  # fmt: skip
_TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": TOKENS,
}  # fmt: skip
LETTERS = [*string.ascii_lowercase, *string.digits, *"'!?,.-"]


def clip(hf):
    """Return a CLIP and its processor, whose tokenizer has a few merges."""
    begin, end = "<|startoftext|>", "<|endoftext|>"
    byte_letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("p", "h"), ("o", "f</w>"), ("c", "a"), ("ca", "t</w>")]
    words = [*byte_letters, *(letter + "</w>" for letter in byte_letters), *map("".join, merges), begin, end]
    vocabulary = {word: number for number, word in enumerate(words)}
    ids = {"bos_token_id": vocabulary[begin], "eos_token_id": vocabulary[end], "pad_token_id": vocabulary[end]}
    config = hf.CLIPConfig(
        text_config={**_TEXT, **ids, "vocab_size": len(words)}, vision_config=_VISION, projection_dim=24
    )
    tokenizer = hf.CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TOKENS)
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    return hf.CLIPModel(config), hf.CLIPProcessor(hf.CLIPImageProcessor(**sizes), tokenizer)


def siglip(hf):
    """Return a SigLIP and its processor, with a unigram tokenizer that removes case and punctuation."""
    words = ["</s>", "<unk>", "▁", *LETTERS, "▁a", "▁photo", "▁of", "cat"]
    backend = Tokenizer(models.Unigram([(word, -float(rank)) for rank, word in enumerate(words)], 1))
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[" + "".join(rf"\{mark}" for mark in string.punctuation) + "]"), ""),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="</s>", eos_token="</s>", unk_token="<unk>", model_max_length=TOKENS,
        model_input_names=["input_ids"],
    )  # fmt: skip
    return _siglip(hf, tokenizer, len(words))


def siglip2(hf):
    """Return a SigLIP 2 with a fixed resolution and its processor: the network of SigLIP, the tokenizer of Gemma."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    words = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, "ca", "cat"]
    tokenizer = hf.GemmaTokenizer(
        vocab={word: number for number, word in enumerate(words)}, merges=[("c", "a"), ("ca", "t")],
        add_bos_token=False, add_eos_token=True, padding_side="right", model_max_length=TOKENS,
        model_input_names=["input_ids"],
    )  # fmt: skip
    return _siglip(hf, tokenizer, len(words))


def _siglip(hf, tokenizer, words):
    text = {
        **_TEXT,
        "vocab_size": words,
        "projection_size": 32,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    config = hf.SiglipConfig(text_config=text, vision_config=_VISION)
    images = hf.SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
    return hf.SiglipModel(config), hf.SiglipProcessor(images, tokenizer)


KINDS = {"clip": clip, "siglip": siglip, "siglip2": siglip2}


def save(hf, kind, folder):
    """Save a model of a kind in a folder, with its processor; no bias, class token or position is zero."""
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    torch.manual_seed(7)
    model, processor = KINDS[kind](hf)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def tokens_of(processor, texts):
    """Return the arguments of transformers' own processor for texts, with the padding that each family needs."""
    if type(processor).__name__ == "CLIPProcessor":
        options = {"padding": True, "truncation": True}
    else:
        options = {"padding": "max_length", "max_length": TOKENS, "truncation": True}
    return processor(text=list(texts), return_tensors="pt", **options)

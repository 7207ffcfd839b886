"""Text sides of models that compare images with texts, such as CLIP and SigLIP."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from camserve_server.core.errors import ConfigError, ServiceError
from camserve_server.models.values import TextHead

MAX_TEXTS = 1000
"""Largest number of texts in a request, and in a model's entry."""

MAX_TEXT_LENGTH = 1000
"""Largest number of characters of a text. It bounds the time and memory of every step of a tokenizer."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in a list of texts.

    Attributes:
        index: the index of the text at fault; None if the list as a whole is.
        message: description of the error.
    """

    index: int | None
    message: str


def faults(texts: Sequence[str]) -> Iterator[Fault]:
    """Yield the errors in a list of texts that are to be a model's classes."""
    if len(texts) > MAX_TEXTS:
        yield Fault(None, f"there are {len(texts):,} texts, and {MAX_TEXTS:,} is the limit")
        return
    first: dict[str, int] = {}
    for index, text in enumerate(texts):
        if message := fault_of(text):
            yield Fault(index, message)
        elif (other := first.setdefault(text, index)) != index:
            yield Fault(index, f"the text is the same as that at index {other}")


def fault_of(text: str) -> str:
    """Return the error in one text; empty without one."""
    if len(text) <= MAX_TEXT_LENGTH:
        return ""
    return f"the text has {len(text):,} characters, and {MAX_TEXT_LENGTH:,} is the limit"


@dataclass(frozen=True, slots=True, eq=False)
class TextTower:
    """The text encoder of a model whose output is the embedding of an image.

    The score of an image and a text is `scale` times the cosine of their embeddings, plus `bias`.

    Attributes:
        encoder: a module whose forward takes a list of n strings and returns their embeddings [n,E], of the same length
            as those of images. It also tokenizes the texts.
        scale: the factor of the cosine; in CLIP and SigLIP the exponential of `logit_scale`.
        bias: the number added to it; in SigLIP `logit_bias`.
        exclusive: True if the texts of a request exclude each other, so that their probabilities are a softmax (CLIP);
            False if each has a probability of its own, a sigmoid (SigLIP).

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from camserve_server.models import TextTower
        >>> class Letters(nn.Module):
        ...     def forward(self, texts):
        ...         return torch.tensor([[float(text.count("a")), float(text.count("b"))] for text in texts])
        >>> tower = TextTower(Letters(), scale=100.0)
        >>> tower.embed(["aaa bbbb"])
        tensor([[0.6000, 0.8000]])
    """

    encoder: nn.Module
    scale: float
    bias: float = 0.0
    exclusive: bool = True

    def head(self, length: int) -> TextHead:
        """Return the constants of the score.

        Args:
            length: the number of values of an embedding.

        Raises:
            ConfigError: scale or bias is not a finite number.

        Example:
            >>> TextTower(nn.Identity(), scale=100.0).head(length=512)
            TextHead(scale=100.0, bias=0.0, exclusive=True, length=512)
        """
        scale, bias = torch.tensor(
            [float(self.scale), float(self.bias)], dtype=torch.float32
        ).tolist()  # as float32 computes with them
        if not torch.tensor([scale, bias]).isfinite().all():
            raise ConfigError(f"the scale ({scale:g}) and the bias ({bias:g}) of its texts must be finite numbers")
        return TextHead(scale, bias, self.exclusive, length)

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings of texts, each of length 1, float32 [n,E].

        Args:
            texts: the texts, n strings.

        Raises:
            ServiceError: the encoder refuses a text.
            RuntimeError: the encoder fails, or returns something else.

        Example:
            >>> class Letters(nn.Module):
            ...     def forward(self, texts):
            ...         return torch.tensor([[float(text.count("a")), float(text.count("b"))] for text in texts])
            >>> TextTower(Letters(), scale=100.0).embed(["aaa bbbb", "b"])
            tensor([[0.6000, 0.8000],
                    [0.0000, 1.0000]])
        """
        embeddings = self.encoder(list(texts))
        if not isinstance(embeddings, Tensor) or embeddings.dim() != 2 or len(embeddings) != len(texts):  # noqa: PLR2004 -- [n,E]
            raise RuntimeError(f"the text encoder must return a tensor of {len(texts)} embeddings")
        return functional.normalize(embeddings.float(), dim=-1)

    def check(self, length: int) -> None:
        """Run the encoder on a text.

        Args:
            length: the length of an image's embedding.

        Raises:
            ConfigError: it does not run, or the embeddings of images and texts differ in length.

        Example:
            >>> class Letters(nn.Module):
            ...     def forward(self, texts):
            ...         return torch.tensor([[float(text.count("a")), float(text.count("b"))] for text in texts])
            >>> try:
            ...     TextTower(Letters(), scale=100.0).check(length=512)
            ... except ConfigError as error:
            ...     print(error)
            the embedding of an image has 512 numbers, and that of a text has 2
        """
        try:
            embedding = self.embed(["a photo"])
        except (ServiceError, ConfigError) as error:
            raise ConfigError(f"its text encoder does not run: {error}") from error
        except Exception as error:  # of a user's module
            raise ConfigError(f"its text encoder does not run: {type(error).__name__}: {error}") from error
        if embedding.shape[1] != length:
            found = embedding.shape[1]
            raise ConfigError(f"the embedding of an image has {length} numbers, and that of a text has {found}")
        if not embedding.isfinite().all():
            raise ConfigError("the embedding of a text is not finite: are the weights of its text encoder damaged?")

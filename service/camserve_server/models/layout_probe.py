"""Finds rows and columns in a layer's output: by changing the image, most at its top and most at its left.

Noise that fades from the top of the image to its bottom changes the upper rows of a feature map more than the lower
ones, whatever the layer is, as long as a position of its output has more to do with its own place in the image than
with others. In which of the ways to read the output the change fades with the row, and not with the column, is then
seen, not assumed: how many prefix tokens there are, which axes are the rows and the columns, whether tokens are in the
image's order at all (those of a Hiera's first stages are not).

The change for noise that fades the other way needs no run: for little noise it is what remains of the change for noise
that does not fade. Their shares do not depend on how strongly the layer reacts at a place.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from camserve_server.models.grid import to_grid
from camserve_server.models.values import Layout

COPIES = 4
"""Images in the probe: one as it is; with noise that fades downward, that fades to the right, that does not fade."""

NOISE = 0.1
"""Standard deviation of the noise, where the image's values go from -1 to 1: little enough for layers to be linear."""

CHANNELS = 64
"""How many of a layer's channels are looked at: more see no more."""

SURE, LOST = 0.8, 0.4
"""A fit from which a reading is right, and one below which it is wrong, if places differ as much as `WIDE` says.

Measured on every layer of 162 architectures with random weights: 96 % of the right readings fit better than `SURE`,
and the wrong ones worse than `LOST`.
"""

BLIND, WIDE = 0.1, 0.3
"""A spread of the shares below which no place shows, and one above which places differ indeed.

Attention with random weights leaves little of a place, or brings every place something of a random other one.
"""

AGREED, SAME = 0.5, 0.9
"""Correlation of what two halves of the channels say: above it is no chance; above it is the same."""


ROUNDING = 1e-4
"""The part of the largest change below which float32 may have made the difference."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How well one way to read an output explains where it changed.

    Attributes:
        layout: the way.
        fit: correlation of the changes' shares with the row or column, the smaller of both; 1 is best.
        spread: standard deviation of the shares over the grid, of at most 0.58 for a ramp from -1 to 1.
        agreement: correlation of the shares of one half of the channels with those of the other.
    """

    layout: Layout
    fit: float
    spread: float
    agreement: float

    @property
    def sure(self) -> bool:
        """Whether the probe shows that this is how the output is to be read."""
        return self.fit >= SURE and self.agreement >= AGREED

    @property
    def blind(self) -> bool:
        """Whether the output does not depend on the place: nothing can be read off it."""
        return self.spread < BLIND

    @property
    def wrong(self) -> bool:
        """Whether the output depends on the place, and this reading does not say how.

        Of four axes two are almost certainly rows and columns; of tokens no shape says what they are. A grid of two
        rows or columns has too few places to tell.
        """
        wide = self.spread >= (BLIND if self.layout.axes == "tokens" else WIDE)
        lost = wide and self.fit < LOST and self.agreement >= SAME
        return lost and min(self.layout.height, self.layout.width) > 2  # noqa: PLR2004


def images(size: tuple[int, int]) -> Tensor:
    """Make the probe's images [COPIES,3,h,w], the same every time."""
    height, width = size
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, height, width, generator=generator) * 2 - 1
    noise = torch.randn(image.shape, generator=generator) * NOISE
    down, right = torch.linspace(1, 0, height).view(1, 1, -1, 1), torch.linspace(1, 0, width).view(1, 1, 1, -1)
    return torch.cat([image, image + noise * down, image + noise * right, image + noise])


def read(output: Tensor, layouts: Iterable[Layout]) -> tuple[Reading, ...]:
    """See how well each way to read an output explains how it changed, up to the first that surely does.

    Args:
        output: of a layer [COPIES,...], for `images`.
        layouts: ways to read it.
    """
    readings: list[Reading] = []
    for layout in layouts:
        readings.append(_read(output, layout))
        if readings[-1].sure:
            break
    return tuple(readings)


def _read(output: Tensor, layout: Layout) -> Reading:
    grid = to_grid(output.detach(), layout)
    grid = grid[:, :: -(-grid.shape[1] // CHANNELS)]
    down, right, everywhere = grid[1:] - grid[:1]
    changes = torch.stack([down, everywhere - down, right, everywhere - right])
    least = float(changes.square().sum(1).max().sqrt()) * ROUNDING
    plain = _correlate(changes, layout, least)
    if plain.sure:
        return plain
    # Attention adds one change to every place; without what is common to all, what is left is the place's own.
    apart = _correlate(changes - changes.mean((2, 3), keepdim=True), layout, least)
    return max(plain, apart, key=lambda one: one.fit)


def _correlate(changes: Tensor, layout: Layout, least: float) -> Reading:
    """Compare the shares of the changes [4,C,h,w] with the rows and columns; what is below `least` is no change."""
    squares = changes.square()
    halves = torch.stack([squares[:, ::2].sum(1), squares[:, 1::2].sum(1)])
    whole, first, second = (_shares(energy, least) for energy in (halves.sum(0), *halves))
    rows = torch.linspace(1, -1, layout.height, device=changes.device).view(-1, 1).expand_as(whole[0])
    columns = torch.linspace(1, -1, layout.width, device=changes.device).view(1, -1).expand_as(whole[0])
    return Reading(
        layout=layout,
        fit=min(_correlation(whole[0], rows), _correlation(whole[1], columns)),
        spread=min(float(share.std()) for share in whole),
        agreement=min(_correlation(one, other) for one, other in zip(first, second, strict=True)),
    )


def _shares(energy: Tensor, least: float) -> Tensor:
    """Return by how much the change fades at each place [2,h,w], downward and to the right, from the squares [4,h,w].

    It is 1 where all of the change is that of the noise which fades, -1 where none is.
    """
    down, up, right, left = energy.sqrt()
    first, last = torch.stack([down, right]), torch.stack([up, left])
    return (first - last) / (first + last).clamp(min=max(least, torch.finfo(torch.float32).tiny))


def _correlation(one: Tensor, other: Tensor) -> float:
    """Return Pearson's correlation, or 0 where one of the two is the same everywhere, or is not finite."""
    one, other = one - one.mean(), other - other.mean()
    found = float((one * other).sum() / (one.norm() * other.norm()).clamp(min=1e-12))
    return found if found == found else 0.0  # noqa: PLR0124 -- NaN

"""Networks that look at several pictures at once, such as the frames of a video, through one picture with all of them.

Everything else in camserve has one picture and one grid over it. So the pictures are the tiles of a sheet:
`tiled` makes a network that takes the sheet. It cuts the sheet into its tiles for the user's network, and puts a
layer's output for all tiles together to a sheet again, from which the user's network goes on. That sheet is the output
of a module, `sheet`. It is an ordinary layer with a grid over the picture, which every method can explain.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, repeat
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from camserve_server.core.errors import ConfigError, did_you_mean

Inputs: TypeAlias = Literal["video", "views", "separate"]
"""How a network takes its pictures: [B,C,T,H,W], [B,T,C,H,W], or one argument [B,C,H,W] for each."""

VOLUME_AXES = 5
IMAGE_AXES = 4


def tiled(
    network: nn.Module, grid: tuple[int, int], layers: str | Sequence[str], inputs: Inputs = "video"
) -> "TiledNetwork":
    """Make a network that takes a sheet of pictures, from one that takes the pictures themselves.

    Args:
        network: the network, with its weights.
        grid: rows and columns of the sheet. Its tiles, row by row, are the frames of a video, the slices of a volume,
            or the pictures that the network compares.
        layers: the layer to explain. Its output is one of these: [B,C,t,h,w] or [B,t,h,w,C], where t slices cover all
            pictures evenly; [B*T,C,h,w], the pictures of an image one after another, or with `inputs="separate"` the
            first pictures of all images, then the second ones; or [B,C,h,w] in each of T calls, one for each picture in
            turn. Or T layers, one for each picture, if each picture has its own: each returns [B,C,h,w].
        inputs: how the network takes the pictures: "video" as [B,C,T,H,W], "views" as [B,T,C,H,W], or "separate" as one
            argument [B,C,H,W] for each.

    Returns:
        The network. Its layer `sheet` is the explained one.

    Raises:
        ConfigError: the network has no such layer, or the grid or another value is invalid.
    """
    names = (layers,) if isinstance(layers, str) else tuple(layers)
    pictures = grid[0] * grid[1]
    if min(grid) < 1 or pictures < 2:  # noqa: PLR2004 -- a sheet of one picture is the picture
        raise ConfigError(f"grid={grid}: a sheet has at least two tiles, in rows and columns")
    if len(names) not in (1, pictures):
        raise ConfigError(f"{len(names)} layers for {pictures} pictures: name one for all, or one for each")
    if inputs not in get_args(Inputs):
        hint = did_you_mean(inputs, get_args(Inputs))
        raise ConfigError(f'inputs="{inputs}" must be one of {", ".join(get_args(Inputs))}{hint}')
    known = dict(network.named_modules())
    for name in names:
        if name not in known:
            raise ConfigError(f'the network has no layer "{name}"{did_you_mean(name, known)}')
    return TiledNetwork(network, grid, names, inputs)


class TiledNetwork(nn.Module):
    """Network that takes a sheet of pictures; see `tiled`.

    Attributes:
        network: the user's network.
        sheet: passes on the explained layer's output as a sheet [B,C,rows*h,columns*w].
    """

    def __init__(self, network: nn.Module, grid: tuple[int, int], names: Sequence[str], inputs: Inputs) -> None:
        super().__init__()
        self.network = network
        self.sheet = nn.Identity()
        self._grid, self._names, self._inputs = grid, tuple(names), inputs

    def forward(self, sheet: Tensor) -> Any:
        """Run the network on the tiles of a sheet [B,C,rows*H,columns*W]."""
        tiles = cut(sheet, self._grid)
        arguments = _ARGUMENTS[self._inputs](tiles)
        layers = [self.network.get_submodule(name) for name in self._names]
        outputs: list[Tensor | None] = [None] * tiles.shape[1]
        try:
            with _replacing(layers, lambda picture, output: self._collect(picture, output, outputs, tiles)):
                result = self.network(*arguments)
        except _AllCollectedError:
            returned = self._through_sheet(cast("list[Tensor]", outputs))
        else:
            if calls := sum(output is not None for output in outputs):
                raise ConfigError(self._words(f"was called for {calls} of them", "one call for all, or one for each"))
            return result  # a single call covered all pictures
        with _replacing(layers, lambda picture, _output: returned[picture]):
            return self.network(*arguments)

    def _collect(self, picture: int, output: Any, outputs: list[Tensor | None], tiles: Tensor) -> Tensor:
        """Return the output of a call for all pictures; collect those of calls for one picture each.

        Raises:
            _AllCollectedError: this was the last picture. The layers after it need the sheet, and run in a second pass.
            ConfigError: the output is neither.
        """
        shape, images = tuple(output.shape) if isinstance(output, Tensor) else (), len(tiles)
        if len(self._names) == 1 and picture == 0:
            if len(shape) == VOLUME_AXES and shape[0] == images:
                last = not _is_grid(shape[3:], tiles) and _is_grid(shape[2:4], tiles)  # channels last, as in Swin3D
                sheet = self._volume_through_sheet(output.movedim(4, 1) if last else output)
                return sheet.movedim(1, 4) if last else sheet
            if len(shape) == IMAGE_AXES and shape[0] == images * len(outputs):
                return self._batch_through_sheet(output)
        if len(shape) != IMAGE_AXES or shape[0] != images:
            raise ConfigError(self._words(f"returns {list(shape)} for {images} images", "[B,C,t,h,w] or [B,C,h,w]"))
        if outputs[picture] is not None:
            raise ConfigError(self._words(f"was called again for picture {picture}", "one call of each layer"))
        outputs[picture] = output
        if all(each is not None for each in outputs):
            raise _AllCollectedError
        return cast("Tensor", output)

    def _words(self, found: str, expected: str) -> str:
        rows, columns = self._grid
        return f'layer "{", ".join(self._names)}" {found}; with {rows}x{columns} pictures, expected: {expected}'

    def _volume_through_sheet(self, output: Tensor) -> Tensor:
        """Pass an output [B,C,t,h,w] through the sheet; of t slices, each covers the same number of tiles, or nearly.

        Each tile has a copy of its slice, and the network goes on with the mean of the copies. The copies share the
        slice's gradient.
        """
        slices, pictures = output.shape[2], self._grid[0] * self._grid[1]
        if slices > pictures:
            raise ConfigError(self._words(f"returns {slices} slices", f"at most {pictures}"))
        place = torch.arange(pictures, device=output.device) * slices // pictures
        tiles = cut(self.sheet(join(output.movedim(2, 1)[:, place], self._grid)), self._grid)
        share = nn.functional.one_hot(place, slices).to(tiles)
        return torch.einsum("bpchw,pt->bcthw", tiles, share / share.sum(0))

    def _batch_through_sheet(self, output: Tensor) -> Tensor:
        """Pass an output [B*T,C,h,w] through the sheet."""
        pictures, shape = self._grid[0] * self._grid[1], output.shape[1:]
        if self._inputs == "separate":
            tiles = output.reshape(pictures, -1, *shape).transpose(0, 1)
            return cut(self.sheet(join(tiles, self._grid)), self._grid).transpose(0, 1).flatten(0, 1)
        return cut(self.sheet(join(output.reshape(-1, pictures, *shape), self._grid)), self._grid).flatten(0, 1)

    def _through_sheet(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Pass outputs [B,C,h,w], one for each picture, through the sheet; return them in the same order.

        Outputs of different layers have channels of their own on the sheet, which are zero in the other tiles.
        """
        if len(self._names) == 1:
            return cut(self.sheet(join(torch.stack(list(outputs), 1), self._grid)), self._grid).unbind(1)
        channels = [output.shape[1] for output in outputs]
        alone = [
            nn.functional.pad(output, (0, 0, 0, 0, sum(channels[:i]), sum(channels[i + 1 :])))
            for i, output in enumerate(outputs)
        ]
        tiles = cut(self.sheet(join(torch.stack(alone, 1), self._grid)), self._grid)
        return [torch.split(tile, channels, 1)[i] for i, tile in enumerate(tiles.unbind(1))]


_ARGUMENTS: Mapping[Inputs, Callable[[Tensor], Sequence[Tensor]]] = {
    "video": lambda tiles: (tiles.transpose(1, 2),),
    "views": lambda tiles: (tiles,),
    "separate": lambda tiles: tiles.unbind(1),
}
"""The arguments of a network, from tiles [B,T,C,H,W]."""


def _is_grid(sizes: Sequence[int], tiles: Tensor) -> bool:
    """Return whether a height and width have the proportions of tiles [B,T,C,H,W], to a row or a column."""
    height, width = tiles.shape[3:]
    return abs(sizes[0] * width - sizes[1] * height) <= max(height, width)


class _AllCollectedError(Exception):
    """Ends a pass at the layer's call for the last picture."""


@contextmanager
def _replacing(layers: Sequence[nn.Module], replace: Callable[[int, Any], Tensor]) -> Iterator[None]:
    """Replace the outputs of layers inside the block.

    Args:
        layers: the layer of each picture, or a single one that is called for all of them, together or in turn.
        replace: receives the index of the picture, and the output; returns the output to continue with.
    """

    def make_hook(first: int) -> Callable[[nn.Module, Any, Any], Tensor]:
        calls = count() if len(layers) == 1 else repeat(first)
        return lambda _layer, _args, output: replace(next(calls), output)

    with ExitStack() as stack:
        for picture, layer in enumerate(layers):
            stack.enter_context(layer.register_forward_hook(make_hook(picture)))
        yield


def cut(sheet: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cut a sheet [B,C,rows*h,columns*w] into its tiles [B,T,C,h,w], row by row."""
    rows, columns = grid
    images, channels, height, width = sheet.shape
    tiles = sheet.reshape(images, channels, rows, height // rows, columns, width // columns)
    return tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def join(tiles: Tensor, grid: tuple[int, int]) -> Tensor:
    """Put tiles [B,T,C,h,w] together to a sheet [B,C,rows*h,columns*w], row by row."""
    images, _, *shape = tiles.shape
    return tiles.reshape(images, *grid, *shape).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)

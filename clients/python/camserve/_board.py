"""Former name of ``camserve._plots.comparison``, until no module imports it."""

from camserve._plots.comparison import Bar, Line, Panel, Tile, draw

__all__ = ["Bar", "Line", "Panel", "Tile", "draw"]

"""The job over many photos: which there are, what came of each, and how to go on after it was cut off."""

from camserve._dataset.job import Question, Rows, Tally, ask, opened, publish, run, taken_up
from camserve._dataset.photos import Photos, is_there
from camserve._dataset.rows import Wanted, schema
from camserve._dataset.store import Store, arrow, locked

__all__ = [
    "Photos",
    "Question",
    "Rows",
    "Store",
    "Tally",
    "Wanted",
    "arrow",
    "ask",
    "is_there",
    "locked",
    "opened",
    "publish",
    "run",
    "schema",
    "taken_up",
]

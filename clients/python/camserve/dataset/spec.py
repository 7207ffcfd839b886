"""The options of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from camserve._codec.rendering import are_regions_requested
from camserve._codec.stored_options import options_to_plain

if TYPE_CHECKING:
    from camserve._values.options import ExplainOptions
    from camserve.dataset import rows


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Options of a job.

    Attributes:
        options: Options of ``Client.explain_many`` for every photo.
        outputs: The files to write for every photo.
    """

    options: ExplainOptions
    outputs: rows.Outputs

    @property
    def regions(self) -> bool:
        """True if the results have a column with the regions of each map."""
        return are_regions_requested(self.options.get("regions"))

    def plain(self) -> dict[str, Any]:
        """Return the options as values for JSON, to compare them with those of the job in a folder."""
        options = options_to_plain(self.options)
        options.pop("model", None)
        return options | {"heatmaps": self.outputs.heatmaps, "receipts": self.outputs.receipts}

"""Drawing of values: HTML for notebooks, and plots. Importing it registers them with ``_display``."""

from camserve import _show_evaluation, _show_inspection
from camserve._notebook import comparison

__all__ = ["_show_evaluation", "_show_inspection", "comparison"]

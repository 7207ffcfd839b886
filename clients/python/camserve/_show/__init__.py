"""Drawing of values: HTML for notebooks, and plots. Importing it registers them with ``camserve._values.display``."""

from camserve._show import evaluation, inspection, results

__all__ = ["evaluation", "inspection", "results"]

"""Parts of the report as HTML: its summary, its script and its style sheet."""

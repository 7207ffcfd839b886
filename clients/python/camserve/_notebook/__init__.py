"""Comparison of the maps of a result in a notebook: one script, one style sheet, and the data, all inline."""

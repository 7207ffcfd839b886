"""Measurements: `make bench`. A speed is a ratio of things timed in turn in one run; medians."""

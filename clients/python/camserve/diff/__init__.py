"""Compare where two models look: record explanations, calibrate, compare, and report."""

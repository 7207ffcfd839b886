"""Planted truth for explanations of texts: a small CLIP that is trained here, and the quadrant that a caption names."""

"""Every case of parity, model by model."""

from methods.parity import MODELS, attention, cams, pixels

CASES = sorted((*attention.CASES, *cams.CASES, *pixels.CASES), key=lambda case: list(MODELS).index(case.model))

"""Every case of parity, model by model."""

from methods.parity import MODELS, attention, cams

CASES = sorted((*attention.CASES, *cams.CASES), key=lambda case: list(MODELS).index(case.model))

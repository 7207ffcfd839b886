"""Every case of parity, model by model."""

from methods.parity import MODELS, cams

CASES = sorted((*cams.CASES,), key=lambda case: list(MODELS).index(case.model))

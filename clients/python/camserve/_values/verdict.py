"""Verdicts on maps."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """Result of the check that a map can be read as an explanation.

    Attributes:
        UNSPECIFIED: The server sent no verdict, or one that this client does not know.
        OK: The map has positive evidence.
        ALL_NEGATIVE: No value of the map is above zero; the picture is blank. Another method or layer may find
            positive evidence.
        FLAT: The map has the same value everywhere.
        ZERO_GRADIENT: The gradient is zero everywhere: the score does not depend on the layer.
        NON_FINITE: The map has NaN or infinite values; the picture is blank.

    Example:
        >>> client.explain("cat.jpg").explanations[0].verdict
        <Verdict.OK: 'OK'>
        >>> silenced = client.explain("cat.jpg", interventions=[camserve.silence("bn2")])  # all features are zero
        >>> silenced.explanations[0].verdict, silenced.explanations[0].verdict_message
        (<Verdict.FLAT: 'FLAT'>, 'the map has the same value everywhere')
    """

    UNSPECIFIED = "UNSPECIFIED"
    OK = "OK"
    ALL_NEGATIVE = "ALL_NEGATIVE"
    FLAT = "FLAT"
    ZERO_GRADIENT = "ZERO_GRADIENT"
    NON_FINITE = "NON_FINITE"

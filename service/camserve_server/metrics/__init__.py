"""Registry of metrics by name. To add one, write a pure function in this package and add a line here.

It may import `methods` and `targets` and the packages below them.
"""

from camserve_server.methods.kinds import Parameter
from camserve_server.metrics import appearance, faithfulness, repetition
from camserve_server.metrics.kinds import (
    Curve,
    Metric,
    MetricInput,
    PerturbationMetric,
    Reading,
    RecomputationMetric,
    StaticMetric,
    Variation,
)

CURVE_STEPS = Parameter("steps", "Number of steps of the curve.", 20, 1, 512, integer=True)
REMOVED_SHARES = Parameter(
    "steps", "Number of shares of the pixels to remove, evenly between 0 and 1.", 9, 1, 99, integer=True
)
IMPUTATION_NOISE = Parameter(
    "noise", "Standard deviation of the noise on imputed pixels, in the normalised input's units.", 0.01, 0.0, 1.0
)
SEED = Parameter("seed", "Seed of the random numbers.", 0, 0, 2**31 - 1, integer=True)
SAMPLES = Parameter("samples", "Number of noisy copies.", 8, 1, 128, integer=True)
NOISE = Parameter("noise", "Standard deviation of the noise, as a share of the input's range.", 0.02, 0.0, 1.0)
STAGES = Parameter("stages", "Number of stages, each with more random modules.", 5, 2, 64, integer=True)
TOLERANCE = Parameter(
    "tolerance", "Largest distance from the box that still counts as a hit, in the photo's pixels.", 15, 0, 16384
)

METRICS: dict[str, Metric] = {
    "deletion": PerturbationMetric(
        faithfulness.deletion,
        "Petsiuk et al. 2018, arXiv:1806.07421",
        faithfulness.edit_per_step,
        higher_is_better=False,
        parameters=(CURVE_STEPS,),
    ),
    "insertion": PerturbationMetric(
        faithfulness.insertion,
        "Petsiuk et al. 2018, arXiv:1806.07421",
        faithfulness.edit_per_step,
        higher_is_better=True,
        parameters=(CURVE_STEPS,),
    ),
    "road": PerturbationMetric(
        faithfulness.road,
        "Rong et al. 2022, arXiv:2202.00449",
        faithfulness.two_edits_per_step,
        higher_is_better=True,
        parameters=(REMOVED_SHARES, IMPUTATION_NOISE, SEED),
    ),
    "average_drop": PerturbationMetric(
        faithfulness.average_drop,
        "Chattopadhyay et al. 2018, arXiv:1710.11063",
        faithfulness.one_edit,
        higher_is_better=False,
    ),
    "increase": PerturbationMetric(
        faithfulness.increase,
        "Chattopadhyay et al. 2018, arXiv:1710.11063",
        faithfulness.one_edit,
        higher_is_better=True,
    ),
    "max_sensitivity": RecomputationMetric(
        repetition.relative_distance,
        repetition.max_sensitivity,
        repetition.noisy_views,
        "Yeh et al. 2019, arXiv:1901.09392",
        repetition.view_per_sample,
        higher_is_better=False,
        parameters=(SAMPLES, NOISE, SEED),
    ),
    "randomisation": RecomputationMetric(
        repetition.rank_correlation,
        repetition.randomisation,
        repetition.cascade,
        "Adebayo et al. 2018, arXiv:1810.03292",
        repetition.model_per_stage,
        higher_is_better=False,
        parameters=(STAGES, SEED),
    ),
    "pointing_game": StaticMetric(
        appearance.pointing_game,
        "Zhang et al. 2018, doi:10.1007/s11263-017-1059-x",
        higher_is_better=True,
        parameters=(TOLERANCE,),
        boxed=True,
    ),
    "energy_in_box": StaticMetric(
        appearance.energy_in_box, "Wang et al. 2020, arXiv:1910.01279", higher_is_better=True, boxed=True
    ),
    "sparseness": StaticMetric(appearance.sparseness, "Chalasani et al. 2020, arXiv:1810.06583", higher_is_better=True),
    "complexity": StaticMetric(appearance.complexity, "Bhatt et al. 2020, arXiv:2005.00631", higher_is_better=False),
}

__all__ = [
    "METRICS",
    "Curve",
    "Metric",
    "MetricInput",
    "PerturbationMetric",
    "Reading",
    "RecomputationMetric",
    "StaticMetric",
    "Variation",
]

"""Every metric by its name. Adding one is a pure function in this folder and a line here.

It may import `methods` and `targets` and the rooms below.
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

STEPS = Parameter("steps", "How many steps the curve has.", 20, 1, 512, integer=True)
SHARES = Parameter("steps", "How many shares of the pixels, evenly between 0 and 1.", 9, 1, 99, integer=True)
SPECKLE = Parameter("noise", "Standard deviation of what is added to imputed pixels, normalised.", 0.01, 0.0, 1.0)
SEED = Parameter("seed", "Seed of what is random.", 0, 0, 2**31 - 1, integer=True)
SAMPLES = Parameter("samples", "How many noisy copies.", 8, 1, 128, integer=True)
NOISE = Parameter("noise", "Standard deviation, as a share of the input's range.", 0.02, 0.0, 1.0)
STAGES = Parameter("stages", "How many times more of the model becomes random.", 5, 2, 64, integer=True)
TOLERANCE = Parameter("tolerance", "How far from the box still counts, in the photo's pixels.", 15, 0, 16384)

METRICS: dict[str, Metric] = {
    "deletion": PerturbationMetric(
        faithfulness.deletion,
        "Petsiuk et al. 2018, arXiv:1806.07421",
        faithfulness.each_step,
        higher_is_better=False,
        parameters=(STEPS,),
    ),
    "insertion": PerturbationMetric(
        faithfulness.insertion,
        "Petsiuk et al. 2018, arXiv:1806.07421",
        faithfulness.each_step,
        higher_is_better=True,
        parameters=(STEPS,),
    ),
    "road": PerturbationMetric(
        faithfulness.road,
        "Rong et al. 2022, arXiv:2202.00449",
        faithfulness.both_ways,
        higher_is_better=True,
        parameters=(SHARES, SPECKLE, SEED),
    ),
    "average_drop": PerturbationMetric(
        faithfulness.average_drop,
        "Chattopadhyay et al. 2018, arXiv:1710.11063",
        faithfulness.single,
        higher_is_better=False,
    ),
    "increase": PerturbationMetric(
        faithfulness.increase,
        "Chattopadhyay et al. 2018, arXiv:1710.11063",
        faithfulness.single,
        higher_is_better=True,
    ),
    "max_sensitivity": RecomputationMetric(
        repetition.relative_distance,
        repetition.max_sensitivity,
        repetition.noisy_views,
        "Yeh et al. 2019, arXiv:1901.09392",
        repetition.each_sample,
        higher_is_better=False,
        parameters=(SAMPLES, NOISE, SEED),
    ),
    "randomisation": RecomputationMetric(
        repetition.rank_correlation,
        repetition.randomisation,
        repetition.cascade,
        "Adebayo et al. 2018, arXiv:1810.03292",
        repetition.each_stage,
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

"""Registry of methods by name. To add one, write a pure function in this package and add a line here.

It may import `models` and the packages below that.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar, get_args

from camserve_server.core import plugins
from camserve_server.core.errors import Internal
from camserve_server.imaging.values import View
from camserve_server.methods import attention, baselines, cams, gradients, perturbation, surrogate
from camserve_server.methods.kinds import (
    Array,
    Attention,
    Baseline,
    Cam,
    FullGradient,
    Fused,
    Method,
    Parameter,
    Parameters,
    Perturbation,
    Product,
    Saliency,
    Scene,
    Windows,
    formula,
    summary,
)
from camserve_server.methods.values import Edit

ALPHA_VARIANT = Parameter(
    "variant",
    "The paper's α, or α divided by its sum over positive gradients, as in the authors' code (official).",
    "paper",
    choices=("paper", "official"),
)
OUTLIER_SIGMAS = Parameter(
    "k", "Standard deviations above its channel's mean from which a value stands out.", 2.0, 0.0, 10.0
)
KERNEL = Parameter(
    "kernel", "Kernel that compares the features of two positions.", "sigmoid", choices=tuple(cams.KERNELS)
)
SCALES = Parameter("scales", "Number of sizes of the image that windows slide over.", 6, 1, 12, integer=True)
SAMPLES = Parameter("samples", "Number of noisy copies.", 16, 1, 512, integer=True)
RANDOM_POINTS = Parameter("samples", "Number of random points.", 50, 1, 512, integer=True)
NOISE = Parameter("noise", "Standard deviation of the noise, as a share of the input's range.", 0.15, 0.0, 1.0)
SEED = Parameter("seed", "Seed of the random numbers.", 0, 0, 2**31 - 1, integer=True)
NOISY_COPIES = (SAMPLES, NOISE, SEED)

STEPS = Parameter("steps", "Number of points on the line from the baseline to the image.", 50, 1, 1024, integer=True)
BASELINE = Parameter(
    "baseline",
    "Image to compare with: zero is the normalised input's zero, the mean colour of the training set; mean is the "
    "image's own mean colour; blur is the image blurred.",
    "zero",
    choices=gradients.BASELINES,
)
QUADRATURE = Parameter(
    "quadrature",
    "Rule that computes the integral: cubic has more steps near the baseline; matched corrects cubic so that the map "
    "adds up; gauss-legendre is Captum's.",
    "matched",
    choices=("matched", "cubic", "gauss-legendre"),
)
SAMPLED_BASELINE = Parameter(
    "baseline",
    "Start of the lines to the image, as in integrated_gradients; any draws one of the three for each sample.",
    "any",
    choices=("any", *gradients.BASELINES),
)

WINDOW = Parameter(
    "window",
    "Side of the window: below 1 as a share of the image's shorter side, from 1 on in pixels.",
    0.2,
    0.01,
    4096,
)
STRIDE = Parameter(
    "stride", "Distance from one window to the next, in the same unit; at most the window.", 0.1, 0.01, 4096
)
MASKS = Parameter("samples", "Number of random masks.", 512, 1, 16_000, integer=True)
# The paper has 5,000. Maps of 2,048 masks correlate 0.95 with its, about as those of rise's 512 with 4,096 do (0.96);
# maps of 1,024 masks 0.92 and of 512 masks 0.87. Measured with a toy detector of coloured squares.
DETECTOR_MASKS = replace(MASKS, default=2048)
CELLS = Parameter("cells", "Number of cells along each side of the image.", 7, 2, 64, integer=True)
SHOW_PROBABILITY = Parameter("probability", "Probability that a cell is shown.", 0.5, 0.01, 0.99)
RISE_DIVISOR = Parameter(
    "divisor",
    "Divisor of a pixel's weighted sum of scores: the sum of its mask values (shown), or the expected sum, as in the "
    "paper (expected).",
    "shown",
    choices=("shown", "expected"),
)
ALL_CHANNELS = Parameter(
    "top_channels",
    "Number of channels to use, those with the largest standard deviation over the grid; 0 for all.",
    0,
    0,
    16_384,
    integer=True,
)
TOP_CHANNELS = replace(ALL_CHANNELS, default=64)
MASKS_PER_CHANNEL = Parameter("samples", "Number of masked images for each channel.", 8, 1, 512, integer=True)
MASK_NOISE = Parameter("noise", "Standard deviation of the noise on a mask with values 0 to 1.", 2.0, 0.0, 10.0)
CELL_SETS = Parameter("samples", "Number of random sets of cells.", 256, 2, 16_000, integer=True)

HEAD_FUSION = Parameter("heads", "Way to fuse the heads of a block.", "mean", choices=("mean", "max", "min"))
DISCARD = Parameter("discard", "Share of each block's lowest values to set to zero.", 0.0, 0.0, 0.99)
BLOCKS = Parameter("blocks", "Number of blocks to add up, from the last; 0 for all.", 0, 0, 1000, integer=True)

METHODS: dict[str, Method] = {
    "gradcam": Cam(cams.gradcam, "Selvaraju et al. 2017, arXiv:1610.02391", smooths=True),
    "hirescam": Cam(cams.hirescam, "Draelos and Carin 2020, arXiv:2011.08891", smooths=True),
    "layercam": Cam(cams.layercam, "Jiang et al. 2021, doi:10.1109/TIP.2021.3089943", smooths=True),
    "gradcam_elementwise": Cam(cams.gradcam_elementwise, "Gildenblat 2021, pytorch-grad-cam", smooths=True),
    "gradcam_plus_plus": Cam(
        cams.gradcam_plus_plus, "Chattopadhay et al. 2018, arXiv:1710.11063", (ALPHA_VARIANT,), smooths=True
    ),
    "smoothgradcam_plus_plus": Cam(
        cams.smoothgradcam_plus_plus,
        "Omeiza et al. 2019, arXiv:1908.01224",
        NOISY_COPIES,
        copy=gradients.noisy,
        count=gradients.samples,
        finish=cams.from_means,
    ),
    "xgradcam": Cam(cams.xgradcam, "Fu et al. 2020, arXiv:2008.02312", smooths=True),
    "shapleycam": Cam(cams.shapleycam, "Cai 2025, arXiv:2501.06261", curvature=True, smooths=True),
    "fem": Cam(
        cams.fem,
        "Fuad et al. 2020, doi:10.1109/IPTA50016.2020.9286629",
        (OUTLIER_SIGMAS,),
        smooths=True,
        differentiates=False,
    ),
    "eigencam": Cam(cams.eigencam, "Muhammad and Yeasin 2020, arXiv:2008.00299", decomposes=True, differentiates=False),
    "eigengradcam": Cam(cams.eigengradcam, "Gildenblat 2021, pytorch-grad-cam", decomposes=True),
    "kpcacam": Cam(
        cams.kpcacam, "Karmani et al. 2024, arXiv:2410.00267", (KERNEL,), decomposes=True, differentiates=False
    ),
    "refinecam": Fused("gradcam", "product", "Domeniconi et al. 2026, arXiv:2605.14641", cams.refinecam),
    "sess": Windows("gradcam", cams.windows, cams.sess, "Tursun et al. 2022, arXiv:2207.01769", (SCALES,)),
    "fullgrad": FullGradient(cams.fullgrad, "Srinivas and Fleuret 2019, arXiv:1905.00780"),
    "saliency": Saliency(gradients.strongest_channel, "Simonyan et al. 2014, arXiv:1312.6034"),
    "input_x_gradient": Saliency(gradients.input_x_gradient, "Shrikumar et al. 2016, arXiv:1605.01713"),
    "smoothgrad": Saliency(
        gradients.strongest_channel,
        "Smilkov et al. 2017, arXiv:1706.03825",
        copy=gradients.noisy,
        count=gradients.samples,
        parameters=NOISY_COPIES,
    ),
    "squaregrad": Saliency(
        gradients.strongest_channel,
        "Hooker et al. 2019, arXiv:1806.10758",
        copy=gradients.noisy,
        count=gradients.samples,
        term=gradients.squared,
        parameters=NOISY_COPIES,
        about=gradients.squared,
    ),
    "vargrad": Saliency(
        gradients.variance,
        "Adebayo et al. 2018, arXiv:1810.03307",
        copy=gradients.noisy,
        count=gradients.samples,
        squares=True,
        parameters=NOISY_COPIES,
        about=gradients.variance,
    ),
    "integrated_gradients": Saliency(
        gradients.integrated,
        "Sundararajan et al. 2017, arXiv:1703.01365",
        copy=gradients.along,
        count=gradients.steps_and_baseline,
        term=gradients.weighted,
        parameters=(STEPS, BASELINE, QUADRATURE),
        baseline=gradients.last,
        about=gradients.integrated,
        split=gradients.integrated_by_channel,
    ),
    "gradient_shap": Saliency(
        gradients.expected,
        "Erion et al. 2021, arXiv:1906.10670",
        copy=gradients.between,
        count=gradients.samples,
        term=gradients.travelled,
        parameters=(RANDOM_POINTS, replace(NOISE, default=0.0), SEED, SAMPLED_BASELINE),
        about=gradients.expected,
    ),
    "guided_backprop": Saliency(gradients.guided_backprop, "Springenberg et al. 2015, arXiv:1412.6806", rule="guided"),
    "deconvnet": Saliency(gradients.deconvnet, "Zeiler and Fergus 2014, arXiv:1311.2901", rule="deconvnet"),
    "guided_gradcam": Product(
        "guided_backprop", "gradcam", "Selvaraju et al. 2017, arXiv:1610.02391", gradients.guided_gradcam
    ),
    "occlusion": Perturbation(
        perturbation.occlusion,
        "Zeiler and Fergus 2014, arXiv:1311.2901",
        perturbation.windows,
        (WINDOW, STRIDE),
    ),
    "rise": Perturbation(
        perturbation.rise,
        "Petsiuk et al. 2018, arXiv:1806.07421",
        perturbation.samples,
        (MASKS, CELLS, SHOW_PROBABILITY, SEED, RISE_DIVISOR),
    ),
    "drise": Perturbation(
        perturbation.drise,
        "Petsiuk et al. 2021, arXiv:2006.03204",
        perturbation.samples,
        (DETECTOR_MASKS, replace(CELLS, default=16), SHOW_PROBABILITY, SEED, RISE_DIVISOR),
        needs="a detector",
        matches=True,
    ),
    "scorecam": Perturbation(
        perturbation.scorecam,
        "Wang et al. 2020, arXiv:1910.01279",
        perturbation.channels_tried,
        (ALL_CHANNELS,),
        layered=True,
    ),
    "sscam": Perturbation(
        perturbation.sscam,
        "Wang et al. 2020, arXiv:2006.14255",
        perturbation.channels_sampled,
        (TOP_CHANNELS, MASKS_PER_CHANNEL, MASK_NOISE, SEED),
        layered=True,
    ),
    "iscam": Perturbation(
        perturbation.iscam,
        "Naidu et al. 2020, arXiv:2010.03023",
        perturbation.channels_sampled,
        (TOP_CHANNELS, MASKS_PER_CHANNEL),
        layered=True,
    ),
    "ablationcam": Perturbation(
        perturbation.ablationcam,
        "Desai and Ramaswamy 2020, doi:10.1109/WACV45572.2020.9093360",
        perturbation.channels_tried,
        (ALL_CHANNELS,),
        layered=True,
    ),
    "kernel_shap": Perturbation(
        surrogate.kernel_shap,
        "Lundberg and Lee 2017, arXiv:1705.07874",
        surrogate.samples,
        (CELL_SETS, CELLS, SEED),
        needs=surrogate.NEEDS,
    ),
    "lime": Perturbation(
        surrogate.lime,
        "Ribeiro et al. 2016, arXiv:1602.04938",
        surrogate.samples,
        (CELL_SETS, CELLS, SEED),
        needs=surrogate.NEEDS,
    ),
    "attention_rollout": Attention(
        attention.rollout, "Abnar and Zuidema 2020, arXiv:2005.00928", parameters=(HEAD_FUSION, DISCARD)
    ),
    "gradient_rollout": Attention(
        attention.gradient_rollout, "Gildenblat 2020, vit-explain", parameters=(replace(DISCARD, default=0.9),)
    ),
    "chefer": Attention(attention.chefer, "Chefer et al. 2021, arXiv:2103.15679"),
    "legrad": Attention(attention.legrad, "Bousselham et al. 2025, arXiv:2404.03214", parameters=(BLOCKS,), each=True),
    "gradeclip": Attention(attention.gradeclip, "Zhao et al. 2024, arXiv:2502.18816", last=True),
    "random": Baseline(baselines.random, "Adebayo et al. 2018, arXiv:1810.03292", (SEED,)),
    "edges": Baseline(baselines.edges, "Adebayo et al. 2018, arXiv:1810.03292"),
}

_BUILT_IN = frozenset(METHODS)

T = TypeVar("T", bound=Method)


def method_of(kind: type[T], name: str) -> T:
    """Return a method whose kind is known from the pass that computes it.

    Raises:
        TypeError: the method is of another kind.
    """
    method = METHODS[name]
    if not isinstance(method, kind):
        raise TypeError(f"{name} is a {type(method).__name__}, not a {kind.__name__}")
    return method


def wrong_shape(name: str, found: Sequence[int], expected: str) -> Internal:
    """Return the error for a method that returned an array of a wrong shape. Only methods of plugins do.

    Args:
        name: the method's name.
        found: the shape of what it returned.
        expected: what it must return, and its shape.
    """
    return Internal(f'the method "{name}" returned the shape {list(found)}; it must return {expected}')


def add_plugins() -> None:
    """Add the methods of installed plugins to `METHODS`.

    Raises:
        ConfigError: a plugin cannot be loaded, is not a method, or has the name of a built-in method.
    """
    for name, entry in plugins.find(plugins.METHODS).items():
        if name in _BUILT_IN or not re.fullmatch("[a-z][a-z0-9_]*", name):
            raise plugins.invalid(
                entry, "a name has lower-case letters, digits and underscores, and is not one of camserve's"
            )
        method = plugins.load(entry)
        if not isinstance(method, get_args(Method)):
            kinds = ", ".join(kind.__name__ for kind in get_args(Method))
            raise plugins.invalid(entry, f"that is a {type(method).__name__}, and a method is one of {kinds}")
        METHODS[name] = method


__all__ = [
    "METHODS",
    "Array",
    "Attention",
    "Baseline",
    "Cam",
    "Edit",
    "FullGradient",
    "Fused",
    "Method",
    "Parameter",
    "Parameters",
    "Perturbation",
    "Product",
    "Saliency",
    "Scene",
    "View",
    "Windows",
    "add_plugins",
    "formula",
    "method_of",
    "summary",
    "wrong_shape",
]

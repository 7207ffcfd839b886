"""Every method by its name. Adding one is a pure function in this folder and a line here."""

from dataclasses import replace

from camserve_server.methods import attention, cams, gradients
from camserve_server.methods.kinds import (
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

SAMPLES = Parameter("samples", "How many noisy copies.", 16, 1, 512, integer=True)
NOISE = Parameter("noise", "Standard deviation, as a share of the input's range.", 0.15, 0.0, 1.0)
SEED = Parameter("seed", "Seed of whatever is drawn by chance.", 0, 0, 2**31 - 1, integer=True)
NOISY = (SAMPLES, NOISE, SEED)

STEPS = Parameter("steps", "Places on the way from the baseline to the image.", 50, 1, 1024, integer=True)
BASELINE = Parameter(
    "baseline",
    "What the image is compared with: the input's zero, which is the mean colour of what the model was trained on; the "
    "image's own mean colour; or the image blurred.",
    "zero",
    choices=gradients.BASELINES,
)
ANY_BASELINE = Parameter(
    "baseline",
    "Where the ways to the image begin, as in integrated_gradients; any draws one of them for each sample.",
    "any",
    choices=("any", *gradients.BASELINES),
)

HEADS = Parameter("heads", "How a block's heads become one.", "mean", choices=("mean", "max", "min"))
DISCARD = Parameter("discard", "Share of each block's lowest values that is set to zero.", 0.0, 0.0, 0.99)
BLOCKS = Parameter("blocks", "How many blocks, from the last, are added up; 0 for all.", 0, 0, 1000, integer=True)

METHODS: dict[str, Method] = {
    "gradcam": Cam(cams.gradcam, "Selvaraju et al. 2017, arXiv:1610.02391", smooths=True),
    "hirescam": Cam(cams.hirescam, "Draelos and Carin 2020, arXiv:2011.08891", smooths=True),
    "layercam": Cam(cams.layercam, "Jiang et al. 2021, doi:10.1109/TIP.2021.3089943", smooths=True),
    "saliency": Saliency(gradients.strongest_channel, "Simonyan et al. 2014, arXiv:1312.6034"),
    "input_x_gradient": Saliency(gradients.input_x_gradient, "Shrikumar et al. 2016, arXiv:1605.01713"),
    "smoothgrad": Saliency(
        gradients.strongest_channel,
        "Smilkov et al. 2017, arXiv:1706.03825",
        copy=gradients.noisy,
        count=gradients.samples,
        parameters=NOISY,
    ),
    "squaregrad": Saliency(
        gradients.strongest_channel,
        "Hooker et al. 2019, arXiv:1806.10758",
        copy=gradients.noisy,
        count=gradients.samples,
        term=gradients.squared,
        parameters=NOISY,
        about=gradients.squared,
    ),
    "vargrad": Saliency(
        gradients.variance,
        "Adebayo et al. 2018, arXiv:1810.03307",
        copy=gradients.noisy,
        count=gradients.samples,
        term=gradients.moments,
        parameters=NOISY,
        about=gradients.variance,
    ),
    "integrated_gradients": Saliency(
        gradients.integrated,
        "Sundararajan et al. 2017, arXiv:1703.01365",
        copy=gradients.along,
        count=gradients.steps_and_baseline,
        term=gradients.weighted,
        parameters=(STEPS, BASELINE),
        baseline=gradients.last,
        about=gradients.integrated,
    ),
    "gradient_shap": Saliency(
        gradients.expected,
        "Erion et al. 2021, arXiv:1906.10670",
        copy=gradients.between,
        count=gradients.samples,
        term=gradients.travelled,
        parameters=(replace(SAMPLES, default=50), replace(NOISE, default=0.0), SEED, ANY_BASELINE),
        about=gradients.expected,
    ),
    "guided_backprop": Saliency(gradients.guided_backprop, "Springenberg et al. 2015, arXiv:1412.6806", rule="guided"),
    "deconvnet": Saliency(gradients.deconvnet, "Zeiler and Fergus 2014, arXiv:1311.2901", rule="deconvnet"),
    "guided_gradcam": Product(
        "guided_backprop", "gradcam", "Selvaraju et al. 2017, arXiv:1610.02391", gradients.guided_gradcam
    ),
    "attention_rollout": Attention(
        attention.rollout, "Abnar and Zuidema 2020, arXiv:2005.00928", parameters=(HEADS, DISCARD)
    ),
    "gradient_rollout": Attention(
        attention.gradient_rollout, "Gildenblat 2020, vit-explain", parameters=(replace(DISCARD, default=0.9),)
    ),
    "chefer": Attention(attention.chefer, "Chefer et al. 2021, arXiv:2103.15679"),
    "legrad": Attention(attention.legrad, "Bousselham et al. 2025, arXiv:2404.03214", parameters=(BLOCKS,), each=True),
}

__all__ = [
    "METHODS",
    "Attention",
    "Baseline",
    "Cam",
    "FullGradient",
    "Fused",
    "Method",
    "Parameter",
    "Parameters",
    "Perturbation",
    "Product",
    "Saliency",
    "Scene",
    "Windows",
    "formula",
    "summary",
]

"""Every method by its name. Adding one is a pure function in this folder and a line here."""

from camserve_server.methods import cams, gradients
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
)

SAMPLES = Parameter("samples", "How many noisy copies.", 16, 1, 512, integer=True)
NOISE = Parameter("noise", "Standard deviation, as a share of the input's range.", 0.15, 0.0, 1.0)
SEED = Parameter("seed", "Seed of the noise.", 0, 0, 2**31 - 1, integer=True)

METHODS: dict[str, Method] = {
    "gradcam": Cam(cams.gradcam, "Selvaraju et al. 2017, arXiv:1610.02391", smooths=True),
    "hirescam": Cam(cams.hirescam, "Draelos and Carin 2020, arXiv:2011.08891", smooths=True),
    "layercam": Cam(cams.layercam, "Jiang et al. 2021, doi:10.1109/TIP.2021.3089943", smooths=True),
    "saliency": Saliency(gradients.strongest_channel, "Simonyan et al. 2014, arXiv:1312.6034"),
    "smoothgrad": Saliency(
        gradients.strongest_channel,
        "Smilkov et al. 2017, arXiv:1706.03825",
        copy=gradients.noisy,
        count=gradients.samples,
        parameters=(SAMPLES, NOISE, SEED),
    ),
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
]

"""Parity of the methods on attention."""

from math import isqrt

from torchcam.methods import LeGrad

from methods.attention_papers import blocks_of, paper, reference
from methods.parity import Case, cached, library

PAPERS = {
    "attention_rollout": "Abnar and Zuidema 2020",
    "gradient_rollout": "Gildenblat 2020, each row divided by its own sum",
    "chefer": "Chefer et al. 2021",
    "legrad": "Bousselham et al. 2025",
}


@cached  # the methods share the results of the slow model
def slow_outputs(subject):
    """Attention and gradients of a class token's transformer."""
    return reference(subject.theirs, subject.input, subject.index, subject.input.dtype)


def written_out(method):
    """The paper's formula."""

    def theirs(subject):
        patches = paper(method, *slow_outputs(subject))[0, 1:]
        return patches.reshape(isqrt(len(patches)), -1)

    return theirs


def torch_cam(subject):
    """The map of torchcam's LeGrad, which is the mean over blocks where ours is the sum."""
    blocks = blocks_of(subject.theirs)
    with LeGrad(subject.theirs, blocks) as cam:
        (result,) = cam(subject.index, subject.theirs(subject.input), normalized=False)
    return result[0].numpy() * len(blocks)


CASES = [
    *(Case(method, "vit_b_16", words, written_out(method)) for method, words in PAPERS.items()),
    Case(
        "legrad",
        "vit_b_16",
        f"{library('torchcam')} LeGrad",
        torch_cam,
        note="The mean of the other library over the blocks, multiplied by their number.",
    ),
]

"""Methods: their parameters, descriptions and costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Method:
    """A method and its parameters. Omitted parameters have the server's defaults.

    Attributes:
        name: Name of the method.
        parameters: Values of the parameters by name.
        augmentation_smoothing: True to average the maps of six copies of the image: the image itself
            and its mirror image, each at 0.9, 1 and 1.1 times its contrast.
        eigen_smoothing: True to use the first principal component of the weighted feature maps
            instead of their sum. ``MethodInfo.eigen_smoothing`` is true for methods that allow it.
        per_channel: True to get a map of each channel of the model's input, as separate
            explanations, or the indices of some channels. ``MethodInfo.per_channel`` is true for methods that
            allow it: those of the gradient at the input.

    Example:
        >>> method = camserve.Method("smoothgrad", {"samples": 4})
        >>> explanation = client.explain("cat.jpg", methods=[method]).explanations[0]
        >>> explanation.parameters["samples"]
        4.0
    """

    name: str
    parameters: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    augmentation_smoothing: bool = False
    eigen_smoothing: bool = False
    per_channel: bool | Sequence[int] = False


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a request.

    Attributes:
        rows: The number of rows (copies of the image through the model).
        explanations: The number of explanations.
        max_rows: The maximum number of rows of a request.

    Example:
        >>> cost = client.estimate_cost(methods=[("rise", {"samples": 1000})])
        >>> cost.rows, cost.explanations, cost.rows <= cost.max_rows
        (1001, 1, True)
    """

    rows: int
    explanations: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """Description of a parameter of a method or a metric.

    Attributes:
        name: Name of the parameter in requests.
        summary: Its effect, in a sentence.
        default: The default value; None if the server does not report it.
        minimum: The smallest allowed number.
        maximum: The largest allowed number.
        integer: True if it must be an integer.
        choices: The allowed words; empty if it is a number.

    Example:
        >>> methods = {method.name: method for method in client.methods()}
        >>> samples = methods["smoothgrad"].parameters[0]
        >>> samples.name, samples.default, samples.minimum, samples.maximum
        ('samples', 16.0, 1.0, 512.0)
    """

    name: str
    summary: str
    default: float | str | None
    minimum: float
    maximum: float
    integer: bool
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """Description of one of the server's methods.

    Attributes:
        name: Name of the method in requests.
        kind: Kind of computation, such as "CAM" or "SALIENCY".
        summary: A description in one sentence.
        paper: The paper that defines it.
        parameters: The parameters that a request can set.
        rows: The number of rows (copies of the image through the model) that one target costs with the
            default parameters. If it depends on the layer's channels, it is given for 512 channels.
        layered: True if it uses layers; if False, it ignores the layers of a request.
        eigen_smoothing: True if ``Method.eigen_smoothing`` can be used.
        needs: Requirements on the model, in words; empty if it works with any model.
        formula: The formula in words and symbols.
        per_channel: True if ``Method.per_channel`` can be used.

    Example:
        >>> methods = {method.name: method for method in client.methods()}
        >>> methods["gradcam"].kind, methods["gradcam"].rows, methods["gradcam"].paper
        ('CAM', 1, 'Selvaraju et al. 2017, arXiv:1610.02391')
        >>> methods["chefer"].needs
        'global (not windowed) self-attention'
    """

    name: str
    kind: str
    summary: str
    paper: str
    parameters: tuple[ParameterInfo, ...]
    rows: int
    layered: bool
    eigen_smoothing: bool
    needs: str
    formula: str
    per_channel: bool = False

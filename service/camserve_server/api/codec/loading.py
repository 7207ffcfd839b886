"""Codec of LoadModel and UnloadModel requests."""

import re
from collections.abc import Mapping

from camserve.v1 import models_pb2
from camserve_server.api.codec.checks import find_known
from camserve_server.api.codec.sizes import check_sizes
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.models.values import KnownModel
from camserve_server.serving.requests import LoadRequest

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def read_loading(request: models_pb2.LoadModelRequest, models: Mapping[str, KnownModel], limits: Limits) -> LoadRequest:
    """Check a request to load a model.

    Args:
        request: the request.
        models: the models of the server by name.
        limits: limits on one request.

    Raises:
        ServiceError: a field is invalid; the error names it.
    """
    check_sizes(request, limits)
    name = _read_name(request.name, models)
    if request.sha256 and not _SHA256.fullmatch(request.sha256):
        raise InvalidArgument.of_field("sha256", "is 64 hexadecimal digits")
    return LoadRequest(name, request.weights, request.sha256.lower())


def read_unloading(request: models_pb2.UnloadModelRequest, models: Mapping[str, KnownModel], limits: Limits) -> str:
    """Check a request to unload a model; return the model's name.

    Args:
        request: the request.
        models: the models of the server by name.
        limits: limits on one request.

    Raises:
        ServiceError: the name is missing or unknown.
    """
    check_sizes(request, limits)
    return _read_name(request.name, models)


def _read_name(name: str, models: Mapping[str, KnownModel]) -> str:
    """Check a name. It has no default, so that no model is loaded or unloaded by mistake."""
    if not name:
        raise InvalidArgument("name the model", field="name")
    find_known("model", name, models, "the server has", "name")
    return name

"""Layers that requests name."""

from camserve_server.api.codec.checks import join_names, shorten
from camserve_server.core.errors import NotFound, did_you_mean
from camserve_server.models.values import LayerInfo, ModelInfo


def find_layer(name: str, model: ModelInfo, field: str) -> LayerInfo:
    """Return a layer.

    Raises:
        NotFound: no module that runs has this name.
    """
    if name not in model.layers:
        hint = did_you_mean(name, model.layers)
        raise NotFound(f'unknown layer "{shorten(name)}": {model.name} has {list_layers(model)}{hint}', field=field)
    return model.layers[name]


def list_layers(model: ModelInfo) -> str:
    """List the layers that can be explained for an error: the outermost ones, if any."""
    names = [name for name, layer in model.layers.items() if layer.layout]
    return join_names([name for name in names if "." not in name] or names)

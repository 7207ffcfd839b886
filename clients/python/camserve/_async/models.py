"""Calls about the server: its models, their layers, its methods and its health."""

from __future__ import annotations

from typing import TYPE_CHECKING

from camserve._async.connection import Calls
from camserve._codec.models import (
    decode_layer,
    decode_method,
    decode_model,
    layers_request,
    load_request,
    methods_request,
    model_request,
    models_request,
    unload_request,
)
from camserve._transport.retry import Retry
from camserve._transport.settings import decode_health, encode_health_request

if TYPE_CHECKING:
    from camserve._values.methods import MethodInfo
    from camserve._values.models import Health, Layer, Model


class ModelCalls(Calls):
    """Calls about the server: its models, their layers, its methods and its health."""

    async def models(self) -> tuple[Model, ...]:
        """List the server's models; the first one is the default.

        Raises:
            CamserveError: The subclass gives the reason.

        Example:
            >>> models = await client.models()
            >>> [(model.name, model.task) for model in models][:3]
            [('efficientnet_lite0', 'classify'), ('segmenter', 'segment'), ('segmenter-2', 'segment')]
        """
        response = await self._call(lambda stubs: stubs.models.ListModels, models_request())
        return tuple(map(decode_model, response.models))

    async def model(self, name: str = "") -> Model:
        """Describe one model, including its labels.

        Args:
            name: Name of the model. Default: the server's first model.

        Raises:
            NotFound: The server has no model of that name.

        Example:
            >>> model = await client.model("efficientnet_lite0")
            >>> model.default_layer, model.labels[281:286]
            ('bn2', ('tabby', 'tiger cat', 'Persian cat', 'Siamese cat', 'Egyptian cat'))
        """
        response = await self._call(lambda stubs: stubs.models.GetModel, model_request(name))
        return decode_model(response.model, response.labels)

    async def load_model(
        self, name: str, *, weights: str = "", sha256: str = "", timeout: float | None = None
    ) -> Model:
        """Load or reload a model on the server; the previous version answers until the new one is ready.

        Args:
            name: Name of a model in the server's configuration.
            weights: A file in the server's model folder. Default: the configured weights.
            sha256: The expected SHA-256 of the weights file, in hexadecimal.
            timeout: Timeout in seconds, instead of the client's. The server completes the load even after a timeout.

        Raises:
            FailedPrecondition: The server does not allow it, or the model could not be loaded.
            NotFound: The server's configuration has no model of that name, or the model folder no such file.

        Example:
            >>> model = await client.load_model("segmenter")
            >>> model.state
            <ModelState.READY: 'READY'>
        """
        request = load_request(name, weights, sha256)
        response = await self._call(lambda stubs: stubs.models.LoadModel, request, timeout)
        return decode_model(response.model)

    async def unload_model(self, name: str, *, timeout: float | None = None) -> Model:
        """Unload a model from the server; return after its last request is answered.

        Args:
            name: Name of the model.
            timeout: Timeout in seconds, instead of the client's. The server completes the unload even after a timeout.

        Raises:
            FailedPrecondition: The server does not allow it.
            NotFound: The server's configuration has no model of that name.

        Example:
            >>> model = await client.unload_model("segmenter")
            >>> model.state
            <ModelState.UNLOADED: 'UNLOADED'>
            >>> model = await client.load_model("segmenter")  # it answers again
        """
        response = await self._call(lambda stubs: stubs.models.UnloadModel, unload_request(name), timeout)
        return decode_model(response.model)

    async def layers(self, model: str = "") -> tuple[Layer, ...]:
        """List the layers of a model in the order in which they run.

        Args:
            model: Name of the model. Default: the server's first model.

        Raises:
            NotFound: The server has no model of that name.

        Example:
            >>> layers = await client.layers("efficientnet_lite0")
            >>> [(layer.name, layer.grid) for layer in layers if layer.explainable][-2:]
            [('bn2', (7, 7)), ('global_pool.pool', (1, 1))]
        """
        response = await self._call(lambda stubs: stubs.models.ListLayers, layers_request(model))
        return tuple(map(decode_layer, response.layers))

    async def methods(self) -> tuple[MethodInfo, ...]:
        """List the server's methods and their parameters.

        Raises:
            CamserveError: The subclass gives the reason.

        Example:
            >>> methods = await client.methods()
            >>> [method.name for method in methods if method.kind == "CAM"][:3]
            ['gradcam', 'hirescam', 'layercam']
        """
        response = await self._call(lambda stubs: stubs.models.ListMethods, methods_request())
        return tuple(map(decode_method, response.methods))

    async def health(self, service: str = "") -> Health:
        """Check once, without retries, whether the server or one of its services accepts requests.

        Args:
            service: Name of the service, such as "camserve.v1.ExplainService". Default: the whole server.

        Raises:
            NotFound: The server has no such service.
            Unavailable: No server answers.

        Example:
            >>> await client.health()
            <Health.SERVING: 'SERVING'>
        """
        request = encode_health_request(service)
        return decode_health(await self._call(lambda stubs: stubs.check_health, request, retry=Retry(attempts=0)))

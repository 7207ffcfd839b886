"""Servicer of ModelService."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from camserve.v1 import models_pb2, models_pb2_grpc
from camserve_server.api import codec
from camserve_server.api.rpc import Context, ServerState, rpc_scope
from camserve_server.core.errors import Unavailable
from camserve_server.methods import METHODS
from camserve_server.models.values import KnownModel, ModelInfo

K = TypeVar("K", bound=KnownModel)


class ModelServicer(models_pb2_grpc.ModelServiceServicer):
    """Servicer that describes models, layers and methods, and loads and unloads models."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def ListModels(  # noqa: N802 -- the RPC's name
        self, _request: models_pb2.ListModelsRequest, context: Context
    ) -> models_pb2.ListModelsResponse:
        """List the models."""
        async with rpc_scope(self._state, context, "ListModels"):
            models = self._state.require_open().models.values()
            return models_pb2.ListModelsResponse(models=map(codec.describe_model, models))

    async def GetModel(  # noqa: N802 -- the RPC's name
        self, request: models_pb2.GetModelRequest, context: Context
    ) -> models_pb2.GetModelResponse:
        """Describe one model."""
        async with rpc_scope(self._state, context, "GetModel"):
            pipeline = self._state.require_open()
            codec.check_sizes(request, pipeline.limits)
            model = codec.find_model(request.name, pipeline.models, "name")
            labels = model.labels if isinstance(model, ModelInfo) else ()
            return models_pb2.GetModelResponse(model=codec.describe_model(model), labels=labels)

    async def ListLayers(  # noqa: N802 -- the RPC's name
        self, request: models_pb2.ListLayersRequest, context: Context
    ) -> models_pb2.ListLayersResponse:
        """List the layers of a model."""
        async with rpc_scope(self._state, context, "ListLayers"):
            pipeline = self._state.require_open()
            codec.check_sizes(request, pipeline.limits)
            layers = codec.read_model(request.model, pipeline.models, "model").layers.values()
            return models_pb2.ListLayersResponse(layers=map(codec.describe_layer, layers))

    async def ListMethods(  # noqa: N802 -- the RPC's name
        self, _request: models_pb2.ListMethodsRequest, context: Context
    ) -> models_pb2.ListMethodsResponse:
        """List the methods, sorted by kind."""
        async with rpc_scope(self._state, context, "ListMethods"):
            names = sorted(METHODS, key=lambda name: codec.kind_of(METHODS[name]))
            return models_pb2.ListMethodsResponse(methods=map(codec.describe_method, names))

    async def LoadModel(  # noqa: N802 -- the RPC's name
        self, request: models_pb2.LoadModelRequest, context: Context
    ) -> models_pb2.LoadModelResponse:
        """Load a model, or load it again."""
        async with rpc_scope(self._state, context, "LoadModel") as call:
            model = await load_model(self._state, request)
            call.fields = {"model": model.name, "version": model.version}
            return models_pb2.LoadModelResponse(model=codec.describe_model(model))

    async def UnloadModel(  # noqa: N802 -- the RPC's name
        self, request: models_pb2.UnloadModelRequest, context: Context
    ) -> models_pb2.UnloadModelResponse:
        """Unload a model."""
        async with rpc_scope(self._state, context, "UnloadModel") as call:
            model = await unload_model(self._state, request)
            call.fields = {"model": model.name, "version": model.version}
            return models_pb2.UnloadModelResponse(model=codec.describe_model(model))


async def load_model(state: ServerState, request: models_pb2.LoadModelRequest) -> ModelInfo:
    """Load a model, or load it again.

    Raises:
        ServiceError: the request is invalid or not allowed, or the model cannot be loaded.
    """
    pipeline = state.require_open()
    load_request = codec.read_loading(request, pipeline.models, pipeline.limits)
    return await _unless_draining(state, (state.changes or pipeline.repository).load(load_request))


async def unload_model(state: ServerState, request: models_pb2.UnloadModelRequest) -> KnownModel:
    """Unload a model, and return when its last request is answered.

    Raises:
        ServiceError: the request is invalid or not allowed.
    """
    pipeline = state.require_open()
    name = codec.read_unloading(request, pipeline.models, pipeline.limits)
    return await _unless_draining(state, (state.changes or pipeline.repository).unload(name))


async def _unless_draining(state: ServerState, work: Coroutine[Any, Any, K]) -> K:
    """Return the result of the work, or raise Unavailable as soon as the server drains."""
    working = asyncio.ensure_future(work)
    draining = asyncio.ensure_future(state.draining.wait())
    try:
        await asyncio.wait((working, draining), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Unavailable("the server is draining", retry_after=1.0, shed_reason="draining")
    finally:
        working.cancel()
        draining.cancel()

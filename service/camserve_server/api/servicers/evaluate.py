"""Servicer of EvaluateService."""

from functools import partial

from camserve.v1 import evaluate_pb2, evaluate_pb2_grpc
from camserve_server.api import codec
from camserve_server.api.rpc import Call, Context, ServerState, rpc_scope
from camserve_server.metrics import METRICS
from camserve_server.serving.evaluate import evaluate
from camserve_server.serving.explain import Pipeline


class EvaluateServicer(evaluate_pb2_grpc.EvaluateServiceServicer):
    """Servicer that evaluates explanations."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def Evaluate(  # noqa: N802 -- the RPC's name
        self, request: evaluate_pb2.EvaluateRequest, context: Context
    ) -> evaluate_pb2.EvaluateResponse:
        """Explain one image, and evaluate every map."""
        async with rpc_scope(self._state, context, "Evaluate") as call:
            response = await _evaluate(self._state.require_open(), request, call)
            response.request_id = response.explained.request_id = call.request_id
            call.note_reply(response.explained)
            return response

    async def ListMetrics(  # noqa: N802 -- the RPC's name
        self, _request: evaluate_pb2.ListMetricsRequest, context: Context
    ) -> evaluate_pb2.ListMetricsResponse:
        """List the metrics."""
        async with rpc_scope(self._state, context, "ListMetrics"):
            self._state.require_open()
            return evaluate_pb2.ListMetricsResponse(metrics=map(codec.describe_metric, METRICS))


async def _evaluate(
    pipeline: Pipeline, request: evaluate_pb2.EvaluateRequest, call: Call
) -> evaluate_pb2.EvaluateResponse:
    call.record_request(request.explain, pipeline.models)
    evaluate_request = codec.read_evaluation(request, pipeline.models, pipeline.limits)
    with codec.within_explain():
        response, readings = await evaluate(
            call.bind(pipeline),
            evaluate_request,
            call.until_sent,
            encode=partial(codec.explain_response, evaluate_request.explain),
            deadline=call.deadline,
        )
    return codec.evaluate_response(evaluate_request, response, readings)

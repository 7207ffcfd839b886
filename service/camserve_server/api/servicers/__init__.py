"""gRPC servicers of camserve.v1. They convert messages into requests, and results into messages."""

from camserve_server.api.servicers.evaluate import EvaluateServicer
from camserve_server.api.servicers.explain import ExplainServicer
from camserve_server.api.servicers.models import ModelServicer

__all__ = ["EvaluateServicer", "ExplainServicer", "ModelServicer"]

"""The gRPC servicers of our own services: they read messages into requests, and encode results into replies."""

from camserve_server.api.servicers.evaluate import EvaluateServicer
from camserve_server.api.servicers.explain import ExplainServicer
from camserve_server.api.servicers.models import ModelServicer

__all__ = ["EvaluateServicer", "ExplainServicer", "ModelServicer"]

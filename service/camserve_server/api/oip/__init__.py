"""The Open Inference Protocol, version 2, which clients of Triton and KServe speak: a translation, beside our own API.

Read a request's way from `InferenceServicer.ModelInfer` downward:

ModelInferRequest -> requests (check; an ExplainRequest for each image) -> pipeline.explain, as our own API's requests
-> replies (its answers as tensors) -> ModelInferResponse
"""

from camserve_server.api.oip.names import NAME, NAMES, SERVICE, add_to_server, known_as, own_name, pool_of
from camserve_server.api.oip.servicer import InferenceServicer

__all__ = ["NAME", "NAMES", "SERVICE", "InferenceServicer", "add_to_server", "known_as", "own_name", "pool_of"]

"""The Open Inference Protocol, version 2, which clients of Triton and KServe use.

Its requests are converted to ExplainRequests and back. To follow a request, start at `InferenceServicer.ModelInfer`:

ModelInferRequest -> requests (check; one ExplainRequest for each image) -> servicers.explain.explain
-> replies (the explanations as tensors) -> ModelInferResponse
"""

from camserve_server.api.oip.names import NAME, NAMES, SERVICE, add_to_server, known_as, own_name, pool_of
from camserve_server.api.oip.servicer import InferenceServicer

__all__ = ["NAME", "NAMES", "SERVICE", "InferenceServicer", "add_to_server", "known_as", "own_name", "pool_of"]

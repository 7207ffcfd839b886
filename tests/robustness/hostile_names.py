"""Send hostile names in every field that takes a name; print each response and the files and sockets it opened."""

import contextlib
import json
import socket
import sys
from pathlib import Path

import grpc
import torch

from camserve.v1 import (
    evaluate_pb2 as ev,
)
from camserve.v1 import (
    evaluate_pb2_grpc,
    explain_pb2_grpc,
    models_pb2_grpc,
)
from camserve.v1 import (
    explain_pb2 as ex,
)
from camserve.v1 import (
    models_pb2 as mo,
)
from robustness import error_checks, fields, process_audit
from support import serving

NAMES = (
    "../../../etc/passwd",
    "/etc/passwd",
    "/proc/self/environ",
    "..\\..\\windows\\win.ini",
    "\\\\127.0.0.1\\share\\w.pth",
    "file:///etc/passwd",
    "http://127.0.0.1:9/w.safetensors",
    "data:image/png;base64,iVBORw0KGgo=",
    "%2e%2e%2fetc%2fpasswd",
    "tiny\0.pth",
    "\uff0e\uff0e\uff0f\u2215etc\u2044passwd",
    "tiny\u202e\u2028\r\n\33[2J",
    "module:os?weights=/etc/passwd",
    "__class__.__init__.__globals__",
    "{0.__class__} %s $(id) `id` ${HOME}",
    "x" * 100_000,
)


def explain(**given):
    return ex.ExplainRequest(**{"image": fields.PHOTO, **given})


FIELDS = {
    "Explain model": ("Explain", lambda name: explain(model=name)),
    "Explain image": ("Explain", lambda name: explain(image=name.encode())),
    "Explain layers": ("Explain", lambda name: explain(layers=[name])),
    "Explain method": ("Explain", lambda name: explain(methods=[ex.Method(name=name)])),
    "Explain parameter": (
        "Explain",
        lambda name: explain(methods=[ex.Method(name="gradcam", parameters={name: ex.Parameter(number=1)})]),
    ),
    "Explain parameter's text": (
        "Explain",
        lambda name: explain(
            methods=[ex.Method(name="gradcam_plus_plus", parameters={"variant": ex.Parameter(text=name)})]
        ),
    ),
    "Explain label": ("Explain", lambda name: explain(targets=[ex.Target(label=name)])),
    "Explain colour map": ("Explain", lambda name: explain(rendering=ex.Rendering(colormap=name))),
    "InspectLayers model": ("InspectLayers", lambda name: ex.InspectLayersRequest(model=name, image=fields.PHOTO)),
    "ExtractFeatures layer": (
        "ExtractFeatures",
        lambda name: ex.ExtractFeaturesRequest(layer=name, image=fields.PHOTO),
    ),
    "GetModel name": ("GetModel", lambda name: mo.GetModelRequest(name=name)),
    "LoadModel name": ("LoadModel", lambda name: mo.LoadModelRequest(name=name)),
    "LoadModel weights": ("LoadModel", lambda name: mo.LoadModelRequest(name="tiny", weights=name)),
    "LoadModel sha256": ("LoadModel", lambda name: mo.LoadModelRequest(name="tiny", sha256=name)),
    "UnloadModel name": ("UnloadModel", lambda name: mo.UnloadModelRequest(name=name)),
    "ListLayers model": ("ListLayers", lambda name: mo.ListLayersRequest(model=name)),
    "Evaluate metric": (
        "Evaluate",
        lambda name: ev.EvaluateRequest(explain=explain(), metrics=[ev.Metric(name=name)]),
    ),
}


def answer(audit, call, request):
    with audit.recording():
        try:
            call(request)
            code, wrong = "OK", []
        except grpc.RpcError as error:
            code, wrong = error.code().name, error_checks.faults(error, fields.texts(request))
        events = list(audit.events)
    return {"code": code, "wrong": wrong, "events": events}


def control(audit):
    """Return the events of a server that follows such names."""
    with audit.recording(), contextlib.suppress(OSError):
        Path("/etc/passwd").read_bytes()
        socket.create_connection(("127.0.0.1", 9), timeout=1)  # real timeout: an error is right too
    return {"code": "", "wrong": [], "events": list(audit.events)}


def main(model):
    torch.set_num_threads(1)
    audit, answers = process_audit.AuditLog(), {}
    allowed = {"admin": True, "model_folder": str(Path(__file__).parent)}
    with serving(models=(model,), threads=1, **allowed) as served, grpc.insecure_channel(served.address) as channel:
        stubs = (
            explain_pb2_grpc.ExplainServiceStub(channel),
            models_pb2_grpc.ModelServiceStub(channel),
            evaluate_pb2_grpc.EvaluateServiceStub(channel),
        )
        for field, (rpc, make) in FIELDS.items():
            call = next(getattr(stub, rpc) for stub in stubs if hasattr(stub, rpc))
            answer(audit, call, make("no such name"))  # triggers the imports of a first call
            for number, name in enumerate(NAMES):
                answers[f"{field} {number}"] = answer(audit, call, make(name))
        answers["sound"] = answer(audit, stubs[0].Explain, explain())
    sys.stdout.write(json.dumps(answers | {"control": control(audit)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

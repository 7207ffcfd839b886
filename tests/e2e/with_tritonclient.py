"""Send requests with tritonclient and our own client from one process; `make test` runs it where both are installed.

The program prints the responses as one JSON object, with pictures in hexadecimal.
"""

import asyncio
import importlib.util
import json
import queue
import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from PIL import Image
from tritonclient.grpc import aio, service_pb2, service_pb2_grpc

import camserve

ROOT = Path(__file__).parents[2]
MODEL, PARAMETERS = "tiny", {"method": "hirescam", "target": "owl", "colormap": "turbo", "alpha": 0.25}
NAMES = ("label", "overlay", "class_id", "score", "heatmap", "verdict")


def tensor(array, kind):
    result = triton.InferInput("image", array.shape, kind)
    result.set_data_from_numpy(array)
    return result


def files(*data):
    return tensor(np.array(data, object).reshape(-1, 1), "BYTES")


def outputs_of(result):
    """Return all outputs of a result."""
    response = result.get_response()
    values = {output.name: result.as_numpy(output.name) for output in response.outputs}
    return {
        "id": response.id,
        "model": [response.model_name, response.model_version],
        "order": list(values),
        "shapes": {name: list(value.shape) for name, value in values.items()},
        "kinds": {output.name: output.datatype for output in response.outputs},
        "values": {name: plain(value) for name, value in values.items()},
    }


def plain(values):
    return [value.hex() if isinstance(value, bytes) else value for value in values.ravel().tolist()]


def explain_natively(address, image, parameters=PARAMETERS):
    """Send the same request by our own API."""
    with camserve.Client(address) as client:
        explanation = client.explain(
            image,
            model=MODEL,
            methods=parameters["method"],
            targets=parameters["target"],
            colormap=parameters["colormap"],
            alpha=parameters["alpha"],
            heatmap=True,
        ).explanations[0]
    return {
        "overlay": [explanation.overlay.hex()],
        "heatmap": explanation.heatmap.ravel().tolist(),
        "class_id": [explanation.target.class_index],
        "score": [explanation.score],
        "label": [explanation.target.label.encode().hex()],
        "verdict": [explanation.verdict.encode().hex()],
    }


def about(client):
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "models": [client.is_model_ready(name) for name in (MODEL, "other", "unknown")],
        "versions": [client.is_model_ready(MODEL, version) for version in ("1", "2")],
        "server": client.get_server_metadata(as_json=True),
        "metadata": client.get_model_metadata(MODEL, as_json=True),
        "config": client.get_model_config(MODEL, as_json=True)["config"],
        "index": client.get_model_repository_index(as_json=True)["models"],
    }


def infer(client, address, data, pixels):
    """Send files and pixels, and the same by our own API."""
    wanted = [triton.InferRequestedOutput(name) for name in NAMES]
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    floats = pixels.astype(np.float32) / 255
    inputs = {
        "file": files(data),
        "rows of pixels": tensor(pixels, "UINT8"),
        "planes": tensor(planes[None], "UINT8"),
        "floats": tensor(floats, "FP32"),
        "planes of floats": tensor(planes[None].astype(np.float32) / 255, "FP32"),
        "two files": files(data, data),
    }
    responses = {
        name: outputs_of(client.infer(MODEL, [tensor_of], outputs=wanted, parameters=PARAMETERS, request_id=name))
        for name, tensor_of in inputs.items()
    }
    label = client.infer(MODEL, [inputs["file"]], outputs=[triton.InferRequestedOutput("label")])
    responses["all"], responses["one"] = outputs_of(client.infer(MODEL, [inputs["file"]])), outputs_of(label)
    return {
        "triton": responses,
        "ours": explain_natively(address, data),
        "ours by pixels": explain_natively(address, pixels),
    }


def infer_typed(address, data):
    """Send a request with a plain stub, with the file in the tensor's typed contents."""
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="image", datatype="BYTES", shape=[1]).contents.bytes_contents.append(data)
    request.outputs.add(name="overlay")
    for name, value in PARAMETERS.items():
        kind = "string_param" if isinstance(value, str) else "double_param"
        setattr(request.parameters[name], kind, value)
    with triton.InferenceServerClient(address) as client:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(client._channel)
        return stub.ModelInfer(request).raw_output_contents[0][4:].hex()


async def infer_async(address, data):
    async with aio.InferenceServerClient(address) as client:
        result = await client.infer(MODEL, [files(data)], parameters=PARAMETERS, client_timeout=600)
        return outputs_of(result)["values"]["overlay"]


def stream(client, data):
    """Send six requests over one stream, one of them invalid; return the responses in order of arrival."""
    responses = queue.Queue()
    client.start_stream(lambda result, error: responses.put((result, error)))
    for number in range(6):
        target = number % 5 if number != 3 else "no such label"
        parameters = {"target": target, "method": "smoothgrad" if number == 0 else "gradcam"}
        client.async_stream_infer(
            MODEL, [files(data)], request_id=str(number), parameters=parameters, enable_empty_final_response=number == 5
        )
    answers = [responses.get() for _ in range(6)]
    client.stop_stream()
    final = answers[5][0].get_response().parameters["triton_final_response"].bool_param
    return {"answers": [_stream_item(*answer) for answer in answers], "final": final}


def _stream_item(result, error):
    return str(error) if error else [result.get_response().id, result.as_numpy("class_id").ravel().tolist()]


def errors_of(client, data):
    """Return the errors of invalid requests."""
    image = files(data)
    cases = {
        "model": lambda: client.infer("unknown", [image]),
        "version": lambda: client.infer(MODEL, [image], model_version="7"),
        "image": lambda: client.infer(MODEL, [files(b"no image")]),
        "parameter": lambda: client.infer(MODEL, [image], parameters={"methd": "gradcam"}),
        "sequence": lambda: client.infer(MODEL, [image], sequence_id=3),
        "label": lambda: client.infer(MODEL, [image], parameters={"target": "oul"}),
        "too late": lambda: client.infer(MODEL, [image], parameters={"method": "rise"}, timeout=1000),
        "shared memory": client.get_system_shared_memory_status,
        "unload": lambda: client.unload_model("unknown"),
        "load": lambda: client.load_model(MODEL, config="{}"),
    }
    return {name: _refusal(case) for name, case in cases.items()}


def _refusal(case):
    try:
        case()
    except triton.InferenceServerException as error:
        return [error.status(), error.message()]
    return None


def repository(client):
    """Reload a model, unload it and load it."""
    states = []
    for change in (client.load_model, client.unload_model, client.load_model):
        change("other")
        states.append(client.get_model_repository_index(as_json=True)["models"][1])
    ready = service_pb2.RepositoryIndexRequest(ready=True)
    client.unload_model("other")
    return {"states": states, "ready": [model.name for model in client._client_stub.RepositoryIndex(ready).models]}


def beside_the_servers_own():
    """Import the server's own messages besides tritonclient's, as in a process that has both."""
    path = ROOT / "service/camserve_server/api/oip/v2/inference_pb2.py"
    spec = importlib.util.spec_from_file_location("own_pb2", path)
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    sent = service_pb2.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"x"])
    sent.parameters["alpha"].double_param = 0.5
    read = own.ModelInferRequest.FromString(sent.SerializeToString())
    return [read.model_name, read.id, read.raw_input_contents[0].decode(), read.parameters["alpha"].double_param]


def main(address, photo):
    data, pixels = Path(photo).read_bytes(), np.asarray(Image.open(photo).convert("RGB"))
    with triton.InferenceServerClient(address) as client:
        responses = {
            "about": about(client),
            "inferred": infer(client, address, data, pixels),
            "typed": infer_typed(address, data),
            "awaited": asyncio.run(infer_async(address, data)),
            "streamed": stream(client, data),
            "refused": errors_of(client, data),
            "statistics": client.get_inference_statistics(MODEL, as_json=True)["model_stats"],
            "repository": repository(client),
            "beside": beside_the_servers_own(),
        }
    sys.stdout.write(json.dumps(responses))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The heaviest loads that one caller can put on a server with default settings, and a meter of their memory."""

import contextlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np

from camserve.v1 import evaluate_pb2, evaluate_pb2_grpc, explain_pb2, explain_pb2_grpc
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.imaging.opencv import cv2
from robustness import tree
from support import PHOTOS

MIB = 2**20
MESSAGE = 8 * MIB - 2**16  # bytes of an image in a message of almost the largest size
CALLS = 100  # concurrent calls: the limit of one connection
PHOTO = PHOTOS["rocket"].read_bytes()
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class Meter:
    """Measures the growth of a server and its workers in bytes: the sum of each process's largest growth.

    The kernel records each process's peak, so that no short peak is missed. The processes may peak at different times,
    so the sum is an upper bound of their common peak.

    Args:
        root: process id of the server.
    """

    def __init__(self, root):
        self._root = root
        self._before = {}

    def start(self):
        """Reset the peaks to the current sizes, from which the growth counts."""
        for pid in tree.pids(self._root):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5)
            self._before[pid] = status_bytes(pid, "VmRSS")

    def grown(self):
        """Return the sum of the processes' largest growth since, in bytes."""
        return sum(max(0, status_bytes(pid, "VmHWM") - size) for pid, size in self._before.items())

    def processes(self):
        """Return the processes that existed at the start."""
        return list(self._before)


def status_bytes(pid, name):
    """Return a size in bytes from a process's status, or 0 if it has ended."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return 1024 * int(status.partition(f"{name}:")[2].split()[0])
    return 0


def method(name, **parameters):
    """Return a method with numeric parameters."""
    numbers = {key: explain_pb2.Parameter(number=value) for key, value in parameters.items()}
    return explain_pb2.Method(name=name, parameters=numbers)


def photo_of(height, width, *flags):
    """Return a small JPEG file of noise in large cells, in which the decoder has to work on each pixel."""
    cells = np.random.default_rng(0).integers(0, 256, (height // 64 + 1, width // 64 + 1, 3), np.uint8)
    picture = cv2.resize(cells, (width, height), interpolation=cv2.INTER_NEAREST)
    return cv2.imencode(".jpg", picture, flags)[1].tobytes()


def pad_jpeg(image, size=MESSAGE):
    """Return a JPEG file with bytes after its end, which decoders ignore."""
    return image + bytes(size - len(image))


class Caller:
    """Caller with one connection.

    Args:
        address: the server's address.
    """

    def __init__(self, address):
        self._channel = grpc.insecure_channel(address, UNLIMITED)
        explains = explain_pb2_grpc.ExplainServiceStub(self._channel)
        self._stream = explains.ExplainStream
        self._calls = {
            explain_pb2.ExplainRequest: explains.Explain,
            explain_pb2.InspectLayersRequest: explains.InspectLayers,
            explain_pb2.ExtractFeaturesRequest: explains.ExtractFeatures,
            evaluate_pb2.EvaluateRequest: evaluate_pb2_grpc.EvaluateServiceStub(self._channel).Evaluate,
            inference_pb2.ModelInferRequest: self._channel.unary_unary(
                INFER, inference_pb2.ModelInferRequest.SerializeToString, inference_pb2.ModelInferResponse.FromString
            ),
        }
        self._infer_stream = self._channel.stream_stream(
            STREAM_INFER,
            inference_pb2.ModelInferRequest.SerializeToString,
            inference_pb2.ModelStreamInferResponse.FromString,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._channel.close()

    def send(self, request, count):
        """Send a request `count` times at once; return the number of calls that ended with each status."""
        call = self._calls[type(request)]
        outcomes = Counter()
        for future in [call.future(request, timeout=600) for _ in range(count)]:
            error = future.exception()
            outcomes[error.code().name if error else "OK"] += 1
        return outcomes

    def stream(self, request, count, streams=1):
        """Send a request `count` times through each of several streams; return the number of replies of each status."""
        items = [explain_pb2.ExplainStreamRequest(request_id=str(number), request=request) for number in range(count)]
        return self._together(lambda: self._outcomes(self._stream(iter(items), timeout=600)), streams)

    def stream_infer(self, request, count, streams=1):
        """Do the same through Triton's stream."""
        return self._together(lambda: self._outcomes(self._infer_stream(iter([request] * count), timeout=600)), streams)

    @staticmethod
    def _together(work, count):
        with ThreadPoolExecutor(count) as threads:
            return sum((future.result() for future in [threads.submit(work) for _ in range(count)]), Counter())

    @staticmethod
    def _outcomes(replies):
        outcomes = Counter()
        try:
            for reply in replies:
                failed = reply.error_message if hasattr(reply, "error_message") else reply.HasField("error")
                outcomes["error" if failed else "OK"] += 1
        except grpc.RpcError as error:
            outcomes[error.code().name] += 1
        return outcomes


def explaining(*methods, image=PHOTO, overlay=explain_pb2.IMAGE_FORMAT_JPEG, **fields):
    """Return a request for explanations of a photo, with overlays."""
    request = explain_pb2.ExplainRequest(image=image, methods=methods, **fields)
    request.rendering.overlay = overlay
    return request


def evaluating(explain, metric, **parameters):
    """Return a request to evaluate explanations."""
    numbers = {key: explain_pb2.Parameter(number=value) for key, value in parameters.items()}
    return evaluate_pb2.EvaluateRequest(explain=explain, metrics=[evaluate_pb2.Metric(name=metric, parameters=numbers)])


def inferring(count):
    """Return a message of `count` images as FP32 pixels, almost of the largest size."""
    side = int((MESSAGE / count / 12) ** 0.5)
    request = inference_pb2.ModelInferRequest(model_name="efficientnet_lite0")
    request.inputs.add(name="image", datatype="FP32", shape=(count, 3, side, side))
    request.raw_input_contents.append(np.zeros((count, 3, side, side), np.float32).tobytes())
    return request


EARLY = [
    *("conv_stem", "bn1", "blocks.0.0.conv_dw", "blocks.0.0.bn1"),
    *("blocks.1.0.conv_pw", "blocks.1.0.bn1.drop", "blocks.1.0.bn1.act", "blocks.1.0.bn1"),
]
"""The layers of efficientnet_lite0 with the largest feature maps: 32 and 96 channels of 112 x 112."""
TARGETS = [explain_pb2.Target(class_index=number) for number in range(16)]
LARGEST = photo_of(4095, 4095)
PROGRESSIVE = photo_of(4095, 4095, cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x111111)
PNG = explain_pb2.IMAGE_FORMAT_PNG


def largest_response(**fields):
    """Return a request with the largest number of pictures, maps and intensities."""
    request = explaining(method("gradcam"), image=photo_of(1700, 1800), targets=TARGETS, layers=EARLY[:4], **fields)
    request.rendering.heatmap = request.rendering.intensity = True
    return request


def request_with_copies(name, copies):
    """Return a request for a method that makes noisy copies of the photo."""
    return explaining(method(name, samples=copies))


def request_with_similarity_targets():
    """Return a request with the largest number of similarity targets, each with an image."""
    image = photo_of(960, 960)
    return explaining(targets=[explain_pb2.Target(similarity=explain_pb2.Similarity(image=image)) for _ in range(16)])


def extracting(layer):
    """Return a request for the largest number of channels of a layer, as pictures and as numbers."""
    request = explain_pb2.ExtractFeaturesRequest(image=PHOTO, layer=layer, top=96, raw=True)
    request.picture = PNG
    return request


LOADS = {
    "forward passes": lambda caller: caller.send(explaining(overlay=0), CALLS // 2),
    "overlays": lambda caller: caller.send(explaining(), CALLS),
    "saliency": lambda caller: caller.send(explaining(method("saliency")), 64),
    "smoothgrad": lambda caller: caller.send(request_with_copies("smoothgrad", 32), 4),
    "vargrad": lambda caller: caller.send(request_with_copies("vargrad", 32), 4),
    "vargrad of 16 targets": lambda caller: caller.send(explaining(method("vargrad", samples=2), targets=TARGETS), 8),
    "fullgrad": lambda caller: caller.send(explaining(method("fullgrad")), 24),
    "shapleycam on early layers": lambda caller: caller.send(explaining(method("shapleycam"), layers=EARLY), 2),
    "layercam on early layers": lambda caller: caller.send(explaining(method("layercam"), layers=EARLY), 32),
    "kpcacam": lambda caller: caller.send(explaining(method("kpcacam")), 16),
    "scorecam on early layers": lambda caller: caller.send(explaining(method("scorecam"), layers=EARLY), 2),
    "ablationcam on early layers": lambda caller: caller.send(explaining(method("ablationcam"), layers=EARLY), 2),
    "rise": lambda caller: caller.send(explaining(method("rise", samples=64)), 32),
    "kernel_shap": lambda caller: caller.send(explaining(method("kernel_shap", samples=64)), 16),
    "occlusion": lambda caller: caller.send(explaining(method("occlusion")), 16),
    "deletion": lambda caller: caller.send(evaluating(explaining(), "deletion"), 32),
    "max_sensitivity of rise": lambda caller: caller.send(
        evaluating(explaining(method("rise", samples=16)), "max_sensitivity"), 4
    ),
    "layers measured": lambda caller: caller.send(explain_pb2.InspectLayersRequest(image=PHOTO), 8),
    "channels": lambda caller: caller.send(extracting("blocks.1.0.conv_pw"), CALLS),
    "photos of 16 megapixels": lambda caller: caller.send(explaining(image=LARGEST), 4),
    "progressive photos of 16 megapixels": lambda caller: caller.send(explaining(image=PROGRESSIVE), 4),
    "PNG of 16 megapixels": lambda caller: caller.send(explaining(image=LARGEST, overlay=PNG), 4),
    "64 maps of 3 megapixels": lambda caller: caller.send(largest_response(), 4),
    "16 maps of 3 megapixels as PNG": lambda caller: caller.send(
        explaining(image=photo_of(1700, 1800), targets=TARGETS, overlay=PNG), 8
    ),
    "targets that are images": lambda caller: caller.send(request_with_similarity_targets(), 8),
    "large messages": lambda caller: caller.send(explaining(image=pad_jpeg(PHOTO)), 20),
    "large messages of one stream": lambda caller: caller.stream(explaining(image=pad_jpeg(PHOTO)), 32),
    "large messages of 32 streams": lambda caller: caller.stream(explaining(image=pad_jpeg(PHOTO)), 2, 32),
    "tensors": lambda caller: caller.send(inferring(8), 32),
    "tensors of 32 streams": lambda caller: caller.stream_infer(inferring(8), 1, 32),
    "large photos in large messages": lambda caller: caller.send(explaining(image=pad_jpeg(LARGEST)), 16),
    "smoothgrad of large photos": lambda caller: caller.send(
        explaining(method("smoothgrad", samples=16), image=pad_jpeg(LARGEST), overlay=PNG), 8
    ),
}

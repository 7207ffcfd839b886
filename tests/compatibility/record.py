"""Write records/. Run it right after a release, in the tree of its tag, and commit the files as the next change.

    make dist
    cd tests && PYTHONPATH=../service:../clients/python ../.venv/bin/python -m compatibility.record [NAME...]

Until the tag, the tests in this folder compare the tree with the release before it. NAME is a function in `PARTS`; the
default is all of them. Never record again only to make a test pass: first announce the change in CHANGELOG.md.
"""

import sys
import tempfile
from pathlib import Path

import grpc
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import camserve
import camserve_server
from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2
from compatibility import calls, servers, storage, surfaces, tape

STUBS = (explain_pb2, evaluate_pb2, models_pb2)
EXAMPLE = surfaces.ROOT / "examples" / "plugin"
IMPORTS = {
    "camserve_server": ("Explainer", "running"),
    "camserve_server.cli": ("main",),
    "camserve_server.models": ("KeepAspect", "ModelSpec", "Preprocess", "Source", "TextTower", "tiled"),
    "camserve_server.methods": (
        *("Attention", "Baseline", "Cam", "FullGradient", "Fused", "METHODS", "Parameter", "Perturbation"),
        *("Product", "Saliency", "Scene", "Windows"),
        *("Edit", "View"),  # a Perturbation yields edits, and Windows take views
    ),
    "camserve_server.types": ("Edit", "View"),  # deprecated
    "camserve_server.cluster.application": ("app",),
    "camserve_server.cluster.proxy": ("add_services_to_server",),
    "camserve.cli": ("main",),
    "camserve.v1.explain_pb2": ("ExplainRequest", "ExplainResponse"),
    "camserve.v1.explain_pb2_grpc": ("ExplainServiceStub",),
    "camserve.v1.evaluate_pb2": ("EvaluateRequest", "EvaluateResponse"),
    "camserve.v1.evaluate_pb2_grpc": ("EvaluateServiceStub",),
    "camserve.v1.models_pb2": ("ListModelsRequest", "ListModelsResponse"),
    "camserve.v1.models_pb2_grpc": ("ModelServiceStub",),
}
"""The names that README.md, docs/, examples/ and deploy/ import, and those that a plugin of another kind needs."""


def client():
    storage.write("client", surfaces.client())


def commands():
    storage.write("commands", surfaces.commands())


def settings():
    storage.write("settings", surfaces.settings())


def package():
    storage.write("package", surfaces.package())


def imports():
    storage.write("imports", {module: surfaces.imported(module, names) for module, names in IMPORTS.items()})


def stub_files():
    """Return the descriptors of the client's stubs."""
    files = []
    for module in STUBS:
        files.append(descriptor_pb2.FileDescriptorProto())
        module.DESCRIPTOR.CopyToProto(files[-1])
    return files


def reflected_files(address):
    """Return the file descriptors that a server's reflection reports, by service."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        return {name: database.FindFileContainingSymbol(name) for name in sorted(database.get_services())}


def described(address):
    """Return the messages, enums and services that a server's reflection reports."""
    files = {file.name: file for file in reflected_files(address).values()}
    return surfaces.descriptors(file for name, file in sorted(files.items()) if not name.startswith("grpc/"))


def wire():
    with servers.serving() as address:
        storage.write("wire", described(address))


def call_outcome(client, name, args, options):
    """Make a call; return its result or error as JSON."""
    try:
        result = getattr(client, name)(*args, **options)
        return surfaces.value(list(result) if name == "explain_many" else result)
    except camserve.CamserveError as error:
        return surfaces.value(error)


def exchanges():
    with (
        servers.serving() as address,
        tape.recording(address) as (front, passed),
        camserve.Client(front, retries=0) as client,
    ):
        known = {method.name: {parameter.name for parameter in method.parameters} for method in client.methods()}
        recorded = {}
        for name, (function, args, options) in {**calls.everything(known), **calls.LOADING}.items():
            passed.clear()
            recorded[name] = {"value": call_outcome(client, function, args, options), "exchanges": list(passed)}
        with grpc.insecure_channel(address) as channel:
            inferences = {name: inference(channel, *call) for name, call in calls.inference_calls().items()}
    storage.pack("calls", recorded)
    storage.pack("inferences", inferences)


def inference(channel, rpc, request):
    path, data = f"/inference.GRPCInferenceService/{rpc}", request.SerializeToString()
    return tape.exchange(channel, path, [data], streams=rpc == "ModelStreamInfer")


RECEIPTS = {
    "gradcam": {},
    "contrast": {"targets": camserve.contrast("red fox", 1), "layers": "1"},
    "smoothgrad": {"methods": ("smoothgrad", {"samples": 4, "seed": 11})},
    "fused": {"layers": ["1", "3"], "fusion": "max"},
    "smoothed": {"methods": camserve.Method("layercam", augmentation_smoothing=True, eigen_smoothing=True)},
    "similarity": {"model": "embedder", "targets": camserve.similarity(calls.png(calls.MIRRORED))},
    "segment": {"model": "segmenter", "targets": camserve.segment("fox")},
}


def receipts():
    """Add receipts to those of earlier releases, which stay readable."""
    with servers.serving() as address, camserve.Client(address) as client:
        for name, options in RECEIPTS.items():
            explanation = client.explain(calls.png(calls.PIXELS), overlay=None, **options).explanations[0]
            explanation.receipt.save(storage.FOLDER / f"{name}-{surfaces.version()}.receipt.json")
    (storage.FOLDER / "photo.png").write_bytes(calls.png(calls.PIXELS))


def telemetry():
    with tempfile.TemporaryDirectory() as folder:
        storage.write("telemetry", servers.observe(Path(folder)))


KINDS = """
from camserve_server.methods import Baseline, Parameter, Perturbation, Saliency
from camserve_server.methods.values import Edit

LEVEL = Parameter("level", "Of every cell.", 0.5, 0.0, 1.0)


def _steepest(mean, _image, **_parameters):
    \"\"\"Take the steepest channel.\"\"\"
    return mean.abs().amax(0)


def _unchanged(scene, **_parameters):
    \"\"\"Compare the image with itself.\"\"\"
    scores = yield [Edit()]
    _, height, width = scene.image.shape
    return (scores[0] / scene.scores)[:, None, None].repeat(height, 1).repeat(width, 2)


def _level(image, level):
    \"\"\"Give every cell the same value.\"\"\"
    return image[0] * 0 + level


steepest = Saliency(_steepest, "an example")
unchanged = Perturbation(_unchanged, "an example", lambda **_: 1)
level = Baseline(_level, "an example", (LEVEL,))
"""


def plugin():
    """Record the source of the example plugin, and of plugins of other kinds."""
    project = surfaces.tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    modules = sorted((EXAMPLE / "camserve_example").glob("*.py"))
    files = {f"camserve_example/{path.name}": path.read_text(encoding="utf-8") for path in modules}
    entries = {group: dict(each) for group, each in project["entry-points"].items()}
    entries["camserve.methods"] |= {name: f"recorded_kinds:{name}" for name in ("steepest", "unchanged", "level")}
    storage.write("plugin", {"entry points": entries, "files": files | {"recorded_kinds.py": KINDS}})


def job():
    with tempfile.TemporaryDirectory() as folder:
        servers.stopped_job(Path(folder))
        servers.pack(Path(folder), storage.FOLDER / "job.zip")


def wheel():
    """Replace the recorded wheel with the one that `make dist` has built."""
    built = surfaces.ROOT / "dist" / f"camserve-{surfaces.version()}-py3-none-any.whl"
    content = built.read_bytes()
    for old in storage.FOLDER.glob("*.whl"):
        old.unlink()
    (storage.FOLDER / built.name).write_bytes(content)


PARTS = (client, commands, settings, package, imports, wire, exchanges, receipts, telemetry, plugin, job, wheel)


def check_tree():
    """Refuse to record a tree other than the one that contains this file.

    Raises:
        SystemExit: Python imports camserve from elsewhere.
    """
    for module in (camserve, camserve_server):
        if surfaces.ROOT not in Path(module.__file__).parents:
            sys.exit(f"{module.__name__} is imported from {module.__file__}: put this tree on PYTHONPATH")


def main(names):
    check_tree()
    for part in PARTS:
        if not names or part.__name__ in names:
            print(part.__name__)  # noqa: T201 -- a command prints
            part()


if __name__ == "__main__":
    main(sys.argv[1:])

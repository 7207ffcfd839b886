"""Reasons for skips: programs and packages that some tests need, with the command that installs each."""


def missing(name: str, command: str) -> str:
    """Return the reason for a skip."""
    return f"{name} is not installed: {command}"


AXE = missing("axe-core", "make browser")
CHROMIUM = missing("Chromium", "make browser")
COMPOSE = missing("docker compose", "apt-get install docker-compose-v2 (Debian 13: docker-compose)")
COMPILER = missing("a C compiler", "apt-get install gcc libc6-dev")
CUDA = "a CUDA device is missing: run this on a machine with a GPU"
CUDA_BUILD = missing("torch for CUDA", "make setup on Linux")
DOCKER = missing("a Docker engine that answers", "apt-get install docker.io")
HAPROXY = missing("HAProxy", "apt-get install haproxy")
IMAGE = missing(
    "a built image", "docker build -f service/Dockerfile -t camserve . && CAMSERVE_TEST_IMAGE=camserve make test-slow"
)
JAVA = missing(
    "grpc-java with its compiler",
    "apt-get install default-jdk-headless protobuf-compiler protobuf-compiler-grpc-java-plugin libgrpc-java "
    "libprotobuf-java libguava-java libnetty-java libperfmark-java libgeronimo-annotation-1.3-spec-java",
)
KUBECTL = missing("kubectl", "apt-get install kubernetes-client")
MEMORY_GROUP = "a memory control group is missing: run this as root on Linux"
NODE = missing("Node.js", "apt-get install nodejs npm && make node")
NODE_PACKAGES = missing("the package list of the Node client", "make node")
NOEXEC = "a file system mounted noexec is missing: run this as root on Linux"
PROMETHEUS = missing("Prometheus", "apt-get install prometheus")
SITE = missing("the built site", "make docs")
SIMULATED = "a process of its own for the simulated GPU is missing: make test-simulated"
RAY = missing("Ray", "make test-ray")
TRANSFORMERS = missing("transformers", "make setup")
TRITON = missing("Triton, which comes with torch for CUDA", "make setup on Linux")
TRITONCLIENT = missing("tritonclient in an environment of its own", "make .venv-triton/.done")
ULTRALYTICS = missing("Ultralytics", "make test-yolo")

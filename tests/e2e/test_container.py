"""Files of the container, and the built image that CAMSERVE_TEST_IMAGE names, if it is set.

To build one and test it:

    docker build -f service/Dockerfile -t camserve . && CAMSERVE_TEST_IMAGE=camserve make test-slow
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

import camserve
import fork_server
import needs
from camserve import cli
from camserve_server.api import exposure
from camserve_server.core import config, device_names
from camserve_server.core.errors import ConfigError
from server_process import reserved_port
from support import PHOTOS, wait_until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "service/Dockerfile").read_text("utf-8")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
HAPROXY = ROOT / "deploy/haproxy/haproxy.cfg"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

LOCKED = ["--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--pids-limit=200"]


def instructions(text):
    """Return the instructions of a Dockerfile in order, as pairs of name and arguments."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def last(name):
    return [arguments for instruction, arguments in instructions(DOCKERFILE) if instruction == name][-1]


ENVIRONMENT = dict(pair.split("=", 1) for pair in shlex.split(last("ENV")))
SETTINGS = config.load(environment=ENVIRONMENT)

OURS = {name: service for name, service in COMPOSE["services"].items() if "build" in service}
services = pytest.mark.parametrize("service", OURS.values(), ids=OURS.keys())


def test_dockerfile_needs_no_buildkit():
    """The Dockerfile uses no feature that needs BuildKit or a front end from a registry."""
    assert not re.search(r"^#\s*syntax=", DOCKERFILE, re.MULTILINE)
    assert "<<" not in DOCKERFILE
    assert "--link" not in DOCKERFILE
    assert "--mount" not in DOCKERFILE


def pip_installs(text):
    """Return the words of every `pip install` and `pip wheel` of a Dockerfile, each up to the end of its command."""
    runs = " && ".join(arguments for instruction, arguments in instructions(text) if instruction == "RUN")
    return [shlex.split(part) for part in re.split(r"&&|;", runs) if re.search(r"\bpip\b.* (install|wheel) ", part)]


def unchecked(text):
    """Return the installations that may take a file with an unknown hash from an index."""
    safe = ("--require-hashes", "--no-index", "wheel")  # `pip wheel --no-deps` downloads nothing
    return [words for words in pip_installs(text) if not set(safe) & set(words)]


def test_image_takes_only_torch_of_another_index_without_hashes():
    """Files of TORCH_INDEX have other hashes than those on PyPI. Everything else is checked."""
    left = unchecked(DOCKERFILE)

    assert len(pip_installs(DOCKERFILE)) == 7
    assert len(left) == 2
    assert all("--index-url" in words and words[-2:] == ["-r", "/opt/build/torch.txt"] for words in left)
    assert DOCKERFILE.count("--extra-index-url") == 0


@pytest.mark.parametrize("flag", ["--require-hashes ", "--no-index "])
def test_installation_without_hashes_is_found(flag):
    assert len(unchecked(DOCKERFILE.replace(flag, "", 1))) == 3


def test_lock_file_is_split_into_torch_with_cuda_and_the_others(tmp_path):
    """The command is that of the Dockerfile. Both parts together have every line of packages, and each line once."""
    lock = (ROOT / "service/requirements.lock").read_text("utf-8")
    (run,) = (arguments for name, arguments in instructions(DOCKERFILE) if name == "RUN" and " awk " in arguments)
    command = (
        run[run.index("awk ") :].replace("/torch.", f"{tmp_path}/torch.").replace("/others.", f"{tmp_path}/others.")
    )
    subprocess.run(["sh", "-c", command], cwd=ROOT / "service", check=True)
    torch_lock, others = ((tmp_path / f"{name}.lock").read_text("utf-8") for name in ("torch", "others"))
    names = re.findall(r"^([\w-]+)==", torch_lock, re.MULTILINE)
    pins = (tmp_path / "torch.txt").read_text("utf-8").split()

    assert sorted((torch_lock + others).splitlines()) == sorted(re.sub(r"\A(#.*\n)+", "", lock).splitlines())
    assert {re.split("[-=]", name)[0] for name in names} == {"torch", "torchvision", "triton", "cuda", "nvidia"}
    assert not re.search(r"^(nvidia|cuda|torch|triton)", others, re.MULTILINE)
    assert [pin.split("==")[0] for pin in pins] == ["torch", "torchvision"]
    assert all(f"\n{pin} \\\n" in f"\n{torch_lock}" for pin in pins)


def test_image_runs_as_a_numeric_user_that_is_not_root():
    assert int(last("USER")) > 0


def test_server_is_the_entrypoint_and_gets_sigterm():
    assert json.loads(last("ENTRYPOINT")) == ["camserve-server"]
    assert json.loads(last("CMD")) == ["serve"]
    assert last("STOPSIGNAL") == "SIGTERM"


def test_image_listens_on_its_exposed_port_on_every_interface():
    assert SETTINGS.address == f"0.0.0.0:{last('EXPOSE')}"


@pytest.mark.parametrize("address", ["0.0.0.0:50051", "[::]:8001"])
def test_health_check_calls_the_servers_own_port(address):
    command = json.loads(last("HEALTHCHECK").partition(" CMD ")[2])
    shown = [*command[:2], re.sub(r"\S*proxy=\S+ exec", "echo", command[2])]
    printed = subprocess.run(
        shown, env={"CAMSERVE_ADDRESS": address}, capture_output=True, text=True, check=True
    ).stdout

    assert printed.startswith("camserve health ")
    assert printed.split()[-2:] == ["--server", f"127.0.0.1:{address.rpartition(':')[2]}"]


def test_version_label_is_the_installed_version():
    assert ("ARG", f"VERSION={PROJECT['project']['version']}") in instructions(DOCKERFILE)


def test_build_context_has_exactly_the_files_of_the_wheel_and_the_locks():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    files = ["pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]]

    assert sent == {*packages, *files, "service/build.lock", "service/requirements.lock"}


@services
def test_compose_stop_period_is_longer_than_the_drain(service):
    assert service["stop_grace_period"].endswith("s")
    assert int(service["stop_grace_period"][:-1]) > SETTINGS.drain_seconds


@services
def test_compose_restricts_the_container(service):
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == [ENVIRONMENT["HOME"]]
    assert not {"user", "privileged", "cap_add", "network_mode"} & service.keys()


@pytest.mark.parametrize("service", COMPOSE["services"].values(), ids=COMPOSE["services"].keys())
def test_compose_limits_memory_and_processes_of_every_service(service):
    (size, unit) = re.fullmatch(r"(?:\$\{CAMSERVE_MEMORY:-)?(\d+)([mg])\}?", service["mem_limit"]).groups()

    assert int(size) * {"m": 1, "g": 1024}[unit] >= 512
    assert 0 < service["pids_limit"] <= 1024


@services
def test_compose_memory_limit_covers_the_measured_need(service):
    """The request in the Kubernetes manifests was measured; compose sets only a limit."""
    deployment = yaml.safe_load((ROOT / "deploy/kubernetes/deployment.yaml").read_text("utf-8"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))

    assert int(re.search(r":-(\d+)g", service["mem_limit"])[1]) >= limit


@pytest.mark.parametrize("name", ["camserve", "gpu", "balancer"])
def test_compose_publishes_the_port_on_loopback_only(name):
    grpc, *http = COMPOSE["services"][name]["ports"]

    assert grpc == f"127.0.0.1:${{CAMSERVE_PORT:-50051}}:{last('EXPOSE')}"
    assert http == ([] if name == "balancer" else ["127.0.0.1:${CAMSERVE_HTTP_PORT:-8080}:8080"])


@services
def test_compose_serves_http_on_the_port_that_it_publishes(service):
    assert service["environment"]["CAMSERVE_HTTP_ADDRESS"] == "${CAMSERVE_HTTP_ADDRESS-0.0.0.0:8080}"
    assert "EXPOSE 8080\n" in (ROOT / "service/Dockerfile").read_text("utf-8")


def test_compose_balancer_calls_replicas_that_have_no_port_of_their_own():
    balancer, replica = COMPOSE["services"]["balancer"], COMPOSE["services"]["replica"]

    assert "ports" not in replica
    assert balancer["environment"] == {"CAMSERVE_SERVERS": f"replica:{last('EXPOSE')}"}
    assert balancer["depends_on"] == {"replica": {"condition": "service_healthy"}}
    assert (balancer["profiles"], replica["profiles"]) == (["balanced"], ["balanced"])


def test_compose_balancer_runs_a_pinned_image_with_the_configuration_of_deploy():
    service = COMPOSE["services"]["balancer"]
    mounted, path, mode = service["volumes"][0].split(":")

    assert re.fullmatch(r"haproxy:\d+\.\d+\.\d+-alpine", service["image"])
    assert (ROOT / mounted, path, mode) == (HAPROXY, "/usr/local/etc/haproxy/haproxy.cfg", "ro")
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])


def test_compose_stop_period_of_the_balancer_is_longer_than_its_own():
    (seconds,) = re.findall(r"^ +hard-stop-after (\d+)s", HAPROXY.read_text("utf-8"), re.MULTILINE)

    assert int(COMPOSE["services"]["balancer"]["stop_grace_period"][:-1]) > int(seconds) > SETTINGS.drain_seconds


@services
def test_compose_keeps_the_health_check_of_the_image(service):
    assert "healthcheck" not in service


@services
def test_compose_sets_only_existing_settings(service):
    known = {config.ENVIRONMENT + name.upper() for name in (*config.Settings.model_fields, *cli.ACCESS_OPTIONS)}
    own = ("CAMSERVE_INSECURE", "CAMSERVE_METRICS_ADDRESS", "CAMSERVE_HTTP_ADDRESS", "CAMSERVE_DEVICE")
    passed = {name: value for name, value in service["environment"].items() if name not in own}

    assert {name for name in service["environment"] if not name.startswith("OTEL_")} <= known
    assert set(passed.values()) == {None}  # compose passes a variable on only if it is set


@services
def test_insecure_is_set_only_in_compose(service):
    assert service["environment"]["CAMSERVE_INSECURE"] == "${CAMSERVE_INSECURE:-true}"
    with pytest.raises(ConfigError, match="CAMSERVE_INSECURE=true"):
        exposure.check(SETTINGS)
    exposure.check(config.load(environment={**ENVIRONMENT, "CAMSERVE_INSECURE": "true"}))


@services
def test_compose_keeps_the_models_in_a_volume(service):
    (name, _, path) = service["volumes"][0].partition(":")

    assert name in COMPOSE["volumes"]
    assert path == last("WORKDIR")
    assert ENVIRONMENT["XDG_CACHE_HOME"].startswith(path)
    assert ENVIRONMENT["TORCH_HOME"].startswith(path)
    assert ENVIRONMENT["HF_HOME"].startswith(path)


@pytest.mark.parametrize(
    ("name", "port", "path"),
    [("prometheus", 9090, "/-/healthy"), ("grafana", 3000, "/api/health"), ("balancer", 8404, "/ready")],
)
def test_compose_checks_the_health_of_services_from_other_projects(name, port, path):
    service = COMPOSE["services"][name]

    assert service["healthcheck"]["test"] == ["CMD", "wget", "-q", "--spider", f"http://127.0.0.1:{port}{path}"]


def test_compose_starts_services_after_their_dependencies():
    for service in COMPOSE["services"].values():
        needed = service.get("depends_on", {})
        assert all(needed[name] == {"condition": "service_healthy"} for name in needed)
        assert all("healthcheck" in COMPOSE["services"][name] or name in OURS for name in needed)
    assert "prometheus" in COMPOSE["services"]["grafana"]["depends_on"]


def test_compose_reserves_a_gpu_only_for_the_gpu_service():
    cpu, gpu = COMPOSE["services"]["camserve"], COMPOSE["services"]["gpu"]
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]

    assert "profiles" not in cpu
    assert "deploy" not in cpu
    assert gpu["profiles"] == ["gpu"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_compose_gpu_service_does_not_fall_back_to_the_cpu(monkeypatch):
    cpu, gpu = COMPOSE["services"]["camserve"]["environment"], COMPOSE["services"]["gpu"]["environment"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    assert gpu == cpu | {"CAMSERVE_DEVICE": "${CAMSERVE_DEVICE:-cuda}"}
    with pytest.raises(ConfigError, match="torch sees 0 CUDA devices here"):
        device_names.parse_devices("cuda")


def run_python(code, **environment):
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)  # noqa: PLW1510 -- one of them fails
    return done.returncode, done.stdout.strip(), done.stderr


ALONE = """
import importlib.util, sys
spec = importlib.util.find_spec("torch")
sys.modules["torch"] = importlib.util.module_from_spec(spec)
import torch._C
"""
"""Import only the compiled part of torch, which reads the setting. All of torch takes four seconds more."""
ALLOCATOR = "import torch; print(torch._C._accelerator_getAllocatorSettings())\n"
COMPUTED = "torch.manual_seed(0); print(torch.nn.Conv2d(3, 4, 3)(torch.randn(2, 3, 9, 9)).tolist())"


def test_allocator_setting_of_the_image_is_valid_and_changes_no_bit():
    names = {name: value for name, value in ENVIRONMENT.items() if name not in ("PATH", "HOME")}
    code, printed, _ = run_python(ALLOCATOR + COMPUTED, **names)
    setting, answer = printed.split("\n")
    plain = fork_server.run(f"import torch; {COMPUTED}")

    assert (code, setting) == (0, "expandable_segments:True")
    assert (plain.returncode, answer) == (0, plain.stdout.strip())


def test_torch_refuses_an_unknown_allocator_setting():
    wrong, _, reason = run_python(ALONE + ALLOCATOR, PYTORCH_ALLOC_CONF="expandable:True")
    right, setting, _ = run_python(ALONE + ALLOCATOR, PYTORCH_ALLOC_CONF="expandable_segments:True")

    assert wrong
    assert "Unrecognized key 'expandable'" in reason
    assert (right, setting) == (0, "expandable_segments:True")


def docker(*words, **options):
    return subprocess.run(("docker", *words), capture_output=True, text=True, check=True, **options).stdout.strip()


def answers(*words):
    try:
        return bool(docker(*words))
    except (OSError, subprocess.CalledProcessError):
        return False


@pytest.fixture(scope="module")
def _compose():
    if not answers("compose", "version"):
        pytest.skip(needs.COMPOSE)


@pytest.fixture(scope="module")
def image():
    name = os.environ.get("CAMSERVE_TEST_IMAGE")
    if not name:
        pytest.skip(needs.IMAGE)
    if not answers("info", "--format", "{{.ServerVersion}}"):
        pytest.skip(needs.DOCKER)
    return name


@contextmanager
def running(image, *options):
    """Run the image in the host's network with all restrictions; yield its id and address once it is healthy."""
    with reserved_port() as port:  # the image's health check needs the address
        address = f"127.0.0.1:{port}"
        name = docker("run", "-d", "--network=host", *LOCKED, *options, "-e", f"CAMSERVE_ADDRESS={address}", image)
        try:
            wait_until_healthy(name)
            yield name, address
        finally:
            docker("rm", "-f", name)


def wait_until_healthy(name):
    def healthy():
        assert inspect(name, "State.Status") == "running", docker("logs", name)
        return inspect(name, "State.Health.Status") == "healthy"

    wait_until(healthy)


def inspect(name, path):
    return docker("inspect", "--format", f"{{{{.{path}}}}}", name)


@pytest.fixture(scope="module")
def container(image):
    with running(image) as (name, address):
        yield name, address


def explain_the_cat(address):
    with camserve.Client(address, timeout=60) as client:
        return client.explain(PHOTOS["chelsea"])


def test_container_explains_a_photo(container):
    _, address = container
    result = explain_the_cat(address)

    assert result.predictions[0].label == "Egyptian cat"
    assert result.explanations[0].image.size == (451, 300)


def test_server_is_process_1_without_privileges(container):
    name, _ = container
    status = dict(line.split(":\t", 1) for line in docker("exec", name, "cat", "/proc/1/status").splitlines())
    command = docker("exec", name, "cat", "/proc/1/cmdline")

    assert status["Uid"].split() == [last("USER")] * 4
    assert int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert "camserve-server" in command


def test_image_has_no_compiler_and_no_cache(container):
    name, _ = container
    output = docker("exec", name, "sh", "-c", "command -v gcc cc g++ make nvcc; ls -d /root/.cache || true")

    assert output == ""


def test_stopped_container_finishes_its_calls_and_exits_with_0(image):
    with running(image, "--memory=2g") as (name, address):
        explain_the_cat(address)
        docker("stop", name)

        assert inspect(name, "State.ExitCode") == "0"
        assert inspect(name, "State.OOMKilled") == "false"


def test_server_can_write_to_a_new_volume(image):
    volume = docker("volume", "create")
    options = (*LOCKED, "--rm", "--network=none", f"--volume={volume}:{last('WORKDIR')}", "--entrypoint=mkdir")
    try:
        docker("run", *options, image, "-p", ENVIRONMENT["TORCH_HOME"], ENVIRONMENT["HF_HOME"])
    finally:
        docker("volume", "rm", volume)


@pytest.mark.usefixtures("_compose")
@pytest.mark.parametrize(
    ("arguments", "started"),
    [
        ([], {"camserve"}),
        (["gpu"], {"gpu"}),
        (["balancer"], {"balancer", "replica"}),
        (["grafana"], {"grafana", "prometheus"}),
    ],
)
def test_compose_starts_these_services(arguments, started):
    text = docker("compose", "--project-directory", str(ROOT), "config", "--format", "json", *arguments)

    assert json.loads(text)["services"].keys() == started


@pytest.mark.usefixtures("_compose")
def test_compose_waits_until_the_service_is_healthy(image, tmp_path):
    override = tmp_path / "override.yml"
    files = ("-f", str(ROOT / "docker-compose.yml"), "-f", str(override), "-p", "camserve-test")
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        override.write_text(
            f"services: {{camserve: {{image: {image}, network_mode: host, ports: !reset [], "
            f'environment: {{CAMSERVE_ADDRESS: "{address}"}}}}}}'
        )
        try:
            docker("compose", *files, "up", "--detach", "--wait", "--no-build")
            assert explain_the_cat(address).predictions[0].label == "Egyptian cat"
        finally:
            docker("compose", *files, "down", "--volumes")

"""Kubernetes manifests: they are valid, and match the server that they start."""

import copy
import functools
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

import kubernetes_validate
import pytest
import torch
import yaml

import needs
from camserve import cli
from camserve_server.api import exposure, grpc_server
from camserve_server.core import config
from camserve_server.serving import pool_sizing
from camserve_server.telemetry import prometheus

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.32", kubernetes_validate.latest_version())
"""The oldest version with a preStop sleep, which needs no program in the container, and the newest known version."""


def read(path):
    (manifest,) = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return manifest


KUSTOMIZATION = read(FOLDER / "kustomization.yaml")
MANIFESTS = {path.stem: read(path) for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "kustomization"}
KSERVE_FOLDER = ROOT / "deploy" / "kserve"
KSERVE = read(KSERVE_FOLDER / "inferenceservice.yaml")
POD = MANIFESTS["deployment"]["spec"]["template"]
KSERVE_FIELDS = ("minReplicas", "maxReplicas", "timeout", "deploymentStrategy")  # the other fields are those of a pod


def predictor(service):
    """Return the pod of an InferenceService."""
    spec = {key: value for key, value in service["spec"]["predictor"].items() if key not in KSERVE_FIELDS}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "predictor"}, "spec": spec}


PREDICTOR = predictor(KSERVE)
KSERVE_LABELS = {
    "app": f"isvc.{KSERVE['metadata']['name']}-predictor",
    "component": "predictor",
    "serving.kserve.io/inferenceservice": KSERVE["metadata"]["name"],
}
"""The labels that KServe's controller puts on the pods of a predictor in mode Standard."""

POLICIES = {"deployment": MANIFESTS["networkpolicy"], "kserve": read(KSERVE_FOLDER / "networkpolicy.yaml")}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
SETTINGS = tomllib.loads((FOLDER / "camserve.toml").read_text(encoding="utf-8"))
FOLDERS = {name: ROOT / "deploy" / name for name in ("kubernetes", "kserve", "kubernetes-gpu", "kserve-gpu")}
GPUS = [name for name in FOLDERS if name.endswith("-gpu")]
TLS_FOLDER = ROOT / "deploy" / "kubernetes-tls"


@functools.cache
def build(folder):
    """Return the objects that kustomize generates from a folder, by kind."""
    if shutil.which("kubectl") is None:
        pytest.skip(needs.KUBECTL)
    generated = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True)
    return {item["kind"]: item for item in yaml.safe_load_all(generated.stdout)}


def pod_of(objects):
    if "Deployment" in objects:
        return objects["Deployment"]["spec"]["template"]["spec"]
    return predictor(objects["InferenceService"])["spec"]


@pytest.fixture(params=FOLDERS)
def pod(request):
    """Return the server's pod of every deployment."""
    plain = {"kubernetes": POD["spec"], "kserve": PREDICTOR["spec"]}
    return plain.get(request.param) or pod_of(build(FOLDERS[request.param]))


def environment(pod):
    return {variable["name"]: variable["value"] for variable in container(pod).get("env", ())}


def settings_of(pod):
    """Return the settings that the server of a pod starts with."""
    file = FOLDER / "camserve.toml" if "--config" in container(pod)["args"] else None
    return config.load(file, environment=environment(pod))


def container(pod):
    (result,) = pod["containers"]
    return result


def ports(pod):
    return {port["name"]: port["containerPort"] for port in container(pod)["ports"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "manifest", [*MANIFESTS.values(), PREDICTOR, POLICIES["kserve"]], ids=[*MANIFESTS, "kserve", "kserve-networkpolicy"]
)
def test_every_manifest_matches_the_schema_of_kubernetes(manifest, version):
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize(
    "plant",
    [
        lambda pod: container(pod)["readinessProbe"]["grpc"].update(port="grpc"),  # must be a number
        lambda pod: pod.update(terminationGracePeriodSecond=30),
        lambda pod: container(pod)["lifecycle"]["preStop"].update(sleep=5),
    ],
)
def test_planted_mistake_is_found(plant):
    wrong = copy.deepcopy(MANIFESTS["deployment"])
    plant(wrong["spec"]["template"]["spec"])
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_kustomization_applies_all_manifests():
    assert sorted(KUSTOMIZATION["resources"]) == sorted(f"{name}.yaml" for name in MANIFESTS)
    assert KUSTOMIZATION["images"][0]["name"] == container(POD["spec"])["image"].partition(":")[0]
    resources = read(KSERVE_FOLDER / "kustomization.yaml")["resources"]
    assert sorted(resources) == sorted(
        path.name for path in KSERVE_FOLDER.glob("*.yaml") if path.stem != "kustomization"
    )


def test_settings_are_valid_for_the_server():
    assert not config.faults_of(SETTINGS)
    dockerfile = (ROOT / "service" / "Dockerfile").read_text(encoding="utf-8")
    address = re.search(r"CAMSERVE_ADDRESS=(\S+)", dockerfile)[1]
    settings = config.Settings.model_validate({**SETTINGS, "address": address})
    exposure.check(settings)

    assert config.ADDRESS.fullmatch(address)["port"] == str(ports(POD["spec"])["grpc"])
    assert config.ADDRESS.fullmatch(settings.metrics_address)["port"] == str(ports(POD["spec"])["metrics"])


def test_environment_has_only_existing_settings(pod):
    settings = {name.removeprefix(config.ENVIRONMENT).lower() for name in environment(pod)}

    assert settings <= set(config.Settings.model_fields)
    assert settings_of(pod).insecure


def test_grace_period_covers_the_stop_of_the_server(pod):
    """The sum of the pause before SIGTERM, the drain, and the longest wait of `serve_until_signal`."""
    settings = settings_of(pod)
    pause = container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
    longest = pause + settings.drain_seconds + 3 * grpc_server.QUIET_TIMEOUT

    assert pause >= 1
    assert longest < pod["terminationGracePeriodSeconds"]


def test_probes_call_existing_health_services_on_the_servers_port(pod):
    probes = {name: container(pod)[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    (port,) = {probe["grpc"]["port"] for probe in probes.values()}

    assert port in ports(pod).values()
    assert probes["liveness"]["grpc"]["service"] == grpc_server.LIVE
    assert all(probes[name]["grpc"].get("service", "") in grpc_server.SERVICES for name in ("startup", "readiness"))


def test_every_probe_states_a_timeout_within_its_period(pod):
    for name in ("startup", "liveness", "readiness"):
        probe = container(pod)[f"{name}Probe"]
        assert 1 < probe["timeoutSeconds"] <= probe["periodSeconds"]


def test_images_are_pinned_to_this_version(pod):
    """With a tag that moves, nodes could run different code, because IfNotPresent compares only names."""
    image = container(pod)

    assert image["image"] == f"camserve:{VERSION}-{'gpu' if gpus(pod) else 'cpu'}"
    assert image["imagePullPolicy"] == "IfNotPresent"


def test_overlay_replaces_the_image_of_its_base():
    for name, folder in FOLDERS.items():
        (image,) = read(folder / "kustomization.yaml")["images"]
        assert image == {
            "name": "camserve",
            "newName": "camserve",
            "newTag": f"{VERSION}-{'gpu' if name in GPUS else 'cpu'}",
        }


def gpus(pod):
    return container(pod)["resources"]["limits"].get("nvidia.com/gpu", 0)


def test_pod_requests_the_documented_memory(pod):
    """The scheduler reserves the request, and the kernel kills the worker at the limit."""
    parts = ("idle", "busy", "CUDA's libraries") if gpus(pod) else ("idle", "busy")
    resources = container(pod)["resources"]

    assert mebibytes(resources["requests"]["memory"]) >= sum(map(documented, parts))
    assert mebibytes(resources["limits"]["memory"]) > mebibytes(resources["requests"]["memory"])


def documented(part):
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    return int(re.search(rf"^\| {part} \| ([\d,]+) MiB", page, re.MULTILINE)[1].replace(",", ""))


def mebibytes(quantity):
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]


def test_liveness_probe_waits_for_the_servers_own_recovery(pod):
    """A hung worker is restarted within `max_batch_seconds`, while the event loop goes on."""
    startup, liveness = container(pod)["startupProbe"], container(pod)["livenessProbe"]

    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= config.Settings().max_batch_seconds


def test_pod_has_only_the_privileges_that_it_needs(pod):
    context = container(pod)["securityContext"]
    user = re.search(r"^USER (\d+)", (ROOT / "service" / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)[1]

    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, int(user))
    assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert not pod["automountServiceAccountToken"]
    assert {mount["mountPath"] for mount in container(pod)["volumeMounts"]} >= {"/tmp", "/models"}  # noqa: S108 -- a mount path


def test_manifests_agree_on_pods_and_ports():
    labels = POD["metadata"]["labels"]
    named = {port["name"]: port["port"] for port in MANIFESTS["service"]["spec"]["ports"]}
    opened = {port["port"] for rule in MANIFESTS["networkpolicy"]["spec"]["ingress"] for port in rule["ports"]}

    assert MANIFESTS["deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["service"]["spec"]["selector"] == labels
    assert MANIFESTS["service"]["spec"]["clusterIP"] == "None"  # for clients that balance calls among the pods
    assert MANIFESTS["pdb"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["networkpolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert MANIFESTS["hpa"]["spec"]["scaleTargetRef"]["name"] == MANIFESTS["deployment"]["metadata"]["name"]
    assert named == ports(POD["spec"])
    assert opened == set(named.values())


class Peer(NamedTuple):
    """Calling pod: the labels of its namespace and its own."""

    namespace: dict[str, str]
    labels: dict[str, str]


HOME = {"kubernetes.io/metadata.name": "home"}
ELSEWHERE = {"kubernetes.io/metadata.name": "elsewhere"}
MONITORING = {"kubernetes.io/metadata.name": "monitoring"}
CLIENT = {"camserve-client": "true"}


def selects(selector, labels):
    """Evaluate a label selector. An empty one selects everything."""
    assert set(selector) <= {"matchLabels"}, "the evaluator knows no matchExpressions"
    return selector.get("matchLabels", {}).items() <= labels.items()


def matches(rule, peer):
    """Evaluate one entry of `from`: without a namespace selector it means pods of the policy's own namespace."""
    assert set(rule) <= {"podSelector", "namespaceSelector"}, "the evaluator knows no ipBlock"
    same = (
        peer.namespace == HOME
        if "namespaceSelector" not in rule
        else selects(rule["namespaceSelector"], peer.namespace)
    )
    return same and selects(rule.get("podSelector", {}), peer.labels)


def admitted_ports(policy, labels, peer):
    """Return the ports of a pod in HOME that are open to a peer; None where the policy does not select the pod."""
    if not selects(policy["spec"]["podSelector"], labels):
        return None
    rules = policy["spec"]["ingress"]
    return {
        port["port"]
        for rule in rules
        if any(matches(source, peer) for source in rule["from"])
        for port in rule["ports"]
    }


BOTH = pytest.mark.parametrize(
    ("policy", "labels"),
    [(POLICIES["deployment"], POD["metadata"]["labels"]), (POLICIES["kserve"], KSERVE_LABELS)],
    ids=POLICIES,
)


@BOTH
def test_network_policy_selects_the_pods_of_the_server(policy, labels):
    unlabelled = Peer(HOME, {})

    assert "Ingress" in policy["spec"]["policyTypes"]
    assert admitted_ports(policy, labels, unlabelled) == set()
    assert admitted_ports(policy, {"app": "another"}, unlabelled) is None


@BOTH
def test_labelled_pods_may_call_from_the_namespace_and_from_labelled_ones(policy, labels):
    assert admitted_ports(policy, labels, Peer(HOME, CLIENT)) == {50051}
    assert admitted_ports(policy, labels, Peer({**ELSEWHERE, **CLIENT}, CLIENT)) == {50051}


@BOTH
def test_pod_label_alone_does_not_admit_another_namespace(policy, labels):
    assert admitted_ports(policy, labels, Peer(ELSEWHERE, CLIENT)) == set()
    assert admitted_ports(policy, labels, Peer({**ELSEWHERE, **CLIENT}, {})) == set()


def test_prometheus_may_scrape_but_not_call():
    labels = POD["metadata"]["labels"]

    assert admitted_ports(POLICIES["deployment"], labels, Peer(MONITORING, {})) == {ports(POD["spec"])["metrics"]}


def test_wrong_network_policies_are_detected():
    wrong = copy.deepcopy(POLICIES["kserve"])
    wrong["spec"]["podSelector"] = {"matchLabels": {"app": "camserve"}}
    assert admitted_ports(wrong, KSERVE_LABELS, Peer(HOME, CLIENT)) is None

    wide = copy.deepcopy(POLICIES["kserve"])
    wide["spec"]["ingress"][0]["from"].append({"namespaceSelector": {}})
    assert admitted_ports(wide, KSERVE_LABELS, Peer(ELSEWHERE, {})) == {50051}


def test_pods_mount_the_generated_settings():
    (made,) = KUSTOMIZATION["configMapGenerator"]
    (volume,) = (item["configMap"]["name"] for item in POD["spec"]["volumes"] if "configMap" in item)
    (mount,) = (item["mountPath"] for item in container(POD["spec"])["volumeMounts"] if item["name"] == "settings")

    assert made["name"] == volume
    assert not {"disableNameSuffixHash"} & {*made["options"], *KUSTOMIZATION.get("generatorOptions", ())}
    assert container(POD["spec"])["args"][-1] in [f"{mount}/{name}" for name in made["files"]]


def test_changed_settings_change_the_pods(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "changed")
    with (tmp_path / "changed" / "camserve.toml").open("a") as settings:
        settings.write("max_queue_rows = 100\n")
    names = []
    for folder in (FOLDER, tmp_path / "changed"):
        objects = build(folder)
        volumes = objects["Deployment"]["spec"]["template"]["spec"]["volumes"]
        names.append(next(volume["configMap"]["name"] for volume in volumes if "configMap" in volume))
        assert objects["ConfigMap"]["metadata"]["name"] == names[-1]
        assert objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "camserve"
        for item in objects.values():
            kubernetes_validate.validate(item, VERSIONS[0], strict=True)

    assert names[0] != names[1]


def test_server_may_query_dns_of_cluster_and_node():
    (rule,) = MANIFESTS["networkpolicy"]["spec"]["egress"]

    assert {(port["protocol"], port["port"]) for port in rule["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert [peer["ipBlock"]["cidr"] for peer in rule["to"] if "ipBlock" in peer] == ["169.254.20.10/32"]
    assert [peer for peer in rule["to"] if "namespaceSelector" in peer]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", GPUS)
def test_every_manifest_for_gpus_matches_the_schema_of_kubernetes(name, version):
    objects = dict(build(FOLDERS[name]))
    if service := objects.pop("InferenceService", None):
        wrapped = copy.deepcopy(MANIFESTS["deployment"])
        wrapped["spec"]["strategy"] = service["spec"]["predictor"]["deploymentStrategy"]
        objects |= {"Pod": predictor(service), "Deployment": wrapped}
    for item in objects.values():
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("name", GPUS)
def test_gpu_overlay_changes_only_the_pods_and_their_scaling(name):
    plain, gpu = build(FOLDERS[name.removesuffix("-gpu")]), build(FOLDERS[name])
    changed = {kind for kind in plain if gpu[kind] != plain[kind]}

    assert gpu.keys() == plain.keys()
    assert changed == {"Deployment", "HorizontalPodAutoscaler", "InferenceService"} & plain.keys()


@pytest.mark.parametrize("name", GPUS)
def test_gpu_pod_reserves_a_gpu_tolerates_the_taint_and_uses_no_cpu(name):
    pod = pod_of(build(FOLDERS[name]))
    plain = pod_of(build(FOLDERS[name.removesuffix("-gpu")]))

    assert (gpus(pod), gpus(plain)) == (1, 0)
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert (settings_of(pod).device, settings_of(plain).device) == ("cuda", "auto")
    assert settings_of(pod) == settings_of(plain).model_copy(update={"device": "cuda"})


@pytest.mark.parametrize("name", GPUS)
def test_gpu_rollout_needs_no_spare_gpu(name):
    objects = build(FOLDERS[name])
    plain = build(FOLDERS["kubernetes"])["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    strategies = [
        item["spec"]["strategy"] if kind == "Deployment" else item["spec"]["predictor"]["deploymentStrategy"]
        for kind, item in objects.items()
        if kind in ("Deployment", "InferenceService")
    ]

    assert plain["maxSurge"] > 0
    assert strategies == [{"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}]


def test_gpu_rollout_or_drain_leaves_a_serving_pod():
    objects = build(FOLDERS["kubernetes-gpu"])
    strategy = objects["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    least = objects["HorizontalPodAutoscaler"]["spec"]["minReplicas"]

    assert least - strategy["maxUnavailable"] >= 1
    assert least - objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] >= 1


def test_gpu_autoscaling_starts_when_more_than_two_batches_wait():
    (metric,) = build(FOLDERS["kubernetes-gpu"])["HorizontalPodAutoscaler"]["spec"]["metrics"]
    rows = int(metric["pods"]["target"]["averageValue"])

    assert rows % pool_sizing.GPU_BATCH == 0
    assert rows // pool_sizing.GPU_BATCH >= 3
    assert rows < config.Settings().max_queue_rows / 4  # long before the queue is full


@pytest.mark.skipif(not torch.version.cuda, reason=needs.CUDA_BUILD)
def test_page_states_the_size_of_cudas_libraries():
    folder = Path(torch.__file__).parents[1]
    libraries = [*folder.glob("nvidia/**/*.so*"), *folder.glob("torch/lib/*cuda*.so")]
    size = sum(path.stat().st_size for path in libraries if not path.is_symlink()) / 2**20

    assert 0.9 * documented("CUDA's libraries") < size <= documented("CUDA's libraries")


def test_autoscaling_uses_an_existing_metric():
    (metric,) = MANIFESTS["hpa"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]

    assert f'"{name}"' in Path(prometheus.__file__).read_text(encoding="utf-8")
    assert f"`{name}`" in (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert (
        int(metric["pods"]["target"]["averageValue"]) < config.Settings().max_queue_rows / 8
    )  # long before the queue is full


def test_documented_scrape_and_rule_provide_the_autoscaling_metric():
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    scrape, rules = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    (job,), (rule,) = scrape["scrape_configs"], rules["rules"]
    relabelled = job["relabel_configs"]
    by = {entry.get("target_label", entry.get("regex")): entry["source_labels"] for entry in relabelled}
    (metric,) = MANIFESTS["hpa"]["spec"]["metrics"]

    assert by["camserve"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_name"]
    assert POD["metadata"]["labels"]["app.kubernetes.io/name"] == "camserve"
    assert by["metrics"] == ["__meta_kubernetes_pod_container_port_name"]
    assert "metrics" in ports(POD["spec"])
    assert rule["seriesQuery"].partition("{")[0] == metric["pods"]["metric"]["name"]
    assert (
        set(re.findall(r'(\w+)!=""', rule["seriesQuery"]))
        == set(rule["resources"]["overrides"])
        == set(by)
        - {
            "camserve",
            "metrics",
        }
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_with_tls_matches_the_schema_of_kubernetes(version):
    for item in build(TLS_FOLDER).values():
        kubernetes_validate.validate(item, version, strict=True)


def test_tls_overlay_changes_only_the_pods_and_their_settings():
    plain, tls = build(FOLDER), build(TLS_FOLDER)

    assert tls.keys() == plain.keys()
    assert {kind for kind in plain if tls[kind] != plain[kind]} == {"Deployment", "ConfigMap"}
    assert read(TLS_FOLDER / "kustomization.yaml")["images"] == KUSTOMIZATION["images"]


def test_settings_with_tls_differ_only_in_access():
    secured = tomllib.loads(build(TLS_FOLDER)["ConfigMap"]["data"]["camserve.toml"])
    changed = {name for name in secured.keys() | SETTINGS.keys() if secured.get(name) != SETTINGS.get(name)}
    exposure.check(config.Settings.model_construct(**{"address": "0.0.0.0:50051", **secured}))

    assert changed == {"insecure", "tls_cert", "tls_key", "tokens_file"}


def test_pod_with_tls_mounts_the_files_of_its_settings():
    pod = pod_of(build(TLS_FOLDER))
    settings = tomllib.loads((TLS_FOLDER / "camserve.toml").read_text(encoding="utf-8"))
    mounts = {mount["name"]: mount["mountPath"] for mount in container(pod)["volumeMounts"]}
    (secret,) = (volume for volume in pod["volumes"] if "secret" in volume)
    folders = {str(Path(settings[name]).parent) for name in ("tls_cert", "tls_key", "tokens_file")}

    assert folders == {mounts[secret["name"]]}
    assert secret["secret"]["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == POD["spec"]["securityContext"]["fsGroup"]


def test_commands_of_probes_with_tls_ask_for_health():
    pod = container(pod_of(build(TLS_FOLDER)))
    settings = tomllib.loads((TLS_FOLDER / "camserve.toml").read_text(encoding="utf-8"))
    for name, service in (("startup", ""), ("liveness", grpc_server.LIVE), ("readiness", "")):
        probe = pod[f"{name}Probe"]
        program, command, *words = probe["exec"]["command"]
        context = cli.main.commands[command].make_context(command, words)

        assert (program, command, context.params["service"]) == ("camserve", "health", service)
        assert (context.params["server"], context.params["ca"]) == ("localhost:50051", settings["tls_cert"])
        assert "grpc" not in probe
        assert probe["timeoutSeconds"] <= probe["periodSeconds"]
        least = config.Settings().max_batch_seconds if service else 0
        assert probe["periodSeconds"] * probe["failureThreshold"] >= least

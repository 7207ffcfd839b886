"""Metrics with a real Prometheus: counts are right, and every panel and alert has data."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml

import camserve
import needs
from server_process import reserved_port, server_process
from support import TINY, alive, wait_until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
BOARD = json.loads((FOLDER / "grafana/dashboards/camserve.json").read_text())
RULES = [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]
PHOTO = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)

real = pytest.mark.skipif(not shutil.which("prometheus"), reason=needs.PROMETHEUS)
tool = pytest.mark.skipif(not shutil.which("promtool"), reason=needs.PROMETHEUS)


@tool
@pytest.mark.parametrize("arguments", [["check", "config", "prometheus.yml"], ["test", "rules", "rules_test.yml"]])
def test_promtool_accepts_the_rules_and_each_alert_fires(arguments):
    result = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_test_in_which_it_fires():
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    checks = [check for test in tests for check in test.get("alert_rule_test", ())]
    fired = {check["alertname"] for check in checks if check.get("exp_alerts")}

    assert fired == {rule["alert"] for rule in RULES if "alert" in rule}


def panels():
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def test_dashboard_uses_the_provisioned_source_and_panels_do_not_overlap():
    (source,) = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    cells = [
        (x, y)
        for cell in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(cell["x"], cell["x"] + cell["w"])
        for y in range(cell["y"], cell["y"] + cell["h"])
    ]

    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in panels():
        assert {panel["datasource"]["uid"], *(target["datasource"]["uid"] for target in panel["targets"])} == {
            source["uid"]
        }


def test_compose_starts_pinned_images_with_these_files():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = compose["services"]
    monitoring = {name for name in services if "observability" in services[name].get("profiles", ())}

    assert monitoring == {"prometheus", "grafana"}
    for service in (services[name] for name in monitoring):
        assert re.fullmatch(r"(prom/prometheus:v|grafana/grafana:)\d+\.\d+\.\d+", service["image"])
        mounted = [volume.split(":")[0] for volume in service["volumes"] if volume.startswith("./")]
        assert mounted
        assert all((ROOT / path).exists() for path in mounted)
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"][0]["dns_sd_configs"][0]
    served = {name: service for name, service in services.items() if "build" in service}
    assert set(scraped["names"]) == set(served)
    for service in served.values():
        assert f":{scraped['port']}}}" in service["environment"]["CAMSERVE_METRICS_ADDRESS"]
        assert not [port for port in service.get("ports", ()) if str(scraped["port"]) in port]


def queries():
    """Yield each expression of dashboard, rules and docs/metrics.md for Prometheus; alerts without thresholds."""
    yield from re.findall(r"```promql\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL)
    for panel in panels():
        for target in panel["targets"]:
            filled = target["expr"].replace("$__rate_interval", "1m")
            yield re.sub(r"\$(instance|model|method)\b", ".*", filled)
    for rule in RULES:
        expression, thresholds = re.subn(r"\s(==|>) [\d.]+$", "", rule["expr"].strip())
        assert thresholds == ("alert" in rule)
        if 'kind="total"' not in expression:  # a GPU's metric, which rules_test.yml tests
            yield expression.replace("[30m]", "[1m]").replace("[15m]", "[1m]")


# --- with Prometheus ---


def fetch(url):
    with urllib.request.urlopen(url) as answer:  # noqa: S310 -- a local server
        return json.loads(answer.read())["data"]


@contextlib.contextmanager
def prometheus(folder, address, metrics):
    """Run Prometheus at an address inside the block; it scrapes the metrics at another address every second."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    del config["scrape_configs"][0]["dns_sd_configs"]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [metrics]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(FOLDER / "rules.yml", folder)
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={address}"]
    command += [f"--storage.tsdb.path={folder / 'data'}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.fixture(scope="module")
def monitored(tmp_path_factory):
    """A server and a Prometheus that scrapes it every second: address, query function, server process, API address."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "watched_nets.py").write_text(TINY)
    flags = ("--metrics-address", "0", "--threads", "1")
    with contextlib.ExitStack() as stack:
        models = ("tiny=watched_nets:tiny?size=32",)
        server = stack.enter_context(server_process(models, *flags, forked=True, cwd=folder))
        address = f"127.0.0.1:{stack.enter_context(reserved_port())}"
        stack.enter_context(prometheus(folder, address, server.metrics_address))

        def query(expression):
            text = urllib.parse.urlencode({"query": expression})
            with contextlib.suppress(OSError):
                return [
                    float(sample["value"][1]) for sample in fetch(f"http://{address}/api/v1/query?{text}")["result"]
                ]
            return []

        wait_until(lambda: query("camserve_ready") == [1.0])
        yield server.address, query, server, f"http://{address}/api/v1"


@real
def test_prometheus_counts_requests_and_errors_and_every_query_has_data(monitored):
    address, query, _, api = monitored
    requests = [{}] * 30 + [{"methods": ["gradcam", "saliency"]}] * 16 + [{"model": "nope"}] * 4
    count = "camserve_request_duration_seconds_count"
    with camserve.Client(address) as client, ThreadPoolExecutor(4) as threads:

        def explain(options):
            with contextlib.suppress(camserve.NotFound):
                client.explain(PHOTO, **options)

        for answered in (50.0, 100.0):  # the rates need two scrapes
            list(threads.map(explain, requests))
            wait_until(lambda answered=answered: query(f"sum({count})") == [answered])
    wait_until(lambda: all(map(query, queries())))
    wait_until(
        lambda: {rule["health"] for group in fetch(f"{api}/rules")["groups"] for rule in group["rules"]} == {"ok"}
    )

    assert query(f'sum({count}{{code!="OK"}})') == [8.0]
    assert query(f'sum({count}{{code="NOT_FOUND",model=""}})') == [8.0]
    assert query("sum(camserve_explanations_total)") == [2 * (30 + 2 * 16)]
    assert not [alert["labels"] for alert in fetch(f"{api}/alerts")["alerts"] if alert["state"] == "firing"]


@tool
@real
def test_promtool_accepts_names_and_help_of_metrics(monitored):
    (target,) = fetch(f"{monitored[3]}/targets")["activeTargets"]
    with urllib.request.urlopen(target["scrapeUrl"]) as answer:  # noqa: S310 -- a local server
        text = answer.read()
    result = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    own_lines = [line for line in result.stderr.decode().splitlines() if line.startswith("camserve")]

    assert not own_lines
    assert result.returncode in (0, 3)  # 3: for metrics of Python's own client library


@real
def test_killed_worker_is_counted_as_a_restart_and_comes_back(monitored):
    _, query, server, _ = monitored
    (worker_id,) = server.workers()
    assert query("camserve_engine_restarts_total") == [0.0]
    assert query('camserve_engine_memory_bytes{kind="resident"} > 1e7')

    os.kill(worker_id, signal.SIGKILL)
    wait_until(lambda: query("camserve_engine_restarts_total") == [1.0])
    wait_until(lambda: query("camserve_engine_up") == [1.0] and query("camserve_ready") == [1.0])
    assert not alive(worker_id)

"""A real Prometheus scrapes a real server: its counts are right, and no panel and no alert is without data."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml

import camserve
import fork_server
import needs
from support import TINY, alive, children, wait_until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
BOARD = json.loads((FOLDER / "grafana/dashboards/camserve.json").read_text())
RULES = [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]
PHOTO = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)

real = pytest.mark.skipif(not shutil.which("prometheus"), reason=needs.PROMETHEUS)
tool = pytest.mark.skipif(not shutil.which("promtool"), reason=needs.PROMETHEUS)


@tool
@pytest.mark.parametrize("what", [["check", "config", "prometheus.yml"], ["test", "rules", "rules_test.yml"]])
def test_promtool_accepts_the_rules_and_each_alert_fires(what):
    found = subprocess.run(["promtool", *what], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)

    assert found.returncode == 0, found.stdout + found.stderr


def test_every_alert_has_a_test_in_which_it_fires():
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test.get("alert_rule_test", ()) if one.get("exp_alerts")}

    assert fired == {rule["alert"] for rule in RULES if "alert" in rule}


def panels():
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def test_dashboard_uses_the_provisioned_source_and_panels_do_not_overlap():
    (source,) = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
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
    watching = {name: one for name, one in compose["services"].items() if "observability" in one.get("profiles", ())}

    assert set(watching) == {"prometheus", "grafana"}
    for one in watching.values():
        assert re.fullmatch(r"(prom/prometheus:v|grafana/grafana:)\d+\.\d+\.\d+", one["image"])
        mounted = [volume.split(":")[0] for volume in one["volumes"] if volume.startswith("./")]
        assert mounted
        assert all((ROOT / path).exists() for path in mounted)
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"][0]["dns_sd_configs"][0]
    served = {name: one for name, one in compose["services"].items() if name not in watching}
    assert set(scraped["names"]) == set(served)
    for one in served.values():
        assert f":{scraped['port']}}}" in one["environment"]["CAMSERVE_METRICS_ADDRESS"]
        assert not [port for port in one["ports"] if str(scraped["port"]) in port]  # for the network of compose alone


def queries():
    """Yield every expression of the dashboard and of the rules, as Prometheus can answer it; without alerts' bars."""
    for panel in panels():
        for target in panel["targets"]:
            filled = target["expr"].replace("$__rate_interval", "1m")
            yield re.sub(r"\$(instance|model|method)\b", ".*", filled)
    for rule in RULES:
        expression, bars = re.subn(r"\s(==|>) [\d.]+$", "", rule["expr"].strip())
        assert bars == ("alert" in rule)
        if 'kind="total"' not in expression:  # of a GPU; its test is rules_test.yml's
            yield expression.replace("[30m]", "[1m]").replace("[15m]", "[1m]")


# --------------------------------------------------------------------------------------------------------- the real one


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@contextlib.contextmanager
def running(start, *command, **how):
    with Path(os.devnull).open("w") as nowhere:
        process = start(*command, stderr=nowhere, stdout=nowhere, **how)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def asked(url):
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 -- ours
        return json.loads(answer.read())["data"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A server in processes of its own, and a Prometheus that scrapes it every second; yield what asks each of them."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "watched_nets.py").write_text(TINY)
    address, metrics, port = (f"127.0.0.1:{free_port()}" for _ in range(3))
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    del config["scrape_configs"][0]["dns_sd_configs"]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [metrics]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(FOLDER / "rules.yml", folder)
    serve = (fork_server.SERVER, "serve", "--address", address)
    serve += ("--model", "tiny=watched_nets:tiny?size=32", "--metrics-address", metrics)
    prometheus = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={port}"]
    prometheus += [f"--storage.tsdb.path={folder / 'data'}"]
    with (
        running(fork_server.start, *serve, cwd=folder) as server,
        running(subprocess.Popen, prometheus),
    ):

        def query(expression):
            text = urllib.parse.urlencode({"query": expression})
            with contextlib.suppress(OSError):
                return [float(one["value"][1]) for one in asked(f"http://{port}/api/v1/query?{text}")["result"]]
            return []

        wait_until(lambda: query("camserve_ready") == [1.0])
        yield address, query, server, f"http://{port}/api/v1"


@real
def test_prometheus_counts_requests_and_errors_and_every_query_has_data(watched):
    address, query, _, api = watched
    asks = [{}] * 60 + [{"methods": ["gradcam", "saliency"]}] * 33 + [{"model": "nope"}] * 7
    with camserve.Client(address) as client, ThreadPoolExecutor(4) as threads:

        def ask(given):
            time.sleep(0.05)  # for longer than between two scrapes, so that there is a rate
            with contextlib.suppress(camserve.NotFound):
                client.explain(PHOTO, **given)

        list(threads.map(ask, asks))
    count = "camserve_request_duration_seconds_count"
    wait_until(lambda: query(f"sum({count})") == [100.0])
    wait_until(lambda: all(map(query, queries())))
    wait_until(
        lambda: {rule["health"] for group in asked(f"{api}/rules")["groups"] for rule in group["rules"]} == {"ok"}
    )

    assert query(f'sum({count}{{code!="OK"}})') == [7.0]
    assert query(f'sum({count}{{code="NOT_FOUND",model=""}})') == [7.0]
    assert query("sum(camserve_explanations_total)") == [60 + 2 * 33]
    assert not [alert["labels"] for alert in asked(f"{api}/alerts")["alerts"] if alert["state"] == "firing"]


@tool
@real
def test_promtools_own_rules_for_names_and_help_are_kept(watched):
    (target,) = asked(f"{watched[3]}/targets")["activeTargets"]
    with urllib.request.urlopen(target["scrapeUrl"], timeout=10) as answer:  # noqa: S310 -- ours
        text = answer.read()
    found = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    ours = [line for line in found.stderr.decode().splitlines() if line.startswith("camserve")]

    assert not ours
    assert found.returncode in (0, 3)  # 3: of those that are Python's own


@real
def test_an_engine_that_is_killed_is_a_restart_and_is_up_again(watched):
    _, query, server, _ = watched
    (nursery,) = children(server.pid)
    (engine,) = children(nursery)
    assert query("camserve_engine_restarts_total") == [0.0]
    assert query('camserve_engine_memory_bytes{kind="resident"} > 1e7')

    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: query("camserve_engine_restarts_total") == [1.0])
    wait_until(lambda: query("camserve_engine_up") == [1.0] and query("camserve_ready") == [1.0])
    assert not alive(engine)

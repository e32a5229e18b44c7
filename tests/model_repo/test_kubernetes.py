"""The Kubernetes manifests agree with what `hemiola serve` is and with each other.

Their fields are checked against the schemas of others by tests/clients/manifests.py, and envoy.yaml by
tests/clients/envoy.py (`make clients`).
"""

import re
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from hemiola.runtime.cli.main import new_main
from hemiola.runtime.serving.metrics import FAMILIES, HISTOGRAMS

DEPLOY = Path(__file__).resolve().parents[2] / "docs/deploy"


def manifests() -> dict[str, Any]:
    """By kind."""
    found = {}
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            assert manifest["kind"] not in found
            found[manifest["kind"]] = manifest
    return found


def pods() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Of our image: each container, and what says how long its pod may take to end."""
    found = manifests()
    deployed = found["Deployment"]["spec"]["template"]["spec"]
    runtime, service = found["ServingRuntime"]["spec"], found["InferenceService"]["spec"]["predictor"]
    return {
        "Deployment": (deployed["containers"][0], deployed),
        "ServingRuntime": (runtime["containers"][0], service),
    }


def option(words: list[str], name: str, default: str) -> str:
    return words[words.index(name) + 1] if name in words else default


def test_containers_run_the_command_with_options_and_ports_that_there_are() -> None:
    help_text = CliRunner().invoke(new_main(["serve"]), ["serve", "--help"], env={"COLUMNS": "300"}).output
    for container, _ in pods().values():
        words = [*container["command"], *container.get("args", [])]
        assert words[:2] == ["hemiola", "serve"] and option(words, "--host", "") == "0.0.0.0"
        for word in words:
            assert not word.startswith("--") or word in help_text, word
        defaults = {
            "--http-port": "8000",
            "--grpc-port": "8001",
            "--metrics-port": "8002",
            "--openai-port": "",
        }
        open_ports = {option(words, name, default) for name, default in defaults.items()}
        named = {port.get("name", ""): str(port["containerPort"]) for port in container["ports"]}
        assert set(named.values()) <= open_ports
        http = option(words, "--http-port", "8000")
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            if kind in container:
                asked = container[kind]["httpGet"]
                port = named.get(str(asked["port"]), str(asked["port"]))
                openai = option(words, "--openai-port", "")
                wanted = {"/health": openai, "/version": openai, "/v2/health/ready": http}
                assert port == wanted[asked["path"]]
        if option(words, "--grpc-port", "8001") in named.values():
            assert option(words, "--triton-host", "") == "0.0.0.0", "--host leaves gRPC on loopback"
        start = container["startupProbe"]
        assert start["periodSeconds"] * start["failureThreshold"] > 300, "--start-timeout ends it before"


def test_requests_in_flight_end_before_kubernetes_kills_the_pod() -> None:
    for name, (container, pod) in pods().items():
        words = [*container["command"], *container.get("args", [])]
        (sleep, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
        assert sleep == "sleep" and int(seconds) > 0, "balancers learn of the end before ports refuse"
        drains = int(seconds) + int(option(words, "--exit-timeout", "30"))
        assert pod["terminationGracePeriodSeconds"] >= drains + 15, name


def test_everything_finds_the_pods_of_the_deployment() -> None:
    found = manifests()
    deployment = found["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    selectors = [
        deployment["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        found["InferencePool"]["spec"]["selector"]["matchLabels"],
        found["PodMonitor"]["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    ports = {port["name"]: port["containerPort"] for port in pods()["Deployment"][0]["ports"]}
    assert {port["targetPort"] for port in found["Service"]["spec"]["ports"]} <= set(ports)
    assert found["InferencePool"]["spec"]["targetPorts"] == [{"number": ports["openai"]}]
    assert [end["port"] for end in found["PodMonitor"]["spec"]["podMetricsEndpoints"]] == ["metrics"]
    scaled = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) == ("Deployment", found["Deployment"]["metadata"]["name"])
    (rule,) = found["HTTPRoute"]["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == found["InferencePool"]["metadata"]["name"]
    service = found["InferenceService"]["spec"]["predictor"]["model"]
    runtime = found["ServingRuntime"]
    assert service["runtime"] == runtime["metadata"]["name"]
    assert service["modelFormat"]["name"] in {f["name"] for f in runtime["spec"]["supportedModelFormats"]}
    assert service["protocolVersion"] in runtime["spec"]["protocolVersions"]
    claims = [volume.get("persistentVolumeClaim", {}) for volume in deployment["template"]["spec"]["volumes"]]
    assert f"pvc://{claims[0]['claimName']}/" == service["storageUri"]


def test_the_autoscaler_asks_for_what_the_adapter_makes_of_metrics_that_there_are() -> None:
    found = manifests()
    rules = yaml.safe_load(found["ConfigMap"]["data"]["config.yaml"])["rules"]
    offered = {rule.get("name", {}).get("as") or rule["seriesQuery"].partition("{")[0] for rule in rules}
    asked = {one["pods"]["metric"]["name"] for one in found["HorizontalPodAutoscaler"]["spec"]["metrics"]}
    assert asked == offered
    for rule in rules:
        for name in re.findall(r"hemiola_\w+", rule["seriesQuery"] + rule["metricsQuery"]):
            assert name in FAMILIES, name
    assert "hemiola_request_queue_time_seconds" in HISTOGRAMS


def test_envoy_sends_only_to_the_replica_that_the_picker_names() -> None:
    """A header of the caller's goes before the picker adds its own."""
    resources = yaml.safe_load((DEPLOY / "envoy.yaml").read_text())["static_resources"]
    replicas = next(cluster for cluster in resources["clusters"] if cluster["type"] == "ORIGINAL_DST")
    header = replicas["original_dst_lb_config"]["http_header_name"]
    filters = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    removes, picks, routes = (each["typed_config"] for each in filters)
    assert removes["mutations"]["request_mutations"] == [{"remove": header}]
    assert not picks["failure_mode_allow"] and routes["@type"].endswith("Router")

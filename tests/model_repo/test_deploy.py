"""What others read: Triton in NVIDIA's container, docker compose, haproxy, Prometheus; only Triton is run."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import requests
import yaml
from google.protobuf import text_format
from kit.manual import blocks
from kit.served import until
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner

from hemiola.runtime.cli.main import new_main
from hemiola.runtime.serving.ask import ALIASES, FIXED, FLAGS, KEYS, LISTS, MAX_N
from hemiola.runtime.serving.ports import ANY_PORTS, choose_ports

ROOT = Path(__file__).resolve().parents[2]
MODEL, DEPLOY = ROOT / "model_repo/hemiola", ROOT / "docs/deploy"
PARAMETER_ONLY = {"timeout", "error_data"}  # Triton's own; read before anything else is


def config() -> model_config_pb2.ModelConfig:
    return text_format.Parse((MODEL / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def test_the_repository_is_what_triton_loads() -> None:
    found = config()
    assert (found.backend, found.max_batch_size, found.name) == ("python", 0, "")
    assert found.model_transaction_policy.decoupled
    (group,) = found.instance_group
    assert (group.kind, group.count) == (model_config_pb2.ModelInstanceGroup.KIND_MODEL, 1)
    assert sorted(path.name for path in (MODEL / "1").glob("*.*")) == ["model.json", "model.py"]
    assert json.loads((MODEL / "1/model.json").read_text()) == {"engine_dir": "${engine_dir}"}


@pytest.mark.server
def test_the_repository_loads_without_hemiola_serve(engine_dirs: dict[str, Path], tmp_path: Path) -> None:
    """By the page's commands, which said `tritonserver`: the wheel's is on no PATH, and finds no backend."""
    for name in ("model_repo", "hemiola"):  # a checkout
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines/qwen").symlink_to(engine_dirs["hemiola"])
    (script,) = [
        block.text for block in blocks("docs/serving.md") if "tritonserver --model-rep" in block.text
    ]
    *prepare, command = script.splitlines()
    venv = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for _ in range(3):  # somebody else may take a port before it does
        ports = choose_ports("127.0.0.1", ANY_PORTS)
        options = [f"--{name}-port={port}" for name, port in ports._asdict().items()]
        lines = [*prepare, " ".join(["exec", command, "--exit-timeout-secs=5", *options])]
        process = subprocess.Popen(
            ["bash", "-ec", "\n".join(lines)], env=venv, cwd=tmp_path, stderr=subprocess.DEVNULL
        )
        url = f"http://127.0.0.1:{ports.http}/v2"
        until(lambda: process.poll() is not None or answers(f"{url}/health/ready"))  # noqa: B023
        if process.poll() is None:
            break
    try:
        body = {"text_input": "def ", "max_tokens": 3}
        answer = requests.post(f"{url}/models/hemiola/generate", json=body, timeout=300)
        assert answer.json()["num_output_tokens"] == 3
    finally:
        process.terminate()
        process.wait(300)


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=60).ok
    except requests.RequestException:
        return False


def test_every_key_is_an_input_of_its_type_and_in_the_manual() -> None:
    inputs = {tensor.name: tensor for tensor in config().input}
    manual = (ROOT / "docs/serving.md").read_text()
    assert set(inputs) == set(KEYS) - PARAMETER_ONLY
    for name, tensor in inputs.items():
        assert tensor.optional and list(tensor.dims) == [-1 if ALIASES.get(name, name) in LISTS else 1], name
        if name in FLAGS or FIXED.get(name) is True:
            assert tensor.data_type == model_config_pb2.TYPE_BOOL, name
    for name, ours in ALIASES.items():
        assert inputs[name].data_type == inputs[ours].data_type, name
    for name in (*KEYS, *(tensor.name for tensor in config().output)):
        assert f"`{name}`" in manual, name
    assert f"(1 to {MAX_N})" in manual


def test_replicas_have_options_and_ports_that_there_are() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    help_text = CliRunner().invoke(new_main(["serve"]), ["serve", "--help"], env={"COLUMNS": "300"}).output
    replicas = {name for name in services if name.startswith("replica-")}
    assert len(replicas) >= 2
    for name in replicas:
        command = services[name]["command"]
        assert command[:2] == ["hemiola", "serve"]
        for option in (word for word in command if word.startswith("--")):
            assert option in help_text, option
        assert (DEPLOY / services[name]["build"]["context"] / services[name]["build"]["dockerfile"]).is_file()
        grace = int(services[name]["stop_grace_period"].removesuffix("s"))
        assert grace > 30, "streams get 30 s, and must not be cut by docker"
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert set(scraped["static_configs"][0]["targets"]) == {f"{name}:8002" for name in replicas}
    for volume in (v for service in services.values() for v in service.get("volumes", [])):
        source = volume.split(":")[0]
        assert source.startswith("${ENGINE_DIR") or (DEPLOY / source).is_file(), volume


def test_the_image_is_made_of_files_and_extras_that_there_are() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line.split(maxsplit=1) for line in text.splitlines() if not line.startswith("#")]
    assert [word for word, _ in lines] == ["FROM", "WORKDIR", "COPY", "RUN", "WORKDIR", "RUN", "EXPOSE"]
    said = dict(lines)
    assert said["COPY"] == ". .", "the context is the checkout"
    install, compiles = [shlex.split(rest) for word, rest in lines if word == "RUN"]
    assert compiles[0] == "python"
    subprocess.run(
        [sys.executable, *compiles[1:]], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True
    )
    assert (ROOT / install[install.index("-c") + 1]).is_file()
    (extra,) = re.findall(r"^\.\[(\w+)\]$", install[-1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]
    assert said["EXPOSE"].split() == ["8000", "8001", "8002", "9000"]
    assert {".venv", "engines", ".git"} <= set((ROOT / ".dockerignore").read_text().split())


def test_the_proxy_leads_each_published_port_to_every_replica() -> None:
    sections: dict[str, list[list[str]]] = {}
    for line in (DEPLOY / "haproxy.cfg").read_text().splitlines():
        words = line.split("#")[0].split()
        if words and not line.startswith(" "):
            own = sections.setdefault(" ".join(words), [])
        elif words:
            own.append(words)
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    replicas = {name for name in services if name.startswith("replica-")}
    bound = {}
    for name, lines in sections.items():
        if name.startswith("frontend "):
            found = {words[0]: words for words in lines}
            bound[found["bind"][1].removeprefix(":")] = sections[f"backend {found['default_backend'][1]}"]
        for words in lines:
            if "resolvers" in words:
                assert f"resolvers {words[words.index('resolvers') + 1]}" in sections
    assert services["address"]["ports"] == [f"{port}:{port}" for port in bound]
    for port, lines in bound.items():
        servers = {tuple(words[1:3]) for words in lines if words[0] == "server"}
        assert servers == {(name, f"{name}:{port}") for name in replicas}
        assert ["balance", "hdr(x-session-id)"] in lines and ["hash-type", "consistent"] in lines


def test_grafana_finds_its_source_and_the_dashboard() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    grafana, configs = compose["services"]["grafana"], compose["configs"]
    mounted = {one["target"]: yaml.safe_load(configs[one["source"]]["content"]) for one in grafana["configs"]}
    (sources, dashboards) = (
        next(found for target, found in mounted.items() if f"/provisioning/{kind}/" in target)
        for kind in ("datasources", "dashboards")
    )
    (source,) = sources["datasources"]
    variable = json.loads((DEPLOY / "grafana.json").read_text())["templating"]["list"][0]
    assert source["type"] == variable["query"] == "prometheus"
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose["services"]
    (provider,) = dashboards["providers"]
    assert grafana["volumes"] == [f"./grafana.json:{provider['options']['path']}/hemiola.json:ro"]

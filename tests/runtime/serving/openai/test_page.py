"""The front's metrics page, by Prometheus' own checker where it is installed."""

import shutil
import subprocess

import pytest

from hemiola.runtime.serving.metrics import FAMILIES, HISTOGRAMS, Meter
from hemiola.runtime.serving.openai.page import engines_page


def triton_page() -> str:
    """Two models' lines, as tritonserver writes them: a family of counters for each part of a histogram."""
    lines: dict[str, list[str]] = {"nv_inference_count": ['nv_inference_count{model="a"} 1']}
    for model, seconds in (("a", 0.1), ("b", 7.0)):
        meter = Meter(2)
        meter.first(seconds)
        meter.later(0.3, 3)
        meter.ended("success")
        for series, value in meter._own():
            labels = {"model": model, "version": "1"} | dict(series.labels)
            shown = ",".join(f'{name}="{label}"' for name, label in labels.items())
            lines.setdefault(series.name, []).append(f"{series.name}{{{shown}}} {value}")
    page = []
    for name, samples in lines.items():
        page += [f"# HELP {name} text", f"# TYPE {name} counter", *samples]
    return "\n".join(page)


def families(page: str) -> dict[str, tuple[str, list[str]]]:
    """Kind and samples by name; fails where a family comes twice or a sample stands elsewhere."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in found, f"{name} comes twice"
            found[name] = (kind, [])
        elif not line.startswith("#"):
            name, (_, samples) = list(found.items())[-1]
            assert line.startswith(name), f"{line} stands among {name}"
            samples.append(line)
    return found


def test_latencies_are_histograms_and_each_family_comes_once() -> None:
    found = families(engines_page(triton_page()))
    for name in HISTOGRAMS:
        kind, samples = found[name]
        assert kind == "histogram"
        assert sum(f'{name}_count{{model="' in sample for sample in samples) == 2
        assert f'{name}_bucket{{model="b",version="1",le="+Inf"}}' in "\n".join(samples)
    assert all(kind == FAMILIES[name].kind for name, (kind, _) in found.items() if name not in HISTOGRAMS)
    assert not any(name.startswith("nv_") for name in found)


def test_what_routers_read_is_on_the_fronts_page() -> None:
    """The endpoint picker scrapes the port to which it sends requests."""
    waiting = 'vllm:num_requests_waiting{engine="0",model_name="a"} 2'
    share = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="a",version="1"} 0.5'
    found = families(engines_page("\n".join([waiting, 'nv_inference_count{model="a"} 1', share])))
    assert found == {
        "vllm:num_requests_waiting": ("gauge", [waiting]),
        "nv_trt_llm_kv_cache_block_metrics": ("gauge", [share]),
    }


def test_promtool_finds_nothing_to_say() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    page = engines_page(triton_page())
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page, text=True, capture_output=True, timeout=120
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")

"""The front's metrics page: the engines' families of tritonserver's page, with latencies as histograms.

tritonserver takes observations of a histogram one call at a time, so the model posts `_bucket`, `_sum` and
`_count` as counters (serving/metrics.py). Here they become the one family that they are.
"""

from collections.abc import Iterator

from hemiola.runtime.serving.metrics import FAMILIES, HISTOGRAMS


def engines_page(page: str) -> str:
    """The families of serving/metrics.py, in Prometheus' text format, each once."""
    samples: dict[str, list[str]] = {}
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in FAMILIES:
            samples.setdefault(name, []).append(line)
    return "".join(f"{line}\n" for line in _lines(samples))


def _lines(samples: dict[str, list[str]]) -> Iterator[str]:
    for name, lines in samples.items():
        if any(name.removesuffix(part) in HISTOGRAMS for part in ("_bucket", "_sum", "_count")):
            continue
        yield f"# HELP {name} {FAMILIES[name].help}"
        yield f"# TYPE {name} {FAMILIES[name].kind}"
        yield from lines
    for name, text in HISTOGRAMS.items():
        parts = [line for part in ("_bucket", "_sum", "_count") for line in samples.get(f"{name}{part}", ())]
        if parts:
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} histogram"
            yield from parts

"""The engine's metrics in the page of Dynamo's worker, under the names that a served engine has."""

from collections.abc import Callable, Mapping
from typing import Protocol

from hemiola.runtime.api import Metrics
from hemiola.runtime.llm import LLM
from hemiola.runtime.serving.foreign import Series, own_labels
from hemiola.runtime.serving.metrics import Meter
from hemiola.runtime.serving.openai.page import engines_page

ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class EngineMetrics(Protocol):
    """Dynamo's, which may not be kept."""

    auto_labels: Mapping[str, str]  # of the worker

    def register_prometheus_expfmt_callback(self, page: Callable[[], str]) -> None: ...


def add_page(metrics: EngineMetrics, meter: Meter, llm: LLM) -> None:
    """Let Dynamo call for the page each time when somebody reads its own."""
    labels = dict(metrics.auto_labels)
    metrics.register_prometheus_expfmt_callback(lambda: page_of(meter.read(llm), labels))


def page_of(values: Mapping[Series, float], labels: Mapping[str, str]) -> str:
    return engines_page("\n".join(_line(series, value, labels) for series, value in values.items()))


def _line(series: Series, value: float, labels: Mapping[str, str]) -> str:
    named = {**own_labels(series, labels), **labels}  # Dynamo's `model` is a folder, `model_name` is a name
    shown = ",".join(f'{name}="{text.translate(ESCAPES)}"' for name, text in named.items())
    return f"{series.name}{{{shown}}} {float(value)!r}"


def measure(meter: Meter, metrics: Metrics, num_given: int, whole: bool) -> None:
    """A request has ended. All at once: a call for each token would cost it time. So the time between two
    tokens is a request's mean. num_given: tokens of its output that another worker has chosen."""
    meter.measured(metrics, whole)
    if metrics.first_token:
        meter.first(metrics.time_to_first_token)
        num_later = metrics.num_output_tokens - num_given - 1
        if num_later > 0:
            meter.later(metrics.last_token - metrics.first_token, num_later)

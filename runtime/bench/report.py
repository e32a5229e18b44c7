"""The table of `vllm bench serve`, with a column for every variant."""

from collections.abc import Sequence
from typing import NamedTuple

from hemiola.runtime.bench.statistics import Summary

LABEL_WIDTH, VALUE_WIDTH = 40, 10
TITLE = " Serving Benchmark Result "
ONLY_IF_ANY = ("unfinished", "num_preemptions")


class Column(NamedTuple):
    name: str  # parts at commas go on lines of their own
    summary: Summary


class Quantity(NamedTuple):
    label: str
    key: str
    digits: int = 0


HEAD = (
    Quantity("Successful requests:", "completed"),
    Quantity("Failed requests:", "failed"),
    Quantity("Unfinished requests:", "unfinished"),
    Quantity("Maximum request concurrency:", "max_concurrency"),
    Quantity("Request rate configured (RPS):", "request_rate", 2),
    Quantity("Benchmark duration (s):", "duration", 2),
    Quantity("Total input tokens:", "total_input_tokens"),
    Quantity("Total generated tokens:", "total_output_tokens"),
    Quantity("Request throughput (req/s):", "request_throughput", 2),
    Quantity("Output token throughput (tok/s):", "output_throughput", 2),
    Quantity("Peak output token throughput (tok/s):", "max_output_tokens_per_s", 2),
    Quantity("Peak concurrent requests:", "max_concurrent_requests"),
    Quantity("Total token throughput (tok/s):", "total_token_throughput", 2),
    Quantity("Preemptions:", "num_preemptions"),
)
LATENCY_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
SPECULATION = (
    Quantity("Acceptance rate (%):", "spec_decode_acceptance_rate", 2),
    Quantity("Acceptance length:", "spec_decode_acceptance_length", 2),
    Quantity("Drafts:", "spec_decode_num_drafts"),
    Quantity("Draft tokens:", "spec_decode_draft_tokens"),
    Quantity("Accepted tokens:", "spec_decode_accepted_tokens"),
)
PER_POSITION = "spec_decode_per_position_acceptance_rates"
PREFIX_CACHE = (
    Quantity("Prompt tokens:", "prefix_cache_prompt_tokens"),
    Quantity("Hit tokens:", "prefix_cache_hit_tokens"),
    Quantity("Hit rate (%):", "prefix_cache_hit_rate", 2),
)


def table(columns: Sequence[Column]) -> str:
    """Width 50 for one column. A row or section that no column has a number for is left out."""
    width = VALUE_WIDTH - 1
    if len(columns) > 1:
        names = [part for column in columns for part in column.name.split(",")]
        width = max(VALUE_WIDTH, *map(len, names)) + 2
    total = LABEL_WIDTH + 1 + width * len(columns)
    lines = [f"{TITLE:=^{total}}"]
    if len(columns) > 1:
        lines += _names(columns, width)
    lines += _rows(HEAD, columns, width)
    for name, title in LATENCY_TITLES.items():
        lines += _section(title, _latency_rows(name), columns, width, total)
    speculation = _section("Speculative Decoding", SPECULATION, columns, width, total)
    lines += speculation + (_per_position(columns, width) if speculation else [])
    lines += _section("Prefix Cache", PREFIX_CACHE, columns, width, total)
    return "\n".join([*lines, "=" * total])


def _names(columns: Sequence[Column], width: int) -> list[str]:
    parts = [column.name.split(",") for column in columns]
    height = max(map(len, parts))
    return [_line("", [part[i] if i < len(part) else "" for part in parts], width) for i in range(height)]


def _latency_rows(name: str) -> list[Quantity]:
    return [
        Quantity(f"{label} {name.upper()} (ms):", f"{what}_{name}_ms", 2)
        for label, what in (("Mean", "mean"), ("Median", "median"), ("P99", "p99"))
    ]


def _section(
    title: str, rows: Sequence[Quantity], columns: Sequence[Column], width: int, total: int
) -> list[str]:
    lines = _rows(rows, columns, width)
    return [f"{title:-^{total}}", *lines] if lines else []


def _rows(rows: Sequence[Quantity], columns: Sequence[Column], width: int) -> list[str]:
    lines = []
    for row in rows:
        values = [column.summary.get(row.key) for column in columns]
        absent = (None, 0) if row.key in ONLY_IF_ANY else (None,)
        if any(_is_number(value) and value not in absent for value in values):
            lines.append(_line(row.label, [_text(value, row.digits) for value in values], width))
    return lines


def _per_position(columns: Sequence[Column], width: int) -> list[str]:
    rates = [column.summary.get(PER_POSITION, []) for column in columns]
    lines = ["Per-position acceptance (%):"]
    for position in range(max(map(len, rates))):
        values = [100 * rate[position] if position < len(rate) else None for rate in rates]
        lines.append(_line(f"  Position {position}:", [_text(value, 2) for value in values], width))
    return lines


def _line(label: str, values: Sequence[str], width: int) -> str:
    return f"{label:<{LABEL_WIDTH}} {''.join(f'{value:<{width}}' for value in values)}".rstrip()


def _text(value: object, digits: int) -> str:
    return f"{value:.{digits}f}" if _is_number(value) else "-"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))

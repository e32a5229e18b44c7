"""The table, to the character."""

from hemiola.runtime.bench.report import Column, table

SUMMARY = {
    "completed": 10, "failed": 1, "unfinished": 0, "max_concurrency": 4, "request_rate": 2.5,
    "duration": 12.3456, "total_input_tokens": 1000, "total_output_tokens": 640, "request_throughput": 0.81,
    "output_throughput": 51.84, "max_output_tokens_per_s": 70.0, "max_concurrent_requests": 4,
    "total_token_throughput": 132.8, "num_preemptions": 0,
    "mean_ttft_ms": 100.0, "median_ttft_ms": 90.0, "p99_ttft_ms": 200.126,
    "mean_tpot_ms": 10.0, "median_tpot_ms": 9.0, "p99_tpot_ms": 20.0,
    "mean_itl_ms": 15.0, "median_itl_ms": 14.0, "p99_itl_ms": 30.0,
    "mean_e2el_ms": 750.0, "median_e2el_ms": 700.0, "p99_e2el_ms": 1500.0,
    "prefix_cache_prompt_tokens": 1000, "prefix_cache_hit_tokens": 250, "prefix_cache_hit_rate": 25.0,
}  # fmt: skip
DRAFTS = {
    "spec_decode_acceptance_rate": 73.9, "spec_decode_acceptance_length": 2.478,
    "spec_decode_num_drafts": 300, "spec_decode_draft_tokens": 600, "spec_decode_accepted_tokens": 443,
    "spec_decode_per_position_acceptance_rates": [0.839, 0.638],
}  # fmt: skip

ONE = """\
============ Serving Benchmark Result ============
Successful requests:                     10
Failed requests:                         1
Maximum request concurrency:             4
Request rate configured (RPS):           2.50
Benchmark duration (s):                  12.35
Total input tokens:                      1000
Total generated tokens:                  640
Request throughput (req/s):              0.81
Output token throughput (tok/s):         51.84
Peak output token throughput (tok/s):    70.00
Peak concurrent requests:                4
Total token throughput (tok/s):          132.80
---------------Time to First Token----------------
Mean TTFT (ms):                          100.00
Median TTFT (ms):                        90.00
P99 TTFT (ms):                           200.13
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          10.00
Median TPOT (ms):                        9.00
P99 TPOT (ms):                           20.00
---------------Inter-token Latency----------------
Mean ITL (ms):                           15.00
Median ITL (ms):                         14.00
P99 ITL (ms):                            30.00
----------------End-to-end Latency----------------
Mean E2EL (ms):                          750.00
Median E2EL (ms):                        700.00
P99 E2EL (ms):                           1500.00
---------------Speculative Decoding---------------
Acceptance rate (%):                     73.90
Acceptance length:                       2.48
Drafts:                                  300
Draft tokens:                            600
Accepted tokens:                         443
Per-position acceptance (%):
  Position 0:                            83.90
  Position 1:                            63.80
-------------------Prefix Cache-------------------
Prompt tokens:                           1000
Hit tokens:                              250
Hit rate (%):                            25.00
=================================================="""

TWO_HEAD = """\
========================= Serving Benchmark Result ==========================
                                         drafts=mtp        drafts=none
                                                           prefix_cache=off
Successful requests:                     10                9
Failed requests:                         1                 1"""

TWO_TAIL = """\
----------------------------Speculative Decoding-----------------------------
Acceptance rate (%):                     73.90             -
Acceptance length:                       2.48              -
Drafts:                                  300               -
Draft tokens:                            600               -
Accepted tokens:                         443               -
Per-position acceptance (%):
  Position 0:                            83.90             -
  Position 1:                            63.80             -"""


def test_one_column_is_the_table_of_vllm_bench_serve() -> None:
    assert table([Column("defaults", SUMMARY | DRAFTS)]) == ONE


def test_variants_stand_side_by_side() -> None:
    columns = [
        Column("drafts=mtp", SUMMARY | DRAFTS),
        Column("drafts=none,prefix_cache=off", SUMMARY | {"completed": 9}),
    ]
    text = table(columns)
    assert text.startswith(TWO_HEAD) and TWO_TAIL in text
    lines = text.splitlines()
    assert len(lines) == len(ONE.splitlines()) + 2
    assert max(map(len, lines)) == len(lines[0]) == len(lines[-1])


def test_what_has_no_number_is_left_out() -> None:
    none = dict.fromkeys(("mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "max_concurrency"))
    text = table([Column("defaults", SUMMARY | none | {"request_rate": "inf"})])
    for label in (
        "Speculative",
        "Per-position",
        "TPOT",
        "Time per Output",
        "concurrency:",
        "configured",
        "Unfinished",
        "Preemptions",
    ):
        assert label not in text
    assert "TTFT" in text


def test_rare_counts_show_when_there_are_any() -> None:
    text = table([Column("defaults", SUMMARY | {"unfinished": 3, "num_preemptions": 2})])
    assert (
        "Unfinished requests:                     3\n" in text
        and "Preemptions:                             2\n" in text
    )

"""CPU forms of the ops against plain torch: one row per case, equality checked in the same run.

    PYTHONPATH=. python benchmarks/ops_cpu.py [--threads 2]

Times are the fastest of many calls in microseconds. `reads` is the time to read once what a case must read
(keys and values, or the weights of the used experts) with torch.sum: the memory's share. On a machine with
other work use --threads 1: a parallel loop waits for its slowest thread.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHExperts

import hemiola.plugins  # noqa: F401  registers torch.ops.hemiola

ops = torch.ops.hemiola
HEADS, GROUPS, HEAD_DIM, PAGE_LEN = 8, 2, 64, 16
NUM_EXPERTS, NUM_SLOTS, WIDTH, INNER = 8, 2, 256, 512
NONE = torch.empty(0)


def fastest(call: Callable[[], object], seconds: float = 0.5) -> float:
    """Microseconds of the fastest call; the machine has other work too."""
    for _ in range(3):
        call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


@dataclass
class Times:
    fast: float
    exact: float
    plain: float
    reads: float
    transformers: float | None = None

    def print(self, name: str) -> None:
        times = [self.fast, self.exact, self.plain, self.reads]
        cells = "".join(f"{value:9.0f}" for value in times)
        if self.transformers is not None:
            cells += f"{self.transformers:13.0f}"
        print(f"{name:34}{cells}", flush=True)


def attention(kv_lens: list[int], num_tokens: list[int]) -> Times:
    """Rows of a step over scattered pages; plain: SDPA per kind of row on keys that lie in line already."""
    widths = [-(-kv_len // PAGE_LEN) for kv_len in kv_lens]
    shape = (sum(widths) + 1, PAGE_LEN, GROUPS, HEAD_DIM)
    k_pages, v_pages = torch.randn(shape), torch.randn(shape)
    page_table = torch.zeros(len(widths), max(widths), dtype=torch.int32)
    free = (torch.randperm(shape[0] - 1) + 1).int()
    for row, (pages, width) in enumerate(zip(free.split(widths), widths, strict=True)):
        page_table[row, :width] = pages
    rows = list(zip(kv_lens, num_tokens, strict=True))
    positions = torch.cat([torch.arange(kv_len - n, kv_len) for kv_len, n in rows]).int()
    cu_tokens = torch.tensor([0, *torch.tensor(num_tokens).cumsum(0)]).int()
    total, scale = sum(num_tokens), HEAD_DIM**-0.5
    q = torch.randn(total, HEADS, HEAD_DIM)
    k, v = torch.randn(2, total, GROUPS, HEAD_DIM)

    def run(exact: bool) -> torch.Tensor:
        return ops.attention(q, k, v, k_pages, v_pages, page_table, cu_tokens, positions, scale, exact, 0)

    o = run(False)
    batches: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(rows):
        batches.setdefault(key, []).append(row)
    calls = []
    for (kv_len, n), members in batches.items():
        keys, values = (
            torch.stack(
                [p[page_table[r, : widths[r]]].flatten(0, 1)[:kv_len].transpose(0, 1) for r in members]
            )
            for p in (k_pages, v_pages)
        )
        queries = torch.stack([q[cu_tokens[r] : cu_tokens[r + 1]].transpose(0, 1) for r in members])
        mask = None
        if 1 < n < kv_len:
            mask = torch.arange(kv_len) <= torch.arange(kv_len - n, kv_len)[:, None]
        calls.append((members, queries, keys, values, mask, n == kv_len))

    def plain() -> list[torch.Tensor]:
        return [
            F.scaled_dot_product_attention(
                queries, keys, values, mask, is_causal=causal, enable_gqa=True, scale=scale
            )
            for _, queries, keys, values, mask, causal in calls
        ]

    for (members, *_), result in zip(calls, plain(), strict=True):
        for row, expected in zip(members, result, strict=True):
            part = slice(int(cu_tokens[row]), int(cu_tokens[row + 1]))
            torch.testing.assert_close(o[part], expected.transpose(0, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run(True), o, rtol=1e-4, atol=1e-5)
    held = [(keys, values) for _, _, keys, values, _, _ in calls]
    return Times(
        fastest(lambda: run(False)),
        fastest(lambda: run(True)),
        fastest(plain),
        fastest(lambda: [x.sum() for pair in held for x in pair]),
    )


def moe(num_tokens: int, activation: str = "relu2") -> Times:
    """Experts after their router; plain: the usual loop over experts."""
    inner = INNER * (2 if activation == "swiglu" else 1)
    up = torch.randn(NUM_EXPERTS, inner, WIDTH) * WIDTH**-0.5
    down = torch.randn(NUM_EXPERTS, WIDTH, INNER) * INNER**-0.5
    x = torch.randn(num_tokens, WIDTH)
    ids = torch.rand(num_tokens, NUM_EXPERTS).argsort(1)[:, :NUM_SLOTS].int().contiguous()
    long_ids, weights = ids.long(), torch.rand(num_tokens, NUM_SLOTS)

    def plain() -> torch.Tensor:
        y = torch.zeros_like(x)
        for expert in range(NUM_EXPERTS):
            tokens, slots = torch.where(long_ids == expert)
            if len(tokens) == 0:
                continue
            hidden = F.linear(x[tokens], up[expert])
            if activation == "relu2":
                hidden = F.relu(hidden).square()
            else:
                gate, value = hidden.chunk(2, dim=1)
                hidden = F.silu(gate) * value
            y.index_add_(0, tokens, F.linear(hidden, down[expert]) * weights[tokens, slots, None])
        return y

    def run(exact: bool) -> torch.Tensor:
        return ops.moe(x, ids, weights, up, down, activation, exact)

    for exact in (False, True):
        torch.testing.assert_close(run(exact), plain(), rtol=1e-4, atol=1e-4)
    used = ids.unique().tolist()
    times = Times(
        fastest(lambda: run(False)),
        fastest(lambda: run(True)),
        fastest(plain),
        fastest(lambda: [w[expert].sum() for expert in used for w in (up, down)]),
    )
    if activation == "relu2":
        config = NemotronHConfig(
            hidden_size=WIDTH,
            moe_intermediate_size=INNER,
            n_routed_experts=NUM_EXPERTS,
            mlp_hidden_act="relu2",
        )
        config._experts_implementation = "eager"
        experts = NemotronHExperts(config)
        experts.load_state_dict({"up_proj": up, "down_proj": down})
        torch.testing.assert_close(run(False), experts(x, long_ids, weights), rtol=1e-4, atol=1e-4)
        times.transformers = fastest(lambda: experts(x, long_ids, weights))
    return times


def norm(num_tokens: int, width: int, gated: bool) -> Times:
    """plain: F.rms_norm and F.silu."""
    x, weight = torch.randn(num_tokens, width), torch.randn(width)
    gate = torch.randn(num_tokens, width) if gated else NONE

    def plain() -> torch.Tensor:
        return F.rms_norm(x * F.silu(gate) if gated else x, (width,), weight, 1e-5)

    def run() -> torch.Tensor:
        return ops.norm(x, gate, weight, 1e-5, width, True)

    torch.testing.assert_close(run(), plain(), rtol=1e-4, atol=1e-5)
    time_of_both = fastest(run)
    return Times(time_of_both, time_of_both, fastest(plain), fastest(lambda: x.sum()))


def linear(num_tokens: int, num_inputs: int, num_outputs: int) -> Times:
    """fast and plain: F.linear, which fast numerics uses."""
    x, weight = torch.randn(num_tokens, num_inputs), torch.randn(num_outputs, num_inputs) * num_inputs**-0.5
    torch.testing.assert_close(ops.linear(x, weight, NONE), F.linear(x, weight), rtol=1e-4, atol=1e-4)
    plain = fastest(lambda: F.linear(x, weight))
    return Times(plain, fastest(lambda: ops.linear(x, weight, NONE)), plain, fastest(lambda: weight.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, fp32, microseconds")
    print(f"{'case':34}{'fast':>9}{'exact':>9}{'plain':>9}{'reads':>9}{'transformers':>13}")
    ragged = torch.randint(1, 4096, (64,)).tolist()
    with torch.inference_mode():
        attention([20] * 8, [1] * 8).print("attention 8 rows x 1, kv 20")
        attention([600], [1]).print("attention 1 row x 1, kv 600")
        attention([600] * 8, [1] * 8).print("attention 8 rows x 1, kv 600")
        attention([600] * 8, [4] * 8).print("attention 8 rows x 4, kv 600")
        attention(ragged, [1] * 64).print("attention 64 rows x 1, kv 1..4096")
        attention([512], [512]).print("attention prefill 512")
        attention([2048], [512]).print("attention 512 tokens at 1536")
        attention([512] + [600] * 7, [512] + [1] * 7).print("attention prefill 512 + 7 x 1")
        for num_tokens in (1, 8, 512):
            moe(num_tokens).print(f"moe relu2, {num_tokens} tokens")
        moe(8, "swiglu").print("moe swiglu, 8 tokens")
        for num_tokens in (1, 8, 512):
            norm(num_tokens, 256, False).print(f"norm {num_tokens} x 256")
            norm(num_tokens, 1024, True).print(f"norm {num_tokens} x 1024, gated")
        for num_tokens in (1, 8, 512):
            linear(num_tokens, 256, 1288).print(f"linear {num_tokens} x 256 -> 1288")
        linear(512, 1024, 1024).print("linear 512 x 1024 -> 1024")


if __name__ == "__main__":
    main()

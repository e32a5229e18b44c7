"""Time of a call of each recurrent op on the CPU, beside transformers' torch fallback of the same recurrence.

PYTHONPATH=. python benchmarks/recurrence_cpu.py [--form torch] [--threads 2] [--chunk-len 16] [--repeats 300]

The outputs of the step that is timed are compared in the same run: with the plain run (one request, one shot)
bit for bit, and with transformers' within 1e-5. "first" includes the plan of the step, which a model's other
layers share; "next" is what they pay. Times are lower quartiles.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from kit.grid import Subject, Tensors, int32, rel_error, same_bits, subject
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from hemiola.plugins import grid
from hemiola.plugins.conv import cpu as conv
from hemiola.plugins.conv.spec import CONV
from hemiola.plugins.delta.spec import DELTA
from hemiola.plugins.mamba2.spec import MAMBA2

NUM_DRAFTS = 3
SUBJECTS = {
    "conv 768": subject(CONV, E=768, W=4),
    "mamba2 8x64x64": subject(MAMBA2, H=8, P=64, G=2, D=64),
    "gdn 8x32x32": subject(DELTA, G=4, K=32, H=8, V=32, J=1),
    "gdn 8x64x64": subject(DELTA, G=4, K=64, H=8, V=64, J=1),
    "kda 8x32x32": subject(DELTA, G=8, K=32, H=8, V=32, J=32),
}


@dataclass(frozen=True)
class Step:
    """Rows with a history and new tokens."""

    name: str
    history: tuple[int, ...]
    new: tuple[int, ...]


STEPS = (
    Step("decode, 1 row", (37,), (1,)),
    Step("decode, 8 rows", tuple(range(32, 48, 2)), (1,) * 8),
    Step("decode, 8 rows at an edge", (47,) * 8, (1,) * 8),
    Step("verify 3 drafts, 8 rows", (32, 34, 36, 38, 40, 41, 42, 43), (4,) * 8),
    Step("prompt of 512", (0,), (512,)),
    Step("prompt of 512 + 7 decode", (0, *range(32, 46, 2)), (512,) + (1,) * 7),
)


def quartile(call: Callable[[], object], repeats: int) -> float:
    """Microseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 4] * 1e6


class Ours:
    """One request per row, its history in a slot."""

    def __init__(self, case: Subject, step: Step, form: str, chunk_len: int):
        self.case, self.chunk_len = case, chunk_len
        self.states = case.states(len(step.new) + 1, chunk_len, NUM_DRAFTS)
        self.tokens = [
            case.tokens(a + b, seed) for seed, (a, b) in enumerate(zip(step.history, step.new, strict=True))
        ]
        self.call, self.constants = case.form(form), case.constants()
        none = torch.zeros(len(step.new), dtype=torch.int32)
        slots = torch.arange(len(step.new), 0, -1).int()
        past = [[t[:a] for t in row] for row, a in zip(self.tokens, step.history, strict=True)]
        self.call(*self.arguments(step.history, past, (slots, *[none] * 5)), chunk_len)
        committed = int32(*step.history)
        drafts = int32(*(count - 1 if count == NUM_DRAFTS + 1 else 0 for count in step.new))
        self.new = [[t[a:] for t in row] for row, a in zip(self.tokens, step.history, strict=True)]
        edge = committed // chunk_len * chunk_len
        self.args = self.arguments(step.new, self.new, (slots, committed, edge, drafts, none, none))

    def arguments(self, lens: tuple[int, ...], new: list[Tensors], rows: Tensors) -> Tensors:
        cu_tokens = torch.tensor([0, *lens]).cumsum(0).int()
        tokens = [torch.cat(pieces) for pieces in zip(*new, strict=True)]
        return [*tokens, *self.constants, *self.states, cu_tokens, *rows]

    def step(self) -> torch.Tensor:
        return self.call(*self.args, self.chunk_len)

    def plain(self) -> torch.Tensor:
        """The same tokens, each request alone and in one shot."""
        pieces = []
        for row, new in zip(self.tokens, self.new, strict=True):
            num = row[0].shape[0]
            states = self.case.states(2, self.chunk_len, NUM_DRAFTS)
            y = self.call(
                *row, *self.constants, *states, int32(0, num), int32(1), *[int32(0)] * 5, self.chunk_len
            )
            pieces.append(y[num - new[0].shape[0] :])
        return torch.cat(pieces)


class Theirs:
    """transformers: prompts one by one through its scan, decode rows as one batch through its update."""

    def __init__(self, case: Subject, ours: Ours, step: Step):
        self.case, self.constants = case, ours.constants
        self.prompts = [row for row, past in zip(ours.tokens, step.history, strict=True) if not past]
        self.decode = [row for row, past in zip(ours.new, step.history, strict=True) if past]
        pasts = [[t[:a] for t in row] for row, a in zip(ours.tokens, step.history, strict=True) if a]
        self.state = torch.cat([self.scan(row)[1] for row in pasts]) if pasts else None

    def step(self) -> list[torch.Tensor]:
        results = [self.scan(row)[0][0] for row in self.prompts]
        if self.decode:
            batch = [torch.stack(pieces) for pieces in zip(*self.decode, strict=True)]
            results.append(self.update(batch, self.state.clone()).flatten(0, 1))
        return results

    def scan(self, row: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = [token[None] for token in row]
        if self.case.op is CONV:
            y = nemotron.causal_conv1d_fn(tokens[0].mT, *self.constants, activation="silu").mT
            return y, torch.nn.functional.pad(tokens[0].mT, (3, 0))[:, :, -3:]
        if self.case.op is MAMBA2:
            x, B, C, dt = tokens
            y, state = nemotron.mamba2_chunk_scan(
                x, dt, self.constants[0], B, C, 128, D=self.constants[1], return_final_states=True
            )
            return y.view(x.shape), state
        q, k, v, g, beta = tokens
        q = q * q.shape[-1] ** 0.5
        if g.shape[-1] == 1:
            return qwen.torch_chunk_gated_delta_rule(q, k, v, g[..., 0], beta, output_final_state=True)
        return kimi.chunk_kimi_delta_attention(q, k, v, g, beta, output_final_state=True, chunk_size=64)

    def update(self, tokens: Tensors, state: torch.Tensor) -> torch.Tensor:
        if self.case.op is CONV:
            return nemotron.causal_conv1d_update(tokens[0].mT, state, *self.constants, activation="silu").mT
        if self.case.op is MAMBA2:
            A = self.constants[0][:, None, None].expand(state.shape[1:])
            D = self.constants[1][:, None].expand(tokens[0].shape[2:])
            steps = []
            for x, B, C, dt in zip(*(token.unbind(1) for token in tokens), strict=True):
                dt = dt[..., None].expand(x.shape)
                steps.append(nemotron.mamba2_selective_state_update(state, x, dt, A, B, C, D))
            return torch.stack(steps, 1)
        q, k, v, g, beta = tokens
        q = q * q.shape[-1] ** 0.5
        if g.shape[-1] == 1:
            return qwen.torch_recurrent_gated_delta_rule(q, k, v, g[..., 0], beta, state, True)[0]
        return kimi.recurrent_kimi_delta_attention(q, k, v, g, beta, state, True)[0]


def forget_plans() -> None:
    grid._plan_tiles.cache_clear()
    grid._step_work.cache_clear()
    conv._plan.cache_clear()


def measure(name: str, case: Subject, step: Step, form: str, chunk_len: int, repeats: int) -> str:
    ours = Ours(case, step, form, chunk_len)
    theirs = Theirs(case, ours, step)
    y, wanted = ours.step(), ours.plain()
    exact = same_bits(y, wanted)
    error = rel_error(y, torch.cat(theirs.step()))
    if step.new[0] > 100:
        repeats = max(repeats // 10, 5)

    def first() -> None:
        forget_plans()
        ours.step()

    times = [quartile(call, repeats) for call in (first, ours.step, theirs.step)]
    columns = "".join(f"{value:10.0f}" for value in times)
    verdict = f"{'yes' if exact else 'NO':>6}{error:10.1e}{'' if error < 1e-5 else '  TOO MUCH'}"
    return f"{name:16}{step.name:28}{columns}{times[2] / times[1]:9.2f}x{verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--form", default="compiled", choices=["compiled", "torch"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--chunk-len", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.form}, C = {options.chunk_len}, {options.threads} threads, torch {torch.__version__}")
    print(
        f"{'op':16}{'step':28}{'first':>10}{'next':>10}{'theirs':>10}{'ratio':>10}{'exact':>6}{'error':>10}"
    )
    with torch.inference_mode():
        for name, case in SUBJECTS.items():
            for step in STEPS:
                print(measure(name, case, step, options.form, options.chunk_len, options.repeats), flush=True)


if __name__ == "__main__":
    main()

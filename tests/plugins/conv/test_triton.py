"""conv on CUDA: the bits of the plain run however steps are cut, and the truth in fp64."""

import pytest
import torch
import torch.nn.functional as F
from kit.gpu_steps import Subject, error, plain_run, rows_of, same_bits, storm

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
DEVICE = "cuda" if CUDA else "cpu"


def subject(width: int = 384, taps: int = 4, chunk_len: int = 16, drafts: int = 4, bound: int = 0) -> Subject:
    from hemiola.plugins.conv.cuda import conv

    fixed = torch.Generator().manual_seed(1)
    weight = torch.randn(width, taps, generator=fixed).to(DEVICE).bfloat16()
    bias = torch.randn(width, generator=fixed).to(DEVICE).bfloat16()
    ring_len = chunk_len + drafts + taps - 1

    def make_tokens(num: int) -> list[torch.Tensor]:
        return [torch.randn(num, width + 64, device=DEVICE).bfloat16()[:, :width]]

    def make_slots(num: int) -> list[torch.Tensor]:
        return [torch.full((num, ring_len, width), float("nan"), device=DEVICE).bfloat16()]

    def call(tokens: list[torch.Tensor], slots: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        return conv(*tokens, weight, bias, *slots, rows, chunk_len, max_tokens=bound)

    name = f"conv E{width} W{taps} C{chunk_len}"
    made = Subject(name, chunk_len, make_tokens, make_slots, call, drafts, same_slots=False)
    object.__setattr__(made, "constants", (weight, bias))
    return made


def truth(it: Subject, tokens: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs in fp64; a ring has no one last state."""
    weight, bias = (t.double() for t in it.constants)  # type: ignore[attr-defined]
    x = F.pad(tokens[0].double().T, (weight.shape[1] - 1, 0))
    y = F.silu(F.conv1d(x[None], weight[:, None], bias, groups=weight.shape[0])[0].T)
    return y, y


SHAPES = {
    "base": {},
    "chunk 64": {"chunk_len": 64},
    "2 taps": {"taps": 2},
    "no drafts": {"drafts": 0},
    "64 drafts": {"drafts": 64},
    "width 40": {"width": 40},
}


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
def test_every_cut_has_the_plain_bits(sizes: dict, poisoned_empty: None) -> None:
    storm(subject(**sizes), (150, 97, 64, 33, 7), seed=3, longest=90)


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
def test_errs_no_more_than_bf16_outputs(sizes: dict) -> None:
    torch.manual_seed(0)
    it = subject(**sizes)
    tokens = it.make_tokens(192)
    assert error(plain_run(it, tokens).outputs, truth(it, tokens)[0]) < 2.5e-3


@pytest.mark.parametrize("num", [30, 5], ids="{} tokens".format)
def test_a_sequence_goes_on_from_a_snapshot(num: int) -> None:
    torch.manual_seed(0)
    it = subject()
    tokens = it.make_tokens(60)
    plain = plain_run(it, tokens)
    slots = it.make_slots(3)
    before = 30 - num
    if before:
        it.call([t[:before] for t in tokens], slots, rows_of((0, before, 0, 1, 0, 0, 0, 0), device=DEVICE))
    edge = before // 16 * 16
    snapshot = rows_of((0, num + 4, 0, 1, before, edge, 2, 32), device=DEVICE)
    it.call([t[before:34] for t in tokens], slots, snapshot)
    y = it.call([t[32:] for t in tokens], slots, rows_of((0, 28, 0, 2, 32, 32, 0, 0), device=DEVICE))
    same_bits(y, plain.outputs[32:], "outputs behind the snapshot")

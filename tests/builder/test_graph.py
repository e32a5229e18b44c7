"""Exported segments: parity with transformers, free sizes, and bits that depend on a text alone."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kit import checkpoints, composed
from kit.harness import Harness
from kit.redzones import red_zones
from kit.varied import VARIED
from oracle import Oracle

FAMILIES = [*checkpoints.FAMILIES, *VARIED]
TOLERANCE = 1e-4  # fp32: transformers scans in chunks of 64 or 128 and multiplies matrices of other shapes
Get = Callable[..., Path]


@pytest.fixture(autouse=True)
def between_red_zones() -> Iterator[None]:
    """Every kernel of a program writes to its arguments and to scratch alone."""
    with red_zones(engines=True):
        yield


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Get) -> Callable[[str], torch.nn.Module]:
    loaded: dict[str, torch.nn.Module] = {}

    def get(family: str) -> torch.nn.Module:
        if family not in loaded:
            loaded[family] = checkpoints.reference(tiny_checkpoint(family))
        return loaded[family]

    return get


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(
        3, checkpoints.VOCAB, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tiny_engine: Get, reference: Callable) -> None:
    tokens = text(150)
    expected = logits_of(reference(family), tokens)
    harness = Harness(tiny_engine(family))
    # one piece; pieces around chunk and page edges; a token at a time across both
    for cuts in ((), (1, 14, 1, 1, 15, 32, 33), (7, *[1] * 28)):
        difference = (harness.run(tokens, *cuts) - expected).abs().max().item()
        assert difference < TOLERANCE, f"pieces {cuts}: {difference}"


@pytest.mark.parametrize("family", FAMILIES)
def test_oracle_equals_transformers(family: str, tiny_checkpoint: Get, reference: Callable) -> None:
    model, oracle = reference(family), Oracle(tiny_checkpoint(family))
    for length in (1, 2, 17):
        tokens = text(length, seed=length)
        result = oracle.generate(tokens, max_tokens=40)
        expected = logits_of(model, tokens + result.token_ids)[length - 1 : -1]
        assert result.token_ids == expected.argmax(1).tolist()
        assert (result.logits - expected).abs().max() < TOLERANCE
    assert torch.equal(oracle.logits(tokens)[-1], result.logits[0])
    stop = result.token_ids[5]
    stopped = oracle.generate(tokens, max_tokens=40, stop_ids=(stop,)).token_ids
    assert stopped == result.token_ids[: result.token_ids.index(stop) + 1]


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_next"])
def test_oracle_in_float64_agrees(family: str, tiny_checkpoint: Get) -> None:
    tokens = text(20)
    narrow, wide = (
        Oracle(tiny_checkpoint(family), dtype).logits(tokens) for dtype in (torch.float32, torch.float64)
    )
    assert wide.dtype == torch.float64
    assert 0 < (narrow - wide).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_mtp_equals_composed_transformers_layers(
    family: str, tiny_checkpoint: Get, tiny_engine: Get, reference: Callable
) -> None:
    """Behind a text, and over four drafts, each from the head's own state for the one before."""
    tokens = text(70)
    expected, expected_hidden = composed.mtp(tiny_checkpoint(family), reference(family), tokens, num_drafts=4)
    harness = Harness(tiny_engine(family))
    request = harness.request()
    harness.step([(request, tokens, 0)])
    hidden, found = harness.hidden, []
    for first, last in ((0, 20), (20, 21), (21, 69)):
        found.append(harness.draft(request, tokens[first + 1 : last + 1], hidden[first:last], first + 1))
    for place in (70, 71, 72):
        found.append(
            harness.draft(request, [int(found[-1].logits[-1].argmax())], found[-1].hidden[-1:], place)
        )
    logits, own = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert (logits - expected).abs().max() < TOLERANCE
    assert (own - expected_hidden).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_next"])
def test_any_sizes_may_be_one_or_rows_empty(family: str, tiny_engine: Get) -> None:
    """torch.export treats sizes 0 and 1 specially when it traces; a program must not have learnt that."""
    tokens = text(40)
    harness = Harness(tiny_engine(family))
    whole = harness.run(tokens)
    harness.table_width, narrow = 1, harness.request()  # W = 1
    narrow.pages = narrow.pages[:1]
    for i in range(20):  # T = N = L = 1
        (logits,) = harness.step([(narrow, tokens[i : i + 1], 0)])
        assert torch.equal(logits[0], whole[i])
    idle, other = harness.request(), harness.request()
    for request in (narrow, idle, other):
        request.pages = request.pages[:1]
    a, b, c = harness.step([(narrow, tokens[20:21], 0), (idle, [], 0), (other, tokens[:3], 0)])
    assert len(b) == 0
    assert torch.equal(a[0], whole[20]) and torch.equal(c, whole[:3])

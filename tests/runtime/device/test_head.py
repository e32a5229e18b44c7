"""What a step computed: logits from an output head only if somebody asks for them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hemiola.runtime import manifest
from hemiola.runtime.device.checked import check_program
from hemiola.runtime.device.head import Best, Head
from hemiola.runtime.device.memory import Storage
from hemiola.runtime.device.program import load_program
from hemiola.runtime.device.session import Computed, load_weights
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import HeadCall


def test_logits_are_computed_only_if_they_are_asked_for() -> None:
    asked: list[int] = []

    def logits(lines: torch.Tensor) -> torch.Tensor:
        asked.append(len(lines))
        return lines + 1

    head = Head(logits, lambda lines: Best(lines[:, 0], torch.arange(len(lines))))
    out = Computed(torch.zeros(5, 4), torch.zeros(9, 4), head)
    assert out.best is not None and out.best.token_id.tolist() == [*range(5)] and not asked
    part = out.first(2, 3)
    assert part.hidden.shape == (3, 4) and part.best is not None and len(part.best.logit) == 2
    found, hidden = part
    assert found.shape == (2, 4) and hidden.shape == (3, 4) and asked == [2]


def test_without_a_head_there_are_logits_alone() -> None:
    out = Computed(torch.ones(5, 7), torch.zeros(9, 4))
    assert out.best is None and out.first(2, 3).logits.shape == (2, 7) and out.logits.shape == (5, 7)


def test_what_is_moved_has_its_head_there_and_no_logits_of_its_own() -> None:
    """Graphs of prompts leave what they find in one place: lines for the head, not logits."""
    head = Head(lambda lines: 2 * lines, lambda lines: Best(lines[:, 0], torch.arange(len(lines))))
    out = Computed(torch.ones(2, 4), torch.full((3, 4), 5.0), head)
    there = out.room(7, 9)
    moved = out.moved(there)
    assert torch.equal(moved.logits, torch.full((2, 4), 2.0)) and torch.equal(moved.hidden, out.hidden)
    assert there.hidden.shape == (9, 4) and moved.hidden.data_ptr() == there.hidden.data_ptr()
    assert moved.best is not None and len(moved.best.token_id) == 2


def test_a_head_of_other_calls_or_weights_is_refused(tiny_engine: Callable[..., Path]) -> None:
    engine_dir = tiny_engine("qwen3_5", arch="sm_90")
    found = manifest.load(engine_dir)
    segment = found.segment("trunk")
    logits, best = segment.head
    weights = load_weights(engine_dir, found, segment.weights, torch.device("cpu"))
    states = Storage(found.states, 3, 3, device=torch.device("cpu")).tensors
    bound = [*(weights[name] for name in segment.weights), *(states[name] for name in segment.states)]

    def check(*head: HeadCall) -> None:
        changed = segment.model_copy(update={"head": head})
        check_program(load_program(engine_dir / segment.file), changed, bound, found, "cuda")

    check(logits, best)
    heads = {
        "its head calls": [(logits,), (best, logits), (logits, best, best)],
        "no weight of the segment": [(logits.model_copy(update={"weights": ("lost", "absent")}), best)],
        "its logits are": [(logits.model_copy(update={"weights": (segment.weights[5], "absent")}), best)],
        "its hidden states|its logits": [()],
    }
    for reason, wrong in heads.items():
        for head in wrong:
            with pytest.raises(
                Refused, match=rf"trunk.jsonl does not fit together \(.*({reason}|expected|forms)"
            ):
                check(*head)

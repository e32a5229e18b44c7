"""A step on a GPU, without one: on tensors that have a device but no content, nothing mixes devices or waits.

What would have to know a content (`tolist`, a boolean mask, `nonzero`) raises, as does an operation on
tensors of two devices, a copy from host to device included: those that do not wait are `upload` and `fetch`.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kit.fake_session import VOCAB, OneRank, resolved
from kit.guided import EOS, compiled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hemiola.plugins.gpu.launch import launches
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.cache.eviction import Cost
from hemiola.runtime.choose import rules
from hemiola.runtime.device.graphs import Stage
from hemiola.runtime.device.session import Computed
from hemiola.runtime.open import make_loop
from hemiola.runtime.schedule import loop
from hemiola.runtime.schedule.plan import Outcome, Plan
from hemiola.runtime.schedule.request import Bounds, new_request
from hemiola.runtime.step import captured, eager, ledger
from hemiola.runtime.step.program import Batch

GPU = torch.device("meta")
HIDDEN = 6
RULES = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3},
    {
        "repetition_penalty": 1.2,
        "logit_bias": {3: 1.0},
        "min_tokens": 2,
        "stop_token_ids": [4],
        "logprobs": 2,
    },
]


class OneDevice(TorchDispatchMode):
    """Raises where an operation has tensors of two devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves((args, kwargs, out)) if isinstance(value, torch.Tensor)]
        assert len({tensor.device for tensor in tensors}) <= 1, f"{func} has tensors of two devices"
        return out


class Empty(OneRank):
    """A session and a storage of tensors without content."""

    def __init__(self, num_slots: int, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size
        self.tensors = {"mtp.hidden": torch.empty(num_slots, 9, HIDDEN, device=GPU)}
        self.copies = 0

    def run(self, batch: Batch) -> Computed:
        return self._computed(len(batch.logits_ids), len(batch.token_ids))

    def draft(self, **inputs: torch.Tensor) -> Computed:
        assert all(value.device == GPU for value in inputs.values())
        return self._computed(len(inputs["logits_ids"]), len(inputs["logits_ids"]))

    def _computed(self, num_logits: int, num_states: int) -> Computed:
        with torch.inference_mode():  # nobody may write into a program's results
            return Computed(
                torch.empty(num_logits, self.vocab_size, device=GPU),
                torch.empty(num_states, HIDDEN, device=GPU),
            )

    def copy_slot(self, source: int, target: int) -> None:
        self.copies += 1

    def free_slots(self, slot_ids: list[int]) -> None: ...

    free_pages = free_slots


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What asks CUDA for something makes it up."""

    def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
        dtypes = [torch.from_numpy(array).dtype for array in arrays]
        return [torch.empty(a.shape, dtype=d, device=device) for a, d in zip(arrays, dtypes, strict=True)]

    for module in (ledger, rules, captured, eager):
        monkeypatch.setattr(module, "upload", upload)
    for module in (captured, eager):
        monkeypatch.setattr(module, "fetch", lambda tensors: tensors)
    monkeypatch.setattr(Stage, "send", lambda stage, arrays: None)
    monkeypatch.setattr(loop, "fence", lambda device: lambda: None)
    with launches(lambda *call: None):
        yield


def outcome(plan: Plan) -> Outcome:
    """As if every row that chose had got one token."""
    chose = [n for n, row in enumerate(plan.rows) if row.chooses]
    return Outcome(
        token_ids={n: [7] for n in chose},
        num_judged={n: plan.rows[n].num_drafts for n in chose},
        num_drafts={n: plan.rows[n].room for n in chose},
        broken=set(),
        logprobs={n: [] for n in chose if plan.rows[n].request.params.logprobs is not None},
    )


@pytest.mark.parametrize("graphs", [False, True], ids=["free", "buckets"])
@pytest.mark.parametrize("drafts", ["none", "ngram", "mtp"])
def test_a_launch_mixes_no_devices_and_waits_for_nothing(
    drafts: str, graphs: bool, without_gpu: None
) -> None:
    num_drafts = 0 if drafts == "none" else 3
    sizes = {"num_slots": 17, "num_pages": 60, "cuda_graphs": graphs}
    config = resolved(drafts=drafts, num_drafts=num_drafts, prefix_cache=True, **sizes)
    with OneDevice():
        empty = Empty(config.num_slots)
        made = make_loop(config, empty, empty, None, Cost(10, 40), device=GPU)
        bounds = Bounds(config.max_len, config.max_len, VOCAB, eos_ids=())
        for at, rule in enumerate([*RULES, *RULES]):  # the later ones hit what the first have left
            params = SamplingParams(max_tokens=6, **rule)
            made.scheduler.add(new_request(at + 1, [*range(3, 30)], params, bounds))
        num_steps = 0
        while made.scheduler.busy:
            plan = made.scheduler.plan()
            flight = made._launch(plan)
            assert flight.output.numbers.device == GPU
            made.scheduler.commit(plan, outcome(plan))
            made.scheduler.reap(plan)
            num_steps += 1
    assert num_steps > 6 and empty.copies > 0
    assert not graphs or made.steps.whole.num_steps > 3


@pytest.mark.parametrize("drafts", ["none", "ngram", "mtp"])
def test_a_launch_with_a_grammar_in_it_mixes_no_devices(drafts: str, without_gpu: None) -> None:
    num_drafts = 0 if drafts == "none" else 3
    config = resolved(drafts=drafts, num_drafts=num_drafts, cuda_graphs=True)
    with OneDevice():
        empty = Empty(config.num_slots)
        made = make_loop(config, empty, empty, None, Cost(10, 40), device=GPU)
        bounds = Bounds(config.max_len, config.max_len, VOCAB, eos_ids=(EOS,))
        for at, grammar in enumerate([None, compiled("a*b"), compiled("a*b")]):
            params = SamplingParams(max_tokens=6, logprobs=at)
            request = new_request(at + 1, [5, 6, 7], params, bounds, grammar=grammar)
            if request.guide is not None:
                request.guide.masks *= 1 + num_drafts  # as if they were those behind drafts
            made.scheduler.add(request)
        for _ in range(4):
            plan = made.scheduler.plan()
            flight = made._launch(plan)
            assert flight.output.told_drafts == num_drafts and flight.output.numbers.device == GPU
            made.scheduler.commit(plan, outcome(plan))


@pytest.mark.parametrize("drafts", ["none", "ngram", "mtp"])
def test_no_bucket_mixes_devices_or_waits(drafts: str, without_gpu: None) -> None:
    """Of a vocabulary that is too large to be sorted for a few."""
    num_drafts, vocab_size = (0 if drafts == "none" else 3), 2 * rules.FEW_BEST
    sizes = {"num_slots": 17, "vocab_size": vocab_size, "cuda_graphs": True}
    config = resolved(drafts=drafts, num_drafts=num_drafts, **sizes)
    with OneDevice():
        empty = Empty(config.num_slots, vocab_size)
        decoder = make_loop(config, empty, empty, None, Cost(10, 40), device=GPU).steps.whole
        for bucket in decoder.buckets:
            assert decoder.step(bucket).told.device == GPU
    assert {bucket.rules for bucket in decoder.buckets} == set(range(4))


class Seen(TorchDispatchMode):
    """The operations that were called, with the dtypes that met in them: a kernel each, but for sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[tuple] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        self.kinds.add((str(func), *sorted({str(tensor.dtype) for tensor in tensors})))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("drafts", ["none", "ngram", "mtp"])
def test_no_kernel_runs_for_the_first_time_while_a_graph_is_captured(drafts: str, without_gpu: None) -> None:
    """It would be loaded there. torch has several to select and to sort, by the number of lines."""
    num_drafts = 0 if drafts == "none" else 3
    sizes = {"num_slots": 17, "vocab_size": 2 * rules.FEW_BEST, "cuda_graphs": True}
    config = resolved(drafts=drafts, num_drafts=num_drafts, **sizes)
    empty = Empty(config.num_slots, config.vocab_size)
    decoder = make_loop(config, empty, empty, None, Cost(10, 40), device=GPU).steps.whole
    found: dict[tuple, set] = {}
    for bucket in decoder.buckets:
        with Seen() as seen:
            decoder.step(bucket)
        found[bucket] = seen.kinds
    ran = set().union(*(found[bucket] for bucket in decoder.warm))
    for bucket, kinds in found.items():
        same_size = (found[warm] for warm in decoder.warm if warm[1:] == bucket[1:])
        by_lines = {kind for kind in kinds if kind[0].startswith(("aten.topk", "aten.sort"))}
        assert kinds <= ran and by_lines <= set().union(*same_size), bucket


def test_the_test_can_fail() -> None:
    ids = torch.empty(3, dtype=torch.int64, device=GPU)
    for bad in (
        ids.tolist,
        lambda: ids[ids > 0],
        lambda: ids[torch.tensor([0, 1])],
        lambda: ids + torch.tensor([1, 2, 3]),
    ):
        with OneDevice(), pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
            bad()

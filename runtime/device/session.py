"""An engine's program with its weights and states: a batch in, logits and hidden out. Sees no request."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch.fx import GraphModule

from hemiola.plugins import OPS
from hemiola.plugins.gpu.checks import spared
from hemiola.plugins.gpu.lines import random_lines
from hemiola.plugins.gpu.words import random_words
from hemiola.plugins.groups import Layout
from hemiola.plugins.ranks import RANK
from hemiola.plugins.step import forms
from hemiola.runtime.device.checked import check_program
from hemiola.runtime.device.head import Best, Head, Logits, bind_head, bind_scores
from hemiola.runtime.device.kernels import load_kernels
from hemiola.runtime.device.memory import Storage, free_bytes_of_host
from hemiola.runtime.device.program import OURS, layouts_of, load_program
from hemiola.runtime.device.segments.pieces import CutSegment
from hemiola.runtime.errors import Refused, one_line
from hemiola.runtime.manifest import Manifest
from hemiola.runtime.manifest_parts import GROUP, Drawn, Segment
from hemiola.runtime.progress import Report, silent

if TYPE_CHECKING:
    from hemiola.plugins.cpu.code import Recorder, View  # numba is not needed elsewhere

    Record = Callable[[Recorder, Mapping[str, View]], list[View]]


TRIED = 64  # tokens, rows and lines of the step by which two programs are compared
OTHER_BYTES = 2**20  # that one program may take for itself


class Computed:
    """What a segment computes: hidden states after the final norm, the trunk's [T, F], the head's [L, F]; and
    of the lines that choose logits, or no more than the best tokens, whichever is asked for."""

    def __init__(
        self,
        lines: torch.Tensor,
        hidden: torch.Tensor,
        head: Head | None = None,
        scores: Logits | None = None,
    ) -> None:
        """lines: [L, F] for the head, or, without one, logits [L, V] fp32."""
        self.hidden, self.head = hidden, head
        self._lines, self._scores = lines, scores

    @property
    def logits(self) -> torch.Tensor:
        """[L, V] fp32, computed whenever they are looked at, if there is a head."""
        return self._lines if self.head is None else self.head.logits(self._lines)

    @property
    def best(self) -> Best | None:
        """The best tokens without logits; None: nothing is sooner than logits."""
        return None if self.head is None else self.head.best(self._lines)

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of any tokens' hidden states [M, F]: logits [M, V] fp32."""
        assert self._scores is not None, "an engine that is cut into parts has no head of its own"
        return self._scores(hidden)

    def first(self, num_lines: int, num_tokens: int) -> "Computed":
        """Of so many lines and tokens."""
        return Computed(self._lines[:num_lines], self.hidden[:num_tokens], self.head, self._scores)

    def room(self, num_lines: int, num_tokens: int) -> "Computed":
        """Memory for so many lines and tokens."""
        lines, hidden = self._lines, self.hidden
        return Computed(_room(lines, num_lines), _room(hidden, num_tokens), self.head, self._scores)

    def moved(self, there: "Computed") -> "Computed":
        """This, in the first of that memory."""
        copy = there.first(len(self._lines), len(self.hidden))
        copy._lines.copy_(self._lines)
        copy.hidden.copy_(self.hidden)
        return copy

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.logits, self.hidden))


def _room(part: torch.Tensor, lines: int) -> torch.Tensor:
    return torch.empty((lines, part.shape[1]), dtype=part.dtype, device=part.device)


class Trunk(Protocol):
    """A Session, or what stands before one; the trunk's inputs are attributes of `batch`."""

    def run(self, batch: object) -> Computed: ...

    def run_all(self, batch: object) -> Computed:
        """The same, with the hidden states of all tokens, and the head to make logits of them."""
        ...


class Drafter(Protocol):
    """A Session with an MTP head, or in tests something that checks what it is given."""

    def draft(self, **inputs: torch.Tensor) -> Computed: ...


class Loaded(NamedTuple):
    """A program, and how a CPU's step records it."""

    call: Callable[..., Any]
    record: "Record | None" = None
    room: int = 0  # bytes of a CPU's step of TRIED tokens, rows and lines


class LoadedSegment:
    """One segment, bound to its forms, weights and states."""

    def __init__(
        self,
        engine_dir: Path,
        manifest: Manifest,
        segment: Segment,
        weights: dict[str, torch.Tensor],
        storage: Storage,
        every_line: bool = True,
        ranks: Head | None = None,
    ) -> None:
        """Not every line: hidden states are read where there are logits alone. A CPU has a program for that,
        which computes no others. ranks: what makes all logits, or the best of all, of this rank's."""
        self.inputs = segment.inputs
        self._head = ranks
        self._scores: Logits | None = None
        # Nothing here refers to the segment itself, so what it holds goes with it.
        self._every_line: Loaded | None = None
        # The program as a part of a CPU's step; None: it is none of compiled kernels.
        self.record: Record | None = None
        bound = [weights[name] for name in segment.weights]
        bound += [storage.tensors[name] for name in segment.states]
        if segment.pieces:
            self._call = torch.inference_mode()(partial(CutSegment(engine_dir, segment), *bound))
            return
        load = partial(_loaded, engine_dir, manifest, segment, bound, storage)
        only_lines = bool(segment.lines_file) and not every_line
        loaded = load(only_lines)
        self._call, self.record = loaded.call, loaded.record
        if only_lines:  # few requests ask for every line, but by then another engine may stand in the folder
            self._every_line = load(False)
            _check_room(segment, self._every_line.room, loaded.room)
        head, scores = bind_head(segment, weights), bind_scores(segment, weights)
        self._scores = scores and _bare(scores if ranks is None else _gathered(scores, ranks))
        if head is not None:
            head = Head(_bare(head.logits), _bare(head.best))
            self._head = head if ranks is None else _of_all(head, ranks, weights[GROUP], manifest, segment)

    def run_all(self, inputs: Iterable[torch.Tensor]) -> Computed:
        """With hidden states of all tokens, of which `logits_of` makes logits."""
        call = self._call if self._every_line is None else self._every_line.call
        lines, hidden = call(*inputs)
        return Computed(lines, hidden, self._head, self._scores)

    def __call__(self, inputs: Iterable[torch.Tensor]) -> Computed:
        lines, hidden = self._call(*inputs)
        return Computed(lines, hidden, self._head, self._scores)


def _gathered(scores: Logits, ranks: Head) -> Logits:
    return lambda lines: ranks.logits(scores(lines))


def _of_all(head: Head, ranks: Head, group: torch.Tensor, manifest: Manifest, segment: Segment) -> Head:
    """A head of all ranks' parts of the vocabulary, from that of this rank's."""
    agree = forms("cuda").agree
    width = manifest.vocab_size
    if segment.name == "draft" and manifest.draft_vocab is not None:
        width = manifest.draft_vocab
    width //= manifest.tp

    def best(lines: torch.Tensor) -> Best:
        return Best(*agree(*head.best(lines), group, width))

    return Head(lambda lines: ranks.logits(head.logits(lines)), best)


def _loaded(
    engine_dir: Path,
    manifest: Manifest,
    segment: Segment,
    bound: list[torch.Tensor],
    storage: Storage,
    only_lines: bool,
) -> Loaded:
    """A checked program: a CPU's as a compiled step, a GPU's with the forms that were chosen."""
    program = load_program(engine_dir / (segment.lines_file if only_lines else segment.file))
    hidden = "L" if only_lines or segment.name == "draft" else "T"
    check_program(program, segment, bound, manifest, storage.device.type, hidden)
    if storage.device.type == "cpu":
        from hemiola.runtime.device.lower import Lowered  # numba is not needed elsewhere

        lowered = Lowered(program, segment, bound, storage.poison, hidden)
        return Loaded(lowered, lowered.record, lowered.room(TRIED))
    bind_forms(program, segment)
    return Loaded(_bare(partial(program, *bound)))


def _check_room(segment: Segment, every_line: int, lines: int) -> None:
    """Where all lines are wanted both compute the same; of the latter it is known that there is memory."""
    if every_line > 2 * lines + OTHER_BYTES:
        message = f"{segment.file} takes {every_line} bytes for {TRIED} tokens, {segment.lines_file} {lines}"
        raise Refused("damaged", message=message, way_out="run build-engine again")


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients, and without what a builder has checked."""
    return torch.inference_mode()(spared()(function))


class Session:
    """The trunk, and the MTP head where one is to draft; they share embeddings and output head."""

    def __init__(
        self,
        engine_dir: Path,
        manifest: Manifest,
        storage: Storage,
        drafts: str,
        report: Report = silent,
        group: torch.Tensor | None = None,
    ) -> None:
        """group: the ranks that run it together (plugins/ranks.py), where they are several."""
        assert (manifest.tp > 1) == (group is not None)
        self.ranks = None if group is None else head_of_ranks(group, storage.device)
        names = ["trunk", "draft"] if drafts == "mtp" else ["trunk"]
        segments = [manifest.segment(name) for name in names]
        names = {name for segment in segments for name in segment.weights}
        rank, self._device = 0 if group is None else int(group[RANK]), storage.device
        weights = load_weights(engine_dir, manifest, names - {GROUP}, storage.device, report, rank)
        if group is not None:
            weights[GROUP] = group
        report("reading programs", 0, 0)
        programs = [
            LoadedSegment(
                engine_dir,
                manifest,
                segment,
                weights,
                storage,
                drafts == "mtp" and segment.name == "trunk",
                self.ranks,
            )
            for segment in segments
        ]
        self._trunk, self._draft = programs[0], programs[-1]
        self._kernels = ExitStack()
        if storage.device.type != "cpu":
            report("loading kernels", 0, 0)
            self._kernels = load_kernels(engine_dir, manifest, storage.device)

    def close(self) -> None:
        """Unload what no other engine launches; behind this nothing runs."""
        self._kernels.close()

    def run(self, batch: object) -> Computed:
        """Logits and hidden states of a step; the trunk's inputs are attributes of `batch`."""
        return self._trunk(getattr(batch, name) for name in self._trunk.inputs)

    def run_all(self, batch: object) -> Computed:
        """The same, with the hidden states of all tokens, and the head to make logits of them."""
        return self._trunk.run_all(getattr(batch, name) for name in self._trunk.inputs)

    @property
    def recordings(self) -> "list[Record]":
        """Trunk and head as parts of a CPU's step: from their inputs to logits and hidden states. Or none."""
        records = [p.record for p in (self._trunk, self._draft) if p.record is not None]
        return records if len(records) == 2 else []

    @property
    def slowest(self) -> Callable[..., list[float]] | None:
        """Of some seconds, the most that a rank has of each: what a clock decides, it decides alike for all.
        None: there is one rank."""
        return None if self.ranks is None else self._slowest

    def _slowest(self, *seconds: float) -> list[float]:
        assert self.ranks is not None
        line = torch.tensor([seconds], dtype=torch.float32, device=self._device)
        return self.ranks.logits(line).view(-1, len(seconds)).amax(0).tolist()

    def draft(self, **inputs: torch.Tensor) -> Computed:
        """Of a token and the hidden state before it: logits and hidden states of those in logits_ids."""
        return self._draft(inputs[name] for name in self._draft.inputs)


def head_of_ranks(group: torch.Tensor, device: torch.device) -> Head:
    """Of lines of this rank's logits: all logits, or the best of all. The best of views, too."""
    ops = forms("compiled" if device.type == "cpu" else "cuda")

    def best(lines: Any) -> Best:
        return Best(*ops.agree(*ops.best(lines), group, lines.shape[1]))

    return Head(lambda lines: ops.gather(lines, group), best)


def bind_forms(program: GraphModule, segment: Segment) -> None:
    """Let every node of ours call the form that was chosen for it, past torch's dispatcher (5 us a call)."""
    calls = [node for node in program.graph.nodes if node.target in OURS]
    layouts = layouts_of([*program.graph.nodes], segment)
    for node, chosen in zip(calls, segment.nodes, strict=True):
        assert OURS[node.target].name == chosen.op, f"{segment.file}: {node} is not {chosen.op}"
        node.target = OPS[chosen.op].bind(chosen.form, chosen.sizes, layouts[node])
    program.recompile()


def load_weights(
    engine_dir: Path,
    manifest: Manifest,
    names: Iterable[str],
    device: torch.device,
    report: Report = silent,
    rank: int = 0,
) -> dict[str, torch.Tensor]:
    """A rank's weights by name, as they lie in the files. On the CPU these are mapped, and read when they
    are."""
    drawn, path, wanted = manifest.drawn, engine_dir / manifest.weights_file, dict.fromkeys(names)
    if device.type == "cpu" and manifest.drawn_bytes > (free := free_bytes_of_host()):
        message = f"{engine_dir} draws {manifest.drawn_bytes} bytes of random weights, and {free} are free"
        raise Refused("exhausted", message=message, way_out="use a larger machine")
    try:
        weights: dict[str, torch.Tensor] = {}
        for name in wanted.keys() & drawn.keys():
            weights[name] = draw(f"{name}@{rank}" if drawn[name].ranked else name, drawn[name], device)
        for path in (engine_dir / file for file in manifest.weights_files(rank)):
            with safe_open(path, framework="pt", device=str(device)) as file:
                for name in wanted.keys() & {*file.keys()} - weights.keys():
                    report("opening weights", len(weights), len(wanted))
                    weights[name] = file.get_tensor(name)
        if missing := sorted(wanted.keys() - weights.keys()):
            raise ValueError(f"it has no {missing[0]}")
        return {name: weights[name] for name in wanted}
    except (SafetensorError, KeyError, ValueError, OverflowError) as error:
        message = f"{path} cannot be read ({one_line(error)})"
        raise Refused("damaged", message=message, way_out="run build-engine again") from None


def draw(name: str, drawn: Drawn, device: torch.device) -> torch.Tensor:
    """The same numbers each time, on devices of a kind."""
    rng = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    if drawn.layout:
        layout = Layout.parse(drawn.layout)
        return (random_lines if layout.inputs else random_words)(layout, drawn.shape, drawn.std, rng)
    weight = torch.empty(drawn.shape, dtype=getattr(torch, drawn.dtype), device=device)
    return weight.normal_(0, drawn.std, generator=rng)

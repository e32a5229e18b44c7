"""An engine's program with its weights and states: a batch in, logits and hidden out. Sees no request."""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch.fx import GraphModule

from hemiola.plugins import OPS
from hemiola.plugins.gpu.checks import spared
from hemiola.runtime.device.checked import check_program
from hemiola.runtime.device.head import Best, Head, cut_head
from hemiola.runtime.device.kernels import load_kernels
from hemiola.runtime.device.memory import Storage, free_bytes_of_host
from hemiola.runtime.device.program import load_program
from hemiola.runtime.device.segments.pieces import CutSegment
from hemiola.runtime.errors import Refused, one_line
from hemiola.runtime.manifest import Drawn, Manifest, Segment
from hemiola.runtime.progress import Report, silent

if TYPE_CHECKING:
    from hemiola.plugins.cpu.code import Recorder, View  # numba is not needed elsewhere

    Record = Callable[[Recorder, Mapping[str, View]], list[View]]


class Computed:
    """What a segment finds: hidden states after the final norm, the trunk's [T, F], the head's [L, F]; and of
    the lines that choose logits, or no more than the best tokens, whichever is asked for."""

    def __init__(self, lines: torch.Tensor, hidden: torch.Tensor, head: Head | None = None) -> None:
        """lines: [L, F] for the head, or, without one, logits [L, V] fp32."""
        self.hidden, self.head = hidden, head
        self._lines = lines

    @property
    def logits(self) -> torch.Tensor:
        """[L, V] fp32, computed whenever they are looked at, if there is a head."""
        return self._lines if self.head is None else self.head.logits(self._lines)

    @property
    def best(self) -> Best | None:
        """The best tokens without logits; None: nothing is sooner than logits."""
        return None if self.head is None else self.head.best(self._lines)

    def first(self, num_lines: int, num_tokens: int) -> "Computed":
        """Of so many lines and tokens."""
        return Computed(self._lines[:num_lines], self.hidden[:num_tokens], self.head)

    def room(self, num_lines: int, num_tokens: int) -> "Computed":
        """Memory for so many lines and tokens."""
        lines, hidden = self._lines, self.hidden
        return Computed(_room(lines, num_lines), _room(hidden, num_tokens), self.head)

    def moved(self, there: "Computed") -> "Computed":
        """This, in the first of that memory."""
        found = there.first(len(self._lines), len(self.hidden))
        found._lines.copy_(self._lines)
        found.hidden.copy_(self.hidden)
        return found

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.logits, self.hidden))


def _room(part: torch.Tensor, lines: int) -> torch.Tensor:
    return torch.empty((lines, part.shape[1]), dtype=part.dtype, device=part.device)


class Trunk(Protocol):
    """A Session, or what stands before one; the trunk's inputs are attributes of `batch`."""

    def run(self, batch: object) -> Computed: ...


class Drafter(Protocol):
    """A Session with an MTP head, or in tests something that checks what it is given."""

    def draft(self, **inputs: torch.Tensor) -> Computed: ...


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
    ) -> None:
        """Not every line: hidden states are wanted of the tokens that have logits, [L, F]; a CPU computes no
        others."""
        self.inputs = segment.inputs
        self._selects = segment.name == "draft" and not every_line
        self._head: Head | None = None
        bound = [weights[name] for name in segment.weights]
        bound += [storage.tensors[name] for name in segment.states]
        if segment.pieces:
            self._call = torch.inference_mode()(partial(CutSegment(engine_dir, segment), *bound))
            return
        program = load_program(engine_dir / segment.file)
        check_program(program, segment, bound, manifest, storage.device.type)
        if storage.device.type == "cpu":
            from hemiola.runtime.device.lower import Lowered  # numba is not needed elsewhere

            self._selects = False
            self._call = Lowered(program, segment, bound, storage.poison, every_line)
        else:
            bind_forms(program, segment)
            head = cut_head(program, bound)
            self._head = head and Head(_bare(head.logits), _bare(head.best))
            self._call = _bare(partial(program, *bound))

    @property
    def record(self) -> "Record | None":
        """The program as a part of a CPU's step; None: it is none of compiled kernels."""
        return getattr(self._call, "record", None)

    def __call__(self, inputs: Iterable[torch.Tensor]) -> Computed:
        given = dict(zip(self.inputs, inputs, strict=True))
        lines, hidden = self._call(*given.values())
        if self._selects:
            hidden = lines if self._head else hidden.index_select(0, given["logits_ids"])
        return Computed(lines, hidden, self._head)


def _bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients, and without what a builder has checked."""
    return torch.inference_mode()(spared()(function))


class Session:
    """The trunk, and the MTP head where one is to draft; they share embeddings and output head."""

    def __init__(
        self, engine_dir: Path, manifest: Manifest, storage: Storage, drafts: str, report: Report = silent
    ) -> None:
        names = ["trunk", "draft"] if drafts == "mtp" else ["trunk"]
        segments = [manifest.segment(name) for name in names]
        names = {name for segment in segments for name in segment.weights}
        weights = load_weights(engine_dir, manifest, names, storage.device, report)
        report("reading programs", 0, 0)
        programs = [
            LoadedSegment(
                engine_dir, manifest, segment, weights, storage, drafts == "mtp" and segment.name == "trunk"
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

    @property
    def recordings(self) -> "list[Record]":
        """Trunk and head as parts of a CPU's step: from their inputs to logits and hidden states. Or none."""
        found = [p.record for p in (self._trunk, self._draft) if p.record is not None]
        return found if len(found) == 2 else []

    def draft(self, **inputs: torch.Tensor) -> Computed:
        """Of a token and the hidden state before it: logits and hidden states of those in logits_ids."""
        return self._draft(inputs[name] for name in self._draft.inputs)


def bind_forms(program: GraphModule, segment: Segment) -> None:
    """Let every node of ours call the form that was chosen for it, past torch's dispatcher (5 us a call)."""
    ours = {op.torch_op: op for op in OPS.values()}
    calls = [node for node in program.graph.nodes if node.target in ours]
    for node, chosen in zip(calls, segment.nodes, strict=True):
        assert ours[node.target].name == chosen.op, f"{segment.file}: {node} is not {chosen.op}"
        node.target = OPS[chosen.op].bind(chosen.form, chosen.sizes)
    program.recompile()


def load_weights(
    engine_dir: Path,
    manifest: Manifest,
    names: Collection[str],
    device: torch.device,
    report: Report = silent,
) -> dict[str, torch.Tensor]:
    """Weights by name, as they lie in the file. On the CPU it is mapped, and read when they are."""
    drawn, path = manifest.drawn, engine_dir / manifest.weights_file
    if device.type == "cpu" and manifest.drawn_bytes > (free := free_bytes_of_host()):
        said = f"{engine_dir} draws {manifest.drawn_bytes} bytes of random weights, and {free} are free"
        raise Refused("exhausted", said=said, way_out="use a larger machine")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            found = {}
            for name in names:
                report("opening weights", len(found), len(names))
                found[name] = draw(name, drawn[name], device) if name in drawn else file.get_tensor(name)
            return found
    except (SafetensorError, KeyError, ValueError, OverflowError) as error:
        said = f"{path} cannot be read ({one_line(error)})"
        raise Refused("damaged", said=said, way_out="run build-engine again") from None


def draw(name: str, drawn: Drawn, device: torch.device) -> torch.Tensor:
    """The same numbers each time, on devices of a kind."""
    rng = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    weight = torch.empty(drawn.shape, dtype=getattr(torch, drawn.dtype), device=device)
    return weight.normal_(0, drawn.std, generator=rng)

"""Every kernel that an engine can come to launch, compiled for its architectures; no GPU is needed."""

import hashlib
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from hemiola.builder.graph import Graph, op_of
from hemiola.builder.targets.torch import Job, layouts_in, packed_empty
from hemiola.plugins import OPS
from hemiola.plugins.gpu.binaries import sources
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.gpu.sizes import Size
from hemiola.plugins.gpu.windows import FEW
from hemiola.plugins.groups import Layout
from hemiola.plugins.ranks import PROGRAMS, words_of
from hemiola.plugins.step import forms
from hemiola.plugins.step.plan import COLUMNS
from hemiola.runtime.abi import widths
from hemiola.runtime.arch import ARCHS
from hemiola.runtime.errors import Refused, one_line
from hemiola.runtime.extra import install
from hemiola.runtime.manifest_parts import KernelFile, Kernels, Segment
from hemiola.runtime.outline import Limits

if TYPE_CHECKING:
    from hemiola.plugins.gpu.launch import Call

FOLDER = "kernels"
UNNAMED_GPU = 132  # multiprocessors: they choose among tiles that all are compiled


def compile_kernels(
    graphs: Sequence[Graph], segments: Sequence[Segment], ops: Collection[str], job: Job
) -> tuple[Kernels, ...]:
    """Binaries of these ops in the engine directory, an architecture after the other."""
    if find_spec("triton") is None:
        message = f"--arch {','.join(job.archs)}: kernels are compiled by Triton, which is not here"
        raise Refused("not_found", "arch", message=message, way_out=f"run {install('cuda')}")
    pairs = zip(graphs, segments, strict=True)
    nodes = {
        n for graph, segment in pairs for n in nodes_of(graph, layouts_in(graph, segment)) if n.op in ops
    }
    return tuple(_compile(nodes, graphs, arch, job) for arch in job.archs)


def _compile(nodes: "set[Node]", graphs: Sequence[Graph], arch: str, job: Job) -> Kernels:
    """All of one architecture."""
    from hemiola.plugins.gpu.compile import Compiled, TooLarge, compile_call, cuda_version, without_lines
    from hemiola.plugins.gpu.cover import calls_of
    from hemiola.plugins.gpu.launch import Call

    def compiled_for(call: Call) -> Compiled:
        with triton_in_one_line(arch):
            return compile_call(call, gpu.capability)

    major, minor = ARCHS[arch].capability or (0, 0)
    gpu = Gpu(10 * major + minor, UNNAMED_GPU)
    calls = calls_between(gpu, job.limits, hidden_of(graphs), job.tp)
    for done, node in enumerate(nodes):
        job.report(f"calls for {arch}", done, len(nodes))
        max_size = node.most(job.limits)
        calls |= calls_of(OPS[node.op], node.arguments, max_size, gpu, node.form, dict(node.layouts))
    (job.folder / FOLDER / arch).mkdir(parents=True)
    files = []
    # threads, since a compilation waits for an assembler of its own
    with without_lines(), ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for compiled in pool.map(compiled_for, sorted(calls, key=repr)):
                name = hashlib.sha256(repr(compiled.binary.call).encode()).hexdigest()[:12]
                file = f"{FOLDER}/{arch}/{compiled.binary.call.kernel}-{name}.cubin"
                (job.folder / file).write_bytes(compiled.cubin)
                files.append(KernelFile(file=file, binary=compiled.binary))
                job.report(f"kernels for {arch}", len(files), len(calls))
        except TooLarge as error:
            message = f"--arch {arch}: {error}"
            raise Refused(
                "unsupported", "arch", message=message, way_out="leave this architecture out"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)  # nobody waits for the rest
    return Kernels(arch=arch, cuda=cuda_version(gpu.capability), sources=sources(), binaries=tuple(files))


def calls_between(gpu: Gpu, limits: Limits, hidden: torch.Tensor | None, tp: int = 1) -> "set[Call]":
    """By the ops around the trunk (plugins/step), in steps of two rows. hidden: of two tokens, for a head."""
    from hemiola.plugins.gpu.cover import calls_at

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    op, long = forms("cuda"), torch.int64
    plan, ids, lengths, two = made(3, len(COLUMNS)), made(3, limits.max_len), made(4, 3, dtype=long), 2
    chosen, logit = made(two, dtype=long), made(two, dtype=torch.float32)
    calls = calls_at(op.mark, gpu, made(two, dtype=long), 1)
    calls |= calls_at(op.change, gpu, made(two, 2, dtype=long), ids)
    calls |= calls_at(op.fill, gpu, plan, ids, lengths, ids, two, two)
    calls |= calls_at(op.look_up, gpu, plan, lengths, ids, 1, 3)
    for most in range(limits.num_drafts + 1):
        answers, width = made(two, most + 9, dtype=long), 1 + most
        calls |= calls_at(op.accept, gpu, plan, chosen, logit, lengths, ids, answers, width, limits.chunk_len)
        calls |= calls_at(op.tell, gpu, plan, lengths, ids, answers, width, most)
    if hidden is not None:
        rows, ring = made(two, 8), hidden.new_empty(3, 2, hidden.shape[1])
        calls |= calls_at(op.first_pairs, gpu, plan, rows, hidden, ring, lengths, ids, two, two)
        calls |= calls_at(op.keep, gpu, rows, lengths, hidden, ring)
        calls |= calls_at(op.write, gpu, plan, chosen, lengths, ids, 1)
        calls |= calls_at(op.next_pairs, gpu, plan, lengths, ids, 1, two)
    if tp > 1:
        group, most = made(words_of(tp), dtype=long), 2 * FEW * PROGRAMS
        for num in (two, most):  # lines of short and of long pieces
            logits = made(num, 4, dtype=torch.float32)
            calls |= calls_at(op.agree, gpu, logits[:, 0], made(num, dtype=long), group, 4)
            calls |= calls_at(op.gather, gpu, logits, group)
    return calls


def hidden_of(graphs: Sequence[Graph]) -> torch.Tensor | None:
    """States of two tokens that a drafting head reads; None: there is no head."""
    for graph in graphs:
        if "hidden" in graph.inputs:
            places = [node.meta["val"] for node in graph.program.graph.nodes if node.op == "placeholder"]
            like = places[len(places) - len(graph.inputs) + graph.inputs.index("hidden")]
            return torch.empty(2, like.shape[1], dtype=like.dtype, device="meta")
    return None


@contextmanager
def triton_in_one_line(arch: str) -> Iterator[None]:
    """Where it has no room for its own files."""
    from triton import knobs
    from triton.runtime.errors import PTXASError

    try:
        yield
    except (OSError, PTXASError) as error:
        places = f"{tempfile.gettempdir()} and {knobs.cache.dir}"
        message = f"--arch {arch}: Triton cannot compile ({one_line(error)})"
        way_out = f"free space in {places}, its folders, and build again"
        raise Refused("failed", message=message, way_out=way_out) from None


class Tensor(NamedTuple):
    """A traced tensor. Letters of the ABI stand for its free sizes."""

    shape: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    offset: int
    dtype: torch.dtype

    def make(self, letters: dict[str, int]) -> torch.Tensor:
        shape, strides = (
            [letters[size] if isinstance(size, str) else size for size in part]
            for part in (self.shape, self.strides)
        )
        extent = self.offset + 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        whole = torch.empty(max(extent, 0), dtype=self.dtype, device="meta")
        return whole.as_strided(shape, strides, self.offset)


class Node(NamedTuple):
    """A call of an op of ours; equal for all layers that call it alike."""

    op: str
    segment: str
    values: tuple[Any, ...]  # tensors and constants, the sizes that its form gets, then options
    form: str = "cuda"
    layouts: tuple[tuple[str, Layout], ...] = ()  # of quantised weights, by argument

    def arguments(self, size: Size) -> list[Any]:
        letters = {"T": size.tokens, "L": size.tokens, "N": size.rows, "W": size.pages, "P": 3, "S": 3}
        return [value.make(letters) if isinstance(value, Tensor) else value for value in self.values]

    def most(self, limits: Limits) -> Size:
        sizes = widths(limits, self.segment)
        return Size(max(sizes["T"], sizes["L"]), sizes["N"], sizes["W"])


def nodes_of(graph: Graph, layouts: Mapping[fx.Node, dict[str, Layout]] | None = None) -> Iterator[Node]:
    """The calls of our ops in a graph; `layouts` of quantised weights by call and argument."""
    names, layouts = graph.letters(), layouts or {}
    for node in graph.program.graph.nodes:
        op = op_of(node)
        if op is None:
            continue
        given = [v.meta["val"] if isinstance(v, fx.Node) else v for v in node.args]
        node_layouts = layouts.get(node, {})
        if not node_layouts:
            yield Node(op.name, graph.name, tuple(_traced(value, names) for value in given))
            continue
        call = op.call(*given)._replace(layouts=node_layouts)
        form = op.choose(call, "cuda").form
        for at, arg in enumerate(op.args):
            if arg.name in node_layouts:
                given[at] = packed_empty(form, arg.name, node_layouts[arg.name], given[at])
        sizes = [call.sizes[letter] for letter in form.sizes]
        num = len(op.args) + len(op.attrs)
        values = tuple(_traced(value, names) for value in (*given[:num], *sizes, *given[num:]))
        yield Node(op.name, graph.name, values, form.name, tuple(node_layouts.items()))


def _traced(value: Any, names: dict[str, str]) -> Any:
    """A tensor, or a constant as it is."""
    if not isinstance(value, torch.Tensor):
        return value

    def known(sizes: Sequence[Any]) -> tuple[int | str, ...]:
        return tuple(size if isinstance(size, int) else names[str(size)] for size in sizes)

    return Tensor(known(value.shape), known(value.stride()), int(value.storage_offset()), value.dtype)

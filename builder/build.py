"""The straight line from a checkpoint to an engine directory."""

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

import hemiola
from hemiola.builder import models, targets
from hemiola.builder.checkpoint import Checkpoint, Files, Tensors
from hemiola.builder.cut import SEGMENTS, Cut
from hemiola.builder.formats.rounded import rounding
from hemiola.builder.graph import Graph, Name, export
from hemiola.builder.hashes import hash_files
from hemiola.builder.hub import Origin, fetch_weights, locate
from hemiola.builder.lazy import Lazy
from hemiola.builder.options import Options
from hemiola.builder.passes.fuse import ordered
from hemiola.builder.place import fresh, memory_in_one_line, refuse_occupied
from hemiola.builder.random_weights import RandomTensors, drawn
from hemiola.builder.refuse import (
    dtype_of,
    limits_of,
    max_len_of,
    refuse_drafts,
    refuse_options,
    refuse_weights,
)
from hemiola.builder.same_bits import write_same_bits
from hemiola.builder.targets.kernels import compile_kernels
from hemiola.builder.targets.torch import CompiledSegment, Job, choose_forms
from hemiola.builder.targets.work import work_bytes
from hemiola.builder.token_ids import refuse_unknown_ids
from hemiola.builder.tokenizer import check_tokenizer, copy_tokenizer
from hemiola.builder.weights import write_weights
from hemiola.plugins import OPS
from hemiola.runtime.arch import ARCHS, name_of
from hemiola.runtime.manifest import Manifest, lossy
from hemiola.runtime.manifest_parts import GROUP, PTX, Kernels, Segment
from hemiola.runtime.outline import FORMAT, Limits, State
from hemiola.runtime.progress import HASHING, Report, silent

WEIGHTS = "weights.safetensors"
RANK_WEIGHTS = "weights.rank{}.safetensors"


@memory_in_one_line()
def build(path: Path, engine_dir: Path, options: Options, report: Report = silent) -> Manifest:
    """Write an engine of a checkpoint's folder, or of its name on the Hub. It appears complete or not at all;
    an engine that stood there before is replaced."""
    target, archs = targets.pick(options.target, ",".join(options.arch))
    arch, dtype = ARCHS[archs[0]], dtype_of(target, archs, options)
    refuse_options(options, target, archs)
    refuse_occupied(engine_dir)
    origin = locate(path, options.revision, report)
    report("checking", 0, 0)
    checkpoint = Checkpoint(origin.folder, _source(origin, options, report), options.act_dtype == "fp8")
    max_len = max_len_of(checkpoint, options)
    num_segments = SEGMENTS if options.same_bits else 1
    ranks = [
        models.load(
            checkpoint,
            torch.ops.hemiola,
            chunk_len=options.chunk_len,
            max_len=max_len,
            dtype=dtype,
            kv_dtype=options.kv_dtype,
            draft_vocab=options.draft_vocab,
            draft_head=options.draft_head,
            quantize_head=options.quantize_head,
            tells_best=_launches(target, arch.device),
            cut=Cut(options.tp, rank),
            num_segments=num_segments,
        )
        for rank in range(options.tp)
    ]
    model = ranks[0]
    refuse_weights(checkpoint, model, options, target, archs)
    drafts, limits = limits_of(model, options, max_len)
    refuse_drafts(model, drafts, options)
    if words := lossy(options.kv_dtype):
        print(f"warning: {words}", file=sys.stderr)
    refuse_unknown_ids(checkpoint.token_configs(model.config), model.vocab_size)
    has_tokenizer = check_tokenizer(origin.folder, model.vocab_size)
    with fresh(engine_dir) as folder:
        if has_tokenizer:
            copy_tokenizer(origin.folder, folder / "tokenizer")
        num_kv_heads = model.config.size("num_key_value_heads", 1)
        # before weights are read, which fails if their file is no longer the one that was hashed
        write_same_bits(folder, origin.folder, options, num_kv_heads, report)
        job = Job(folder, arch.device, archs, limits, report, options.tp)
        names: list[Name] = ["trunk", "draft"] if drafts == "mtp" else ["trunk"]
        graphs, segments, weights = _compile(ranks, names, target, job)
        kernels = _kernels(graphs, segments, job)
        absent = drawn(weights[0])
        rank_files = _write(weights, absent, folder, report)
        carried = (_hidden(model, limits),) if drafts == "mtp" else ()
        return Manifest(
            format=FORMAT,
            builder_version=hemiola.__version__,
            torch_version=torch.__version__,
            repo=origin.repo,
            commit=origin.commit,
            architecture=model.architecture,
            layers=model.layers,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            target=target.name,
            promise=target.promise,
            arch=",".join(archs),
            drafts=drafts,
            draft_vocab=options.draft_vocab,
            draft_head=options.draft_head,
            kv_dtype=options.kv_dtype,
            act_dtype="fp8" if options.act_dtype == "fp8" else name_of(dtype),
            eos_ids=checkpoint.eos_ids(model.config),
            limits=limits,
            tp=options.tp,
            sum_segments=num_segments,
            weights_file=WEIGHTS,
            rank_files=rank_files,
            drawn=absent,
            states=tuple(state for graph in graphs for state in graph.states) + carried,
            segments=tuple(segments),
            kernels=kernels,
            ops={node.op: OPS[node.op].schema() for segment in segments for node in segment.calls},
            sha256=_hashes(folder, report),
        ).write(folder)


def _source(origin: Origin, options: Options, report: Report) -> Callable[[Checkpoint], Tensors]:
    """Where tensors come from. A model that no family knows is refused before its weights are fetched."""

    def files(checkpoint: Checkpoint) -> Files:
        models.refuse_unknown(checkpoint)
        fetch_weights(origin, report)
        return Files(checkpoint)

    source = RandomTensors if options.random_weights else files
    return rounding(source, options.quantize) if options.quantize else source


def _compile(
    ranks: Sequence[models.Model], names: Sequence[Name], target: targets.Target, job: Job
) -> tuple[list[Graph], list[Segment], list[dict[str, Lazy]]]:
    """Graphs and segments of these names, which all ranks run, and each rank's weights of all of them."""
    graphs: list[Graph] = []
    segments: list[Segment] = []
    model, weights = ranks[0], [dict[str, Lazy]() for _ in ranks]
    for name in names:
        job.report(f"exporting {name}", 0, 0)
        graphs.append(export(model, name, job.limits))
        segment = model.trunk if name == "trunk" else model.draft
        assert segment is not None
        launches, segment_weights = _launches(target, job.device), model.weights(segment)
        compiled = target.compile(graphs[-1], segment_weights, job)
        made = _segment(compiled, graphs[-1], segment_weights)
        work = work_bytes(graphs[-1], made, job.limits) if launches else 0
        segments.append(made.model_copy(update={"work_bytes": work}))
        weights[0] = compiled.weights | weights[0]
        for rank, other in enumerate(ranks[1:], 1):
            part = other.trunk if name == "trunk" else other.draft
            assert part is not None
            given = ordered(graphs[-1], other.weights(part))
            weights[rank] |= choose_forms(graphs[-1], given, job.device)[1]
    return graphs, segments, weights


def _write(
    ranks: Sequence[dict[str, Lazy]], drawn: Collection[str], folder: Path, report: Report
) -> tuple[str, ...]:
    """Weights that stand in files: what all ranks have in one, the parts of each rank in one of its own."""
    stored = [{n: w for n, w in rank.items() if n not in drawn and n != GROUP} for rank in ranks]
    whole = {name: lazy for name, lazy in stored[0].items() if len(ranks) == 1 or not lazy.ranked}
    write_weights(whole, folder / WEIGHTS, report)
    files = [RANK_WEIGHTS.format(rank) for rank in range(len(ranks))] if len(ranks) > 1 else []
    for file, weights in zip(files, stored, strict=False):
        write_weights({n: lazy for n, lazy in weights.items() if n not in whole}, folder / file, report)
    return tuple(files)


def _launches(target: targets.Target, device: str) -> bool:
    """Whether all of a segment are our kernels and torch's, launched one by one."""
    return device == "cuda" and target.name == "torch"


def _kernels(graphs: Sequence[Graph], segments: Sequence[Segment], job: Job) -> tuple[Kernels, ...]:
    """What a GPU's process launches itself; TensorRT has the others' PTX in its engines."""
    if job.device == "cpu":
        return ()
    ops = {node.op for segment in segments for node in segment.calls if node.form != PTX}
    return compile_kernels(graphs, segments, ops, job)


def _segment(compiled: CompiledSegment, graph: Graph, sources: dict[str, Lazy]) -> Segment:
    names = (name for name in graph.weights if name in compiled.weights)
    return Segment(
        name=graph.name,
        weights=tuple(dict.fromkeys((*names, *compiled.weights))),
        layouts={name: str(lazy.layout) for name, lazy in sources.items() if lazy.layout},
        states=tuple(state.name for state in graph.states),
        inputs=graph.inputs,
        **{key: value for key, value in compiled._asdict().items() if key != "weights"},
    )


def _hidden(model: models.Model, limits: Limits) -> State:
    """What an MTP head needs of earlier steps: the trunk's hidden states since, and just before, an edge."""
    shape = (limits.chunk_len + limits.num_drafts + 1, model.hidden_size)
    return State(name="mtp.hidden", kind="slot", shape=shape, dtype=name_of(model.dtype))


def _hashes(folder: Path, report: Report) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [str(path.relative_to(folder)) for path in files]
    return dict(zip(names, hash_files(files, HASHING, report), strict=True))

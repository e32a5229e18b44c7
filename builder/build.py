"""The straight line from a checkpoint to an engine directory."""

import hashlib
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer

import hemiola
from hemiola.builder import models, targets
from hemiola.builder.checkpoint import TOKENIZER_FILES, Checkpoint, Files, Tensors, file_in, read_json
from hemiola.builder.cut import SEGMENTS, Cut
from hemiola.builder.formats.declared import SINCE
from hemiola.builder.formats.rounded import rounding
from hemiola.builder.graph import Graph, Name, export
from hemiola.builder.hub import Origin, fetch_weights, locate
from hemiola.builder.lazy import Lazy
from hemiola.builder.options import Options
from hemiola.builder.passes.fuse import ordered
from hemiola.builder.place import fresh, memory_in_one_line, refuse_occupied
from hemiola.builder.random_weights import RandomTensors, drawn
from hemiola.builder.targets.kernels import compile_kernels
from hemiola.builder.targets.torch import CompiledSegment, Job, choose_forms
from hemiola.builder.targets.work import work_bytes
from hemiola.builder.token_ids import refuse_unknown_ids
from hemiola.builder.weights import write_weights
from hemiola.plugins import OPS
from hemiola.plugins.attention.pages import FORMATS
from hemiola.runtime import manifest
from hemiola.runtime.arch import ARCHS, name_of
from hemiola.runtime.config import lossy
from hemiola.runtime.errors import Refused, one_line
from hemiola.runtime.manifest import GROUP, MOST_PAGES, MOST_STEP_TOKENS, Limits, Manifest, Segment, State
from hemiola.runtime.progress import HASHING, Report, silent
from hemiola.runtime.step.bucket import ROWS
from hemiola.runtime.tokenizer import panics_as_errors

WEIGHTS = "weights.safetensors"
RANK_WEIGHTS = "weights.rank{}.safetensors"
PART = 2**24  # bytes that are hashed between two reports


@memory_in_one_line()
def build(path: Path, engine_dir: Path, options: Options, report: Report = silent) -> Manifest:
    """Write an engine of a checkpoint's folder, or of its name on the Hub. It appears complete or not at all;
    an engine that stood there before is replaced."""
    target, archs = targets.pick(options.target, ",".join(options.arch))
    arch, dtype = ARCHS[archs[0]], _dtype(target, archs, options)
    _refuse_pages(options, target, archs)
    if options.draft_head is not None and target.name != "torch":
        said = f"--draft-head {options.draft_head} is not supported by --target {target.name}, only by torch"
        raise Refused("unsupported", "draft_head", said=said, way_out="leave one of them out")
    _refuse_narrow_inputs(options, target, archs)
    _refuse_ranks(options, target, archs)
    if arch.device == "cuda":
        _refuse_rows(options.max_rows, archs)
    refuse_occupied(engine_dir)
    origin = locate(path, options.revision, report)
    report("checking", 0, 0)
    checkpoint = Checkpoint(origin.folder, _source(origin, options, report), options.act_dtype == "fp8")
    max_len = _max_len(checkpoint, options)
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
            tells_best=_launches(target, arch.device),
            cut=Cut(options.tp, rank),
            num_segments=num_segments,
        )
        for rank in range(options.tp)
    ]
    model = ranks[0]
    if arch.device == "cuda":
        _refuse_odd_shares(model.vocab_size, options)
    _refuse_quantised(checkpoint, model, options, target, archs)
    _refuse_wide_inputs(checkpoint, model, options)
    drafts, limits = _limits(model, options, max_len)
    _refuse_draft_vocab(model, drafts, options)
    _refuse_draft_head(model, drafts, options)
    if model.draft is None and options.drafts is None:
        _warn_of_a_missing_head(model)
    if words := lossy(options.kv_dtype):
        print(f"warning: {words}", file=sys.stderr)
    refuse_unknown_ids(checkpoint.token_configs(model.config), model.vocab_size)
    has_tokenizer = _check_tokenizer(origin.folder, model.vocab_size)
    with fresh(engine_dir) as folder:
        if has_tokenizer:
            _copy_tokenizer(origin.folder, folder / "tokenizer")
        job = Job(folder, arch.device, archs, limits, report, options.tp)
        names: list[Name] = ["trunk", "draft"] if drafts == "mtp" else ["trunk"]
        graphs, segments, weights = _compile(ranks, names, target, job)
        kernels = _kernels(graphs, segments, job)
        absent = drawn(weights[0])
        rank_files = _write(weights, absent, folder, report)
        carried = (_hidden(model, limits),) if drafts == "mtp" else ()
        return Manifest(
            format=manifest.FORMAT,
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


def _refuse_quantised(
    checkpoint: Checkpoint,
    model: models.Model,
    options: Options,
    target: targets.Target,
    archs: Sequence[str],
) -> None:
    """Where nothing multiplies quantised weights; and a config that declares what no tensor is."""
    declared, where = checkpoint.declared, checkpoint.config.where
    head = model.draft.own_head if model.draft else None
    ours = head.weight if head and options.draft_head else None  # what --draft-head has rounded
    layouts = (lazy.layout for weight, lazy in model.sources.items() if weight is not ours)
    kinds = sorted({str(layout.kind) for layout in layouts if layout})
    if declared is None and not kinds:
        return
    names = declared.names if declared else ()
    what = f"{where}: weights are {' and '.join(names) or ', '.join(kinds)}"
    way_out = "leave --quantize out" if options.quantize else "use the bf16 checkpoint"
    if not target.takes_codes:
        said = f"{what}, which --target {target.name} does not multiply"
        field, way_out = "quantize" if options.quantize else "", f"build for --target torch, or {way_out}"
        raise Refused("unsupported", field, said=said, way_out=way_out)
    if not kinds:
        told = "random weights are plain without --quantize" if options.random_weights else "no tensor is"
        raise Refused("conflict", said=f"{what} by its config, but {told}", way_out=way_out)


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
        launches, own = _launches(target, job.device), model.weights(segment)
        compiled = target.compile(graphs[-1], own, job)
        made = _segment(compiled, graphs[-1], own)
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


def _kernels(graphs: Sequence[Graph], segments: Sequence[Segment], job: Job) -> tuple[manifest.Kernels, ...]:
    """What a GPU's process launches itself; TensorRT has the others' PTX in its engines."""
    if job.device == "cpu":
        return ()
    ops = {node.op for segment in segments for node in segment.calls if node.form != manifest.PTX}
    return compile_kernels(graphs, segments, ops, job)


def _segment(compiled: CompiledSegment, graph: Graph, sources: dict[str, Lazy]) -> Segment:
    own = (name for name in graph.weights if name in compiled.weights)
    return Segment(
        name=graph.name,
        weights=tuple(dict.fromkeys((*own, *compiled.weights))),
        layouts={name: str(lazy.layout) for name, lazy in sources.items() if lazy.layout},
        states=tuple(state.name for state in graph.states),
        inputs=graph.inputs,
        **{key: value for key, value in compiled._asdict().items() if key != "weights"},
    )


def _hidden(model: models.Model, limits: Limits) -> State:
    """What an MTP head needs of earlier steps: the trunk's hidden states since, and just before, an edge."""
    shape = (limits.chunk_len + limits.num_drafts + 1, model.hidden_size)
    return State(name="mtp.hidden", kind="slot", shape=shape, dtype=name_of(model.dtype))


def _dtype(target: targets.Target, archs: tuple[str, ...], options: Options) -> torch.dtype:
    """Of activations, weights, records and pages."""
    arch = ARCHS[archs[0]]
    dtype = getattr(torch, options.dtype) if options.dtype else arch.dtype
    if dtype is not arch.dtype and (arch.device, target.name) != ("cuda", "torch"):
        said = (
            f"--dtype {options.dtype} is not supported by --target {target.name} --arch {','.join(archs)},"
            f" only {name_of(arch.dtype)}"
        )
        raise Refused("unsupported", "dtype", said=said, way_out="leave --dtype out")
    return dtype


def _max_len(checkpoint: Checkpoint, options: Options) -> int:
    """Tokens of the longest request."""
    longest = checkpoint.text_config.size("max_position_embeddings")
    if options.max_len is not None and options.max_len > longest:
        said = f"--max-len {options.max_len} is more than max_position_embeddings"
        raise Refused("out_of_range", "max_len", said=said, way_out=f"use at most {longest}")
    return options.max_len or min(longest, 8192)


def _limits(
    model: models.Model, options: Options, max_len: int
) -> tuple[Literal["none", "ngram", "mtp"], Limits]:
    """Resolve what was left open, and refuse what does not fit together."""
    drafts = options.drafts or ("mtp" if model.draft else "none")
    if drafts == "mtp" and model.draft is None:
        said = "--drafts mtp: the checkpoint has no mtp.* tensors"
        raise Refused("unsupported", "drafts", said=said, way_out="use --drafts ngram or --drafts none")
    num_drafts = (0 if drafts == "none" else 3) if options.num_drafts is None else options.num_drafts
    if drafts == "none" and num_drafts:
        said = f"--num-drafts {num_drafts} with --drafts none"
        raise Refused("conflict", "num_drafts", said=said, way_out="use 0, or --drafts ngram or mtp")
    if drafts != "none" and not num_drafts:
        said = f"--num-drafts 0 with --drafts {drafts}"
        way_out = "use --num-drafts 1 or more, or --drafts none"
        raise Refused("conflict", "num_drafts", said=said, way_out=way_out)
    if max_len < options.page_len:
        said = f"--max-len {max_len} is less than one page of --page-len {options.page_len}"
        raise Refused("conflict", "max_len", said=said, way_out="change one of them")
    if num_drafts >= max_len:
        said = f"--num-drafts {num_drafts} is more than a request of --max-len {max_len} can take"
        raise Refused("conflict", "num_drafts", said=said, way_out=f"use at most {max_len - 1}")
    limits = Limits(
        max_len=max_len,
        max_rows=options.max_rows,
        max_step_tokens=options.max_step_tokens,
        num_drafts=num_drafts,
        page_len=options.page_len,
        chunk_len=options.chunk_len,
    )
    _refuse_short_steps(limits)
    if limits.num_pages > MOST_PAGES:
        said = (
            f"--max-rows {limits.max_rows} of --max-len {max_len} name {limits.num_pages} pages of"
            f" --page-len {limits.page_len}, at most {MOST_PAGES} can be named"
        )
        raise Refused("out_of_range", "max_rows", said=said, way_out="lower one of the former")
    return drafts, limits


def _refuse_short_steps(limits: Limits) -> None:
    """All rows may decode in one step, with all their drafts."""
    rows, drafts, each = limits.max_rows, limits.num_drafts, limits.num_drafts + 1
    most = MOST_STEP_TOKENS
    if rows * each > most:
        said = (
            f"--max-rows {rows} with {drafts} drafts each are {rows * each} tokens in one step, at most"
            f" {most} can be"
        )
        way_out = f"use --max-rows {most // each} at most, or fewer --num-drafts"
        raise Refused("out_of_range", "max_rows", said=said, way_out=way_out)
    if limits.max_step_tokens < rows * each:
        said = (
            f"--max-step-tokens {limits.max_step_tokens} cannot hold --max-rows {rows} with {drafts} drafts"
            " each"
        )
        raise Refused("conflict", "max_step_tokens", said=said, way_out=f"use at least {rows * each}")


def _refuse_draft_vocab(model: models.Model, drafts: str, options: Options) -> None:
    """A head to reduce, and fewer rows than it has."""
    if options.draft_vocab is not None and drafts != "mtp":
        said = f"--draft-vocab {options.draft_vocab} is about an MTP head, but drafts are {drafts}"
        raise Refused("conflict", "draft_vocab", said=said, way_out="leave it out")
    if options.draft_vocab is not None and options.draft_vocab >= model.vocab_size:
        said = f"--draft-vocab {options.draft_vocab} is no part of a vocabulary of {model.vocab_size}"
        raise Refused("out_of_range", "draft_vocab", said=said, way_out="use fewer, or leave it out")


def _refuse_draft_head(model: models.Model, drafts: str, options: Options) -> None:
    """A head to round, which is wide."""
    asked, layout = options.draft_head, model.sources[model.trunk.head.weight].layout
    if asked is not None and drafts != "mtp":
        said = f"--draft-head {asked} is about an MTP head, but drafts are {drafts}"
        raise Refused("conflict", "draft_head", said=said, way_out="leave it out")
    if asked is not None and layout is not None:
        said = f"--draft-head {asked}: the checkpoint's output head is quantised already ({layout})"
        raise Refused("conflict", "draft_head", said=said, way_out="leave it out")


def _warn_of_a_missing_head(model: models.Model) -> None:
    """transformers drops mtp.* when it saves a model, and leaves the config as it is."""
    config = model.config
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        if config.values.get(key):
            print(
                f"warning: {config.where} has {key} = {config.values[key]}, but the checkpoint has no mtp.*"
                " tensors: this engine will not draft; get the whole checkpoint, or ask for --drafts ngram or"
                " --drafts none",
                file=sys.stderr,
            )


def _refuse_ranks(options: Options, target: targets.Target, archs: Sequence[str]) -> None:
    if (options.tp > 1 or options.same_bits) and target.name != "torch":
        where = f"--target {target.name} --arch {','.join(archs)}"
        asked = f"--tp {options.tp}" if options.tp > 1 else "--same-bits"
        said = f"{asked} is not supported by {where} yet, only by --target torch"
        raise Refused("unsupported", "tp", options.tp, said=said, way_out="leave it out")


def _refuse_odd_shares(vocab_size: int, options: Options) -> None:
    """GPUs exchange logits in pairs."""
    for what, num in (("vocab_size", vocab_size), ("--draft-vocab", options.draft_vocab or 0)):
        if options.tp > 1 and num // options.tp % 2:
            said = f"--tp {options.tp} leaves a rank {num // options.tp} of {what} {num}, an odd number"
            raise Refused("conflict", "tp", options.tp, said=said, way_out="use fewer ranks")


def _refuse_rows(max_rows: int, archs: Sequence[str]) -> None:
    """Graphs there have sizes up to the last of ROWS; kernels are looked at for each number of rows."""
    if max_rows > ROWS[-1]:
        said = (
            f"--max-rows {max_rows} is more than --arch {','.join(archs)} can take in one step, which is"
            f" {ROWS[-1]}"
        )
        way_out = f"use at most {ROWS[-1]}, and an engine on another GPU for more requests at once"
        raise Refused("out_of_range", "max_rows", said=said, way_out=way_out)


def _refuse_pages(options: Options, target: targets.Target, archs: Sequence[str]) -> None:
    if options.page_len % options.chunk_len:
        said = f"--page-len {options.page_len} is not a multiple of --chunk-len {options.chunk_len}"
        way_out = "choose them so that pages end on chunk edges"
        raise Refused("conflict", "page_len", said=said, way_out=way_out)
    if options.kv_dtype != "auto":
        _refuse_narrow_pages(options.kv_dtype, target.name, archs)


def _refuse_narrow_pages(kv_dtype: str, target: str, archs: Sequence[str]) -> None:
    if target != "torch":
        said = f"--kv-dtype {kv_dtype} is not supported by --target {target}, only by torch"
        raise Refused("unsupported", "kv_dtype", said=said, way_out="leave one of them out")
    if FORMATS[kv_dtype].key_bits != 8:
        return
    if without := _without_e4m3(archs):
        said = f"--kv-dtype {kv_dtype}: {', '.join(without)} cannot convert e4m3, sm_89 and newer can"
        raise Refused("unsupported", "kv_dtype", said=said, way_out="leave one out")


def _refuse_narrow_inputs(options: Options, target: targets.Target, archs: Sequence[str]) -> None:
    if options.act_dtype != "fp8":
        return
    if target.name != "torch":
        said = f"--act-dtype fp8 is not supported by --target {target.name}, only by torch"
        raise Refused("unsupported", "act_dtype", said=said, way_out="leave one of them out")
    if without := _without_e4m3(archs):
        said = f"--act-dtype fp8: {', '.join(without)} cannot multiply e4m3, sm_89 and newer can"
        raise Refused("unsupported", "act_dtype", said=said, way_out="leave one out")


def _refuse_wide_inputs(checkpoint: Checkpoint, model: models.Model, options: Options) -> None:
    """Where none would be narrow."""
    layouts = [lazy.layout for lazy in model.sources.values() if lazy.layout]
    if options.act_dtype == "fp8" and not any(layout.inputs for layout in layouts):
        said = f"--act-dtype fp8: {checkpoint.config.where} says of no weight that its inputs are FP8"
        way_out = "leave it out, or round weights with --quantize fp8" if not layouts else "leave it out"
        raise Refused("conflict", "act_dtype", said=said, way_out=way_out)


def _without_e4m3(archs: Sequence[str]) -> list[str]:
    """GPUs among these whose instructions do not know it."""
    known = {name: capability for name in archs if (capability := ARCHS[name].capability)}
    return [name for name, (major, minor) in known.items() if 10 * major + minor < SINCE["FP8"]]


def _check_tokenizer(folder: Path, vocab_size: int) -> bool:
    """Whether there is one. It must be readable, and every id that it makes one that the model knows."""
    path = file_in(folder, TOKENIZER_FILES[0])
    if path is None:
        print(
            f"warning: {folder} has no tokenizer.json: this engine takes and gives token ids; for text,"
            " save the tokenizer in the tokenizers format and build again",
            file=sys.stderr,
        )
        return False
    try:
        with panics_as_errors():
            ids = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()
    except Exception as error:  # tokenizers raises nothing narrower
        said = f"{path} is not a tokenizer ({one_line(error)})"
        raise Refused("damaged", said=said, way_out="download it again") from None
    if max(ids, default=0) >= vocab_size:
        said = f"{path} has ids up to {max(ids)}, but vocab_size is {vocab_size}"
        raise Refused("conflict", said=said, way_out="correct one of them")
    return True


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """tokenizer.json, its config and the chat template, which older checkpoints keep inside the config."""
    folder.mkdir()
    for name in TOKENIZER_FILES:
        if found := file_in(source, name):
            shutil.copyfile(found, folder / name)
    config = file_in(source, "tokenizer_config.json")
    template = read_json(config).get("chat_template") if config else None
    if isinstance(template, list):  # several named ones
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    if isinstance(template, str) and not (folder / "chat_template.jinja").exists():
        try:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        except UnicodeEncodeError as error:
            said = f"{config}: chat_template is not Unicode ({one_line(error)})"
            raise Refused("malformed", said=said, way_out="correct it") from None


def _hashes(folder: Path, report: Report) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    total, done, found = sum(path.stat().st_size for path in files), 0, {}
    for path in files:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(PART):
                digest.update(part)
                done += len(part)
                report(HASHING, done, total)
        found[str(path.relative_to(folder))] = digest.hexdigest()
    return found

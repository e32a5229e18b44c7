"""The straight line from a checkpoint to an engine directory."""

import hashlib
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer

import hemiola
from hemiola.builder import models, targets
from hemiola.builder.checkpoint import Checkpoint, Files, Tensors, file_in, read_json
from hemiola.builder.formats.declared import SINCE, lacks
from hemiola.builder.formats.rounded import rounding
from hemiola.builder.fuse import fuse
from hemiola.builder.graph import Graph, Name, export
from hemiola.builder.lazy import Lazy
from hemiola.builder.options import Options
from hemiola.builder.place import fresh, memory_in_one_line, refuse_occupied
from hemiola.builder.random_weights import RandomTensors, drawn
from hemiola.builder.targets.kernels import compile_kernels
from hemiola.builder.targets.torch import CompiledSegment, Job
from hemiola.builder.targets.work import work_bytes
from hemiola.builder.token_ids import refuse_unknown_ids
from hemiola.builder.weights import write_weights
from hemiola.plugins import OPS
from hemiola.plugins.spec import E4M3
from hemiola.runtime import manifest
from hemiola.runtime.arch import ARCHS, name_of
from hemiola.runtime.errors import Refused, one_line
from hemiola.runtime.manifest import MOST_PAGES, MOST_STEP_TOKENS, Limits, Manifest, Segment, State
from hemiola.runtime.progress import HASHING, Report, silent
from hemiola.runtime.step.bucket import ROWS

WEIGHTS = "weights.safetensors"
PART = 2**24  # bytes that are hashed between two reports
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
KV_DTYPES = {"auto": None, "fp8": E4M3}


@memory_in_one_line()
def build(path: Path, engine_dir: Path, options: Options, report: Report = silent) -> Manifest:
    """Write an engine. It appears complete or not at all; an engine that stood there before is replaced."""
    target, archs = targets.pick(options.target, ",".join(options.arch))
    arch, dtype = ARCHS[archs[0]], _dtype(target, archs, options)
    _refuse_pages(options, target, archs)
    if arch.device == "cuda":
        _refuse_rows(options.max_rows, archs)
    refuse_occupied(engine_dir)
    report("checking", 0, 0)
    checkpoint = Checkpoint(path, _source(options))
    max_len = _max_len(checkpoint, options)
    model = models.load(
        checkpoint,
        torch.ops.hemiola,
        chunk_len=options.chunk_len,
        max_len=max_len,
        dtype=dtype,
        kv_dtype=KV_DTYPES[options.kv_dtype],
        draft_vocab=options.draft_vocab,
        tells_best=_launches(target, arch.device),
    )
    _refuse_quantised(checkpoint, model, options, target, archs)
    drafts, limits = _limits(model, options, max_len)
    _refuse_draft_vocab(model, drafts, options)
    if model.draft is None and options.drafts is None:
        _warn_of_a_missing_head(model)
    refuse_unknown_ids(checkpoint.token_configs(model.config), model.vocab_size)
    has_tokenizer = _check_tokenizer(path, model.vocab_size)
    with fresh(engine_dir) as folder:
        if has_tokenizer:
            _copy_tokenizer(path, folder / "tokenizer")
        job = Job(folder, arch.device, archs, limits, report)
        names: list[Name] = ["trunk", "draft"] if drafts == "mtp" else ["trunk"]
        graphs, segments, weights = _compile(model, names, target, job)
        kernels = _kernels(graphs, segments, job)
        absent = drawn(weights)
        write_weights({n: w for n, w in weights.items() if n not in absent}, folder / WEIGHTS, report)
        carried = (_hidden(model, limits),) if drafts == "mtp" else ()
        return Manifest(
            format=manifest.FORMAT,
            builder_version=hemiola.__version__,
            torch_version=torch.__version__,
            architecture=model.architecture,
            layers=model.layers,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            target=target.name,
            promise=target.promise,
            arch=",".join(archs),
            drafts=drafts,
            draft_vocab=options.draft_vocab,
            eos_ids=checkpoint.eos_ids(model.config),
            limits=limits,
            weights_file=WEIGHTS,
            drawn=absent,
            states=tuple(state for graph in graphs for state in graph.states) + carried,
            segments=tuple(segments),
            kernels=kernels,
            ops={node.op: OPS[node.op].schema() for segment in segments for node in segment.nodes},
            sha256=_hashes(folder, report),
        ).write(folder)


def _source(options: Options) -> Callable[[Checkpoint], Tensors]:
    """Where tensors come from."""
    source = RandomTensors if options.random_weights else Files
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
    kinds = sorted({str(lazy.layout.kind) for lazy in model.sources.values() if lazy.layout})
    if declared is None and not kinds:
        return
    names = declared.names if declared else ()
    what = f"{where}: weights are {' and '.join(names) or ', '.join(kinds)}"
    way_out = "leave --quantize out" if options.quantize else "use the bf16 checkpoint"
    if ARCHS[archs[0]].device != "cpu" or target.name != "torch":
        raise Refused(
            f"{what}, which --target {target.name} --arch {','.join(archs)} does not multiply yet;"
            f"{lacks(names, archs)} build for --target torch --arch cpu, or {way_out}"
        )
    if not kinds:
        told = "random weights are plain without --quantize" if options.random_weights else "no tensor is"
        raise Refused(f"{what} by its config, but {told}; {way_out}")


def _compile(
    model: models.Model, names: Sequence[Name], target: targets.Target, job: Job
) -> tuple[list[Graph], list[Segment], dict[str, Lazy]]:
    """Graphs and segments of these names, and the weights of all of them."""
    graphs: list[Graph] = []
    segments: list[Segment] = []
    weights: dict[str, Lazy] = {}
    for name in names:
        job.report(f"exporting {name}", 0, 0)
        graphs.append(export(model, name, job.limits))
        segment = model.trunk if name == "trunk" else model.draft
        assert segment is not None
        launches, own = _launches(target, job.device), model.weights(segment)
        compiled = target.compile(graphs[-1], fuse(graphs[-1], own) if launches else own, job)
        work = work_bytes(graphs[-1], compiled.nodes, job.limits) if launches else 0
        segments.append(_segment(compiled, graphs[-1], own, work))
        weights = compiled.weights | weights
    return graphs, segments, weights


def _launches(target: targets.Target, device: str) -> bool:
    """Whether all of a segment are our kernels and torch's, launched one by one."""
    return device == "cuda" and target.name == "torch"


def _kernels(graphs: Sequence[Graph], segments: Sequence[Segment], job: Job) -> tuple[manifest.Kernels, ...]:
    """What a GPU's process launches itself; TensorRT has the others' PTX in its engines."""
    if job.device == "cpu":
        return ()
    ops = {node.op for segment in segments for node in segment.nodes if node.form != manifest.PTX}
    return compile_kernels(graphs, ops, job)


def _segment(compiled: CompiledSegment, graph: Graph, sources: dict[str, Lazy], work: int) -> Segment:
    return Segment(
        name=graph.name,
        work_bytes=work,
        weights=tuple(name for name in graph.weights if name in compiled.weights),
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
    if options.kv_dtype == "fp8":
        _refuse_e4m3(target.name, archs)


def _refuse_e4m3(target: str, archs: Sequence[str]) -> None:
    if target != "torch":
        said = f"--kv-dtype fp8 is not supported by --target {target}, only by torch"
        raise Refused("unsupported", "kv_dtype", said=said, way_out="leave one of them out")
    known = {name: capability for name in archs if (capability := ARCHS[name].capability)}
    without = [name for name, (major, minor) in known.items() if 10 * major + minor < SINCE["FP8"]]
    if without:
        said = f"--kv-dtype fp8: {', '.join(without)} cannot convert e4m3, sm_89 and newer can"
        raise Refused("unsupported", "kv_dtype", said=said, way_out="leave one out")


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
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if isinstance(template, str) and not (folder / "chat_template.jinja").exists():
        (folder / "chat_template.jinja").write_text(template)


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

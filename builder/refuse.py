"""What no engine can be, and what an engine is where options leave it open; before any work."""

import sys
from collections.abc import Sequence
from typing import Literal

import torch

from hemiola.builder import models, targets
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.formats.declared import SINCE
from hemiola.builder.options import Options
from hemiola.plugins.attention.pages import FORMATS
from hemiola.runtime.arch import ARCHS
from hemiola.runtime.errors import Refused, shown
from hemiola.runtime.manifest import MOST_PAGES
from hemiola.runtime.options import MOST_STEP_TOKENS
from hemiola.runtime.outline import Limits
from hemiola.runtime.step.bucket import ROWS


def refuse_options(options: Options, target: targets.Target, archs: Sequence[str]) -> None:
    """What needs no checkpoint to be seen."""
    _refuse_pages(options, target, archs)
    if options.draft_head is not None and target.name != "torch":
        message = (
            f"--draft-head {options.draft_head} is not supported by --target {target.name}, only by torch"
        )
        raise Refused("unsupported", "draft_head", message=message, way_out="leave one of them out")
    if options.quantize_head is not None and not target.takes_codes:
        message = f"--quantize-head {options.quantize_head} is not supported by --target {target.name}"
        raise Refused("unsupported", "quantize_head", message=message, way_out="leave one of them out")
    _refuse_narrow_inputs(options, target, archs)
    _refuse_ranks(options, target, archs)
    if ARCHS[archs[0]].device == "cuda":
        _refuse_rows(options.max_rows, archs)


def refuse_weights(
    checkpoint: Checkpoint,
    model: models.Model,
    options: Options,
    target: targets.Target,
    archs: Sequence[str],
) -> None:
    if ARCHS[archs[0]].device == "cuda":
        _refuse_odd_shares(model.vocab_size, options)
    _refuse_quantised(checkpoint, model, options, target, archs)
    _refuse_wide_inputs(checkpoint, model, options)


def refuse_drafts(model: models.Model, drafts: str, options: Options) -> None:
    """What a drafting head is asked for that it cannot be."""
    _refuse_draft_vocab(model, drafts, options)
    _refuse_draft_head(model, drafts, options)
    if model.draft is None and options.drafts is None:
        _warn_of_a_missing_head(model)


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
    ours = {head.weight} if head and options.draft_head else set()  # heads that options have rounded
    ours |= {model.trunk.head.weight} if options.quantize_head else set()
    layouts = (lazy.layout for weight, lazy in model.sources.items() if weight not in ours)
    kinds = sorted({str(layout.kind) for layout in layouts if layout})
    if declared is None and not kinds:
        return
    names = declared.names if declared else ()
    what = f"{where}: weights are {' and '.join(names) or ', '.join(kinds)}"
    way_out = "leave --quantize out" if options.quantize else "use the bf16 checkpoint"
    if not target.takes_codes:
        message = f"{what}, which --target {target.name} does not multiply"
        field, way_out = "quantize" if options.quantize else "", f"build for --target torch, or {way_out}"
        raise Refused("unsupported", field, message=message, way_out=way_out)
    if not kinds:
        told = "random weights are plain without --quantize" if options.random_weights else "no tensor is"
        raise Refused("conflict", message=f"{what} by its config, but {told}", way_out=way_out)


def dtype_of(target: targets.Target, archs: tuple[str, ...], options: Options) -> torch.dtype:
    """Of activations, weights, records and pages."""
    arch = ARCHS[archs[0]]
    dtype = options.dtype or arch.dtype
    if dtype != arch.dtype and (arch.device, target.name) != ("cuda", "torch"):
        message = (
            f"--dtype {options.dtype} is not supported by --target {target.name} --arch {','.join(archs)},"
            f" only {arch.dtype}"
        )
        raise Refused("unsupported", "dtype", message=message, way_out="leave --dtype out")
    return getattr(torch, dtype)


def max_len_of(checkpoint: Checkpoint, options: Options) -> int:
    """Tokens of the longest request."""
    longest = checkpoint.text_config.size("max_position_embeddings")
    if options.max_len is not None and options.max_len > longest:
        message = f"--max-len {options.max_len} is more than max_position_embeddings"
        raise Refused("out_of_range", "max_len", message=message, way_out=f"use at most {longest}")
    return options.max_len or min(longest, 8192)


def limits_of(
    model: models.Model, options: Options, max_len: int
) -> tuple[Literal["none", "ngram", "mtp"], Limits]:
    """Resolve what was left open, and refuse what does not fit together."""
    drafts = options.drafts or ("mtp" if model.draft else "none")
    if drafts == "mtp" and model.draft is None:
        message = "--drafts mtp: the checkpoint has no mtp.* tensors"
        raise Refused("unsupported", "drafts", message=message, way_out="use --drafts ngram or --drafts none")
    num_drafts = (0 if drafts == "none" else 3) if options.num_drafts is None else options.num_drafts
    if drafts == "none" and num_drafts:
        message = f"--num-drafts {num_drafts} with --drafts none"
        raise Refused("conflict", "num_drafts", message=message, way_out="use 0, or --drafts ngram or mtp")
    if drafts != "none" and not num_drafts:
        message = f"--num-drafts 0 with --drafts {drafts}"
        way_out = "use --num-drafts 1 or more, or --drafts none"
        raise Refused("conflict", "num_drafts", message=message, way_out=way_out)
    if max_len < options.page_len:
        message = f"--max-len {max_len} is less than one page of --page-len {options.page_len}"
        raise Refused("conflict", "max_len", message=message, way_out="change one of them")
    if num_drafts >= max_len:
        message = f"--num-drafts {num_drafts} is more than a request of --max-len {max_len} can take"
        raise Refused("conflict", "num_drafts", message=message, way_out=f"use at most {max_len - 1}")
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
        message = (
            f"--max-rows {limits.max_rows} of --max-len {max_len} name {limits.num_pages} pages of"
            f" --page-len {limits.page_len}, at most {MOST_PAGES} can be named"
        )
        raise Refused("out_of_range", "max_rows", message=message, way_out="lower one of the former")
    return drafts, limits


def _refuse_short_steps(limits: Limits) -> None:
    """All rows may decode in one step, with all their drafts."""
    rows, drafts, each = limits.max_rows, limits.num_drafts, limits.num_drafts + 1
    limit = MOST_STEP_TOKENS
    if rows * each > limit:
        message = (
            f"--max-rows {rows} with {drafts} drafts each are {rows * each} tokens in one step, at most"
            f" {limit} can be"
        )
        way_out = f"use --max-rows {limit // each} at most, or fewer --num-drafts"
        raise Refused("out_of_range", "max_rows", message=message, way_out=way_out)
    if limits.max_step_tokens < rows * each:
        message = (
            f"--max-step-tokens {limits.max_step_tokens} cannot hold --max-rows {rows} with {drafts} drafts"
            " each"
        )
        raise Refused("conflict", "max_step_tokens", message=message, way_out=f"use at least {rows * each}")


def _refuse_draft_vocab(model: models.Model, drafts: str, options: Options) -> None:
    """A head to reduce, and fewer rows than it has."""
    if options.draft_vocab is not None and drafts != "mtp":
        message = f"--draft-vocab {options.draft_vocab} is about an MTP head, but drafts are {drafts}"
        raise Refused("conflict", "draft_vocab", message=message, way_out="leave it out")
    if options.draft_vocab is not None and options.draft_vocab >= model.vocab_size:
        message = f"--draft-vocab {options.draft_vocab} is no part of a vocabulary of {model.vocab_size}"
        raise Refused("out_of_range", "draft_vocab", message=message, way_out="use fewer, or leave it out")


def _refuse_draft_head(model: models.Model, drafts: str, options: Options) -> None:
    """A head to round, which is wide."""
    asked, layout = options.draft_head, model.sources[model.trunk.head.weight].layout
    if asked is not None and drafts != "mtp":
        message = f"--draft-head {asked} is about an MTP head, but drafts are {drafts}"
        raise Refused("conflict", "draft_head", message=message, way_out="leave it out")
    if asked is not None and layout is not None:
        message = f"--draft-head {asked}: the output head is quantised already ({layout})"
        raise Refused("conflict", "draft_head", message=message, way_out="leave it out")


def _warn_of_a_missing_head(model: models.Model) -> None:
    """transformers drops mtp.* when it saves a model, and leaves the config as it is."""
    config = model.config
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        if config.values.get(key):
            print(
                f"warning: {config.where} has {key} = {shown(config.values[key])}, but the checkpoint has no"
                " mtp.* tensors: this engine will not draft; get the whole checkpoint, or ask for --drafts"
                " ngram or --drafts none",
                file=sys.stderr,
            )


def _refuse_ranks(options: Options, target: targets.Target, archs: Sequence[str]) -> None:
    if (options.tp > 1 or options.same_bits) and target.name != "torch":
        where = f"--target {target.name} --arch {','.join(archs)}"
        field, asked = ("tp", f"--tp {options.tp}") if options.tp > 1 else ("same_bits", "--same-bits")
        message = f"{asked} is not supported by {where} yet, only by --target torch"
        raise Refused("unsupported", field, getattr(options, field), message=message, way_out="leave it out")


def _refuse_odd_shares(vocab_size: int, options: Options) -> None:
    """GPUs exchange logits in pairs."""
    for what, num in (("vocab_size", vocab_size), ("--draft-vocab", options.draft_vocab or 0)):
        if options.tp > 1 and num // options.tp % 2:
            message = f"--tp {options.tp} leaves a rank {num // options.tp} of {what} {num}, an odd number"
            raise Refused("conflict", "tp", options.tp, message=message, way_out="use fewer ranks")


def _refuse_rows(max_rows: int, archs: Sequence[str]) -> None:
    """Graphs there have sizes up to the last of ROWS; kernels are looked at for each number of rows."""
    if max_rows > ROWS[-1]:
        message = (
            f"--max-rows {max_rows} is more than --arch {','.join(archs)} can take in one step, which is"
            f" {ROWS[-1]}"
        )
        way_out = f"use at most {ROWS[-1]}, and an engine on another GPU for more requests at once"
        raise Refused("out_of_range", "max_rows", message=message, way_out=way_out)


def _refuse_pages(options: Options, target: targets.Target, archs: Sequence[str]) -> None:
    if options.page_len % options.chunk_len:
        message = f"--page-len {options.page_len} is not a multiple of --chunk-len {options.chunk_len}"
        way_out = "choose them so that pages end on chunk edges"
        raise Refused("conflict", "page_len", message=message, way_out=way_out)
    if options.kv_dtype != "auto":
        _refuse_narrow_pages(options.kv_dtype, target.name, archs)


def _refuse_narrow_pages(kv_dtype: str, target: str, archs: Sequence[str]) -> None:
    if target != "torch":
        message = f"--kv-dtype {kv_dtype} is not supported by --target {target}, only by torch"
        raise Refused("unsupported", "kv_dtype", message=message, way_out="leave one of them out")
    if FORMATS[kv_dtype].key_bits != 8:
        return
    if without := _without_e4m3(archs):
        message = f"--kv-dtype {kv_dtype}: {', '.join(without)} cannot convert e4m3, sm_89 and newer can"
        raise Refused("unsupported", "kv_dtype", message=message, way_out="leave one out")


def _refuse_narrow_inputs(options: Options, target: targets.Target, archs: Sequence[str]) -> None:
    if options.act_dtype != "fp8":
        return
    if target.name != "torch":
        message = f"--act-dtype fp8 is not supported by --target {target.name}, only by torch"
        raise Refused("unsupported", "act_dtype", message=message, way_out="leave one of them out")
    if without := _without_e4m3(archs):
        message = f"--act-dtype fp8: {', '.join(without)} cannot multiply e4m3, sm_89 and newer can"
        raise Refused("unsupported", "act_dtype", message=message, way_out="leave one out")


def _refuse_wide_inputs(checkpoint: Checkpoint, model: models.Model, options: Options) -> None:
    """Where none would be narrow."""
    layouts = [lazy.layout for lazy in model.sources.values() if lazy.layout]
    if options.act_dtype == "fp8" and not any(layout.inputs for layout in layouts):
        message = f"--act-dtype fp8: {checkpoint.config.where} says of no weight that its inputs are FP8"
        way_out = "leave it out, or round weights with --quantize fp8" if not layouts else "leave it out"
        raise Refused("conflict", "act_dtype", message=message, way_out=way_out)


def _without_e4m3(archs: Sequence[str]) -> list[str]:
    """GPUs among these whose instructions do not know it."""
    known = {name: capability for name in archs if (capability := ARCHS[name].capability)}
    return [name for name, (major, minor) in known.items() if 10 * major + minor < SINCE["FP8"]]

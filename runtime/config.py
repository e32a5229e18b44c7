"""Options of a running engine, and the pure function that turns "auto" into numbers."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest import Manifest, State

Auto = Literal["auto"]
EXACT_TILE = 32  # in exact numerics a step's tokens are padded to a multiple of this


class Options(BaseModel):
    """Frozen and strictly typed; what does not fit raises Refused with one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise Refused(_one_line(error, list(type(self).model_fields))) from None


def _one_line(error: ValidationError, names: list[str]) -> str:
    first = error.errors()[0]
    name = first["loc"][0] if first["loc"] else "options"
    if first["type"] == "extra_forbidden":
        return f"unknown option {name!r}; the options are {', '.join(names)}"
    reason = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return f"{name} is {first['input']!r}: {reason}"


class ServeConfig(Options):
    """What may be chosen when an engine is started. Lengths are in tokens."""

    max_len: int | Auto = Field(
        default="auto", description="longest prompt + output; auto: as the engine was built"
    )
    max_rows: int | Auto = Field(
        default="auto", description="requests in one step; auto: as the engine was built"
    )
    max_step_tokens: int | Auto = Field(
        "auto", description="tokens in one step; auto: as the engine was built"
    )
    num_pages: int | Auto = Field(
        default="auto", description="pages of keys and values, the dump page included"
    )
    cache_bytes: int | Auto = Field(
        "auto", description="bytes for pages and slots; auto: see memory_fraction"
    )
    memory_fraction: float = Field(
        default=0.5, gt=0, le=1, description="share of the free memory that auto may take"
    )


class Resolved(Options):
    """A ServeConfig without "auto": the sizes that the runtime's parts are made with."""

    max_len: int
    max_rows: int
    max_step_tokens: int
    num_pages: int  # the dump page included
    num_slots: int  # the dump slot included
    page_len: int
    chunk_len: int
    num_drafts: int
    pad_tokens: int  # a step's tokens are padded to a multiple of this


def state_bytes(states: Sequence[State], kind: str) -> int:
    """Bytes of one page or one slot over all layers."""
    sizes = (torch.Size(s.shape).numel() * getattr(torch, s.dtype).itemsize for s in states if s.kind == kind)
    return sum(sizes)


def resolve(config: ServeConfig, manifest: Manifest, free_bytes: int) -> Resolved:
    """The sizes to run with: what was asked, bounded by the engine's limits and by the memory given."""
    limits = manifest.limits
    pad_tokens = EXACT_TILE if manifest.numerics == "exact" else 1
    max_len = _bounded("max_len", config.max_len, 2, limits.max_len)
    max_rows = _bounded("max_rows", config.max_rows, 1, limits.max_rows)
    max_step_tokens = _bounded("max_step_tokens", config.max_step_tokens, 1, limits.max_step_tokens)
    if max_rows > max_step_tokens:
        raise Refused(
            f"max_rows is {max_rows}, max_step_tokens is {max_step_tokens}: each row needs a token per step;"
            f" lower max_rows or raise max_step_tokens"
        )
    return Resolved(
        max_len=max_len,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        num_pages=_num_pages(config, manifest, max_len, max_rows, free_bytes),
        num_slots=max_rows + 1,
        page_len=limits.page_len,
        chunk_len=limits.chunk_len,
        num_drafts=limits.num_drafts,
        pad_tokens=pad_tokens,
    )


def _bounded(name: str, value: int | Auto, least: int, most: int) -> int:
    if value == "auto":
        return most
    if value < least:
        raise Refused(f"{name} is {value}, it must be at least {least}")
    if value > most:
        flag = name.replace("_", "-")
        raise Refused(f"{name} is {value}, the engine was built for {most}; rebuild with --{flag} {value}")
    return value


def _num_pages(config: ServeConfig, manifest: Manifest, max_len: int, max_rows: int, free_bytes: int) -> int:
    per_request = -(-max_len // manifest.limits.page_len)
    wanted = max_rows * per_request + 1
    if config.num_pages != "auto":
        if config.cache_bytes != "auto":
            raise Refused("num_pages and cache_bytes were both given; choose one")
        num_pages, source = config.num_pages, f"num_pages is {config.num_pages}"
    else:
        given = (
            int(free_bytes * config.memory_fraction) if config.cache_bytes == "auto" else config.cache_bytes
        )
        left = given - (max_rows + 1) * state_bytes(manifest.states, "slot")
        page_bytes = state_bytes(manifest.states, "page")
        fitting = left // page_bytes if page_bytes else (wanted if left >= 0 else 0)
        num_pages, source = (
            min(wanted, fitting),
            f"the cache may take {given} bytes, room for {max(fitting, 0)} pages",
        )
    if num_pages < per_request + 1:
        raise Refused(
            f"{source}, but one request of max_len={max_len} needs {per_request + 1} with the dump page;"
            f" raise num_pages, cache_bytes or memory_fraction, or lower max_len or max_rows"
        )
    return num_pages

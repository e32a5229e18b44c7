"""What a user may choose when an engine is built."""

from typing import Literal

from pydantic import Field, field_validator

from hemiola.runtime.api import Strict
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest import MOST_STEP_TOKENS


class Options(Strict):
    """None is decided from the checkpoint. Lengths are in tokens."""

    target: str = Field(
        default="torch", description="what runs the engine: torch, tensorrt, tensorrt-rtx, onnxruntime"
    )
    arch: tuple[str, ...] = Field(
        default=("cpu",),
        description="what it runs on: cpu (if none is named), or kinds of GPUs: sm_89,sm_120",
    )
    dtype: Literal["bfloat16", "float32"] | None = Field(
        default=None,
        description="what it computes in; default: float32 on a CPU, bfloat16 on GPUs, where float32 is for"
        " comparing tokens with transformers' in fp32, not for speed",
    )
    max_len: int | None = Field(
        default=None,
        ge=1,
        lt=2**31,
        description="longest prompt + output; default: what the checkpoint knows, at most 8192",
    )
    max_rows: int = Field(
        default=64, ge=1, le=MOST_STEP_TOKENS, description="requests in one step; on GPUs at most 1024"
    )
    max_step_tokens: int = Field(
        default=2048, ge=1, le=MOST_STEP_TOKENS, description="tokens in one step, at most 262144"
    )
    drafts: Literal["none", "ngram", "mtp"] | None = Field(
        default=None, description="who proposes tokens; default: mtp if the checkpoint has it"
    )
    num_drafts: int | None = Field(
        default=None, ge=0, description="most drafts of one request in one step; default: 3, or 0 without"
    )
    draft_vocab: int | None = Field(
        default=None,
        ge=1,
        description="MTP drafts are chosen among so many of the lowest token ids; default: among all",
    )
    kv_dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="numbers in pages of keys and values: auto (the engine's own) or fp8 (e4m3, a byte each)",
    )
    quantize: Literal["fp8", "int8", "int4", "nvfp4"] | None = Field(
        default=None,
        description="round weights of dense layers and experts to 8 or 4 bits; output heads and routers stay",
    )
    page_len: int = Field(default=64, ge=1, description="tokens in a page of keys and values")
    random_weights: bool = Field(
        default=False,
        description="random numbers for CHECKPOINT/config.json: an engine of its dimensions, to measure",
    )
    chunk_len: int = Field(default=16, ge=1, description="tokens between two edges of the recurrence grid")

    @field_validator("arch", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """`sm_90,sm_120` as on the command line, in any order, each once."""
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
            return value
        names = [name for part in parts for word in part.split(",") for name in word.split() or [""]]
        if not all(names):
            way_out = "give cpu, or kinds of GPUs such as sm_89,sm_120"
            raise Refused("missing", "arch", ",".join(parts), "where a name is empty", way_out)
        return tuple(dict.fromkeys(names))

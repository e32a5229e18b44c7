"""What a user may choose when an engine is built."""

from typing import Literal

from pydantic import Field, field_validator

from hemiola.runtime.api import Strict
from hemiola.runtime.errors import Refused
from hemiola.runtime.options import MOST_STEP_TOKENS, TP_SIZES, KvDtype


class Options(Strict):
    """None is decided from the checkpoint. Lengths are in tokens."""

    revision: str | None = Field(
        default=None,
        description="branch, tag or commit of a CHECKPOINT that is a name on the Hub; default: main",
    )
    target: str = Field(
        default="torch", description="what runs the engine: torch, tensorrt, tensorrt-rtx, onnxruntime"
    )
    arch: tuple[str, ...] = Field(
        default=("cpu",),
        description="device: cpu (default), or one or more GPU architectures: sm_89,sm_120",
    )
    dtype: Literal["bfloat16", "float32"] | None = Field(
        default=None,
        description="numbers that the engine computes in; default: float32 on a CPU, bfloat16 on a GPU."
        " float32 on a GPU is slow: it is for comparing tokens with those of transformers in fp32",
    )
    max_len: int | None = Field(
        default=None,
        ge=1,
        lt=2**31,
        description="maximum of prompt and output tokens together; default: the checkpoint's, at most 8192",
    )
    max_rows: int = Field(
        default=64,
        ge=1,
        le=MOST_STEP_TOKENS,
        description="maximum of requests in one step; on GPUs at most 1024",
    )
    max_step_tokens: int = Field(
        default=2048, ge=1, le=MOST_STEP_TOKENS, description="maximum of tokens in one step, at most 262144"
    )
    drafts: Literal["none", "ngram", "mtp"] | None = Field(
        default=None, description="what proposes drafts; default: mtp if the checkpoint has it"
    )
    num_drafts: int | None = Field(
        default=None,
        ge=0,
        description="maximum of drafts per request and step; default: 3, or 0 without drafts",
    )
    draft_vocab: int | None = Field(
        default=None,
        ge=1,
        description="choose MTP drafts among this many of the lowest token ids; default: among all",
    )
    draft_head: Literal["fp8", "int4"] | None = Field(
        default=None,
        description="MTP drafts read a copy of the output head in 8 or 4 bits; tokens and logits stay the"
        " same",
    )
    kv_dtype: KvDtype = Field(
        default="auto",
        description="numbers in pages of keys and values: auto (the engine's own), fp8 (e4m3, a byte each),"
        " or vLLM's codes of 8, 4 and 3 bits: turboquant_k8v4, turboquant_4bit_nc, turboquant_k3v4_nc,"
        " turboquant_3bit_nc",
    )
    quantize: Literal["fp8", "int8", "int4", "nvfp4"] | None = Field(
        default=None,
        description="round weights of dense layers and experts, but not of heads and routers, to 8 or 4 bits",
    )
    quantize_head: Literal["fp8", "int8", "int4"] | None = Field(
        default=None, description="round the output head, too, to 8 or 4 bits; tokens and logits change"
    )
    act_dtype: Literal["auto", "fp8", "bf16"] = Field(
        default="auto",
        description="inputs of FP8 layers: auto and bf16 do not round them; fp8 rounds them to e4m3 where the"
        " checkpoint asks for it, or with --quantize fp8",
    )
    tp: int = Field(
        default=1,
        description="ranks: processes that compute each step together, each with a part of the weights: 1, 2,"
        " 4 or 8",
    )
    same_bits: bool = Field(
        default=False,
        description="give the same bits for every --tp: sums are added in 8 segments, which is slower",
    )
    page_len: int = Field(default=64, ge=1, description="tokens in a page of keys and values")
    random_weights: bool = Field(
        default=False,
        description="random weights with the dimensions of CHECKPOINT/config.json, to measure speed",
    )
    chunk_len: int = Field(default=16, ge=1, description="tokens between two edges, where states are stored")

    @field_validator("tp")
    @classmethod
    def _known_size(cls, value: int) -> int:
        if value not in TP_SIZES:
            raise Refused("out_of_range", "tp", value, way_out="give 1, 2, 4 or 8")
        return value

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

"""What may be chosen when an engine is built or opened. Help waits for this file: it imports no torch."""

from typing import Literal

from pydantic import Field

from hemiola.runtime.api import Strict

Auto = Literal["auto"]
Drafts = Literal["none", "ngram", "mtp"]
KvDtype = Literal[  # plugins/attention/pages.py
    "auto",
    "fp8",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
]
TP_SIZES = (1, 2, 4, 8)  # how many ranks an engine may have
# The longest text of the models here in one piece. Twice as many would fit no launch on a GPU: of conv's
# programs, 65,535 at most, each has 8 tokens.
MOST_STEP_TOKENS = 2**18


class ServeConfig(Strict):
    """What may be chosen when an engine is started. Lengths are in tokens."""

    max_len: int | Auto = Field(
        default="auto",
        description="maximum of prompt and output tokens together; auto: as the engine was built",
    )
    max_rows: int | Auto = Field(
        default="auto", description="maximum of requests in one step; auto: as the engine was built"
    )
    max_step_tokens: int | Auto = Field(
        "auto", description="maximum of tokens in one step; auto: as the engine was built"
    )
    num_pages: int | Auto = Field(
        default="auto", description="pages of keys and values, including one for padding"
    )
    cache_bytes: int | Auto = Field(
        "auto", description="bytes for pages and slots; auto: see memory_fraction"
    )
    drafts: Drafts | Auto = Field("auto", description="what proposes drafts; auto: as the engine was built")
    num_drafts: int | Auto = Field("auto", description="maximum of drafts per row and step; auto: as built")
    adaptive_drafts: bool = Field(
        True, description="propose fewer drafts when more would be slower; false: always num_drafts"
    )
    ngram_min: int = Field(2, ge=1, le=64, description="shortest suffix that ngram drafting searches for")
    ngram_max: int = Field(5, ge=1, le=64, description="longest suffix that ngram drafting searches for")
    prefix_cache: bool | Auto = Field(
        "auto", description="reuse cached prefixes of earlier requests; auto: if a page fits into max_len"
    )
    num_snapshots: int | Auto = Field(
        "auto", description="slots for snapshots, states kept for reuse; auto: 4 per row if memory allows"
    )
    snapshot_interval: int = Field(
        0,
        ge=0,
        description="also take a snapshot every so many tokens of a prompt, a multiple of page_len; 0: no",
    )
    pipeline_depth: int | Auto = Field(
        "auto",
        description="steps that start before an earlier one is committed, 0 to 2; auto: 1 on a GPU, else 0",
    )
    cuda_graphs: bool | Auto = Field(
        "auto", description="replay steps as CUDA graphs, except long prompts; auto: on a GPU"
    )
    aging_s: float = Field(
        30.0,
        ge=0,
        description="seconds of waiting after which a request's priority improves by one; 0: never",
    )
    host_cache_bytes: int = Field(
        default=0,
        ge=0,
        description="bytes of host memory for pages and states that are evicted from the cache",
    )
    disk_cache_dir: str | None = Field(
        default=None,
        min_length=1,
        description="folder for pages and states that outlive the process; needs host_cache_bytes",
    )
    disk_cache_bytes: int = Field(
        default=0, ge=0, description="bytes that this engine may use in disk_cache_dir"
    )
    memory_fraction: float = Field(
        default=0.5, gt=0, le=1, description="share of the free memory that auto values may use"
    )

"""What may be chosen for a benchmark, checked before anything runs."""

import math
from pathlib import Path

from pydantic import ConfigDict, Field

from hemiola.runtime.api import Options

RANDOM, MULTI_TURN = "random", "multi-turn"


class BenchOptions(Options):
    """Lengths are in tokens, times in seconds."""

    model_config = ConfigDict(allow_inf_nan=True)

    workload: str = Field(RANDOM, description="random, multi-turn, or a file of prompts")
    num_requests: int | None = Field(None, ge=1, description="None: 32, or all of a file")
    input_len: int = Field(256, ge=1)
    output_len: int = Field(64, ge=1)
    random_range_ratio: float = Field(0.0, ge=0, lt=1)
    turns: int = Field(4, ge=1)
    system_len: int = Field(128, ge=0)
    num_groups: int = Field(1, ge=1)
    think_time: float = Field(0.0, ge=0, lt=math.inf)
    text: Path | None = None
    ignore_eos: bool | None = Field(None, description="None: yes, but not for files")
    request_rate: float = Field(math.inf, gt=0)
    burstiness: float = Field(1.0, gt=0)
    concurrency: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0)
    num_warmups: int = Field(1, ge=0)

    @property
    def file(self) -> Path | None:
        return None if self.workload in (RANDOM, MULTI_TURN) else Path(self.workload)

    @property
    def eos_ignored(self) -> bool:
        return self.file is None if self.ignore_eos is None else self.ignore_eos

"""What may be chosen for a benchmark, checked before anything runs."""

import math
from pathlib import Path

from pydantic import ConfigDict, Field, field_validator

from hemiola.runtime.api import Strict
from hemiola.runtime.errors import Name, Refused

RANDOM, MULTI_TURN = "random", "multi-turn"


class BenchOptions(Strict):
    """Lengths are in tokens, times in seconds."""

    model_config = ConfigDict(allow_inf_nan=True)

    workload: str = Field(
        RANDOM, description="random, multi-turn, or a file of JSON lines: prompts, chats or ShareGPT"
    )
    num_requests: int | None = Field(
        None, ge=1, description="number of requests; default: 32, or all of a file"
    )
    input_len: int = Field(256, ge=1, description="tokens of a prompt, or of a turn's message")
    output_len: int = Field(64, ge=1, description="tokens to generate, unless the file says how many")
    random_range_ratio: float = Field(
        0.0, ge=0, lt=1, description="lengths vary by up to this share, 0 to below 1"
    )
    turns: int = Field(4, ge=1, description="multi-turn: requests of a session")
    system_len: int = Field(128, ge=0, description="multi-turn: tokens that the sessions of a group share")
    num_groups: int = Field(1, ge=1, description="multi-turn: number of different system prompts")
    think_time: float = Field(
        0.0, ge=0, lt=math.inf, description="multi-turn: mean seconds between an answer and the next turn"
    )
    text: Path | None = Field(
        None, description="text to take prompts from; default for multi-turn: Python's standard library"
    )
    ignore_eos: bool | None = Field(
        None, description="continue after the end token; default: yes, except for files"
    )
    request_rate: float = Field(
        math.inf, gt=0, description="sessions per second; inf: as soon as --concurrency allows"
    )
    burstiness: float = Field(
        1.0, gt=0, description="shape of the arrival times: 1 Poisson, less: bursts, inf: even"
    )
    concurrency: int | None = Field(None, ge=1, description="sessions at a time; default: no limit")
    seed: int = Field(0, ge=0, description="the same seed makes the same requests at the same times")
    num_warmups: int = Field(1, ge=0, description="short requests before the clock starts")

    @field_validator("workload")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value:
            message, way_out = (Name("workload"), " is empty"), "give random, multi-turn or a file"
            raise Refused("missing", "workload", message=message, way_out=way_out)
        return value

    @property
    def file(self) -> Path | None:
        return None if self.workload in (RANDOM, MULTI_TURN) else Path(self.workload)

    @property
    def eos_ignored(self) -> bool:
        return self.file is None if self.ignore_eos is None else self.ignore_eos

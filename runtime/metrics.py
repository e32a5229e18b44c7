"""What is counted: per request, and over the engine's life."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Metrics:
    """One request's counts and times (seconds, time.perf_counter's clock; 0.0 until it happens)."""

    num_prompt_tokens: int
    arrival: float
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    cached_tokens: int = 0
    drafted: list[int] = field(
        default_factory=list
    )  # by position in the window: how often a draft stood there
    accepted: list[int] = field(default_factory=list)  # and how often it stayed

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """One window."""
        missing = num_drafts - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for position in range(num_drafts):
            self.drafted[position] += 1
            self.accepted[position] += position < num_accepted

    @property
    def time_to_first_token(self) -> float:
        return self.first_token - self.arrival

    @property
    def time_per_output_token(self) -> float:
        """Mean over the tokens after the first; 0 for a single one."""
        later = self.num_output_tokens - 1
        return (self.last_token - self.first_token) / later if later > 0 else 0.0


@dataclass(slots=True)
class Counters:
    """Sums over the life of an engine."""

    num_steps: int = 0
    num_computed_tokens: int = 0  # recomputation after a preemption counts again
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    engine_seconds: float = 0.0  # inside session.run
    step_seconds: float = 0.0  # whole steps

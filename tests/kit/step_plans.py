"""Random plans of a step (plugins/step/plan.py) with the ledger, states and choices that fit them."""

import random
from dataclasses import dataclass, field

import torch

from hemiola.plugins.step.plan import ANSWERS, COLUMNS, COMMITTED, DRAFTS, EDGE, TOTAL, PlanFields

CHUNK = 16
FEW_IDS = 3  # so that drafts are often right, and a text repeats itself


@dataclass(frozen=True)
class Shape:
    """How large a step is."""

    num_rows: int = 7
    num_padding: int = 2  # rows of slot 0 behind them
    spare: int = 3  # items behind the ends
    longest: int = 40  # tokens of a row that is a part of a prompt
    most: int = 3  # drafts
    kinds: tuple[str, ...] = ("decode", "decode", "part", "end")
    with_head: float = 0.8  # of the rows have pairs
    num_features: int = 24
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        """The name of a test's case."""
        return f"{self.num_rows}+{self.num_padding} {'/'.join(dict.fromkeys(self.kinds))} {self.dtype}"[:48]


@dataclass
class Step:
    """All that the ops around the trunk take in one step, on the CPU."""

    shape: Shape
    plan: torch.Tensor
    changes: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    ids: torch.Tensor
    hidden: torch.Tensor
    ring: torch.Tensor
    chosen: torch.Tensor  # of each line
    logit: torch.Tensor
    drafted: list[torch.Tensor] = field(repr=False)  # by the head, of each row that drafts
    answers: torch.Tensor = field(repr=False)

    @property
    def width(self) -> int:
        """Most lines of a row."""
        return 1 + self.shape.most

    def num(self, column: str) -> int:
        """Tokens, lines, pairs or drafts of the step, spare ones included."""
        end = int(self.plan[-1, COLUMNS.index(column)])
        return end + self.shape.spare * (end > 0)

    def num_lines_of(self, row: int) -> int:
        line = COLUMNS.index("line")
        return int(self.plan[row + 1, line] - self.plan[row, line])


def make(seed: int, shape: Shape) -> Step:
    """Prints the seed."""
    print("seed", seed)
    dice, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    num_slots = 2 * shape.num_rows + 3
    slots = dice.sample(range(1, num_slots), 2 * shape.num_rows)  # the second half is for snapshots
    lengths = torch.randint(0, 4, (4, num_slots), generator=rng)
    lengths[:, 0] = 0
    ends = dict.fromkeys(("token", "line", "pair", "draft"), 0)
    rows = []
    for slot, snapshot_slot in zip(slots[: shape.num_rows], slots[shape.num_rows :], strict=True):
        row, sizes = _a_row(dice, shape, slot, snapshot_slot, lengths)
        rows.append(PlanFields(**ends, **row))
        ends = {name: first + sizes[name] for name, first in ends.items()}
    nobody = dict.fromkeys(COLUMNS[len(ends) :], 0)
    for _ in range(shape.num_padding):
        junk = {"room": dice.randrange(3), "num_drafts": dice.randrange(3)}  # which nobody may mind
        rows.append(PlanFields(**ends, **nobody | junk))
    plan = torch.tensor([*rows, PlanFields(**ends, **nobody)], dtype=torch.int32)
    ids = torch.randint(
        FEW_IDS, (num_slots, int(lengths[TOTAL].max()) + 2 * shape.most + 1), generator=rng
    ).int()
    ids[0] = 0
    made = Step(
        shape, plan, torch.zeros(0), torch.randint(1, 99, (num_slots, 11), generator=rng).int(), lengths, ids,
        torch.zeros(0), torch.zeros(0), torch.zeros(0), torch.zeros(0), [], torch.zeros(0),
    )  # fmt: skip
    made.table[0] = 0
    places = torch.randperm(made.table.numel() - 11, generator=rng)[:9] + 11
    made.changes = torch.cat((torch.stack((places, torch.arange(500, 509)), 1), torch.zeros(4, 2).long()))
    made.hidden = torch.randn(made.num("token"), shape.num_features, generator=rng).to(shape.dtype)
    made.hidden[ends["token"] :] = torch.nan
    ring_len = CHUNK + shape.most + 1
    made.ring = torch.randn(num_slots, ring_len, shape.num_features, generator=rng).to(shape.dtype)
    made.chosen, made.logit = _choices(made, rng)
    made.drafted = [torch.randint(FEW_IDS, (made.num("draft"),), generator=rng) for _ in range(shape.most)]
    made.answers = torch.full((len(plan) - 1, made.width + ANSWERS + shape.most + 2), -7)
    return made


def _a_row(
    dice: random.Random, shape: Shape, slot: int, snapshot_slot: int, lengths: torch.Tensor
) -> tuple[dict[str, int], dict[str, int]]:
    """Columns of a row, and how many items it owns; its lengths are set."""
    committed = max(CHUNK * dice.randrange(5) + dice.choice([-1, 0, 0, 1, 5]), 0)
    kind = dice.choice(shape.kinds)
    num_new = 1 if kind == "decode" else dice.randint(1, shape.longest)
    num_drafts = 0 if kind == "part" else dice.choice([0, dice.randint(0, shape.most), shape.most])
    num_lines = 0 if kind == "part" else 1 + num_drafts
    edge = committed // CHUNK * CHUNK
    edge = max(edge - CHUNK * (dice.random() < 0.4), 0)
    lengths[TOTAL, slot] = committed + num_new + dice.randint(1, 9) * (kind == "part")
    lengths[COMMITTED, slot], lengths[EDGE, slot] = committed, edge
    lengths[DRAFTS, slot] = dice.randint(0, shape.most)
    room = dice.choice([0, 1, shape.most]) if num_lines else 0
    reads = dice.random() < shape.with_head
    owed = min(committed, dice.choice([0, 0, 1, 5, CHUNK])) if reads else 0
    takes_snapshot = dice.random() < 0.7
    row = {
        "slot": slot,
        "num_drafts": num_drafts,
        "room": room,
        "owed": owed,
        "snapshot_slot": snapshot_slot if takes_snapshot else 0,
        "snapshot_edge": edge + CHUNK * dice.choice([0, 1, 1, 1, 2]),
    }
    sizes = {
        "token": num_new + num_drafts,
        "line": num_lines,
        "pair": (owed + num_new + num_drafts) * reads,
        "draft": int(reads and num_lines > 0 and (room > 0 or dice.random() < 0.2)),
    }
    return row, sizes


def _choices(made: Step, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts that are mostly right, and logits that are mostly numbers; behind the ends nothing is right."""
    num = made.num("line")
    chosen = torch.randint(FEW_IDS, (num,), generator=rng)
    for n, row in enumerate(made.plan[:-1].tolist()):
        known = PlanFields(*row)
        behind = made.ids[known.slot, made.lengths[TOTAL, known.slot] :][: made.num_lines_of(n)]
        is_right = torch.rand(len(behind), generator=rng) < 0.7
        part = chosen[known.line : known.line + len(behind)]
        part[:] = torch.where(is_right, behind.long(), part)
    logit, broken = torch.randn(num, generator=rng), torch.randint(0, 24, (num,), generator=rng)
    for which, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        logit[broken == which] = value
    end = int(made.plan[-1, COLUMNS.index("line")])
    chosen[end:], logit[end:] = 2**40, torch.nan
    return chosen, logit

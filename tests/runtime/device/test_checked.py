"""Programs whose shapes fit, and which would read or write outside of their tensors: each is refused."""

import json
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hemiola.plugins import OPS
from hemiola.plugins.ranks import words_of
from hemiola.plugins.spec import INT
from hemiola.runtime import manifest
from hemiola.runtime.device.checked import MOST_PARTS, SHAPES, check_program
from hemiola.runtime.device.program import load_program
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest import GROUP, Manifest

Line = list[Any]
INPUTS = ("token_ids", "positions", "rows", "page_table", "logits_ids")
# Where an op has these arguments.
ROWS = {"conv": 4, "mamba2": 11, "delta": 12, "attention": 6}


class Trunk:
    """The lines of an engine's trunk, to be changed and checked."""

    def __init__(self, engine_dir: Path, folder: Path) -> None:
        self.dir, self.path = engine_dir, folder / "trunk.jsonl"
        self.manifest = manifest.load(engine_dir)
        self.lines: list[Line] = [
            json.loads(line) for line in (engine_dir / "trunk.jsonl").read_text().splitlines()
        ]
        names = [line[0] for line in self.lines if line[1] == ""]
        self.inputs = dict(zip(INPUTS, names[-len(INPUTS) :], strict=True))

    def call(self, op: str) -> int:
        """The number of the line that calls it first."""
        return next(n for n, line in enumerate(self.lines) if line[1] == f"hemiola.{op}.default")

    def insert(self, before: int, called: str, *args: Any) -> dict[str, str]:
        name = f"mine_{len(self.lines)}"
        self.lines.insert(before, [name, called, list(args)])
        return {"node": name}

    def shortened(self, ending: str) -> Manifest:
        """States of this kind hold one number less in their first dimension, here and in the manifest."""
        names = [line[0] for line in self.lines if line[1] == ""]
        segment = self.manifest.segment("trunk")
        first = len(names) - len(INPUTS) - len(segment.states)
        for name, line in zip(segment.states, self.lines[first:], strict=False):
            if name.endswith(ending):
                line[4][1] -= 1
        states = tuple(
            state.model_copy(update={"shape": (state.shape[0] - 1, *state.shape[1:])})
            if state.name.endswith(ending)
            else state
            for state in self.manifest.states
        )
        return self.manifest.model_copy(update={"states": states})

    def check(self, changed: Manifest | None = None, mine: torch.Tensor | None = None) -> None:
        """mine: a weight behind all others."""
        whole = changed or self.manifest
        segment = whole.segment("trunk")
        self.path.write_text("\n".join(map(json.dumps, self.lines)))
        states = {s.name: torch.empty((4, *s.shape), dtype=getattr(torch, s.dtype)) for s in whole.states}
        with safe_open(self.dir / whole.weights_file, "pt") as file:
            bound = [file.get_tensor(name) for name in segment.weights]
        if mine is not None:
            segment = segment.model_copy(update={"weights": (*segment.weights, "mine")})
            bound.append(mine)
        bound += [states[name] for name in segment.states]
        check_program(load_program(self.path), segment, bound, whole, "cpu")

    def refused(self, said: str, changed: Manifest | None = None, mine: torch.Tensor | None = None) -> None:
        with pytest.raises(Refused, match=f"does not fit together .*{said}.*; run build-engine again$"):
            self.check(changed, mine)


@pytest.fixture
def trunk(tiny_engine: Callable[..., Path], tmp_path: Path) -> Trunk:
    return Trunk(tiny_engine("nemotron_h_moe"), tmp_path)


@pytest.fixture
def qwen(tiny_engine: Callable[..., Path], tmp_path: Path) -> Trunk:
    return Trunk(tiny_engine("qwen3_5"), tmp_path)


def test_engines_of_ours_are_not_refused(trunk: Trunk, qwen: Trunk) -> None:
    trunk.check()
    qwen.check()


@pytest.mark.parametrize(
    ("limit", "more", "said"),
    [
        ("num_drafts", 1, "conv.* keeps 22 records, it needs 23"),
        ("page_len", -16, "attention.* has pages of 32, page_len=16"),
        ("page_len", 16, "attention.* has pages of 32, page_len=48"),
        ("max_len", 1, "rope.* has a table of 512 places, max_len=513"),
        ("chunk_len", -8, "chunk_len is 16, the engine's 8"),
    ],
)
def test_limits_that_the_program_was_not_made_for_are_refused(
    qwen: Trunk, limit: str, more: int, said: str
) -> None:
    """Rings, pages and tables of positions would be too short."""
    limits = qwen.manifest.limits
    limits = limits.model_copy(update={limit: getattr(limits, limit) + more})
    qwen.refused(said, qwen.manifest.model_copy(update={"limits": limits}))


@pytest.mark.parametrize(
    ("family", "ending", "said"),
    [
        ("qwen3_5", "_records", "delta.* keeps 18 records, it needs 19"),
        ("nemotron_h_moe", "_records", "mamba2.* keeps 18 records, it needs 19"),
        ("qwen3_5", ".conv", "conv.* keeps 21 records, it needs 22"),
    ],
)
def test_rings_that_are_one_record_too_short_are_refused(
    tiny_engine: Callable[..., Path], tmp_path: Path, family: str, ending: str, said: str
) -> None:
    """A window of drafts would overwrite what the chunk's tokens still read."""
    trunk = Trunk(tiny_engine(family), tmp_path)
    trunk.refused(said, trunk.shortened(ending))


@pytest.mark.parametrize("called", ["aten.chunk.default", "aten.split.Tensor"])
def test_a_part_of_several_parts_is_a_traceback(trunk: Trunk, called: str) -> None:
    at = next(n for n, line in enumerate(trunk.lines) if line[1].startswith("aten.split"))
    trunk.insert(at + 1, called, {"node": trunk.lines[at][0]}, 1, 1)
    trunk.refused("list")


@pytest.mark.parametrize("op", ["conv", "mamba2", "attention"])
def test_rows_that_a_program_computes_are_refused(trunk: Trunk, op: str) -> None:
    """Twice a slot's number is no slot."""
    rows = {"node": trunk.inputs["rows"]}
    at = trunk.call(op)
    doubled = trunk.insert(at, "aten.add.Tensor", rows, rows)
    trunk.lines[at + 1][2][ROWS[op]] = doubled
    trunk.refused("rows")


def test_pages_that_a_program_computes_are_refused(trunk: Trunk) -> None:
    table = {"node": trunk.inputs["page_table"]}
    at = trunk.call("attention")
    trunk.lines[at + 1][2][5] = trunk.insert(at, "aten.add.Tensor", table, table)
    trunk.refused("page_table")


def test_positions_as_token_ids_are_refused(trunk: Trunk) -> None:
    """A text is longer than a vocabulary."""
    trunk.lines[trunk.call("embed")][2][1] = {"node": trunk.inputs["positions"]}
    trunk.refused("token_ids")


def test_token_ids_as_positions_are_refused(trunk: Trunk) -> None:
    trunk.lines[trunk.call("attention")][2][7] = {"node": trunk.inputs["token_ids"]}
    trunk.refused("positions")


def test_experts_that_no_route_chose_are_refused(trunk: Trunk) -> None:
    at = trunk.call("moe")
    ids = trunk.lines[at][2][1]
    trunk.lines[at + 1][2][1] = trunk.insert(at, "aten.add.Tensor", ids, ids)
    trunk.refused("expert_ids")


def test_experts_of_another_route_are_refused(trunk: Trunk) -> None:
    """Scores of more experts than there are."""
    at = trunk.call("route")
    args = trunk.lines[at][2]
    for place, dim in ((0, 1), (1, 0)):  # scores, and their bias
        args[place] = trunk.insert(at, "aten.cat.default", [args[place], args[place]], dim)
        at += 1
    trunk.refused("experts")


def test_fewer_tokens_than_the_rows_name_are_refused(trunk: Trunk) -> None:
    """The others would be read and written behind the end."""
    at = trunk.call("conv")
    line = trunk.lines[at]
    line[3:] = []
    first = ["first", "operator.getitem", [trunk.insert(at, "aten.split.Tensor", line[2][0], 1, 0), 0]]
    trunk.lines.insert(at + 1, first)
    line[2][0] = {"node": "first"}
    trunk.refused("tokens")


def test_lines_that_are_selected_are_those_of_the_step(trunk: Trunk) -> None:
    at = next(n for n, line in enumerate(trunk.lines) if line[1] == "aten.index_select.default")
    trunk.lines[at][2][2] = {"node": trunk.inputs["token_ids"]}
    trunk.refused("token_ids for its logits_ids")


def test_lines_of_a_weight_are_selected_by_places_of_a_step(trunk: Trunk) -> None:
    """A weight of one line would be read as far behind its end as a step has tokens."""
    at = next(n for n, line in enumerate(trunk.lines) if line[1] == "aten.index_select.default")
    width = trunk.manifest.hidden_size
    weight = next(line for line in trunk.lines if line[1] == "" and len(line[4]) == 2 and line[4][1] == width)
    trunk.lines[at][2][0] = {"node": weight[0]}
    trunk.refused(f"{weight[0]} is wanted in two layouts")


def test_selected_lines_are_selected_by_places_of_a_step(trunk: Trunk) -> None:
    """They are fewer than the step's tokens."""
    at = next(n for n, line in enumerate(trunk.lines) if line[1] == "aten.index_select.default")
    again = trunk.insert(
        at + 1, "aten.index_select.default", {"node": trunk.lines[at][0]}, *trunk.lines[at][2][1:]
    )
    trunk.lines[at + 2][2][0] = again
    trunk.refused(r"selects from 2 lines, a step has 7 tokens")


def test_columns_are_selected_by_places_of_a_step(trunk: Trunk) -> None:
    at = next(n for n, line in enumerate(trunk.lines) if line[1] == "aten.index_select.default")
    trunk.lines[at][2][1] = 1
    trunk.refused("selects from")


@pytest.mark.parametrize("before", [True, False])
def test_a_packed_weight_is_read_by_torch_as_if_it_were_not(trunk: Trunk, before: bool) -> None:
    """It has another shape, and may have fewer bytes, than is declared."""
    at = trunk.call("linear")
    weight = trunk.lines[at][2][1]
    trunk.insert(at + 1 - before, "aten.mul.Tensor", weight, weight)
    trunk.refused("wanted in two layouts")


def test_a_state_that_is_read_as_something_else_is_refused(trunk: Trunk) -> None:
    """There are as many slots as the machine has memory for, not as many as tokens."""
    at = trunk.call("conv")
    state = trunk.lines[at][2][3]
    trunk.insert(at, "aten.view.default", state, [-1, 4])
    trunk.refused("a state")


@pytest.mark.parametrize(("kind", "said"), [("page", "slots"), ("slot", "pages")])
def test_states_of_the_other_kind_are_refused(trunk: Trunk, kind: str, said: str) -> None:
    """There would be as many of them as there are slots, and pages are written; or the other way round."""
    states = tuple(state.model_copy(update={"kind": kind}) for state in trunk.manifest.states)
    trunk.refused(said, trunk.manifest.model_copy(update={"states": states}))


@pytest.mark.parametrize(
    "layout, said",
    [
        ("int4 32", "the program wants uint8"),
        ("int4 24", "a scale for 24 inputs, no multiple of 16"),
        ("e5m2 128", "'e5m2 128' is no layout of a quantised weight"),
        ("", "'' is no layout"),
    ],
)
def test_a_layout_that_a_weight_does_not_have_is_refused(trunk: Trunk, layout: str, said: str) -> None:
    """A kernel would read codes and scales behind the weight's end."""
    segment = trunk.manifest.segment("trunk")
    (name,) = [name for name in segment.weights if name.endswith("head.weight")]
    changed = segment.model_copy(update={"layouts": {name: layout}})
    others = [each for each in trunk.manifest.segments if each.name != "trunk"]
    trunk.refused(said, trunk.manifest.model_copy(update={"segments": (changed, *others)}))


@pytest.mark.parametrize(
    ("op", "place", "value", "said"),
    [
        ("norm", 4, 0, "group_len is 0"),
        ("route", 4, 0, "9 experts do not make 0 groups"),
        ("attention", 9, -4096, "first is -4096, below 0"),
    ],
)
def test_an_attribute_that_no_model_has_divides_by_zero_or_reads_before_a_table(
    trunk: Trunk, op: str, place: int, value: int, said: str
) -> None:
    trunk.lines[trunk.call(op)][2][place] = value
    trunk.refused(said)


def test_hidden_states_that_are_wider_than_the_trunks_are_read_behind_their_end(trunk: Trunk) -> None:
    """By a head that declares them so; a process that drafted ended by a signal."""
    program = load_program(trunk.dir / "draft.jsonl")
    whole, segment = trunk.manifest, trunk.manifest.segment("draft")
    states = {s.name: torch.empty((4, *s.shape), dtype=getattr(torch, s.dtype)) for s in whole.states}
    with safe_open(trunk.dir / whole.weights_file, "pt") as file:
        bound = [file.get_tensor(name) for name in segment.weights]
    bound += [states[name] for name in segment.states]
    check_program(program, segment, bound, whole, "cpu", "L")
    hidden = [node for node in program.graph.nodes if node.op == "placeholder"][len(bound) + 1]
    hidden.meta["val"] = torch.empty(0, 2 * whole.hidden_size, device="meta")
    with pytest.raises(Refused, match=f"is float32 .*, hidden has {whole.hidden_size} numbers"):
        check_program(program, segment, bound, whole, "cpu", "L")


@pytest.mark.parametrize(
    ("called", "args", "num"),
    [
        ("split.Tensor", (1, 1), 4096),
        ("chunk.default", (2048, 1), 2048),
        ("split_with_sizes.default", ([1] * 4096, 1), 4096),
    ],
)
def test_a_value_is_split_into_millions_of_parts(
    trunk: Trunk, called: str, args: tuple[Any, ...], num: int
) -> None:
    at = trunk.call("norm")
    wide: Any = {"node": "embed"}
    for more in range(6):  # 4,096 numbers of 64
        wide = trunk.insert(at + more, "aten.cat.default", [wide, wide], 1)
    trunk.insert(at + 6, f"aten.{called}", wide, *args)
    trunk.refused(f"a value is split into {num} parts, at most {MOST_PARTS} are taken")


def test_a_layout_of_what_no_form_packs_is_refused(trunk: Trunk) -> None:
    segment = trunk.manifest.segment("trunk")
    (name,) = [name for name in segment.weights if name.endswith("embed.weight")]
    changed = segment.model_copy(update={"layouts": {name: "e4m3 row"}})
    trunk.refused("it reads no quantised weights", trunk.manifest.model_copy(update={"segments": (changed,)}))


X, COLUMN, HALF = torch.ones(3, 4), torch.ones(3, 1), torch.ones(3, 2).bfloat16()


@pytest.mark.parametrize(
    ("called", "args"),
    [
        ("add.Tensor", (X, COLUMN)),
        ("add.Tensor", (COLUMN.bfloat16(), X)),
        ("add.Tensor", (X.int(), 2)),
        ("mul.Tensor", (X[0], X[None])),
        ("mul.Tensor", (HALF, 0.5)),
        ("mul.Tensor", (X, torch.tensor(2.0))),
        ("relu.default", (HALF,)),
        ("cat.default", ([X, COLUMN, COLUMN], 1)),
        ("cat.default", ([HALF, HALF], -2)),
        ("cat.default", ([X],)),
    ],
)
def test_shapes_are_torchs(called: str, args: tuple[Any, ...]) -> None:
    op = attrgetter(called)(torch.ops.aten)
    ours, theirs = SHAPES[op](*args), op(*args)
    assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


@pytest.mark.parametrize(
    ("called", "args", "said"),
    [
        ("add.Tensor", (2, 3), "2 is no tensor"),
        ("mul.Tensor", ("x", 3), "'x' is no tensor"),
        ("cat.default", ([2, 3], 0), "is no list of tensors"),
        ("cat.default", (3, 0), "3 is no list of tensors"),
    ],
)
def test_arguments_that_are_no_tensors_are_refused(
    trunk: Trunk, called: str, args: tuple[Any, ...], said: str
) -> None:
    trunk.insert(trunk.call("conv"), f"aten.{called}", *args)
    trunk.refused(said)


@pytest.mark.parametrize("other", [COLUMN, HALF.float(), X.int(), X[0], 3])
def test_parts_that_do_not_fit_are_not_joined(other: Any) -> None:
    with pytest.raises(ValueError, match=r"is joined to|no list of tensors"):
        SHAPES[torch.ops.aten.cat.default]([X, other], 0)


INDICES = {"rows": (3, 8), "page_table": (3, 5), "positions": (7,), "token_ids": (7,), "expert_ids": (7, 2)}
TAKERS = [(op.name, place) for op in OPS.values() for place, arg in enumerate(op.args) if arg.dtypes == INT]


@pytest.mark.parametrize(("op", "place"), TAKERS)
def test_numbers_of_a_file_are_taken_for_slots_pages_or_tokens(
    op: str, place: int, trunk: Trunk, qwen: Trunk
) -> None:
    """A weight of integers: kernels would read and write where a stranger's file says."""
    changed = next(
        each for each in (trunk, qwen) if f"hemiola.{op}.default" in (line[1] for line in each.lines)
    )
    name = OPS[op].args[place].name
    mine = torch.zeros(INDICES[name], dtype=torch.int32)
    changed.lines[changed.call(op)][2][place] = {"node": "mine"}
    behind = len(changed.manifest.segment("trunk").weights)
    changed.lines.insert(behind, ["mine", "", [], {"dtype": "int32"}, [*mine.shape]])
    changed.refused(f"{op}.* has mine for its {name}", mine=mine)


def test_a_weight_is_taken_for_the_addresses_of_ranks(
    tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    """Kernels would read and write where a stranger's file says."""
    trunk = Trunk(tiny_engine("qwen3_5_moe_divisible", tp=2), tmp_path)
    segment, call = trunk.manifest.segment("trunk"), trunk.lines[trunk.call("sum")]
    place = segment.weights.index(GROUP)
    assert trunk.lines[place][0] == call[2][1]["node"]
    trunk.lines.insert(place + 1, ["mine", *trunk.lines[place][1:]])
    call[2][1] = {"node": "mine"}
    names = [*segment.weights[: place + 1], "mine", *segment.weights[place + 1 :]]
    trunk.path.write_text("\n".join(map(json.dumps, trunk.lines)))
    held = {GROUP: torch.zeros(words_of(2), dtype=torch.int64)}
    held["mine"] = held[GROUP]
    for file in trunk.manifest.weights_files(0):
        with safe_open(trunk.dir / file, "pt") as opened:
            held |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    held |= {s.name: torch.empty((4, *s.shape), dtype=getattr(torch, s.dtype)) for s in trunk.manifest.states}
    bound = [held[name] for name in (*names, *segment.states)]
    changed = segment.model_copy(update={"weights": tuple(names)})
    with pytest.raises(Refused, match="has mine for its ranks, which are given to group alone"):
        check_program(load_program(trunk.path), changed, bound, trunk.manifest, "cpu")

"""What a declaration promises: schema, shapes of its fake, export with dynamic sizes, choice and refusals."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.ops import SUBJECTS, Subject
from torch._subclasses import FakeTensorMode

from hemiola.plugins import OPS, references
from hemiola.plugins.spec import Call, Form, Op, Unsupported

BASES = {name: same_op[0] for name, same_op in SUBJECTS.items()}
OPTIONAL = [own for same_op in SUBJECTS.values() for own in same_op if own.option]
EVERY = pytest.mark.parametrize("subject", BASES.values(), ids=BASES)

SCHEMAS = {
    "attention": "Tensor q, Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor page_table, "
    "Tensor rows, Tensor positions, float scale, int first, float k_scale, float v_scale, "
    "Tensor? logits_ids=None",
    "conv": "Tensor x, Tensor weight, Tensor bias, Tensor(a!) columns, Tensor rows, int chunk_len",
    "delta": "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor dt_bias, Tensor A, Tensor(a!) state, "
    "Tensor(b!) k_records, Tensor(c!) v_records, Tensor(d!) g_records, Tensor(e!) beta_records, Tensor rows, "
    "int chunk_len",
    "embed": "Tensor weight, Tensor token_ids",
    "gate": "Tensor x, Tensor gate, str kind",
    "linear": "Tensor x, Tensor weight, Tensor bias, Tensor? residual=None",
    "linear_argmax": "Tensor x, Tensor weight, Tensor bias",
    "linear_relu2": "Tensor x, Tensor weight, Tensor bias",
    "linear_swiglu": "Tensor x, Tensor weight, Tensor bias",
    "mamba2": "Tensor x, Tensor B, Tensor C, Tensor dt, Tensor dt_bias, Tensor A, Tensor D, "
    "Tensor(a!) state, Tensor(b!) x_records, Tensor(c!) B_records, Tensor(d!) dt_records, Tensor rows, "
    "int chunk_len, float dt_min, float dt_max",
    "moe": "Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor up, Tensor down, str activation",
    "norm": "Tensor x, Tensor gate, Tensor weight, float eps, int group_len, bool gate_first",
    "rope": "Tensor x, Tensor positions, Tensor table",
    "route": "Tensor scores, Tensor bias, str scoring, int top_k, int num_groups, int top_groups, "
    "bool renormalise, float scale",
    "sum": "Tensor x, Tensor group, Tensor? residual=None",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_made_of_declarations(name: str) -> None:
    results = "(Tensor, Tensor)" if name in ("linear_argmax", "route") else "Tensor"
    assert OPS[name].schema() == f"{name}({SCHEMAS[name]}) -> {results}"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_torch_has_the_declared_schema(op: Op) -> None:
    assert str(op.torch_op._schema) == f"hemiola::{op.schema()}"


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if not op.ending])
def test_the_reference_and_every_form_take_what_is_declared(name: str) -> None:
    op = OPS[name]
    declared = [argument.name for argument in (*op.args, *op.attrs)]
    options = [argument.name for argument in op.options] + (["ending"] if op.endings else [])
    assert list(inspect.signature(getattr(references, name)).parameters) == declared + options
    for form in op.forms:
        assert op.form(form.name) is form and set(form.packs) <= set(declared)
        given = inspect.signature(op.function(form.name)).parameters.values()
        needed = [p for p in given if p.default is p.empty and not p.name.endswith("_layout")]
        assert len(needed) == len(declared) + len(form.sizes)
        taken = {*form.options, *(["ending"] if form.endings else [])}
        assert taken <= {*options} & {p.name for p in given}
        assert {*form.endings} <= {ending.name for ending in op.endings}


@pytest.mark.parametrize("subject", [*BASES.values(), *OPTIONAL], ids=str)
def test_torch_opcheck(subject: Subject) -> None:
    """torch's own check: mutation as declared, fake shapes as real ones, no output aliases an input."""
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(subject.op.torch_op, tuple(subject.arguments(6)), test_utils=checks)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fake_has_the_shape_and_dtype_of_the_result(subject: Subject, dtype: torch.dtype) -> None:
    arguments = subject.arguments(6)
    for index, value in enumerate(arguments):
        arg = subject.op.arg_at(index)
        if arg is not None and dtype in arg.dtypes:
            arguments[index] = value.to(dtype)
    real = subject.op.torch_op(*arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        fake = subject.op.torch_op(*fakes)
    for a, b in zip(*[x if isinstance(x, tuple) else (x,) for x in (fake, real)], strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


class Calls(torch.nn.Module):
    def __init__(self, op: Any, constants: list) -> None:
        super().__init__()
        self.op, self.constants = op, constants

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        y = self.op(*tensors, *self.constants)
        return (y if isinstance(y, torch.Tensor) else y[0]) + 1


@EVERY
def test_export_keeps_the_op_and_its_dynamic_tokens_and_rows(subject: Subject) -> None:
    op, example = subject.op, subject.arguments(6)
    module = Calls(op.torch_op, example[len(op.args) :])
    dims = {"T": torch.export.Dim("T", max=64), "N": torch.export.Dim("N", max=64)}
    shapes = tuple({0: dims[arg.shape[0]]} if arg.shape[0] in dims else {} for arg in op.args)
    tensors = [x.clone() for x in example[: len(op.args)]]
    program = torch.export.export(module, tuple(tensors), dynamic_shapes=(shapes,), strict=False)
    assert op.torch_op in [node.target for node in program.graph.nodes if node.op == "call_function"]
    for num_tokens, num_rows in ((3, 2), (40, 3)):
        other = subject.arguments(num_tokens, 1, num_rows)[: len(op.args)]
        states = [index for index, arg in enumerate(op.args) if arg.mutated]
        for index in states:  # their sizes are constant: of two rows, which are padding here
            other[index] = example[index].clone()
        if num_rows > 2 and "rows" in [arg.name for arg in op.args]:
            other[[arg.name for arg in op.args].index("rows")][2:, 3] = 0
        mine, theirs = [x.clone() for x in other], [x.clone() for x in other]
        torch.testing.assert_close(program.module()(*mine), module(*theirs), rtol=0, atol=0, equal_nan=True)
        for index in states:
            torch.testing.assert_close(mine[index], theirs[index], rtol=0, atol=0, equal_nan=True)
            assert not mine[index].isnan().all()


WRONG = [
    ("attention", "q", torch.zeros(6, 32), "q has 2 dimensions"),
    ("attention", "k", torch.zeros(6, 2, 9), "k's D is 9"),
    ("attention", "v", torch.zeros(6, 3, 32), "v's G is 3"),
    ("attention", "v_pages", torch.zeros(5, 16, 2, 32), "v_pages's Z is 5"),
    ("attention", "page_table", torch.zeros(2, 1), "page_table is torch.float32"),
    ("attention", "rows", torch.zeros(2, 7, dtype=torch.int32), "rows's 8 is 7"),
    ("conv", "rows", torch.zeros(2, 8, dtype=torch.int64), "rows is torch.int64"),
    ("conv", "columns", torch.zeros(3, 20, 16), "columns's E is 16"),
    ("delta", "dt_bias", torch.zeros(3, 16), "dt_bias's J is 16"),
    ("delta", "A", torch.zeros(3, dtype=torch.bfloat16), "A is torch.bfloat16"),
    ("mamba2", "dt_records", torch.zeros(3, 40, 4), "dt_records's H is 4"),
    ("embed", "token_ids", torch.zeros(6, dtype=torch.int64), "token_ids is torch.int64"),
    ("linear", "x", torch.zeros(6, 48, dtype=torch.int32), "x is torch.int32"),
    ("linear", "weight", torch.zeros(80, 9), "weight's F is 9"),
    ("linear", "bias", torch.zeros(4), "bias's O is 4"),
    ("moe", "expert_weights", torch.zeros(6, 3, dtype=torch.bfloat16), "expert_weights is torch.bfloat16"),
    ("moe", "down", torch.zeros(4, 32, 48), "down's E is 4"),
    ("norm", "gate", torch.zeros(6, 7), "gate's W is 7"),
    ("norm", "weight", torch.zeros(1, 96), "weight has 2 dimensions"),
    ("rope", "table", torch.zeros(50, 3, 20), "table's 2 is 3"),
    ("route", "bias", torch.zeros(36), "bias's E is 36"),
]


@pytest.mark.parametrize("name,argument,value,message", WRONG, ids=[f"{w[0]}-{w[3]}" for w in WRONG])
def test_wrong_argument_is_refused_by_name(
    name: str, argument: str, value: torch.Tensor, message: str
) -> None:
    op, arguments = OPS[name], BASES[name].arguments(6)
    op.check(*arguments)
    arguments[[arg.name for arg in op.args].index(argument)] = value
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        op.check(*arguments)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=f"{name}: {message}"):
        op.torch_op(*[mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments])


@EVERY
def test_choose_takes_fp32_and_says_what_other_dtype_it_got(subject: Subject) -> None:
    op, arguments = subject.op, subject.arguments(6)
    assert op.choose(op.call(*arguments), "cpu") == (op.forms[0], {})
    for index, arg in enumerate(op.args):
        if torch.float64 in arg.dtypes and arguments[index].numel():
            other = [*arguments[:index], arguments[index].double(), *arguments[index + 1 :]]
            reason = rf"{op.forms[0].name}: {arg.name} is torch\.float64, not torch\.float32"
            with pytest.raises(Unsupported, match=rf"^{op.name} cannot run on cpu \({reason}[);]"):
                op.choose(op.call(*other), "cpu")
    other = [arguments[0].bfloat16(), *arguments[1:]]
    if op.name != "embed":  # whose first argument is a weight
        with pytest.raises(Unsupported, match=r"torch\.bfloat16, not torch\.float32"):
            op.choose(op.call(*other), "cpu")


WIDE = {  # fp32 in an engine for a GPU
    "delta": {"dt_bias", "A", "state", "g_records", "beta_records"},
    "mamba2": {"dt_bias", "A", "D", "state", "dt_records"},
    "moe": {"expert_weights"},
    "norm": {"weight"},
    "rope": {"table"},
    "route": {"bias"},
}
FITTING = {"attention": {"D": 64, "A": 64, "B": 64, "L": 64}, "mamba2": {"D": 64}, "delta": {"K": 64}}


@pytest.mark.parametrize("subject", [one for one in BASES.values() if one.op.runs_on("cuda")], ids=str)
def test_on_cuda_floats_are_bf16_but_for_states_and_factors(subject: Subject) -> None:
    op, call = subject.op, subject.op.call(*subject.arguments(6))
    attrs = call.attrs | ({"chunk_len": 32} if "chunk_len" in call.attrs else {})
    call = Call({}, call.sizes | FITTING.get(op.name, {}), attrs)
    floats = [arg.name for arg in op.args if torch.float32 in arg.dtypes]
    wide = WIDE.get(op.name, set())
    dtypes = {name: torch.float32 if name in wide else torch.bfloat16 for name in floats}
    assert op.choose(call._replace(dtypes=dtypes), "cuda").form.name == "cuda"
    for name, dtype in dtypes.items():
        other = call._replace(dtypes=dtypes | {name: torch.float16})
        with pytest.raises(Unsupported, match=rf"cuda \(cuda: {name} is torch\.float16, not {dtype}[);]"):
            op.choose(other, "cuda")


REFUSED: list[tuple[str, dict, dict, str]] = [
    *(("attention", {letter: 24}, {}, f"{letter} is 24, no multiple of 16") for letter in "DL"),
    ("conv", {"E": 24}, {}, "E is 24, no multiple of 16"),
    *(("delta", {letter: 24}, {}, f"{letter} is 24, no multiple of 16") for letter in "KV"),
    *(("mamba2", {letter: 24}, {}, f"{letter} is 24, no multiple of 16") for letter in "PD"),
    ("gate", {"E": 24, "J": 24}, {}, "E is 24, no multiple of 16"),
    ("gate", {"J": 16}, {}, "the gate has 16 channels, x has 48"),
    ("gate", {}, {"kind": "gelu"}, "kind is 'gelu', not silu or sigmoid"),
    ("moe", {}, {"activation": "gelu"}, "activation is 'gelu', not relu2 or swiglu"),
    ("moe", {}, {"activation": "relu2"}, "up has 96 outputs, down 48 inputs; not so after relu2"),
    ("norm", {}, {"group_len": 24}, "group_len is 24, not a multiple of 16 that divides the width 96"),
    ("norm", {}, {"group_len": 64}, "group_len is 64, not a multiple of 16 that divides the width 96"),
    ("rope", {"R": 25}, {}, "25 pairs do not fit into 48 channels"),
    ("route", {}, {"scoring": "tanh"}, "scoring is 'tanh', not softmax or sigmoid"),
    ("route", {"E": 36}, {"num_groups": 5}, "36 experts do not make 5 groups"),
    ("route", {"E": 36}, {"num_groups": 36}, "36 experts do not make 36 groups"),
    ("route", {}, {"top_k": 38}, "top_k 38 is more than the groups leave"),
    ("route", {"E": 36}, {"num_groups": 6, "top_k": 7}, "top_k 7 is more than the groups leave"),
    ("route", {"E": 36}, {"num_groups": 6, "top_groups": 7}, "7 groups of 6 cannot stay"),
    ("route", {}, {"top_groups": 0}, "0 groups of 1 cannot stay"),
    # A stranger's program may hold these: a kernel read outside of its tensors, or wrote nothing.
    *(("attention", {"H": 8, "G": groups}, {}, f"H is 8, no multiple of G {groups}") for groups in (0, 3, 9)),
    *(("mamba2", {"H": 8, "G": groups}, {}, f"H is 8, no multiple of G {groups}") for groups in (0, 3, 9)),
    *(("delta", {"H": 8, "G": groups}, {}, f"H is 8, no multiple of G {groups}") for groups in (0, 3, 9)),
    ("delta", {"K": 48, "J": 3}, {}, "J is 3, not 1 or K 48"),
    *(("attention", {}, {"first": first}, f"first is {first}, below 0") for first in (-1, -4096)),
    *(("norm", {}, {"group_len": size}, f"group_len is {size}, not a multiple") for size in (0, -16)),
    *(("route", {}, {"num_groups": num}, f"37 experts do not make {num} groups") for num in (0, -1)),
]
REFUSED_ON_CUDA: list[tuple[str, dict, dict, str]] = [
    ("attention", {"D": 48}, {}, "D is 48, not 16, 32, 64, 128 or 256"),
    ("attention", {"D": 64, "L": 24}, {}, "L is 24, no multiple of 16"),
    ("delta", {"K": 48}, {"chunk_len": 16}, "K is 48, not a power of two from 16 up"),
    ("delta", {"K": 64}, {"chunk_len": 8}, "chunk_len is 8, not 16 or 32"),
    ("mamba2", {"D": 8}, {"chunk_len": 16}, "D is 8, not a power of two from 16 up"),
    ("mamba2", {"D": 64}, {"chunk_len": 64}, "chunk_len is 64, not 16 or 32"),
    ("norm", {}, {"group_len": 40}, "group_len is 40, which does not divide the width 96"),
]


WHERE = [("cpu", *case) for case in REFUSED] + [("cuda", *case) for case in REFUSED_ON_CUDA]


@pytest.mark.parametrize(
    "device,name,sizes,attrs,reason", WHERE, ids=[f"{w[0]}-{w[1]}-{w[4]}" for w in WHERE]
)
def test_a_call_that_no_form_takes_is_refused_with_the_reason(
    device: str, name: str, sizes: dict, attrs: dict, reason: str
) -> None:
    op = OPS[name]
    call, form = op.call(*BASES[name].arguments(6)), "cuda" if device == "cuda" else op.forms[0].name
    with pytest.raises(Unsupported, match=rf"^{name} cannot run on {device} \({form}: {reason}.*\)"):
        op.choose(call._replace(sizes=call.sizes | sizes, attrs=call.attrs | attrs), device)


def test_the_first_form_that_takes_a_call_runs_with_the_reasons_of_those_before() -> None:
    forms = [
        Form("far", "cuda", lambda call: ""),
        Form("picky", "cpu", lambda call: f"E is {call.sizes['E']}"),
        Form("compiled", "cpu", lambda call: ""),
        Form("spare", "cpu", lambda call: ""),
    ]
    op = replace(OPS["gate"], forms=tuple(forms))
    call = op.call(*BASES["gate"].arguments(6))
    assert call.sizes["E"] == 48 and call.attrs == {"kind": "silu"} and call.dtypes["x"] is torch.float32
    assert op.choose(call, "cpu") == (forms[2], {"picky": "E is 48"})
    assert op.choose(call, "cuda") == (forms[0], {})
    with pytest.raises(Unsupported, match=r"gate cannot run on cpu \(picky: E is 48\)"):
        replace(op, forms=tuple(forms[:2])).choose(call, "cpu")


def test_bind_adds_the_sizes_that_a_form_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from hemiola.plugins.gate import compiled

    monkeypatch.setattr(compiled, "gate", lambda *values: values)
    assert OPS["gate"].bind("compiled", ())(1, 2, 3) == (1, 2, 3)
    assert OPS["gate"].bind("compiled", (48, 6))(1, 2, 3) == (1, 2, 3, 48, 6)


def test_a_dynamic_size_is_not_constant_in_a_call() -> None:
    """What is known when an engine is built: letters whose sizes are numbers."""
    op, seen = OPS["gate"], []

    class Probe(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(op.call(x, x, "silu").sizes)
            return x + 1

    dims = {"x": {0: torch.export.Dim("T", max=64)}}
    torch.export.export(Probe(), (torch.zeros(6, 48),), dynamic_shapes=dims, strict=False)
    assert seen[0]["E"] == 48 and "T" not in seen[0]

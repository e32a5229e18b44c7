"""What a declaration promises: schema, shapes of its fake, export with dynamic sizes, refusals by name."""

from dataclasses import dataclass

import pytest
import torch
from torch._subclasses import FakeTensorMode

from hemiola.plugins import OPS, references

BY_NAME = {op.name: op for op in OPS}


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def example(name: str, num_tokens: int = 6, width: int = 8) -> list:
    """Arguments of the op `name`; two rows, the second holds one token. Compiled forms take a width of 32."""
    torch.manual_seed(0)
    if name == "attention":
        positions = ints(*range(num_tokens - 1), 0)
        pages = [torch.zeros(4, 16, 2, width) for _ in range(2)]
        q, k, v = (torch.randn(num_tokens, heads, width) for heads in (4, 2, 2))
        return [
            q,
            k,
            v,
            *pages,
            ints(1, 2).view(2, 1),
            ints(0, num_tokens - 1, num_tokens),
            positions,
            0.3,
            False,
            0,
        ]
    if name == "linear":
        return [torch.randn(num_tokens, 8), torch.randn(5, 8), torch.empty(0)]
    if name == "moe":
        ids = torch.arange(2 * num_tokens, dtype=torch.int32).view(-1, 2) % 3
        up, down = torch.randn(3, 10, 8), torch.randn(3, 8, 5)
        return [torch.randn(num_tokens, 8), ids, torch.rand(num_tokens, 2), up, down, "swiglu", False]
    assert name == "norm"
    x, gate, weight = torch.randn(num_tokens, width), torch.randn(num_tokens, width), torch.randn(width)
    return [x, gate, weight, 1e-5, width // 2, True]


NAMES = pytest.mark.parametrize("name", ["attention", "linear", "moe", "norm"])

SCHEMAS = {
    "attention": "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, "
    "Tensor page_table, Tensor cu_tokens, Tensor positions, float scale, bool exact, int first) -> Tensor",
    "linear": "linear(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    "moe": "moe(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor up, Tensor down, str activation, "
    "bool exact) -> Tensor",
    "norm": "norm(Tensor x, Tensor gate, Tensor weight, float eps, int group_len, bool gate_first) -> Tensor",
}


@NAMES
def test_schema(name: str) -> None:
    assert BY_NAME[name].schema() == SCHEMAS[name]
    registered = getattr(torch.ops.hemiola, name).default._schema
    assert str(registered) == "hemiola::" + SCHEMAS[name]


def test_every_op_has_a_reference_with_the_same_arguments() -> None:
    for op in OPS:
        code = getattr(references, op.name).__code__
        declared = [argument.name for argument in (*op.args, *op.attrs)]
        assert list(code.co_varnames[: code.co_argcount]) == declared


@NAMES
@pytest.mark.parametrize("width", [8, 32])
def test_torch_opcheck(name: str, width: int) -> None:
    """torch's own check: mutation as declared, fake shapes as real ones, no output aliases an input."""
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        getattr(torch.ops.hemiola, name).default, tuple(example(name, width=width)), test_utils=checks
    )


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fake_has_the_shape_and_dtype_of_the_result(name: str, dtype: torch.dtype) -> None:
    arguments = example(name)
    arguments[0] = arguments[0].to(dtype)
    real = getattr(torch.ops.hemiola, name)(*arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        fake = getattr(torch.ops.hemiola, name)(*fakes)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


class Calls(torch.nn.Module):
    def __init__(self, name: str, constants: list) -> None:
        super().__init__()
        self.op = getattr(torch.ops.hemiola, name)
        self.constants = constants

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.op(*tensors, *self.constants) + 1


@NAMES
def test_export_keeps_the_op_and_its_dynamic_tokens(name: str) -> None:
    arguments = example(name)
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    module = Calls(name, arguments[len(tensors) :])
    tokens = torch.export.Dim("T", min=2, max=64)
    shapes = tuple({0: tokens} if argument.shape.startswith("T") else {} for argument in BY_NAME[name].args)
    program = torch.export.export(module, tuple(tensors), dynamic_shapes=(shapes,), strict=False)
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert getattr(torch.ops.hemiola, name).default in targets
    for num_tokens in (3, 40):
        other = [x for x in example(name, num_tokens) if isinstance(x, torch.Tensor)]
        if name == "attention":  # 40 tokens need more than a page
            other[5] = ints(1, 2, 3, 1, 2, 3).view(2, 3)[:, : arguments[5].shape[1]]
            other[7] = other[7] % 16
        expected = module(*[x.clone() for x in other])
        assert torch.equal(program.module()(*[x.clone() for x in other]), expected)


@dataclass(frozen=True)
class Wrong:
    """One argument replaced, and what the refusal must say."""

    op: str
    argument: str
    value: torch.Tensor
    message: str

    def __str__(self) -> str:
        return f"{self.op}-{self.argument}-{self.message.split()[0]}"


WRONG = [
    Wrong("attention", "q", torch.zeros(6, 32), "q has 2 dimensions"),
    Wrong("attention", "k", torch.zeros(6, 2, 9), "k's D is 9"),
    Wrong("attention", "v", torch.zeros(6, 3, 8), "v's G is 3"),
    Wrong("attention", "k_pages", torch.zeros(4, 16, 16), "k_pages has 3 dimensions"),
    Wrong("attention", "v_pages", torch.zeros(5, 16, 2, 8), "v_pages's Z is 5"),
    Wrong("attention", "page_table", torch.zeros(2, 1), "page_table is torch.float32"),
    Wrong("attention", "cu_tokens", torch.zeros(3, dtype=torch.int64), "cu_tokens is torch.int64"),
    Wrong("attention", "positions", ints(1, 2), "positions's T is 2"),
    Wrong("linear", "x", torch.zeros(6, 8, dtype=torch.int32), "x is torch.int32"),
    Wrong("linear", "weight", torch.zeros(5, 9), "weight's F is 9"),
    Wrong("linear", "bias", torch.zeros(4), "bias's O is 4"),
    Wrong("moe", "expert_ids", torch.zeros(6, 2), "expert_ids is torch.float32"),
    Wrong(
        "moe", "expert_weights", torch.zeros(6, 2, dtype=torch.bfloat16), "expert_weights is torch.bfloat16"
    ),
    Wrong("moe", "up", torch.zeros(10, 8), "up has 2 dimensions"),
    Wrong("moe", "down", torch.zeros(4, 8, 5), "down's E is 4"),
    Wrong("norm", "gate", torch.zeros(6, 7), "gate's W is 7"),
    Wrong("norm", "weight", torch.zeros(1, 8), "weight has 2 dimensions"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_argument_is_refused_by_name(wrong: Wrong) -> None:
    arguments = example(wrong.op)
    index = [argument.name for argument in BY_NAME[wrong.op].args].index(wrong.argument)
    arguments[index] = wrong.value
    with pytest.raises(ValueError, match=f"^{wrong.op}: {wrong.message}"):
        BY_NAME[wrong.op].check(*arguments)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=f"{wrong.op}: {wrong.message}"):
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        getattr(torch.ops.hemiola, wrong.op)(*fakes)

"""A specialised program against the program as it was exported."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kit.grid import needs_numba, rel_error, same_bits
from torch.fx import GraphModule

from hemiola.plugins import jit, on_cpu
from hemiola.runtime.device.specialise import SMALL, specialise

aten, ours = torch.ops.aten, torch.ops.hemiola
Tensors = dict[str, torch.Tensor]
WIDTH, OUTPUTS, VOCAB = 160, 136, 200  # a weight of these sizes is not small


def numbers(*shape: int, seed: int = 0, half: bool = True) -> torch.Tensor:
    """Random numbers, by default such as bfloat16 holds."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.bfloat16().float() if half else made


class Program:
    """function(*weights, *inputs), exported; then specialised and run beside what it was."""

    def __init__(self, function: Callable[..., object], weights: Tensors, *inputs: torch.Tensor) -> None:
        class Whole(torch.nn.Module):
            def forward(self, *tensors: torch.Tensor) -> object:
                return function(*tensors)

        self.weights, self.inputs = weights, inputs
        exported = torch.export.export(Whole(), (*weights.values(), *inputs), strict=False)
        self.module: GraphModule = exported.graph_module
        self.expected = self.module(*weights.values(), *inputs)
        self.bound: Tensors = {}

    def specialise(self, packs: Tensors | None = None) -> "Program":
        packs = {} if packs is None else packs
        names = tuple(self.weights)
        bound = specialise(self.module, names, self.weights, packs)
        self.module.graph.lint()
        self.bound = dict(zip(names, bound, strict=True))
        return self

    def run(self) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode():
            return self.module(*self.bound.values(), *self.inputs)

    def check(self) -> None:
        for mine, theirs in zip(self.run(), self.expected, strict=True):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            assert rel_error(mine, theirs) < 1e-6

    def unchanged(self) -> None:
        """Bit for bit, with the weights themselves."""
        for name, weight in self.weights.items():
            assert self.bound[name] is weight
        for mine, theirs in zip(self.run(), self.expected, strict=True):
            assert same_bits(mine, theirs)

    @property
    def targets(self) -> list[object]:
        return [node.target for node in self.module.graph.nodes if node.op == "call_function"]


def mm(weight, bias, x):
    return (torch.mm(x, weight),)


def addmm(weight, bias, x):
    return (torch.addmm(bias, x, weight),)


def linear(weight, bias, x):
    return (F.linear(x, weight),)


def linear_with_bias(weight, bias, x):
    return (F.linear(x, weight, bias),)


def exact(weight, bias, x):
    """Such a layer names an empty weight as its bias."""
    return (ours.linear(x, weight, bias),)


def exact_with_bias(weight, bias, x):
    return (ours.linear(x, weight, bias),)


DENSE = {
    mm: aten.mm.default,
    addmm: aten.addmm.default,
    linear: aten.linear.default,
    linear_with_bias: aten.linear.default,
    exact: ours.linear.default,
    exact_with_bias: ours.linear.default,
}
BIASED = (addmm, linear_with_bias, exact_with_bias)
LAYERS = pytest.mark.parametrize("layer", DENSE, ids=lambda layer: layer.__name__)


def weight_for(layer: Callable, weight: torch.Tensor) -> torch.Tensor:
    """The weight [F, O] as the layer takes it."""
    return weight if layer in (mm, addmm) else weight.mT.contiguous()


def dense(layer: Callable, num_tokens: int = 5, weight: torch.Tensor | None = None) -> Program:
    weight = numbers(WIDTH, OUTPUTS) if weight is None else weight
    bias = torch.empty(0) if layer is exact else numbers(weight.shape[1], seed=1, half=False)
    weights = {"up": weight_for(layer, weight), "bias": bias}
    return Program(layer, weights, numbers(num_tokens, weight.shape[0], seed=2, half=False))


def runs_in_torch(program: Program, layer: Callable) -> bool:
    return on_cpu.get(DENSE[layer], DENSE[layer]) in program.targets


@needs_numba
@LAYERS
@pytest.mark.parametrize("num_tokens", [2, 40, 300])
def test_dense_layers_run_from_packed_weights(layer: Callable, num_tokens: int) -> None:
    program, packs = dense(layer, num_tokens), {}
    assert DENSE[layer] in program.targets
    program.specialise(packs)
    program.check()
    assert not runs_in_torch(program, layer)
    (strips,) = packs.values()
    assert strips.dtype is torch.bfloat16 and program.bound["up"].numel() == 0
    if layer in BIASED:
        assert program.bound["bias"] is program.weights["bias"]
    assert not program.module.state_dict()


@needs_numba
def test_rows_of_a_packed_layer_may_be_columns_of_another() -> None:
    def both(weight, other, x):
        gate, value = F.linear(x, weight).chunk(2, dim=1)
        return torch.mm(gate, other), torch.mm(value, other), F.linear(x, weight)

    weights = {"up": numbers(2 * WIDTH, WIDTH), "down": numbers(WIDTH, OUTPUTS, seed=1)}
    packs: Tensors = {}
    program = Program(both, weights, numbers(7, WIDTH, seed=2, half=False)).specialise(packs)
    program.check()
    assert len(packs) == len(weights)
    assert all(tensor.numel() == 0 for tensor in program.bound.values())


@needs_numba
def test_a_weight_that_an_embedding_reads_too_stays() -> None:
    def tied(table, ids):
        return (F.linear(F.embedding(ids, table), table),)

    packs: Tensors = {}
    program = Program(tied, {"table": numbers(VOCAB, WIDTH)}, torch.tensor([3, 0, 199])).specialise(packs)
    program.check()
    assert program.bound["table"] is program.weights["table"] and len(packs) == 1


@needs_numba
def test_two_programs_share_a_packed_weight() -> None:
    packs: Tensors = {}
    first, second = dense(linear).specialise(packs), None
    (strips,) = packs.values()
    second = dense(linear_with_bias, num_tokens=3)
    second.weights["up"] = first.weights["up"]
    second.specialise(packs)
    assert list(packs.values()) == [strips]
    places = {
        buffer.data_ptr() for program in (first, second) for _, buffer in program.module.named_buffers()
    }
    assert places == {strips.data_ptr()}
    for program in (first, second):
        program.check()
        assert program.bound["up"].numel() == 0


@needs_numba
def test_a_program_that_only_embeds_what_another_packs() -> None:
    """Trunk and head share the table; each binds what it reads."""
    table, packs = numbers(VOCAB, WIDTH), {}
    head = Program(lambda table, x: (F.linear(x, table),), {"table": table}, numbers(2, WIDTH)).specialise(
        packs
    )
    trunk = Program(lambda table, ids: (F.embedding(ids, table),), {"table": table}, torch.tensor([1, 2]))
    trunk.specialise(packs).unchanged()
    head.check()
    assert head.bound["table"].numel() == 0


@LAYERS
def test_a_weight_that_bfloat16_would_change_stays(layer: Callable) -> None:
    packs: Tensors = {}
    program = dense(layer, weight=numbers(WIDTH, OUTPUTS, half=False)).specialise(packs)
    assert not packs and runs_in_torch(program, layer)
    if layer in BIASED:
        program.unchanged()
    else:
        for mine, theirs in zip(program.run(), program.expected, strict=True):
            assert same_bits(mine, theirs)
        assert program.bound["up"] is program.weights["up"]


@needs_numba
@LAYERS
@pytest.mark.parametrize("size", [SMALL - 1, SMALL])
def test_small_weights_stay(layer: Callable, size: int) -> None:
    num_inputs = 128 if size % 128 == 0 else 129  # SMALL is 128 * 128, one less is 129 * 127
    packs: Tensors = {}
    program = dense(layer, weight=numbers(num_inputs, size // num_inputs)).specialise(packs)
    program.check()
    assert len(packs) == (size >= SMALL)
    assert runs_in_torch(program, layer) == (size < SMALL)
    if size < SMALL:
        assert program.bound["up"] is program.weights["up"]
        assert same_bits(program.run()[0], program.expected[0])


@LAYERS
def test_nothing_is_packed_without_numba(layer: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "AVAILABLE", False)
    packs: Tensors = {}
    program = dense(layer).specialise(packs)
    assert not packs and runs_in_torch(program, layer)
    assert program.bound["up"] is program.weights["up"]
    assert same_bits(program.run()[0], program.expected[0])


@needs_numba
def test_a_product_of_two_inputs_is_no_layer() -> None:
    """Neither is one whose left side is the weight."""

    def products(weight, x, y):
        return torch.mm(x, y), torch.mm(weight, y), torch.addmm(y, y, y)

    square = [numbers(WIDTH, WIDTH, seed=seed) for seed in range(3)]
    packs: Tensors = {}
    program = Program(products, {"up": square[0]}, *square[1:]).specialise(packs)
    program.unchanged()
    assert not packs


def test_a_weight_that_nothing_reads_is_not_bound() -> None:
    weights = {"used": numbers(4, 4), "unused": numbers(4, 4)}
    program = Program(lambda used, unused, x: (used + x,), weights, numbers(4, 4, seed=1)).specialise()
    assert program.bound["used"] is weights["used"] and program.bound["unused"].numel() == 0
    assert same_bits(program.run()[0], program.expected[0])


def test_ops_of_the_project_are_called_directly() -> None:
    def normed(weight, table, x):
        rows = ours.norm(x, x.new_empty(0), weight, 1e-5, 16, False)
        return ours.linear(rows, table, x.new_empty(0)), rows

    weights = {"norm": numbers(WIDTH), "table": numbers(OUTPUTS, WIDTH, seed=1, half=False)}
    program = Program(normed, weights, numbers(5, WIDTH, seed=2, half=False))
    ops = [ours.norm.default, ours.linear.default]
    assert set(ops) <= set(program.targets)
    program.specialise()
    assert not set(ops) & set(program.targets)
    assert {on_cpu[op] for op in ops} <= set(program.targets)
    program.unchanged()


@needs_numba
@pytest.mark.parametrize("layer", [exact, exact_with_bias], ids=lambda layer: layer.__name__)
def test_an_exact_layer_stays_exact(layer: Callable) -> None:
    """A row's bits are those of the row alone, however many come together."""
    program = dense(layer, 300).specialise()
    (whole,), (x,) = program.run(), program.inputs
    for start, count in ((0, 1), (299, 1), (5, 40), (1, 257), (0, 256)):
        with torch.inference_mode():
            (part,) = program.module(*program.bound.values(), x[start : start + count])
        assert same_bits(part, whole[start : start + count])


@needs_numba
def test_an_exact_layer_without_a_bias_that_the_program_makes() -> None:
    program = Program(
        lambda weight, x: (ours.linear(x, weight, x.new_empty(0)),),
        {"up": numbers(OUTPUTS, WIDTH)},
        numbers(5, WIDTH, seed=2, half=False),
    )
    program.specialise().check()


@needs_numba
def test_one_weight_multiplied_both_ways_is_packed_twice() -> None:
    def both(weight, x):
        return torch.mm(x, weight), F.linear(x, weight)

    packs: Tensors = {}
    Program(both, {"up": numbers(WIDTH, WIDTH)}, numbers(5, WIDTH, seed=2)).specialise(packs).check()
    assert len(packs) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda weight, bias, x: (torch.addmm(bias, x, weight, beta=0.5),),
        lambda weight, bias, x: (torch.addmm(bias, x, weight, alpha=2),),
        lambda weight, bias, x: (torch.addmm(bias[:1], x, weight),),
        lambda weight, bias, x: (torch.addmm(bias + 1, x, weight),),
        lambda weight, bias, x: (F.linear(x[None], weight.mT, bias)[0],),
        lambda weight, bias, x: (torch.mm(x.double(), weight.double()).float(),),
    ],
    ids=["beta", "alpha", "short bias", "computed bias", "three dimensions", "double"],
)
def test_other_calls_stay_with_torch(call: Callable) -> None:
    weights = {"up": numbers(WIDTH, OUTPUTS), "bias": numbers(OUTPUTS, seed=1)}
    Program(call, weights, numbers(5, WIDTH, seed=2)).specialise().check()


def test_a_strided_bias_stays_with_torch() -> None:
    weights = {"up": numbers(WIDTH, OUTPUTS), "bias": numbers(2 * OUTPUTS, seed=1)[::2]}
    Program(addmm, weights, numbers(5, WIDTH, seed=2)).specialise().check()

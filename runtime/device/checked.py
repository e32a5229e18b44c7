"""What a program would do, before it does anything: every call is made on tensors without memory.

A kernel reads and writes where shapes say, and these come from a file that a stranger may have written. So
each shape must follow from the tensors that are there, each op take its arguments, and each form its call.
What a kernel takes as an index (of a slot, a page, a token or an expert) must come from the step or from
`route`.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule, Node

from hemiola.plugins import OPS
from hemiola.plugins.groups import Layout, WeightGroup
from hemiola.plugins.spec import INT, Arg, Call, Op
from hemiola.runtime.abi import INPUTS
from hemiola.runtime.device.program import OURS, layouts_of
from hemiola.runtime.errors import Refused, one_line, shown
from hemiola.runtime.manifest import Manifest
from hemiola.runtime.manifest_parts import GROUP, HeadCall, OpNode, Segment

# Sizes to try, by letter (abi.py; P pages, S slots): no two equal, and others the second time, so that a size
# that is written down is not taken for one that is free.
TRIED = (
    {"T": 7, "N": 3, "W": 5, "L": 2, "P": 11, "S": 13},
    {"T": 17, "N": 19, "W": 23, "L": 29, "P": 31, "S": 37},
)
MAX_WIDTH = 2**24  # numbers of one token in one value
MOST_PARTS = 1024  # of a value that is split
SELECT = torch.ops.aten.index_select.default
PLAIN = "as it is"  # a weight that no form packs
HEAD_OPS = ["linear", "linear_argmax"]  # of logits, and of the best of them


def check_program(
    program: GraphModule,
    segment: Segment,
    bound: Sequence[torch.Tensor],
    manifest: Manifest,
    device: str,
    hidden: str = "T",
) -> None:
    """Refuses a program whose calls contradict its weights, its states or each other.

    bound: the tensors of its weights, then of its states. hidden: the letter of how many hidden states it
    has.
    """
    try:
        for sizes in TRIED:
            _Trial(program, segment, bound, manifest, device, sizes, hidden).run()
    except (  # of ours, of torch, and of Python: a list has no shape
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        reason = one_line(error)
        message = f"{segment.file} does not fit together ({reason})"
        raise Refused("damaged", message=message, way_out="run build-engine again") from None


class _Trial:
    def __init__(
        self,
        program: GraphModule,
        segment: Segment,
        bound: Sequence[torch.Tensor],
        manifest: Manifest,
        device: str,
        sizes: dict[str, int],
        hidden: str,
    ) -> None:
        self._num_hidden = sizes[hidden]
        self._segment, self._bound, self._device, self._sizes = segment, bound, device, sizes
        self._manifest, self._limits = manifest, manifest.limits
        self._nodes = list(program.graph.nodes)
        self._forms = list(segment.calls)
        self._layouts = layouts_of(self._nodes, segment)
        self._values: dict[Node, Any] = {}
        self._weights: dict[Node, torch.Tensor] = {}  # as they lie in the file
        self._seen: dict[Node, str] = {}  # in which layout a weight is wanted
        self._kinds = {state.name: state.kind for state in manifest.states}
        self._states: set[Node] = set()
        self._group: Node | None = None  # the only value that may be taken for addresses of ranks
        self._numbers: dict[Node, str] = {}  # inputs of integers by name; arguments of this name may be one

    def run(self) -> None:
        self._give()
        for node in self._nodes[len(self._values) : -1]:
            if node.op != "call_function":
                raise ValueError(f"{node.name} is one input more than the segment has")
            args = [self._of(value) for value in node.args]
            op = OURS.get(node.target)
            self._check_use(node, op)
            if node.target is SELECT:
                self._check_select(node, *args)
            if op is not None:
                self._check_op(node, op, args)
            made = SHAPES.get(node.target, node.target)(*args)  # type: ignore[operator]
            self._values[node] = self._computed(node, made)
        results = [self._of(value) for value in self._nodes[-1].args[0]]
        if self._segment.head:
            results = [self._run_head(self._nodes[-1].args[0][0]), *results[1:]]
        if self._forms:
            raise ValueError(f"the manifest has {len(self._forms)} forms more than there are calls")
        for node, layout in self._plain():
            _same(f"{node.name}, a weight", self._weights[node], layout)
        self._check_results(results)
        if self._segment.scores is not None:
            self._run_scores(self._segment.scores, results)

    def _check_select(self, node: Node, lines: Any = None, dim: Any = None, *_: Any) -> None:
        """Of a step's tokens, since its places are theirs."""
        num = self._sizes["T"]
        if not isinstance(lines, torch.Tensor) or lines.dim() == 0:
            raise ValueError(f"{node.name} selects from {shown(lines)}, which has no lines")
        if type(dim) is not int or dim != 0:
            raise ValueError(f"{node.name} selects from dimension {shown(dim)}, not from lines")
        if lines.shape[0] != num:
            raise ValueError(f"{node.name} selects from {lines.shape[0]} lines, a step has {num} tokens")

    def _run_head(self, lines: Any) -> Any:
        """Logits, computed as a step asks for them: two calls on the program's first result."""
        head = self._segment.head
        if [call.op for call in head] != HEAD_OPS:
            raise ValueError(f"its head calls {shown([call.op for call in head])}, not {HEAD_OPS}")
        logits, _ = [self._run_call(call, lines, "its head") for call in head]
        return logits.float()

    def _run_scores(self, call: HeadCall, results: list[Any]) -> None:
        """Logits of any line, computed from the program's hidden states."""
        if call.op != HEAD_OPS[0]:
            raise ValueError(f"its scores call {shown(call.op)}, not {HEAD_OPS[0]}")
        self._forms.insert(0, call)
        logits = self._run_call(call, self._nodes[-1].args[0][1], "its scores")
        if logits.shape[1] != results[0].shape[1]:
            raise ValueError(f"its scores are of {logits.shape[1]} tokens, not {results[0].shape[1]}")

    def _run_call(self, call: HeadCall, lines: Any, what: str) -> Any:
        """A call that stands apart from the program."""
        segment, op = self._segment, OPS[call.op]
        places = dict(zip(segment.weights, self._nodes, strict=False))
        if unknown := [name for name in call.weights if name not in places]:
            raise ValueError(f"{what} reads {shown(unknown[0])}, no weight of the segment")
        node = fx.Graph().call_function(op.torch_op)
        node._args = (lines, *(places[name] for name in call.weights))
        args = [self._of(value) for value in node.args]
        self._layouts |= layouts_of([*self._nodes, node], segment)
        self._check_use(node, op)
        self._check_op(node, op, args)
        return op.torch_op(*args)

    def _give(self) -> None:
        """Values of the inputs: weights, states, and what a step brings."""
        segment, num_bound = self._segment, len(self._bound)
        wanted = INPUTS[segment.name]
        if tuple(segment.inputs) != tuple(wanted):
            raise ValueError(f"its inputs are {shown(list(segment.inputs))}, a step has {list(wanted)}")
        given = self._nodes[: num_bound + len(wanted)]
        if len(given) < num_bound + len(wanted) or any(node.op != "placeholder" for node in given):
            raise ValueError(f"it has fewer inputs than the segment, which has {num_bound + len(wanted)}")
        for index, (node, tensor) in enumerate(zip(given, self._bound, strict=False)):
            value = node.meta.get("val")
            if value is None:
                raise ValueError(f"{node.name} has no sizes")
            if index < len(segment.weights):
                if segment.weights[index] == GROUP:
                    self._group = node
                self._weights[node] = tensor
                self._values[node] = value
            else:
                kind = self._kinds[segment.states[index - len(segment.weights)]]
                self._give_state(node, value, tensor, kind)
        for node, (name, letters) in zip(given[num_bound:], wanted.items(), strict=True):
            self._give_input(node, name, letters)

    def _give_state(self, node: Node, value: torch.Tensor, tensor: torch.Tensor, kind: str) -> None:
        """Its first size, of pages or slots, is free."""
        if value.shape[1:] != tensor.shape[1:] or value.dtype != tensor.dtype or value.dim() == 0:
            raise ValueError(f"{node.name} is {_told(value)}, the state {_told(tensor)}")
        first = self._sizes["P" if kind == "page" else "S"]
        self._states.add(node)
        self._values[node] = torch.empty((first, *value.shape[1:]), dtype=value.dtype, device="meta")

    def _give_input(self, node: Node, name: str, letters: str) -> None:
        value = node.meta.get("val")
        if value is None or value.dim() != len(letters):
            raise ValueError(f"{node.name} has not the sizes [{', '.join(letters)}]")
        known = self._sizes | {"8": 8, "F": self._manifest.hidden_size}
        is_hidden = "F" in letters
        if value.is_floating_point() != is_hidden or (not is_hidden and value.dtype != torch.int32):
            raise ValueError(f"{node.name} is {value.dtype}")
        shape = [known[letter] for letter in letters]
        if letters[-1] in "8F" and value.shape[-1] != shape[-1]:
            raise ValueError(f"{node.name} is {_told(value)}, {name} has {shape[-1]} numbers")
        self._values[node] = torch.empty(shape, dtype=value.dtype, device="meta")
        if not is_hidden:
            self._numbers[node] = name

    def _check_use(self, node: Node, op: Op | None) -> None:
        """Only ops that change a state may have it; and a program computes no index that a kernel takes."""
        for place, value in enumerate(node.args):
            arg = op.arg_at(place) if op is not None else None
            wanted = _number(node, place, arg)
            for part in value if isinstance(value, (list, tuple)) else [value]:
                if op is None and part in self._weights:
                    self._see(part, PLAIN)
                if part in self._states and not (arg and arg.mutated):
                    raise ValueError(f"{node.name} reads {part}, a state, which no op of ours changes there")
                kind = self._numbers.get(part) if isinstance(part, Node) else None
                if kind != wanted and not (wanted == "expert_ids" and _route(part) is not None):
                    raise ValueError(f"{node.name} has {kind or part} for its {wanted or 'argument'}")

    def _check_op(self, node: Node, op: Op, args: list[Any]) -> None:
        """Its arguments, its attributes, its form, and in which layout the form gets weights."""
        chosen = self._forms.pop(0) if self._forms else None
        if chosen is None or chosen.op != op.name:
            raise ValueError(f"{node.name} calls {op.name}, the manifest has {chosen and chosen.op}")
        first, num = len(op.args), len(op.args) + len(op.attrs)
        tensors = args[:first] + args[num:]
        if not num <= len(args) <= num + len(op.options) or not all(
            isinstance(value, torch.Tensor) for value in tensors
        ):
            raise ValueError(f"{node.name} has {len(args)} arguments, which {op.name} does not take")
        for attr, value in zip(op.attrs, args[first:num], strict=True):
            if type(value) is not attr.type:
                raise ValueError(f"{node.name}: {attr.name} is {value!r}, not {attr.type.__name__}")
            if attr.name == "chunk_len" and value != self._limits.chunk_len:
                raise ValueError(f"{node.name}: chunk_len is {value}, the engine's {self._limits.chunk_len}")
        call = op.call(*args)
        call = call._replace(layouts=self._layouts[node])
        self._check_form(node, op, chosen, call)
        for arg, value in zip(op.args, node.args, strict=False):
            if arg.mutated and value not in self._states:
                raise ValueError(f"{node.name} writes into {value}, which is no state")
            if arg.name == GROUP and value is not self._group:
                raise ValueError(f"{node.name} has {value} for its ranks, which are given to {GROUP} alone")
        self._check_sizes(node, op, args, call)

    def _check_form(self, node: Node, op: Op, chosen: OpNode, call: Call) -> None:
        form = next((f for f in op.forms if (f.name, f.device) == (chosen.form, self._device)), None)
        if form is None:
            raise ValueError(f"{node.name}: {op.name} has no form {chosen.form!r} on {self._device}")
        if reason := form.reason(call):
            raise ValueError(f"{node.name}: {form.name} does not take it: {reason}")
        sizes = tuple(call.sizes[letter] for letter in form.sizes)
        if tuple(chosen.sizes) != sizes:
            raise ValueError(f"{node.name}: its sizes are {sizes}, the manifest has {chosen.sizes}")
        for arg, value in zip(op.args, node.args, strict=False):
            if value in self._weights:
                self._check_layout(value, form.packs.get(arg.name), call.layouts.get(arg.name))
            elif arg.name in form.packs:
                raise ValueError(f"{node.name}: {arg.name} is computed, {form.name} reads a packed weight")

    def _check_layout(self, node: Any, pack: Any, group: Layout | None) -> None:
        """A packed weight is what packing one of the declared shape makes: a group, its dtype or bfloat16."""
        declared, weight = self._values[node], self._weights[node]
        self._see(node, PLAIN if pack is None else f"{pack.__module__}.{pack.__qualname__}, {group}")
        if group is not None and pack is not None:
            _same(f"{node.name}, a weight", weight, pack(WeightGroup.empty(group, tuple(declared.shape))))
        elif pack is not None:
            packed = [pack(declared.to(dtype)) for dtype in (declared.dtype, torch.bfloat16)]
            kind = next((made for made in packed if made.dtype == weight.dtype), packed[0])
            _same(f"{node.name}, a weight", weight, kind)

    def _see(self, node: Any, layout: str) -> None:
        if self._seen.setdefault(node, layout) != layout:
            raise ValueError(f"{node.name} is wanted in two layouts")

    def _plain(self) -> list[tuple[Node, torch.Tensor]]:
        """Weights that no form packs lie as they were declared."""
        return [(n, self._values[n]) for n in self._weights if self._seen.get(n, PLAIN) == PLAIN]

    def _check_sizes(self, node: Node, op: Op, args: list[Any], call: Call) -> None:
        """What the host knows: how many tokens, slots and pages there are, how long rings and tables are."""
        limits, vocab_size = self._limits, self._manifest.vocab_size
        if any(arg.name == "rows" for arg in op.args):
            for letter, free, what in (("T", "T", "tokens"), ("S", "S", "slots"), ("Z", "P", "pages")):
                if call.sizes.get(letter, self._sizes[free]) != self._sizes[free]:
                    raise ValueError(f"{node.name} has not the {what} of a step: {call.sizes[letter]}")
        if op.name == "moe":
            route = _route(node.args[1])
            source = route.args[0] if route is not None else None
            if not isinstance(source, Node):
                raise ValueError(f"{node.name} has experts that no route chose")
            scores = self._values[source]
            if scores.shape[1] != call.sizes["E"]:
                raise ValueError(f"{node.name} has {call.sizes['E']} experts, scores {scores.shape[1]}")
        if op.name == "embed" and call.sizes["V"] != vocab_size:
            raise ValueError(f"{node.name} knows {call.sizes['V']} tokens, vocab_size is {vocab_size}")
        if op.name == "rope" and args[2].shape[0] < limits.max_len:
            raise ValueError(
                f"{node.name} has a table of {args[2].shape[0]} places, max_len={limits.max_len}"
            )
        if op.name == "attention" and args[3].shape[1] != limits.page_len:
            raise ValueError(f"{node.name} has pages of {args[3].shape[1]}, page_len={limits.page_len}")
        rings = [value for arg, value in zip(op.args, args, strict=False) if arg.shape.startswith("SR")]
        least = limits.chunk_len + limits.num_drafts + (args[1].shape[1] - 1 if op.name == "conv" else 0)
        for ring in rings:
            if ring.shape[1] < least:
                raise ValueError(f"{node.name} keeps {ring.shape[1]} records, it needs {least}")

    def _computed(self, node: Node, made: Any) -> Any:
        """The value of a call; what is declared of it must be so, where its sizes are not free."""
        for part in made if isinstance(made, (list, tuple)) else [made]:
            if not isinstance(part, torch.Tensor):
                raise ValueError(f"{node.name} is {type(part).__name__}, no tensor")
            if part.numel() > MAX_WIDTH * max(self._sizes.values()):
                raise ValueError(f"{node.name} is {_told(part)}, which no step needs")
        declared = node.meta.get("val")
        if isinstance(declared, torch.Tensor):
            is_tensor = isinstance(made, torch.Tensor)
            if not is_tensor or made.dtype != declared.dtype or not _alike(declared.shape, made.shape):
                raise ValueError(f"{node.name} is declared as {_told(declared)}, and is {_told(made)}")
        return made

    def _check_results(self, results: list[Any]) -> None:
        if len(results) != 2 or any(not isinstance(part, torch.Tensor) for part in results):
            raise ValueError(f"it has {len(results)} results, a step has logits and hidden states")
        logits, hidden = results[:2]
        manifest, lines = self._manifest, self._sizes["L"]
        chosen = manifest.draft_vocab if self._segment.name == "draft" else None
        width = (chosen or manifest.vocab_size) // manifest.tp
        if tuple(logits.shape) != (lines, width) or logits.dtype != torch.float32:
            raise ValueError(f"its logits are {_told(logits)}, a step has {width} of each line, in float32")
        if tuple(hidden.shape) != (self._num_hidden, manifest.hidden_size):
            raise ValueError(f"its hidden states are {_told(hidden)}, hidden_size is {manifest.hidden_size}")

    def _of(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self._values[value]
        if isinstance(value, (list, tuple)):
            return [self._of(part) for part in value]
        return value


def _broadcast(first: Any, second: Any) -> torch.Tensor:
    if not isinstance(first, torch.Tensor):
        raise ValueError(f"{shown(first)} is no tensor to add to or to multiply")
    shape = torch.broadcast_shapes(first.shape, getattr(second, "shape", ()))
    return torch.empty(shape, dtype=torch.result_type(first, second), device="meta")


def _joined(parts: Any, dim: int = 0) -> torch.Tensor:
    """What `cat` makes of parts that differ in one size only; no builder writes others."""
    if not isinstance(parts, list) or not all(isinstance(part, torch.Tensor) for part in parts):
        raise ValueError(f"{shown(parts)} is no list of tensors to join")
    first = parts[0]
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    for part in parts:
        alike = [*part.shape]
        alike[dim] = first.shape[dim]
        if alike != [*first.shape] or part.dtype != first.dtype:
            raise ValueError(f"{_told(part)} is joined to {_told(first)}")
    return torch.empty(shape, dtype=first.dtype, device="meta")


def _split(x: torch.Tensor, size: int, dim: int = 0) -> Any:
    _check_parts(-(-x.shape[dim] // max(size, 1)))
    return torch.ops.aten.split.Tensor(x, size, dim)


def _chunk(x: torch.Tensor, count: int, dim: int = 0) -> Any:
    _check_parts(min(count, x.shape[dim]))
    return torch.ops.aten.chunk.default(x, count, dim)


def _split_with_sizes(x: torch.Tensor, sizes: list[int], dim: int = 0) -> Any:
    _check_parts(len(sizes))
    return torch.ops.aten.split_with_sizes.default(x, sizes, dim)


def _check_parts(number: int) -> None:
    """Each is an object, and a line of a file can make millions of them."""
    if number > MOST_PARTS:
        raise ValueError(f"a value is split into {number} parts, at most {MOST_PARTS} are taken")


# On tensors without memory torch computes the first four in Python and imports torch._dynamo: 2 s of a start.
SHAPES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.add.Tensor: _broadcast,
    torch.ops.aten.mul.Tensor: _broadcast,
    torch.ops.aten.relu.default: torch.empty_like,
    torch.ops.aten.cat.default: _joined,
    torch.ops.aten.split.Tensor: _split,
    torch.ops.aten.chunk.default: _chunk,
    torch.ops.aten.split_with_sizes.default: _split_with_sizes,
}


def _number(node: Node, place: int, arg: Arg | None) -> str | None:
    """What of a step this argument numbers, if it does."""
    if arg is not None:
        return arg.name if arg.dtypes == INT else None
    return "logits_ids" if node.target is SELECT and place == 2 else None


def _route(node: Any) -> Node | None:
    """The call of `route` whose second result this is."""
    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != 1:
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and source.target is OPS["route"].torch_op else None


def _alike(declared: torch.Size, shape: torch.Size) -> bool:
    """0 is a size that is free."""
    return len(declared) == len(shape) and all(a in (0, b) for a, b in zip(declared, shape, strict=True))


def _same(what: str, given: torch.Tensor, wanted: torch.Tensor) -> None:
    if given.shape != wanted.shape or given.dtype != wanted.dtype:
        raise ValueError(f"{what}, is {_told(given)}, the program wants {_told(wanted)}")


def _told(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor).__name__
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")

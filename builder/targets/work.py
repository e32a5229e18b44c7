"""The memory that an engine's largest step takes on a GPU, found without one.

The program and its launchers run on tensors without content; what these hold at a time is summed.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hemiola.builder.graph import Graph, op_of
from hemiola.builder.targets.torch import layouts_in, packed_empty
from hemiola.plugins.gpu.launch import launches
from hemiola.plugins.groups import Layout
from hemiola.runtime.abi import INPUTS, widths
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import OpNode, Segment
from hemiola.runtime.outline import Limits

Layouts = dict[fx.Node, dict[str, Layout]]  # of quantised weights, by call and argument


def work_bytes(graph: Graph, segment: Segment, limits: Limits) -> int:
    """Of intermediate tensors, outputs and what launchers take for themselves."""
    layouts = layouts_in(graph, segment)
    given = list(_given(graph, layouts, widths(limits, graph.name)))
    with launches(lambda *launch: None), torch.inference_mode(), Peak() as peak:
        _Run(graph.program.graph_module, segment.calls, layouts).run(*given)
    return peak.most


def _given(graph: Graph, layouts: Layouts, max_sizes: dict[str, int]) -> list[torch.Tensor]:
    """Weights, states and inputs of the largest step, as the program takes them."""
    places = graph.placeholders()
    coded = dict(_packed(layouts))
    first = len(places) - len(graph.inputs)
    given = []
    for at, node in enumerate(places):
        if node in coded:
            given.append(coded[node])
            continue
        traced = node.meta["val"]
        shape = [size if isinstance(size, int) else 3 for size in traced.shape]  # pages or slots
        if at >= first:
            letters = INPUTS[graph.name][graph.inputs[at - first]]
            shape = [max_sizes.get(letter, size) for letter, size in zip(letters, shape, strict=True)]
        given.append(torch.empty(shape, dtype=traced.dtype, device="meta"))
    return given


def _packed(layouts: Layouts) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """Quantised weights, without memory."""
    for node, node_layouts in layouts.items():
        op = op_of(node)
        if op is None or not node_layouts:
            continue
        forms = [form for form in op.forms if form.device == "cuda"]
        for arg, value in zip(op.args, node.args, strict=False):
            if arg.name in node_layouts and isinstance(value, fx.Node):
                layout = node_layouts[arg.name]
                form = next(form for form in forms if not form.refuses_layout(layout))
                yield value, packed_empty(form, arg.name, layout, value.meta["val"])


class _Run(fx.Interpreter):
    """The program with its forms; a value is dropped behind its last use, as in a run, or at once."""

    def __init__(self, program: fx.GraphModule, nodes: Sequence[OpNode], layouts: Layouts) -> None:
        super().__init__(program)
        self._layouts = layouts
        self._forms = iter(nodes)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        op = op_of(n)
        if op is None:
            made = super().run_node(n)
            return made if n.users or n.op == "output" else None
        chosen = next(self._forms)
        arguments, _ = self.fetch_args_kwargs_from_env(n)
        try:
            return op.bind(chosen.form, chosen.sizes, self._layouts[n])(*arguments)
        except ValueError as error:  # of sizes that no declaration tells: where a part of a projection starts
            raise Refused("unsupported", message=f"{error}", way_out="use another checkpoint") from None


class Peak(TorchDispatchMode):
    """Inside: the most bytes that tensors which were made here held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._live: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {value.untyped_storage()._cdata for value in tree_leaves((args, kwargs)) if _is_tensor(value)}
        for value in filter(_is_tensor, tree_leaves(out)):
            memory = value.untyped_storage()
            if memory._cdata not in given | self._live:
                self._live.add(memory._cdata)
                self.now += memory.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(memory, self._gone, memory._cdata, memory.nbytes())
        return out

    def _gone(self, memory: int, num_bytes: int) -> None:
        self._live.discard(memory)
        self.now -= num_bytes


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)

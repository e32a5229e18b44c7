"""A segment's ONNX graph under onnx's own evaluator, with our references as the ops that are not ONNX's."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from kit.ops import next_edge
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from hemiola.builder.graph import Graph
from hemiola.builder.models import Model
from hemiola.plugins import OPS
from hemiola.plugins.onnx import DOMAIN, is_plugin
from hemiola.plugins.spec import Op
from hemiola.runtime.manifest_parts import NEXT

Tensors = dict[str, torch.Tensor]
TABLE = 3  # pages of a row


def _run(op: Op) -> type:
    """The reference as an op of the evaluator: what it updates in place, comes out behind its results."""

    def run(self: OpRun, *values: np.ndarray) -> tuple[np.ndarray, ...]:
        attrs = {a.name: onnx.helper.get_attribute_value(a) for a in self.onnx_node.attribute}
        attrs = {k: v.decode() if isinstance(v, bytes) else v for k, v in attrs.items()}
        tensors = [torch.from_numpy(value.copy()) for value in values]
        made = op.reference(*tensors, *(attr.type(attrs[attr.name]) for attr in op.attrs))
        results = [made] if isinstance(made, torch.Tensor) else list(made)
        results += [tensor for arg, tensor in zip(op.args, tensors, strict=True) if arg.mutated]
        return tuple(tensor.numpy() for tensor in results)

    return type(op.name, (OpRun,), {"op_domain": DOMAIN, "_run": run, "run": lambda s, *v, **_: run(s, *v)})


class Gemm(OpRun):
    """Summed as our reference sums: in fp16 a sum's last bit decides a rounding, and so all that follows."""

    op_domain = ""

    def _run(
        self, a: Any, b: Any, c: Any = None, alpha: Any = 1, beta: Any = 1, transA: Any = 0, transB: Any = 0
    ):
        assert (alpha, beta, transA, transB) == (1, 1, 0, 1)
        bias = np.empty(0, a.dtype) if c is None else c
        return (OPS["linear"].reference(*(torch.from_numpy(value.copy()) for value in (a, b, bias))).numpy(),)


def evaluator(model: onnx.ModelProto) -> Callable[[Tensors], Tensors]:
    """The graph as a function from its inputs to its outputs, by name."""
    kinds = {value.type.tensor_type.elem_type for value in model.graph.input}
    own = [Gemm] if onnx.TensorProto.FLOAT16 in kinds else []
    made = ReferenceEvaluator(model, new_ops=[*own, *(_run(op) for op in OPS.values() if is_plugin(op))])
    names = [value.name for value in model.graph.output]

    def call(inputs: Tensors) -> Tensors:
        found: Any = made.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return {name: torch.from_numpy(value) for name, value in zip(names, found, strict=True)}

    return call


class Steps:
    """Fresh states of a segment, and steps of two rows that share them: prompts, tokens, rejected drafts."""

    def __init__(self, graph: Graph, model: Model, weights: Tensors) -> None:
        self.graph, self.model, self.weights = graph, model, weights
        counts = {"page": 1 + 2 * TABLE, "slot": 3}
        self.states = {
            s.name: torch.full((counts[s.kind], *s.shape), torch.nan, dtype=getattr(torch, s.dtype))
            for s in graph.states
        }

    def inputs(self, seed: int = 0) -> Iterator[Tensors]:
        dice, committed, chunk = torch.Generator().manual_seed(seed), [0, 0], 16
        for lengths, drafts in [((19, 4), 0), ((1, 3), 2), ((15, 1), 0), ((1, 1), 0)]:
            rows, first = [], 0
            for n, (start, length) in enumerate(zip(committed, lengths, strict=True)):
                own = min(drafts, length - 1)
                rows.append([first, length, own, n + 1, start, start // chunk * chunk, 0, 0])
                assert next_edge(start, length, own, chunk) >= rows[-1][5]
                first += length
            places = [start + i for start, n in zip(committed, lengths, strict=True) for i in range(n)]
            made: dict[str, Sequence[Any]] = {
                "token_ids": torch.randint(3, self.model.vocab_size, (first,), generator=dice).tolist(),
                "positions": places,
                "rows": rows,
                "page_table": [[1 + n * TABLE + i for i in range(TABLE)] for n in range(2)],
                "logits_ids": range(first),
            }
            step = {name: torch.tensor(value, dtype=torch.int32) for name, value in made.items()}
            hidden = torch.randn(first, self.model.hidden_size, generator=dice).to(self.model.dtype)
            yield {name: (step | {"hidden": hidden})[name] for name in self.graph.inputs}
            committed = [s + n - r[2] for s, n, r in zip(committed, lengths, rows, strict=True)]

    def torch(self, inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and hidden of the exported program with references; it moves the states."""
        flat = (*self.weights.values(), *self.states.values(), *inputs.values())
        with torch.no_grad():
            return self.graph.program.graph_module(*flat)

    def onnx(self, call: Callable[[Tensors], Tensors], inputs: Tensors) -> Tensors:
        """The same of an ONNX graph."""
        made = call(self.weights | self.states | inputs)
        self.states = {name: made.pop(name + NEXT) for name in self.states}
        return made

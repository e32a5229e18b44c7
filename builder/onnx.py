"""An exported segment as an ONNX graph: ONNX's own operators, and nodes of our domain for the ops it has not.

Its inputs are those of the segment: weights, states, inputs, by the names of the manifest. Its outputs are
logits and hidden, then every state after the step. Sizes that may change are named (`DIMS`).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import torch
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from torch.fx import Node

import hemiola
from hemiola.builder.dequantise import SCALES, TYPES
from hemiola.builder.graph import DIMS, Graph, op_of
from hemiola.plugins import onnx as plugin_nodes
from hemiola.plugins.groups import Layout
from hemiola.plugins.onnx import DOMAIN, DTYPES, OPSET, PLUGIN
from hemiola.plugins.spec import Op
from hemiola.runtime.abi import OUTPUTS
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import NEXT


def to_onnx(graph: Graph, layouts: Mapping[str, Layout] = MappingProxyType({})) -> onnx.ModelProto:
    """The graph without weights: they are inputs. `layouts` of dense layers' quantised weights, which are two
    inputs each (builder/dequantise.py)."""
    plugin_nodes.register()
    return _Writer(graph, layouts).model()


def with_weights(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """A copy for the folder of a safetensors file, whose tensors it takes as external data."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    made = onnx.ModelProto()
    made.CopyFrom(model)
    inputs = [value for value in made.graph.input if value.name not in header]
    for value in made.graph.input:
        if value.name in header:
            begin, end = header[value.name]["data_offsets"]
            tensor = made.graph.initializer.add(name=value.name, data_type=value.type.tensor_type.elem_type)
            tensor.dims.extend(dim.dim_value for dim in value.type.tensor_type.shape.dim)
            tensor.data_location = TensorProto.EXTERNAL
            for key, number in (
                ("location", path.name),
                ("offset", 8 + size + begin),
                ("length", end - begin),
            ):
                tensor.external_data.add(key=key, value=str(number))
    del made.graph.input[:]
    made.graph.input.extend(inputs)
    return made


def outputs(graph: Graph) -> list[str]:
    """Names of logits and hidden; an MTP head has an input `hidden`, too."""
    return ["next_hidden" if name in graph.inputs else name for name in OUTPUTS]


class _Writer:
    """Walks the program once. It is the `Emit` of the bodies in plugins/onnx.py."""

    def __init__(self, graph: Graph, layouts: Mapping[str, Layout]) -> None:
        self.graph, self.layouts = graph, layouts
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self.known: list[ValueInfoProto] = []
        self.names: dict[Node, str | list[str]] = {}
        self.at, self.first = "", 0  # the node of the program that is being written, and its first of ours
        placeholders = graph.placeholders()
        states = [state.name for state in graph.states]
        self.names |= dict(zip(placeholders, [*graph.weights, *states, *graph.inputs], strict=True))
        self.states = dict(zip(states, placeholders[len(graph.weights) :], strict=False))
        self.symbols = {size: DIMS[letter] for size, letter in graph.letters().items()}
        (output,) = (node for node in graph.program.graph.nodes if node.op == "output")
        self.results: dict[Node, str] = dict(zip(output.args[0], outputs(graph), strict=True))
        self.written: dict[str, str] = {}  # by state, its value after the step

    def model(self) -> onnx.ModelProto:
        for node in self.graph.program.graph.nodes:
            if node.op == "call_function":
                self.at, self.first = node.name, len(self.nodes)
                self._write(node)
        places = {self._name(n): n.meta["val"] for n in self.names if n.op == "placeholder"}
        inputs = [self._info(name, value, self.layouts.get(name)) for name, value in places.items()]
        for name, layout in self.layouts.items():
            spans = [places[name].shape[1] // layout.span] if layout.span else []
            shape = [places[name].shape[0], *spans]
            inputs.append(helper.make_tensor_value_info(name + SCALES, TensorProto.FLOAT, shape))
        outputs = [self._info(name, node.meta["val"]) for node, name in self.results.items()]
        outputs += [self._info(name, self.states[s].meta["val"]) for s, name in self.written.items()]
        made = helper.make_graph(
            self.nodes, self.graph.name, inputs, outputs, self.constants, value_info=self.known
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, plugin_nodes.VERSION)]
        return helper.make_model(
            made,
            opset_imports=opsets,
            ir_version=helper.find_min_ir_version_for(opsets[:1]),
            producer_name="hemiola",
            producer_version=hemiola.__version__,
        )

    # What bodies call.

    def __call__(self, op: str, inputs: Sequence[str], outputs: int = 1, **attrs: Any) -> Any:
        name = f"{self.at}.{len(self.nodes) - self.first}"
        made = [f"{name}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, made, name=name, **attrs))
        return made if outputs > 1 else made[0]

    def constant(self, value: np.ndarray) -> str:
        name = f"{self.at}.constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def cast(self, value: str, source: torch.dtype, target: torch.dtype) -> str:
        return value if source is target else self("Cast", [value], to=DTYPES[target])

    # Nodes of the program.

    def _write(self, node: Node) -> None:
        if node.target.__name__ == "getitem":  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            source, index = node.args
            self.names[node] = self.names[source][index]  # pyright: ignore[reportArgumentType, reportCallIssue, reportIndexIssue]
            return
        op = op_of(node)
        if op is not None and plugin_nodes.is_plugin(op):
            made = self._plugin(op, node)
        elif op is not None:
            call = op.call(*(value.meta["val"] if isinstance(value, Node) else value for value in node.args))
            values = self._values(node.args[: len(op.args)])
            if op.name == "linear" and values[1] in self.layouts:
                values[1] = self._dequantised(values[1], call.dtypes["x"])
            made = [plugin_nodes.body(op)(self, call, *values)]
        else:
            made = self._of_torch(node)
        self._keep(node, made)

    def _dequantised(self, name: str, dtype: torch.dtype) -> str:
        span = self.layouts[name].span
        how = {"axis": 1, "block_size": span} if span else {"axis": 0}
        return self.cast(self("DequantizeLinear", [name, name + SCALES], **how), torch.float32, dtype)

    def _plugin(self, op: Op, node: Node) -> list[str]:
        """A node of our domain, whose states come out under their name and `NEXT`."""
        inputs = self._values(node.args[: len(op.args)])
        results = [f"{self.at}.{i}" for i in range(len(op.results))]
        states = [name for arg, name in zip(op.args, inputs, strict=True) if arg.mutated]
        assert not set(states) & self.written.keys(), f"{node} updates a state that another node has updated"
        self.written |= {state: state + NEXT for state in states}
        attrs = {a.name: a.type(v) for a, v in zip(op.attrs, node.args[len(op.args) :], strict=True)}
        outputs = results + [state + NEXT for state in states]
        self.nodes.append(
            helper.make_node(op.name, inputs, outputs, name=self.at, domain=DOMAIN, **attrs, **PLUGIN)
        )
        return results

    def _of_torch(self, node: Node) -> list[str]:
        """What may stand between our ops (builder/graph.py)."""
        name, args = node.target._overloadpacket.__name__, node.args  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess, reportOptionalMemberAccess]
        match name:
            case "view" | "unsqueeze":
                kind = {"view": "Reshape", "unsqueeze": "Unsqueeze"}[name]
                places = np.atleast_1d(np.array(args[1], np.int64))
                return [self(kind, [self._name(args[0]), self.constant(places)])]
            case "split" | "split_with_sizes" | "chunk":
                axis = int(args[2])  # pyright: ignore[reportArgumentType]
                sizes = np.array([part.shape[axis] for part in node.meta["val"]])
                made = self("Split", [self._name(args[0]), self.constant(sizes)], len(sizes), axis=axis)
                return made if len(sizes) > 1 else [made]
            case "cat":
                return [self("Concat", self._values(args[0]), axis=args[1])]
            case "index_select":
                return [self("Gather", [self._name(args[0]), self._name(args[2])], axis=args[1])]
            case "add" | "mul" | "relu":
                return [self(name.title(), self._values(args))]
            case "to" | "_to_copy":
                return [self("Cast", [self._name(args[0])], to=DTYPES[node.meta["val"].dtype])]
        message = f"{self.graph.name}: torch's {name} has no ONNX form here"
        raise Refused("unsupported", message=message, way_out="add it to builder/onnx.py")

    def _keep(self, node: Node, made: list[str]) -> None:
        """Remember the node's values; the graph's results get their own names."""
        values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
        if node in self.results:
            result = self.results[node]
            outputs = self.nodes[-1].output
            outputs[list(outputs).index(made[0])] = result
            made = [result]
        else:
            self.known += [self._info(name, value) for name, value in zip(made, values, strict=True)]
        self.names[node] = made if isinstance(node.meta["val"], (tuple, list)) else made[0]

    def _name(self, node: object) -> str:
        name = self.names[node]  # pyright: ignore[reportArgumentType]
        assert isinstance(name, str)
        return name

    def _values(self, nodes: Any) -> list[str]:
        return [self._name(node) for node in nodes]

    def _info(self, name: str, value: torch.Tensor, layout: Layout | None = None) -> ValueInfoProto:
        shape = [size if isinstance(size, int) else self.symbols[str(size)] for size in value.shape]
        kind = DTYPES[value.dtype] if layout is None else TYPES[layout.kind]
        return helper.make_tensor_value_info(name, kind, shape)

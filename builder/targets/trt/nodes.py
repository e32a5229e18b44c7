"""Our ops in a graph for TensorRT: the kernels of each, told beforehand, in the place of its node.

What cannot be told beforehand stays the op's own node, a callback into Python, and says why.
"""

from collections.abc import Sequence

import onnx
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper

from hemiola.builder.graph import Graph
from hemiola.builder.targets.kernels import UNNAMED_GPU, Node, Tensor, nodes_of, triton_in_one_line
from hemiola.builder.targets.torch import Job
from hemiola.builder.targets.trt.ahead import LaunchPlan, NotAhead, Sized
from hemiola.builder.targets.trt.dims import Dim
from hemiola.builder.targets.trt.ptx import Ahead, ahead
from hemiola.plugins import OPS
from hemiola.plugins.gpu.compile import without_lines
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.onnx import DOMAIN, DTYPES, PLUGIN
from hemiola.runtime.arch import ARCHS
from hemiola.runtime.manifest_parts import NEXT, PTX, OpNode

KERNELS = "hemiola.kernels"  # their domain; TensorRT goes by name, version and namespace


def told_beforehand(graph: Graph, job: Job) -> list[Ahead | str]:
    """The kernels of every node of ours in the graph, or why there are none."""
    major, minor = ARCHS[job.archs[0]].capability or (0, 0)
    gpu = Gpu(10 * major + minor, UNNAMED_GPU)
    known: dict[Node, Ahead | str] = {}
    nodes = [node for node in nodes_of(graph) if not OPS[node.op].has_onnx_body]
    for node in nodes:
        if node not in known:
            op, max_size = OPS[node.op], node.most(job.limits)
            sizes = {"T": max_size.tokens, "L": max_size.tokens, "N": max_size.rows, "W": max_size.pages}
            sizes |= {"P": max_size.rows * max_size.pages + 1, "S": max_size.rows + 1}
            tensors = zip(op.args, node.values, strict=False)
            given = {arg.name: _sized(value, sizes) for arg, value in tensors}
            try:
                # lines name files of this machine, and kernels are named by content
                with triton_in_one_line(job.archs[0]), without_lines():
                    known[node] = ahead(op, given, node.values[len(op.args) :], gpu)
            except NotAhead as error:
                known[node] = str(error)
            job.report(f"{graph.name}: kernels", len(known), len(set(nodes)))
    return [known[node] for node in nodes]


def _sized(value: Tensor, sizes: dict[str, int]) -> Sized:
    dims = (size if isinstance(size, int) else Dim.of(size, sizes[size]) for size in value.shape)
    return Sized(tuple(dims), value.dtype)


def with_forms(nodes: Sequence[OpNode], kernels: Sequence[Ahead | str]) -> tuple[OpNode, ...]:
    """What the manifest says of each."""
    return tuple(
        node.model_copy(
            update={"refused": {PTX: node_kernels}} if isinstance(node_kernels, str) else {"form": PTX}
        )
        for node, node_kernels in zip(nodes, kernels, strict=True)
    )


def with_kernels(model: onnx.ModelProto, kernels: Sequence[Ahead | str]) -> onnx.ModelProto:
    """A copy in which kernels stand where their op's node stood."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    made.opset_import.append(helper.make_opsetid(KERNELS, 1))
    left = iter(kernels)
    for node in model.graph.node:
        node_kernels = next(left) if node.domain == DOMAIN else ""
        if isinstance(node_kernels, str):
            made.graph.node.append(node)
        else:
            nodes, constants = _nodes(node, node_kernels)
            made.graph.node.extend(nodes)
            made.graph.initializer.extend(constants)
    return made


def _nodes(node: NodeProto, node_kernels: Ahead) -> tuple[list[NodeProto], list[TensorProto]]:
    """A tensor's name grows with every kernel that it comes out of; the last one has the op's own name."""
    op, (plan, entries) = OPS[node.op_type], node_kernels
    now = dict(zip((arg.name for arg in op.args), node.input, strict=True))
    names = dict(zip(plan.results, node.output, strict=False))
    names |= {arg.name: now[arg.name] + NEXT for arg in op.args if arg.mutated}
    last = {name: entry for entry in entries for name in entry.outputs}
    nodes, constants = _filled(node, plan, now)
    for i, entry in enumerate(entries):
        inputs = [now[name] for name in entry.inputs]
        now |= {
            name: names[name] if name in names and last[name] is entry else f"{node.name}.{name}.{i}"
            for name in entry.outputs
        }
        outputs = [now[name] for name in entry.outputs]
        made = helper.make_node(
            entry.name, inputs, outputs, name=f"{node.name}.{i}", domain=KERNELS, **PLUGIN
        )
        nodes.append(made)
    assert set(node.output) <= set(now.values()), f"{node.name}: no kernel gives all outputs"
    return nodes, constants


def _filled(
    node: NodeProto, plan: LaunchPlan, now: dict[str, str]
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Zeros and ones that kernels start from; zeros are a tensor that they write."""
    nodes: list[NodeProto] = []
    constants: list[TensorProto] = []
    for name, memory in plan.memory.items():
        if memory.fill is None:
            continue
        now[name] = f"{node.name}.{name}"
        constant = [size for size in memory.shape if isinstance(size, int)]
        if len(constant) == len(memory.shape):
            full = torch.full(constant, memory.fill, dtype=memory.dtype)
            constants.append(numpy_helper.from_array(full.numpy(), now[name]))
            continue
        (letter,) = memory.shape
        lender = next(tensor for tensor in plan.memory if letter in plan.memory[tensor].shape)
        place = plan.memory[lender].shape.index(letter)
        value = helper.make_tensor("value", DTYPES[memory.dtype], [1], [memory.fill])
        nodes.append(
            helper.make_node("Shape", [now[lender]], [f"{now[name]}.shape"], start=place, end=place + 1)
        )
        nodes.append(helper.make_node("ConstantOfShape", [f"{now[name]}.shape"], [now[name]], value=value))
    return nodes, constants

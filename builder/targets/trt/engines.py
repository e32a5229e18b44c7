"""What TensorRT and TensorRT-RTX share: an ONNX graph in, a serialized engine out. `trt` is either module."""

import operator
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from onnx import ValueInfoProto
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from hemiola.builder.graph import DIMS, Graph
from hemiola.builder.place import says_lack_of_memory
from hemiola.builder.targets.trt.network import NotBuilt, Shapes
from hemiola.runtime.abi import widths
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import Profile
from hemiola.runtime.outline import Limits

MOST = 2**20  # pages or slots


@contextmanager
def interrupts_wait() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM come when a compiler has returned: raised in what it calls of Python, they are lost.

    Gives what has come by now, so that a long build can be told to end.
    """
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    handlers = {number: handler for number, handler in previous.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came[:1]:
            handlers[signal.Signals(number)](number, None)


def lay_out(graph: Graph, views: Sequence[str] = ()) -> None:
    """Trace tensors as they lie when parts make them: each in memory of its own, but for these views.

    Kernels are compiled for what is known of the addresses and strides that they get.
    """
    kept = {name.rsplit(".", 2)[0] for name in views}  # ONNX values are named after torch's nodes
    for node in graph.program.graph.nodes:
        if node.op != "call_function":
            continue
        maker = node.args[0] if node.target is operator.getitem else node
        if maker.name in kept:
            node.meta["val"] = node.target(*map_arg(node.args, lambda arg: arg.meta["val"]))
        else:
            node.meta["val"] = tree_map(lambda value: value.new_empty(value.shape), node.meta["val"])


def make_profiles(limits: Limits, graph: Graph, letters: str = "TL") -> tuple[Profile, ...]:
    """One for steps that only decode and verify, one for prompts; of the sizes with these letters.

    A step may want no logits at all. How many pages and slots there are, is decided where the engine runs.
    """
    widest = widths(limits, graph.name)
    decode = min(limits.max_rows * (1 + limits.num_drafts), widest["T"])
    sizes = {
        "L": (0, min(decode, widest["L"]), widest["L"]),
        "N": (1, widest["N"], widest["N"]),
        "W": (1, widest["W"], widest["W"]),
        "P": (1, widest["N"] * widest["W"], MOST),
        "S": (1, widest["N"] + 1, MOST),
    }
    max_tokens = {"decode": decode, "prefill": widest["T"]}
    return tuple(
        Profile(
            name=name,
            sizes={DIMS[letter]: (sizes | {"T": (1, tokens, tokens)})[letter] for letter in letters},
        )
        for name, tokens in max_tokens.items()
    )


def shapes_of(inputs: Sequence[ValueInfoProto], profiles: Sequence[Profile]) -> list[Shapes]:
    """Of each profile, the sizes of the inputs that have dynamic ones."""
    dims = {value.name: value.type.tensor_type.shape.dim for value in inputs}
    return [
        {
            name: tuple(zip(*(taken.sizes.get(d.dim_param, (d.dim_value,) * 3) for d in of), strict=True))
            for name, of in dims.items()
            if any(d.dim_param for d in of)
        }
        for taken in profiles
    ]


def refused(trt: Any, failure: NotBuilt) -> Exception:
    """The last of the errors is the most telling one, but for a lack of memory, which brings others."""
    errors = failure.errors
    name = trt.__name__.replace("_", "-")
    if lack := next(filter(says_lack_of_memory, errors), ""):
        return MemoryError(f"{name} {trt.__version__}: {lack}")
    reason = errors[-1] if errors else "it gives no reason"
    message = f"{name} {trt.__version__} cannot {failure.what} the graph ({reason})"
    return Refused("failed", "target", message=message, way_out="use --target torch")

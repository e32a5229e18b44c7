"""Graph rewriting, all of it when an engine is built: the runtime runs a program as it is stored.

| pass | engines | what |
|---|---|---|
| `fuse` | CPU, GPU | a dense layer, or on GPUs a sum over ranks, and what follows it as one call |
| `lines` | CPU | a second program, which computes hidden states only where there are logits |
| `head` | GPU | the output head apart: a step asks for logits, or only for the best tokens |
| `cut` | ONNX Runtime, TensorRT-RTX | parts for another compiler, our ops between them |
"""

from torch.fx import Graph


def copied(graph: Graph) -> Graph:
    """The same calls under the same names."""
    made = Graph()
    made.output(made.graph_copy(graph, {}))
    return made

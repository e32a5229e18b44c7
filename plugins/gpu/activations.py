"""Activations of fp32 values, in the registers of a kernel."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def silu(z):
    return z / (1.0 + tl.exp(-z))


@triton.jit
def relu2(z):
    positive = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return positive * positive

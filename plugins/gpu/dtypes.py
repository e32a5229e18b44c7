"""Dtypes that kernels take."""

import torch

ENGINES = (torch.bfloat16, torch.float32)  # what an engine's activations and weights are
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)

"""Dtypes that kernels take."""

import torch

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)

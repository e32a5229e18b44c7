"""Dtypes that kernels take."""

import torch
import triton.language as tl

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

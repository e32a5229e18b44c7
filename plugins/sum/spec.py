"""The sum over all ranks of an engine, behind layers whose inputs are cut between them."""

import torch

from hemiola.plugins.spec import Arg, Call, Form, Op, Result, first_reason, fp32_in_sixteens, one_dtype
from hemiola.plugins.sum.reference import sum as reference

GROUP = Arg("group", "G", (torch.int64,))  # plugins/ranks.py
LINE = 8  # bytes


def _in_lines(call: Call) -> str:
    """Refuses tokens that are no whole number of a GPU's lines (plugins/gpu/exchange.py)."""
    num_bytes = call.sizes["F"] * call.dtypes["x"].itemsize
    return f"F is {call.sizes['F']}, {num_bytes} bytes and no multiple of {LINE}" if num_bytes % LINE else ""


SUM = Op(
    name="sum",
    args=(Arg("x", "TF"), GROUP),
    attrs=(),
    results=(Result("TF"),),
    reference=reference,
    forms=(
        Form("compiled", "cpu", fp32_in_sixteens("")),
        Form("cuda", "cuda", first_reason(one_dtype(), _in_lines), options=("residual",)),
    ),
    options=(Arg("residual", "TF"),),  # builder/passes/fuse.py
    by_line=True,
)

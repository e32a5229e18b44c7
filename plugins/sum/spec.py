"""The sum over all ranks of an engine, behind layers whose inputs are cut between them."""

import torch

from hemiola.plugins.spec import Arg, Form, Op, Result, fp32_in_sixteens
from hemiola.plugins.sum.reference import sum as reference

GROUP = Arg("group", "G", (torch.int64,))  # plugins/ranks.py

SUM = Op(
    name="sum",
    args=(Arg("x", "TF"), GROUP),
    attrs=(),
    results=(Result("TF"),),
    reference=reference,
    forms=(Form("compiled", "cpu", fp32_in_sixteens("")),),
    by_line=True,
)

"""The best of a dense layer's outputs, without the others: all that a greedy choice needs of a head."""

import torch

from hemiola.plugins.gpu.lines import pack_lines, refuses_wide
from hemiola.plugins.gpu.words import pack_words, refuses_layout
from hemiola.plugins.linear.spec import CODED
from hemiola.plugins.linear_argmax.reference import linear_argmax as reference
from hemiola.plugins.spec import Arg, Form, Op, Result, one_dtype

LINEAR_ARGMAX = Op(
    name="linear_argmax",
    args=(
        Arg("x", "TF"),
        Arg("weight", "OF"),
        Arg("bias", "O*"),
    ),
    attrs=(),
    results=(Result("T", torch.float32), Result("T", torch.int64)),
    reference=reference,
    forms=(
        Form("cuda", "cuda", one_dtype()),
        Form("coded", "cuda", CODED, {"weight": pack_words}, "O", refuses_layout),
        Form("e4m3", "cuda", CODED, {"weight": pack_lines}, "O", refuses_wide),
    ),
    is_fusion=True,
)

"""Causal attention over paged keys and values, for rows of any number of tokens."""

from hemiola.plugins.attention.reference import attention as reference
from hemiola.plugins.spec import INT, ROWS, Arg, Attr, Form, Op, Result, bf16, fp32_in_sixteens

ATTENTION = Op(
    name="attention",
    args=(
        Arg("q", "THD"),
        Arg("k", "TGD"),
        Arg("v", "TGD"),
        Arg("k_pages", "ZLGD", mutated=True),  # Z pages of L tokens
        Arg("v_pages", "ZLGD", mutated=True),
        Arg("page_table", "NW", INT),
        ROWS,
        Arg("positions", "T", INT),
    ),
    attrs=(Attr("scale", float), Attr("first", int)),
    results=(Result("THD"),),
    reference=reference,
    forms=(
        Form("compiled", "cpu", fp32_in_sixteens("DL")),
        Form("triton", "cuda", bf16()),
    ),
)

"""Causal attention over paged keys and values, for rows of any number of tokens."""

from hemiola.plugins.attention.cpu import attention as in_torch
from hemiola.plugins.attention.reference import attention as reference
from hemiola.plugins.spec import INT, Arg, Attr, Op

ATTENTION = Op(
    name="attention",
    args=(
        Arg("q", "THD"),
        Arg("k", "TGD"),
        Arg("v", "TGD"),
        Arg("k_pages", "ZLGD", mutated=True),  # Z pages of L tokens
        Arg("v_pages", "ZLGD", mutated=True),
        Arg("page_table", "NW", INT),
        Arg("cu_tokens", "M", INT),  # M = N + 1
        Arg("positions", "T", INT),
    ),
    attrs=(
        Attr("scale", float),
        Attr("exact", bool),
        Attr("first", int),
    ),
    result="THD",
    reference=reference,
    in_torch=in_torch,
    lanes="DL",
)

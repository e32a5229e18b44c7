"""Causal attention over paged keys and values, for rows of any number of tokens."""

from hemiola.plugins.attention.reference import attention as reference
from hemiola.plugins.spec import (
    INT,
    ROWS,
    Arg,
    Attr,
    Call,
    Form,
    Op,
    Result,
    bf16,
    first_reason,
    fp32_in_sixteens,
)


def _refuses_on_cuda(call: Call) -> str:
    depth, page_len = call.sizes["D"], call.sizes["L"]
    if depth not in (16, 32, 64, 128, 256):
        return f"D is {depth}, not 16, 32, 64, 128 or 256"
    return f"L is {page_len}, no multiple of 16" if page_len % 16 else ""


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
        Form("cuda", "cuda", first_reason(_refuses_on_cuda, bf16())),
    ),
)

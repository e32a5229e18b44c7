"""Causal attention over paged keys and values, for rows of any number of tokens."""

from hemiola.plugins.attention.reference import attention as reference
from hemiola.plugins.spec import (
    E4M3,
    FLOAT,
    INT,
    ROWS,
    Arg,
    Attr,
    Call,
    Form,
    Op,
    Reason,
    Result,
    first_reason,
    fp32_in_sixteens,
    one_dtype,
)

PAGES, NARROW = (*FLOAT, E4M3), ("k_pages", "v_pages")


def _refuses_on_cuda(call: Call) -> str:
    depth, page_len = call.sizes["D"], call.sizes["L"]
    if depth not in (16, 32, 64, 128, 256):
        return f"D is {depth}, not 16, 32, 64, 128 or 256"
    return Reason(f"L is {page_len}, no multiple of 16", "page_len") if page_len % 16 else ""


def _refuses_scales(call: Call) -> str:
    """Only pages of 8 bits have units of their own."""
    scales = call.attrs["k_scale"], call.attrs["v_scale"]
    if scales == (1.0, 1.0) or call.dtypes["k_pages"] is E4M3:
        return ""
    return f"k_scale and v_scale are {scales[0]} and {scales[1]}, k_pages is {call.dtypes['k_pages']}"


ATTENTION = Op(
    name="attention",
    args=(
        Arg("q", "THD"),
        Arg("k", "TGD"),
        Arg("v", "TGD"),
        Arg("k_pages", "ZLGD", PAGES, mutated=True),  # Z pages of L tokens
        Arg("v_pages", "ZLGD", PAGES, mutated=True),
        Arg("page_table", "NW", INT),
        ROWS,
        Arg("positions", "T", INT),
    ),
    attrs=(Attr("scale", float), Attr("first", int), Attr("k_scale", float), Attr("v_scale", float)),
    results=(Result("THD"),),
    reference=reference,
    forms=(
        Form(
            "compiled",
            "cpu",
            first_reason(_refuses_scales, fp32_in_sixteens("DL", NARROW, {"L": "page_len"})),
        ),
        Form("cuda", "cuda", first_reason(_refuses_on_cuda, _refuses_scales, one_dtype(narrow=NARROW))),
    ),
)

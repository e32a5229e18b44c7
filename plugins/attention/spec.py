"""Causal attention over paged keys and values, for rows of any number of tokens."""

from collections.abc import Callable

from hemiola.plugins.attention.pages import CODES, bits_of, refuses_codes
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
    in_groups,
    one_dtype,
)

NARROW = (E4M3, CODES)
PAGES = (*FLOAT, *NARROW)
PARTS = (("key", "k_pages", "A"), ("value", "v_pages", "B"))


def _refuses_on_cuda(call: Call) -> str:
    depth, page_len = call.sizes["D"], call.sizes["L"]
    if depth not in (16, 32, 64, 128, 256):
        return f"D is {depth}, not 16, 32, 64, 128 or 256"
    return Reason(f"L is {page_len}, no multiple of 16", "page_len") if page_len % 16 else ""


def _refuses_first(call: Call) -> str:
    """No key stands before place 0."""
    return f"first is {call.attrs['first']}, below 0" if call.attrs["first"] < 0 else ""


def _refuses_scales(call: Call) -> str:
    """Only pages of e4m3 have units of their own."""
    for name, scale in (("k", call.attrs["k_scale"]), ("v", call.attrs["v_scale"])):
        kind = call.dtypes[f"{name}_pages"]
        if scale != 1.0 and kind is not E4M3:
            return f"{name}_scale is {scale}, {name}_pages is {kind}"
    return ""


def _refuses_pages(call: Call) -> str:
    """Pages in other numbers than the engine's, on both sides or none; and of other widths than theirs."""
    depth, plain = call.sizes["D"], call.dtypes["q"]
    for _, name, _ in PARTS:
        other = next((call.dtypes[n] for _, n, _ in PARTS if n != name), plain)
        if (kind := call.dtypes[name]) is not plain and (kind not in NARROW or other is plain):
            return f"{name} is {kind}, not {plain}"
    for part, name, letter in PARTS:
        try:
            bits = bits_of(part, call.dtypes[name], call.sizes[letter], depth)
        except ValueError as error:
            return str(error)
        if reason := refuses_codes(part, bits, depth):
            return Reason(reason, "kv_dtype")
    return ""


_REFUSES = first_reason(in_groups("H", "G"), _refuses_first, _refuses_pages, _refuses_scales)


def _but_pages(refuses: Callable[[Call], str]) -> Callable[[Call], str]:
    """Looks at all else."""

    def others(call: Call) -> str:
        dtypes = {name: dtype for name, dtype in call.dtypes.items() if not name.endswith("_pages")}
        return refuses(call._replace(dtypes=dtypes))

    return others


ATTENTION = Op(
    name="attention",
    args=(
        Arg("q", "THD"),
        Arg("k", "TGD"),
        Arg("v", "TGD"),
        Arg("k_pages", "ZLGA", PAGES, mutated=True),  # Z pages of L tokens, see pages.py
        Arg("v_pages", "ZLGB", PAGES, mutated=True),
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
            first_reason(_but_pages(fp32_in_sixteens("DL", {"L": "page_len"})), _REFUSES),
            options=("logits_ids",),
        ),
        Form(
            "cuda",
            "cuda",
            first_reason(_refuses_on_cuda, _but_pages(one_dtype()), _REFUSES),
        ),
    ),
    options=(Arg("logits_ids", "I", INT),),  # builder/passes/lines.py
)

"""Layers whose inputs are e4m3 like their weights (W8A8): how inputs are rounded, in which order sums go.

A scale belongs to one token, or is one of the checkpoint's: an output's bits depend on its own row alone. A
dynamic scale of a whole tensor would not keep that, and no format may ask for it (builder/formats/inputs.py).
"""

import torch

from hemiola.plugins.groups import E4M3, Layout, WeightGroup, factors, numbers

SPAN = 128  # inputs whose products are summed from zero, and that share a scale by "group"
LARGEST = 448.0  # of e4m3
LEAST = 1e-10  # what the largest input of a span counts as at least
INVERSE = torch.tensor(1 / LARGEST, dtype=torch.float32).item()
WIDE_INPUTS = "it takes inputs as wide as they come"  # why other forms refuse


def refuses_inputs(layout: Layout) -> str:
    """Of a layout with inputs in e4m3: why no kernel multiplies it, or ""."""
    if layout.kind != "e4m3" or layout.others:
        return "inputs in e4m3 are multiplied with weights in e4m3 alone"
    if layout.span % SPAN:
        return f"a scale for {layout.span} inputs, no multiple of {SPAN}"
    return ""


def rounded(x: torch.Tensor, layout: Layout, static: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [R, F] as numbers of e4m3 [R, F] and their scales [R, G], fp32; G: ceil(F / SPAN) by "group", or
    1. `static`: the scale where the layout has it.

    code = nearest(clamp(x / scale, -448, 448)), ties to even; scale = max(largest |x|, LEAST) * INVERSE, each
    rounded to fp32. NaN and infinities among inputs of a scale make all outputs of their row NaN; a static
    scale makes infinities 448.
    """
    (num_rows, num_inputs), x = x.shape, x.float()
    span = SPAN if layout.inputs == "group" else num_inputs
    padded = torch.nn.functional.pad(x, (0, -num_inputs % span)).unflatten(1, (-1, span))
    if layout.inputs == "static":
        scales = static.float().expand(num_rows, 1)
    else:
        scales = padded.abs().amax(2).clamp(min=LEAST) * torch.tensor(INVERSE)
    codes = (padded / scales[..., None]).clamp(-LARGEST, LARGEST).to(E4M3)
    return codes.float().flatten(1)[:, :num_inputs], scales


def product(x: torch.Tensor, group: WeightGroup) -> torch.Tensor:
    """x [R, F] times a weight [O, F], as [R, O] fp32: the truth, which a CPU's kernels compute bit for bit.

    A sum of SPAN products begins at zero and adds them in their order, each step rounded to fp32 (a product
    of two e4m3 numbers is an fp32 number). Then it is promoted: y += (sum * input scale) * weight scale, each
    rounded. A GPU's tensor cores keep some 14 bits of the sums, and it adds with an fma.
    """
    static = group.tensors["input"][0, 0] if group.layout.inputs == "static" else torch.empty(0)
    codes, scales = rounded(x, group.layout, static)
    weight, by_span = numbers(group), factors(group)
    width = group.layout.span or group.shape[1]
    y = torch.zeros(x.shape[0], group.shape[0])
    for begin in range(0, x.shape[1], SPAN):
        sums = torch.zeros_like(y)
        for k in range(begin, min(begin + SPAN, x.shape[1])):
            sums = sums + codes[:, k : k + 1] * weight[:, k]
        scale = scales[:, begin // SPAN if scales.shape[1] > 1 else 0]
        y = y + sums * scale[:, None] * by_span[:, begin // width]
    return y

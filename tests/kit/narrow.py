"""Pages of codes (plugins/attention/pages.py), as tests look at them."""

import torch

from hemiola.plugins.attention.pages import CODES, NOTE_BYTES, NOTES


def by_token(name: str, pages: torch.Tensor) -> torch.Tensor:
    """Pages of a state [.., L, G, width] with the bytes of a token side by side: codes, then notes."""
    if pages.dtype is not CODES:
        return pages
    note_bytes = NOTES["key" if name.endswith("k_pages") else "value"] * NOTE_BYTES
    *_, page_len, groups, width = pages.shape
    num = page_len * groups * (width - note_bytes)
    flat = pages.flatten(-3)
    codes = flat[..., :num].unflatten(-1, (page_len, groups, -1))
    return torch.cat((codes, flat[..., num:].unflatten(-1, (page_len, groups, -1))), -1)


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    return tensor == 0xFF if tensor.dtype is CODES else tensor.isnan()

"""What the packed form of a prefix has of pages and of a snapshot, and where that stands in their bytes.

A page is the bytes of all states of its kind, one behind the other, and so is a slot (device/host_units.py).
A slot that stands at an edge is a snapshot, of which less means something: states whole, no records, of a
conv the inputs of the last width - 1 tokens in the order of the text, of mtp.hidden the last token's line.
A conv's parts (x, B, C, or q, k, v) have names of their own. Of an engine of several ranks there is what each
rank has, by names that begin with `rank0.` and so on.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from hemiola.runtime.config import state_bytes
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import HIDDEN, Limits, State


class NamedShape(NamedTuple):
    """A tensor of the packed form."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * getattr(torch, self.dtype).itemsize


class _PagePart(NamedTuple):
    """All bytes of one state in a page."""

    tensor: NamedShape  # of one page
    start: int


class _SlotPart(NamedTuple):
    """Columns of some lines of one state in a slot."""

    tensor: NamedShape
    start: int  # of the state
    line_bytes: int
    num_lines: int  # of the state; a ring, in which position p stands in line p % num_lines
    columns: slice  # bytes of a line


class PrefixLayout:
    """Of one engine's states; each rank has as many. has_head: an MTP head runs, else its states mean nothing
    and are left out.

    Raises Refused for a state of which nobody knows what it is at an edge.
    """

    def __init__(self, states: Sequence[State], limits: Limits, has_head: bool, num_ranks: int = 1) -> None:
        own = [state for state in states if prod(state.shape)]
        shapes = {state.name: state.shape for state in own}
        ring = limits.chunk_len + limits.num_drafts  # by which a conv's is longer than what it needs
        self._pages: list[_PagePart] = []
        self._slots: list[_SlotPart] = []
        starts = {"page": 0, "slot": 0}
        for state in own:
            start, num_bytes = starts[state.kind], state_bytes([state], state.kind)
            starts[state.kind] += num_bytes
            if state.name.startswith("mtp.") and not has_head:
                continue
            if state.kind == "page":
                self._pages.append(_PagePart(NamedShape(state.name, state.dtype, state.shape), start))
            else:
                self._slots.extend(_at_edge(state, start, num_bytes // state.shape[0], ring, shapes))
        self.page_bytes, self.slot_bytes = starts["page"], starts["slot"]  # of a rank
        self.num_ranks = num_ranks
        self.page_len = limits.page_len

    def tensors(self, num_pages: int) -> list[NamedShape]:
        """All of a prefix, in the order of the payload: ids, pages, and the snapshot behind them."""
        ids = NamedShape("token_ids", "int32", (num_pages * self.page_len,))
        pages = [part.tensor._replace(shape=(num_pages, *part.tensor.shape)) for part in self._pages]
        return [ids, *self._of_ranks(pages), *self._of_ranks([part.tensor for part in self._slots])]

    def _of_ranks(self, tensors: Sequence[NamedShape]) -> list[NamedShape]:
        if self.num_ranks == 1:
            return [*tensors]
        ranks = range(self.num_ranks)
        return [tensor._replace(name=f"rank{rank}.{tensor.name}") for rank in ranks for tensor in tensors]

    def num_bytes(self, num_pages: int) -> int:
        """Of the payload."""
        return sum(tensor.num_bytes for tensor in self.tensors(num_pages))

    def pack(
        self, ids: np.ndarray, pages: Sequence[np.ndarray], slot: np.ndarray, payload: np.ndarray
    ) -> None:
        """Fill payload [num_bytes] from ids [edge] int32, pages [ranks, page_bytes] each, and slots
        [ranks, slot_bytes] that stand at the edge behind them; all but ids are uint8."""
        own = ids.view(np.uint8)
        payload[: len(own)] = own
        for piece, place in self._pieces(payload, pages):
            piece[:] = place
        for piece, place in self._snapshot(payload, slot):
            piece[:] = place

    def unpack(self, payload: np.ndarray, pages: Mapping[int, np.ndarray], slot: np.ndarray | None) -> None:
        """The other way, for those pages that are asked for by their place, and a slot if there is one.
        What means nothing at an edge is left as it is."""
        wanted = [pages.get(n) for n in range(self.num_pages(payload))]
        for piece, place in self._pieces(payload, wanted):
            place[:] = piece
        if slot is not None:
            for piece, place in self._snapshot(payload, slot):
                place[:] = piece

    def num_pages(self, payload: np.ndarray) -> int:
        """Whose payload has these bytes."""
        one = self.num_bytes(1) - self.num_bytes(0)
        return (len(payload) - self.num_bytes(0)) // one

    def _pieces(
        self, payload: np.ndarray, pages: Sequence[np.ndarray | None]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Where each state of each page of each rank stands in the payload, and in the page."""
        at = 4 * self.page_len * len(pages)  # behind the ids
        for rank in range(self.num_ranks):
            for tensor, start in self._pages:
                size = tensor.num_bytes
                for page in pages:
                    if page is not None:
                        yield payload[at : at + size], page[rank, start : start + size]
                    at += size

    def _snapshot(self, payload: np.ndarray, slots: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        edge = self.num_pages(payload) * self.page_len
        at = len(payload) - self.num_ranks * sum(part.tensor.num_bytes for part in self._slots)
        for slot in slots:
            for tensor, start, line_bytes, num_lines, columns in self._slots:
                lines = slot[start : start + num_lines * line_bytes].reshape(num_lines, line_bytes)
                kept = tensor.shape[0]
                width = tensor.num_bytes // kept
                piece = payload[at : at + tensor.num_bytes].reshape(kept, width)
                at += tensor.num_bytes
                first = 0 if kept == num_lines else (edge - kept) % num_lines
                head = min(kept, num_lines - first)  # lines before the ring begins again
                yield piece[:head], lines[first : first + head, columns]
                yield piece[head:], lines[: kept - head, columns]


def _at_edge(
    state: State, start: int, line_bytes: int, ring: int, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[_SlotPart]:
    """What a state has at an edge."""
    num_lines, *rest = state.shape
    layer, _, what = state.name.rpartition(".")
    if what.endswith("_records"):
        return
    if what == "state":
        kept = num_lines
    elif what == "conv" and len(rest) == 1 and num_lines > ring:
        kept = num_lines - ring
    elif state.name == HIDDEN:
        kept = 1
    elif what == "conv" and len(rest) == 1:  # of width 1
        return
    else:
        message = f"nobody knows what of the state {state.name} stands at an edge"
        raise Refused("unsupported", message=message, way_out="this engine's prefixes cannot be moved")
    item = line_bytes // max(prod(rest), 1)
    first = 0
    for name, width in _conv_parts(layer, rest[0], shapes) if what == "conv" else [("", prod(rest))]:
        columns = slice(first * item, (first + width) * item)
        first += width
        shape = (kept, width) if what == "conv" else (kept, *rest)
        tensor = NamedShape(state.name + name, state.dtype, shape)
        yield _SlotPart(tensor, start, line_bytes, num_lines, columns)


def _conv_parts(layer: str, channels: int, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    """Names and channels. The records beside a conv say what goes through it."""

    def width(record: str) -> int:
        return prod(shapes.get(f"{layer}.{record}_records", (0, 0))[1:])

    for parts in ({"x": "x", "B": "B", "C": "B"}, {"q": "k", "k": "k", "v": "v"}):
        widths = {f".{part}": width(record) for part, record in parts.items()}
        if sum(widths.values()) == channels:
            return list(widths.items())
    return [("", channels)]

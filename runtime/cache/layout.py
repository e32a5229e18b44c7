"""What the packed form of a prefix has of pages and of a snapshot, and where that stands in their bytes.

A page is the bytes of all states of its kind, one behind the other, and so is a slot (device/host_units.py).
A slot that stands at an edge is a snapshot, of which less means something: states whole, no records, of a
conv the inputs of the last width - 1 tokens in the order of the text, of mtp.hidden the last token's line.
A conv's parts (x, B, C, or q, k, v) have names of their own. What ranks of an engine have of a tensor stands
in the order of its heads or channels, as one rank would have it.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from hemiola.runtime.config import state_bytes
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import HIDDEN
from hemiola.runtime.outline import Limits, State


class NamedShape(NamedTuple):
    """A tensor of the packed form."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * getattr(torch, self.dtype).itemsize


class _Part(NamedTuple):
    """A tensor of the packed form, and what each rank has of it: pieces, one behind the other in `num_lines`
    lines of bytes. Ranks may have the same piece."""

    tensor: NamedShape  # of all ranks
    num_lines: int
    num_pieces: int

    def piece(self, content: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
        """The rank's, [lines, bytes], of all bytes of the tensor."""
        lines = content.reshape(self.num_lines, self.num_pieces, -1)
        return lines[:, rank * self.num_pieces // num_ranks]


class _PagePart(NamedTuple):
    """All bytes of one state in a page."""

    part: _Part  # of one page
    start: int  # in a rank's page


class _SlotPart(NamedTuple):
    """Columns of some lines of one state in a slot."""

    part: _Part
    start: int  # of the state in a rank's slot
    line_bytes: int
    num_lines: int  # of the state; a ring, in which position p stands in line p % num_lines
    num_kept: int
    columns: slice  # bytes of a line


class PrefixLayout:
    """Of one engine's states; each rank has as many. has_head: an MTP head runs, else its states mean nothing
    and are left out. num_kv_parts: ranks that have heads of keys and values of their own; the others have
    the same as one of these.

    Raises Refused for a state of which nobody knows what it is at an edge.
    """

    def __init__(
        self,
        states: Sequence[State],
        limits: Limits,
        has_head: bool,
        num_ranks: int = 1,
        num_kv_parts: int | None = None,
    ) -> None:
        nonempty = [state for state in states if prod(state.shape)]
        shapes = {state.name: state.shape for state in nonempty}
        ring = limits.chunk_len + limits.num_drafts  # by which a conv's is longer than what it needs
        self._pages: list[_PagePart] = []
        self._slots: list[_SlotPart] = []
        starts = {"page": 0, "slot": 0}
        for state in nonempty:
            start, num_bytes = starts[state.kind], state_bytes([state], state.kind)
            starts[state.kind] += num_bytes
            if state.name.startswith("mtp.") and not has_head:
                continue
            if state.kind == "page":
                self._pages.append(_PagePart(_of_heads(state, num_kv_parts or num_ranks), start))
            else:
                line_bytes = num_bytes // state.shape[0]
                self._slots.extend(_at_edge(state, start, line_bytes, ring, shapes, num_ranks))
        self.page_bytes, self.slot_bytes = starts["page"], starts["slot"]  # of a rank
        self.num_ranks = num_ranks
        self.page_len = limits.page_len

    def tensors(self, num_pages: int) -> list[NamedShape]:
        """All of a prefix, in the order of the payload: ids, pages, and the snapshot behind them."""
        ids = NamedShape("token_ids", "int32", (num_pages * self.page_len,))
        pages = [part.tensor for part, _ in self._pages]
        pages = [tensor._replace(shape=(num_pages, *tensor.shape)) for tensor in pages]
        return [ids, *pages, *(one.part.tensor for one in self._slots)]

    def num_bytes(self, num_pages: int) -> int:
        """Of the payload."""
        return sum(tensor.num_bytes for tensor in self.tensors(num_pages))

    def pack(
        self, ids: np.ndarray, pages: Sequence[np.ndarray], slot: np.ndarray, payload: np.ndarray
    ) -> None:
        """Fill payload [num_bytes] from ids [edge] int32, pages [ranks, page_bytes] each, and slots
        [ranks, slot_bytes] that stand at the edge behind them; all but ids are uint8."""
        id_bytes = ids.view(np.uint8)
        payload[: len(id_bytes)] = id_bytes
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
        for part, start in self._pages:
            size = part.tensor.num_bytes
            own_size = size // part.num_pieces
            for page in pages:
                content = payload[at : at + size]
                at += size
                for rank, rank_page in enumerate(() if page is None else page):
                    piece = part.piece(content, rank, self.num_ranks)
                    yield piece, rank_page[start : start + own_size].reshape(piece.shape)

    def _snapshot(self, payload: np.ndarray, slots: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        edge = self.num_pages(payload) * self.page_len
        at = len(payload) - sum(one.part.tensor.num_bytes for one in self._slots)
        for part, start, line_bytes, num_lines, num_kept, columns in self._slots:
            content = payload[at : at + part.tensor.num_bytes]
            at += len(content)
            first = 0 if num_kept == num_lines else (edge - num_kept) % num_lines
            head = min(num_kept, num_lines - first)  # lines before the ring begins again
            for rank, slot in enumerate(slots):
                lines = slot[start : start + num_lines * line_bytes].reshape(num_lines, line_bytes)
                piece = part.piece(content, rank, self.num_ranks)
                piece = piece if len(piece) == num_kept else piece.reshape(num_kept, -1)
                yield piece[:head], lines[first : first + head, columns]
                yield piece[head:], lines[: num_kept - head, columns]


def _of_heads(state: State, num_pieces: int) -> _Part:
    """Keys or values of a page: each token's heads."""
    num_tokens, heads, *rest = state.shape
    return _Part(
        NamedShape(state.name, state.dtype, (num_tokens, heads * num_pieces, *rest)), num_tokens, num_pieces
    )


def _at_edge(
    state: State,
    start: int,
    line_bytes: int,
    ring: int,
    shapes: Mapping[str, tuple[int, ...]],
    num_ranks: int,
) -> Iterator[_SlotPart]:
    """What a state has at an edge."""
    num_lines, *rest = state.shape
    layer, _, what = state.name.rpartition(".")
    if what.endswith("_records"):
        return
    if what == "state":  # a line for each head
        tensor = NamedShape(state.name, state.dtype, (num_lines * num_ranks, *rest))
        part = _Part(tensor, 1, num_ranks)
        yield _SlotPart(part, start, line_bytes, num_lines, num_lines, slice(0, line_bytes))
    elif state.name == HIDDEN:  # each rank has all of it
        part = _Part(NamedShape(state.name, state.dtype, (1, *rest)), 1, 1)
        yield _SlotPart(part, start, line_bytes, num_lines, 1, slice(0, line_bytes))
    elif what == "conv" and len(rest) == 1:
        num_kept, item, first = num_lines - ring, line_bytes // rest[0], 0
        parts = _conv_parts(layer, rest[0], shapes)
        for name, width in parts if num_kept > 0 else []:  # else of width 1
            tensor = NamedShape(state.name + name, state.dtype, (num_kept, width * num_ranks))
            columns = slice(first * item, (first + width) * item)
            first += width
            part = _Part(tensor, num_kept, num_ranks)
            yield _SlotPart(part, start, line_bytes, num_lines, num_kept, columns)
    else:
        message = f"nobody knows what of the state {state.name} stands at an edge"
        raise Refused("unsupported", message=message, way_out="this engine's prefixes cannot be moved")


def _conv_parts(layer: str, channels: int, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    """Names and channels. The records beside a conv say what goes through it."""

    def width(record: str) -> int:
        return prod(shapes.get(f"{layer}.{record}_records", (0, 0))[1:])

    for parts in ({"x": "x", "B": "B", "C": "B"}, {"q": "k", "k": "k", "v": "v"}):
        widths = {f".{part}": width(record) for part, record in parts.items()}
        if sum(widths.values()) == channels:
            return list(widths.items())
    return [("", channels)]

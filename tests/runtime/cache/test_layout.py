"""A packed prefix has the same bytes whatever the number of ranks that computed it."""

import numpy as np
import pytest

from hemiola.runtime.cache.layout import PrefixLayout
from hemiola.runtime.outline import Limits, State

PAGE_LEN, C, K, KEPT, NUM_PAGES = 8, 4, 7, 3, 2  # what a conv keeps begins at the end of its ring
EDGE = NUM_PAGES * PAGE_LEN
LIMITS = Limits(max_len=64, max_rows=2, max_step_tokens=16, num_drafts=K, page_len=PAGE_LEN, chunk_len=C)
KV_HEADS, HEADS, GROUPS, N, P, HIDDEN = 2, 8, 4, 3, 2, 6
RING = C + K
SIZES = (1, 2, 4)


def states(tp: int) -> list[State]:
    """Of a rank, as the layers of a Mamba2 mixer, of attention and an MTP head declare them."""
    kv, heads, groups = max(1, KV_HEADS // tp), HEADS // tp, GROUPS // tp
    channels = heads * P + 2 * groups * N

    def page(name: str, width: int) -> State:
        return State(name=name, kind="page", shape=(PAGE_LEN, kv, width), dtype="uint8")

    def slot(name: str, *shape: int, dtype: str = "float32") -> State:
        return State(name=name, kind="slot", shape=shape, dtype=dtype)

    return [
        slot("layers.0.state", heads, P, N),
        slot("layers.0.x_records", RING, heads, P),
        slot("layers.0.B_records", RING, groups, N),
        slot("layers.0.conv", RING + KEPT, channels, dtype="int32"),
        page("layers.1.k", 5),
        page("layers.1.v", 4),
        slot("mtp.hidden", RING + 1, HIDDEN, dtype="int32"),
    ]


def whole(seed: int) -> dict[str, np.ndarray]:
    """What one rank with all heads has: pages, and the slot at the edge behind them."""
    dice = np.random.default_rng(seed)
    found = {}
    for state in states(1):
        lines = (NUM_PAGES, *state.shape) if state.kind == "page" else state.shape
        dtype = np.dtype(state.dtype)
        found[state.name] = dice.integers(0, 256, (*lines, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    return found


def of_rank(content: dict[str, np.ndarray], rank: int, tp: int) -> dict[str, np.ndarray]:
    """What this one of `tp` ranks has of it: neighbouring heads, groups and channels; heads of keys and
    values may be those of several ranks."""

    def share(array: np.ndarray, axis: int, parts: int = tp) -> np.ndarray:
        return np.split(array, parts, axis)[rank * parts // tp]

    x, b, c = np.split(content["layers.0.conv"], [HEADS * P, HEADS * P + GROUPS * N], 1)
    found = {
        "layers.0.state": share(content["layers.0.state"], 0),
        "layers.0.conv": np.concatenate([share(part, 1) for part in (x, b, c)], 1),
        "mtp.hidden": content["mtp.hidden"],
    }
    found |= {f"layers.0.{name}_records": share(content[f"layers.0.{name}_records"], 1) for name in "xB"}
    return found | {f"layers.1.{kv}": share(content[f"layers.1.{kv}"], 2, min(tp, KV_HEADS)) for kv in "kv"}


def memory(content: dict[str, np.ndarray], tp: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Pages [ranks, bytes] each and slots [ranks, bytes], as units of the host have them."""
    ranks = [of_rank(content, rank, tp) for rank in range(tp)]
    kinds = {kind: [s.name for s in states(tp) if s.kind == kind] for kind in ("page", "slot")}

    def joined(parts: list[np.ndarray]) -> np.ndarray:
        return np.frombuffer(b"".join(part.tobytes() for part in parts), np.uint8)

    pages = [
        np.stack([joined([rank[name][n] for name in kinds["page"]]) for rank in ranks])
        for n in range(NUM_PAGES)
    ]
    return pages, np.stack([joined([rank[name] for name in kinds["slot"]]) for rank in ranks])


def layout(tp: int, has_head: bool = True) -> PrefixLayout:
    return PrefixLayout(states(tp), LIMITS, has_head, tp, min(tp, KV_HEADS))


@pytest.mark.parametrize("has_head", [True, False])
def test_the_packed_bytes_are_the_same_for_all_numbers_of_ranks(has_head: bool) -> None:
    content, ids = whole(1), np.arange(EDGE, dtype=np.int32)
    packed = []
    for tp in SIZES:
        own = layout(tp, has_head)
        packed.append(np.full(own.num_bytes(NUM_PAGES), 0xEE, np.uint8))
        own.pack(ids, *memory(content, tp), packed[-1])
        assert own.tensors(NUM_PAGES) == layout(1, has_head).tensors(NUM_PAGES)
    assert all((one == packed[0]).all() for one in packed[1:])
    assert packed[0][: 4 * EDGE].view(np.int32).tolist() == ids.tolist()


@pytest.mark.parametrize("taker", SIZES)
@pytest.mark.parametrize("giver", SIZES)
def test_every_rank_gets_its_own_part_of_what_others_packed(giver: int, taker: int) -> None:
    content, other = whole(1), whole(2)
    packed = np.zeros(layout(giver).num_bytes(NUM_PAGES), np.uint8)
    layout(giver).pack(np.arange(EDGE, dtype=np.int32), *memory(content, giver), packed)
    pages, slots = memory(other, taker)
    layout(taker).unpack(packed, dict(enumerate(pages)), slots)
    wanted = dict(content)
    for name in ("layers.0.x_records", "layers.0.B_records"):  # mean nothing at an edge
        wanted[name] = other[name]
    lines = (EDGE - 1) % (RING + 1), [(EDGE - n) % (RING + KEPT) for n in range(1, KEPT + 1)]
    for name, kept in zip(("mtp.hidden", "layers.0.conv"), lines, strict=True):
        wanted[name] = other[name].copy()
        wanted[name][kept] = content[name][kept]
    wanted_pages, wanted_slots = memory(wanted, taker)
    assert all((one == two).all() for one, two in zip(pages, wanted_pages, strict=True))
    assert (slots == wanted_slots).all()

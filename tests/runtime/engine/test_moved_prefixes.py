"""A prefix that another engine computed is a hit: every token and every logit is the plain run's."""

import hashlib
import json
import random
from collections.abc import Callable

import numpy as np
import pytest
from kit.engine_hand import PAGE as B
from kit.engine_hand import EngineHand, Wanted

from hemiola.runtime.cache import moves
from hemiola.runtime.cache.packed import MAGIC, START
from hemiola.runtime.errors import Refused
from hemiola.runtime.open import packed_form
from hemiola.runtime.schedule.carrier import Carrier

SIZES = {"max_rows": 2, "max_len": 6 * B, "num_pages": 2 * 6 + 1, "num_snapshots": 4, "snapshot_interval": B}
Make = Callable[..., EngineHand]


@pytest.fixture
def ready(small_hand: Make) -> Make:
    """An engine through whose host prefixes move."""
    return lambda *given, **options: small_hand(*given, host_cache_bytes=2**24, **SIZES | options)


def carrier(hand: EngineHand) -> Carrier:
    form = packed_form(hand.config, hand.manifest, hand.storage.device)
    return Carrier(lambda act: act(hand.loop.scheduler.prefix), form)


def ask(hand: EngineHand, prompt: list[int], expected: list[int], **params: object) -> int:
    """Returns where the answer began."""
    request_id = hand.submit(prompt, max_tokens=len(expected), **params)
    hand.run()
    hand.check(request_id, expected)
    return hand.requests[request_id - 1].metrics.cached_tokens


def pack(hand: EngineHand, text: list[int], cache_salt: str = "") -> bytearray:
    return carrier(hand).pack(np.array(text, np.int32), cache_salt)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("nemotron_h_moe", "mtp"),
        ("qwen3_5", "mtp"),
        ("qwen3_5", "plain"),
        ("three_convs", "ngram"),
        ("attention_only", "plain"),
    ],
)
def test_a_prefix_of_another_engine_is_a_hit_at_every_edge(
    ready: Make, wanted: Wanted, family: str, kind: str
) -> None:
    giver, taker, text = ready(family, kind), ready(family, kind), wanted.story(family)
    ask(giver, text[: 5 * B], text[5 * B : 5 * B + 4])
    for edge in range(B, 5 * B, B):
        packed = pack(giver, text[:edge])
        taker.loop.scheduler.prefix.flush()
        assert carrier(taker).unpack(packed) == edge
        assert ask(taker, text[: edge + 3], text[edge + 3 : edge + B]) == edge
        assert pack(taker, text[:edge]) == packed, "it is not what came"
    for hand in (giver, taker):
        hand.check_logits()
        hand.check_drafts()
        hand.check_contents()


def test_a_part_that_the_host_has_is_not_written_again(ready: Make, wanted: Wanted) -> None:
    giver, taker, text = ready("qwen3_5"), ready("qwen3_5"), wanted.story("qwen3_5")
    ask(giver, text[: 5 * B], text[5 * B : 5 * B + 4])
    host = taker.loop.scheduler.prefix.host
    assert host is not None
    used = []
    for edge in (2 * B, 4 * B, 4 * B, 3 * B):
        if edge == 4 * B and len(used) == 1:
            prefix = taker.loop.scheduler.prefix
            chain = prefix.chain(np.array(text[: 4 * B], np.int32))
            given = moves.reserve(prefix, chain, edge, "prompt")
            assert given is not None and list(given.pages) == [2, 3]
            moves.give_up(prefix, given)
        free = host.num_free
        carrier(taker).unpack(pack(giver, text[:edge]))
        host.audit()
        used.append(free - host.num_free)
    state = host.mover.units_per_slot
    assert used == [2 + state, 2 + state, 0, state]
    assert ask(taker, text[: 5 * B], text[5 * B : 5 * B + 4]) == 4 * B
    taker.check_logits()


def test_salts_stay_apart(ready: Make, wanted: Wanted) -> None:
    giver, taker, text = ready("qwen3_5"), ready("qwen3_5"), wanted.story("qwen3_5")
    ask(giver, text[: 3 * B], text[3 * B : 3 * B + 2], cache_salt="a")
    for salt in ("", "b"):
        with pytest.raises(Refused, match="nothing is stored") as refused:
            pack(giver, text[: 3 * B], salt)
        assert refused.value.code == "not_found"
    assert carrier(taker).unpack(pack(giver, text[: 3 * B], "a")) == 3 * B
    assert ask(taker, text[: 3 * B + 1], text[3 * B + 1 : 3 * B + 3]) == 0
    assert ask(taker, text[: 3 * B + 1], text[3 * B + 1 : 3 * B + 3], cache_salt="a") == 3 * B


def test_what_nobody_has_proven_is_not_packed(ready: Make, wanted: Wanted) -> None:
    giver, text = ready("qwen3_5", max_step_tokens=B), wanted.story("qwen3_5")
    giver.submit(text[: 5 * B], max_tokens=4)
    for _ in range(3):
        giver.turn()
    with pytest.raises(Refused, match="nothing is stored"):
        pack(giver, text[: 5 * B])


# What is refused.


def sealed(header: object, payload: bytes) -> bytes:
    """As somebody writes who knows the format."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = MAGIC + len(content).to_bytes(4, "little") + hashlib.sha256(content).digest()
    return start + content + payload


def parts(packed: bytes) -> tuple[dict, bytes]:
    end = START + int.from_bytes(packed[len(MAGIC) : len(MAGIC) + 4], "little")
    return json.loads(packed[START:end]), packed[end:]


def changed(name: str, value: object) -> Callable[[bytes], bytes]:
    def change(packed: bytes) -> bytes:
        header, payload = parts(packed)
        return sealed(header | {name: value(header[name]) if callable(value) else value}, payload)

    return change


def with_ids(token_id: int) -> Callable[[bytes], bytes]:
    def change(packed: bytes) -> bytes:
        header, payload = parts(packed)
        payload = np.array([token_id], np.int32).tobytes() + payload[4:]
        return sealed(header | {"sha256": hashlib.sha256(payload).hexdigest()}, payload)

    return change


def swapped(tensors: list) -> list:
    return [*tensors[:-1], [*tensors[-1][:-1], [*tensors[-1][-1], 1]]]


REFUSED = {
    "nothing": (lambda packed: b"", "malformed", "no prefix of this format"),
    "a text": (lambda packed: "text", "wrong_type", "packed is str"),
    "foreign bytes": (lambda packed: b"PK\3\4" + bytes(1000), "malformed", "no prefix of this format"),
    "another version": (lambda packed: b"hemiola prefix 2" + packed[16:], "malformed", "no prefix of this"),
    "a header of 4 GiB": (lambda p: p[:16] + b"\xff" * 4 + p[20:], "damaged", "cut short in its header"),
    "no JSON": (lambda packed: sealed(b"{", b""), "malformed", "no JSON object"),
    "a list": (lambda packed: sealed([1], b""), "malformed", "no JSON object"),
    "deep JSON": (lambda packed: sealed(b"[" * 10**5, b""), "malformed", "no JSON object"),
    "another hemiola": (changed("hemiola", "9.9"), "conflict", "has hemiola '9.9', this engine '0.1"),
    "another engine": (changed("engine", "0" * 64), "conflict", "packed has engine '000"),
    "other ranks": (changed("ranks", 2), "conflict", "packed has ranks 2, this engine 1"),
    "another machine": (changed("machine", "Z80"), "conflict", "packed has machine 'Z80'"),
    "no head": (changed("mtp_head", False), "conflict", "packed has mtp_head False, this engine True"),
    "a number for a head": (changed("mtp_head", 1), "conflict", "packed has mtp_head 1"),
    "other pages": (changed("page_len", 2 * B), "conflict", "packed has page_len"),
    "other chunks": (changed("chunk_len", B), "conflict", "packed has chunk_len"),
    "edge 0": (changed("edge", 0), "out_of_range", "packed has edge 0"),
    "an edge inside of a page": (changed("edge", B + 1), "out_of_range", f"packed has edge {B + 1}"),
    "an edge that is too far": (changed("edge", 6 * B), "out_of_range", "below max_len="),
    "an edge of text": (changed("edge", "16"), "out_of_range", "packed has edge '16'"),
    "another edge": (changed("edge", B), "conflict", "packed has other tensors"),
    "another kind": (changed("kind", "x"), "malformed", "another header"),
    "a salt of numbers": (changed("cache_salt", 7), "malformed", "another header"),
    "a salt that is no text": (changed("cache_salt", "\ud800"), "malformed", "cache_salt"),
    "a salt that is too long": (changed("cache_salt", "x" * 2000), "malformed", "cache_salt"),
    "every second byte": (lambda packed: memoryview(packed)[::2], "wrong_type", "contiguous"),
    "a new field": (changed("color", "red"), "conflict", "packed has other color"),
    "another name": (changed("tensors", lambda own: [["x", *own[0][1:]], *own[1:]]), "conflict", "\\['x', "),
    "another dtype": (
        changed("tensors", lambda own: [*own[:-1], [own[-1][0], "float16", own[-1][2]]]),
        "conflict",
        "'float16'",
    ),
    "another shape": (changed("tensors", swapped), "conflict", "packed has other tensors than this engine"),
    "a tensor less": (changed("tensors", lambda own: own[:-1]), "conflict", "packed has other tensors"),
    "no tensors": (changed("tensors", None), "conflict", "packed has other tensors"),
    "another sum": (changed("sha256", "0" * 64), "damaged", "its sha256 is another"),
    "a byte more": (lambda packed: packed + b"\0", "damaged", "bytes behind its header"),
    "a token id below 0": (with_ids(-1), "out_of_range", "outside of the vocabulary"),
    "a token id beyond all": (with_ids(10**6), "out_of_range", "outside of the vocabulary"),
}


@pytest.fixture
def moved(ready: Make, wanted: Wanted) -> tuple[EngineHand, bytes]:
    """An engine, and what another one packed for it."""
    giver, text = ready("qwen3_5", "mtp"), wanted.story("qwen3_5")
    ask(giver, text[: 2 * B + 1], text[2 * B + 1 : 2 * B + 3])
    return ready("qwen3_5", "mtp"), bytes(pack(giver, text[: 2 * B]))


def check_refused(taker: EngineHand, packed: object) -> Refused:
    host = taker.loop.scheduler.prefix.host
    with pytest.raises(Refused) as refused:
        carrier(taker).unpack(packed)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert host is not None and host.num_free == host.mover.num_units
    host.audit()
    return refused.value


def test_what_is_not_this_engines_is_refused_in_a_line(
    moved: tuple[EngineHand, bytes], wanted: Wanted
) -> None:
    taker, packed = moved
    for name, (change, code, said) in REFUSED.items():
        refused = check_refused(taker, change(packed))
        assert refused.code == code, f"{name}: {refused.code}, {refused}"
        with pytest.raises(Refused, match=said):
            raise refused
    text = wanted.story("qwen3_5")
    assert ask(taker, text[: 2 * B + 1], text[2 * B + 1 : 2 * B + 3]) == 0
    assert sealed(*parts(packed)) == packed and carrier(taker).unpack(packed) == 2 * B


@pytest.mark.parametrize("seed", range(2))
def test_cut_and_flipped_bytes_are_refused(moved: tuple[EngineHand, bytes], seed: int) -> None:
    taker, packed = moved
    dice, header_len = random.Random(seed), len(packed) - len(parts(packed)[1])
    for most in [header_len] * 150 + [len(packed)] * 150:
        at, bit = dice.randrange(most), 1 << dice.randrange(8)
        flipped = bytearray(packed)
        flipped[at] ^= bit
        check_refused(taker, flipped)
        check_refused(taker, packed[:at])


def test_a_host_without_room_refuses_and_loses_nothing(
    moved: tuple[EngineHand, bytes], wanted: Wanted
) -> None:
    taker, packed = moved
    host, text = taker.loop.scheduler.prefix.host, wanted.story("qwen3_5")
    assert host is not None
    host.mover.num_units = host.mover.units_per_slot + 1
    host._free = list(range(host.mover.num_units))
    with pytest.raises(Refused, match=f"no room for a prefix of {2 * B} tokens") as refused:
        carrier(taker).unpack(packed)
    assert (refused.value.code, refused.value.field) == ("exhausted", "host_cache_bytes")
    host.audit()
    assert ask(taker, text[: 2 * B + 1], text[2 * B + 1 : 2 * B + 3]) == 0
    with pytest.raises(Refused, match="no room"):
        pack(taker, text[: 2 * B])


def test_an_engine_that_rests_while_a_prefix_is_written_is_lost(ready: Make, wanted: Wanted) -> None:
    """Its audit knew nothing of a page that is held, and an assert ended the engine."""
    giver, taker, text = ready("qwen3_5", "mtp"), ready("qwen3_5", "mtp"), wanted.story("qwen3_5")
    ask(giver, text[: 4 * B + 1], text[4 * B + 1 : 4 * B + 3])
    carrier(taker).unpack(pack(giver, text[:B]))
    own = carrier(taker)

    def visit(act: Callable) -> object:
        taker.loop._idle()
        return act(taker.loop.scheduler.prefix)

    own._visit = visit
    assert own.unpack(pack(giver, text[: 4 * B])) == 4 * B
    taker.loop._idle()


def test_an_import_across_a_reset_is_refused(moved: tuple[EngineHand, bytes]) -> None:
    taker, packed = moved
    prefix, own = taker.loop.scheduler.prefix, carrier(taker)
    assert prefix.host is not None
    calls = []

    def visit(act: Callable) -> object:
        calls.append(act)
        if len(calls) == 2:
            prefix.flush()
        return act(prefix)

    own._visit = visit
    with pytest.raises(Refused, match="reset meanwhile"):
        own.unpack(packed)
    prefix.host.audit()
    assert prefix.host.num_free == prefix.host.mover.num_units

"""The packed form of a prefix, in which it goes from one engine to another.

    MAGIC | length of the header, 4 bytes, little endian | the header's sha256 | header | payload

The header is JSON: which engine computed it (PackedForm.fields), the edge, whose text it is (cache_salt), why
the snapshot was taken, names, dtypes and shapes of the tensors of which the payload consists, and the
payload's sha256. Nothing is taken of it unless all of that is what this engine would have written.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.cache.layout import PrefixLayout
from hemiola.runtime.errors import Refused, shown

MAGIC = b"hemiola prefix 1"
SHA = 32  # bytes
START = len(MAGIC) + 4 + SHA
MAX_HEADER = 2**22  # bytes
KINDS = ("prompt", "junction", "interval", "decode")
AGAIN = "requests compute it again"


@dataclass(frozen=True)
class PackedForm:
    """What the bits of an engine's prefixes depend on, by name, and where its tensors stand."""

    fields: Mapping[str, object]
    layout: PrefixLayout
    vocab_size: int
    max_len: int

    def header(self, edge: int, kind: str, cache_salt: str, sha256: str) -> dict[str, Any]:
        tensors = self.layout.tensors(edge // self.layout.page_len)
        return {
            **self.fields,
            "edge": edge,
            "kind": kind,
            "cache_salt": cache_salt,
            "tensors": [[one.name, one.dtype, list(one.shape)] for one in tensors],
            "sha256": sha256,
        }


class PackedPrefix(NamedTuple):
    """A packed prefix that was checked."""

    edge: int
    kind: str
    cache_salt: str
    ids: np.ndarray  # [edge] int32
    payload: np.ndarray  # uint8


def written(form: PackedForm, edge: int, kind: str, cache_salt: str) -> "Unsealed":
    """Room for a prefix; its payload is to be filled, then `seal` it."""
    header = _header_bytes(form.header(edge, kind, cache_salt, "0" * 2 * SHA))
    num_bytes = form.layout.num_bytes(edge // form.layout.page_len)
    packed = bytearray(START + len(header) + num_bytes)
    return Unsealed(form, edge, kind, cache_salt, packed, num_bytes)


@dataclass(frozen=True)
class Unsealed:
    """A packed prefix without its payload and its sums."""

    form: PackedForm
    edge: int
    kind: str
    cache_salt: str
    packed: bytearray
    num_bytes: int  # of the payload

    @property
    def payload(self) -> np.ndarray:
        return np.frombuffer(self.packed, np.uint8)[-self.num_bytes :]

    def seal(self) -> bytearray:
        sha256 = hashlib.sha256(self.payload.data).hexdigest()
        header = _header_bytes(self.form.header(self.edge, self.kind, self.cache_salt, sha256))
        start = MAGIC + len(header).to_bytes(4, "little") + hashlib.sha256(header).digest()
        self.packed[: START + len(header)] = start + header
        return self.packed


def read(form: PackedForm, packed: bytes | bytearray | memoryview) -> PackedPrefix:
    """Raises Refused unless this engine, or one that computes the same bits, has written it."""
    if not isinstance(packed, (bytes, bytearray, memoryview)):
        raise Refused("wrong_type", "packed", type(packed), way_out="pass what export_prefix returned")
    content = memoryview(packed)
    if not content.c_contiguous:
        message = "packed is a memoryview that is not contiguous"
        raise Refused("wrong_type", "packed", message=message, way_out="pass its bytes")
    content = content.cast("B")
    header = _header(content)
    payload = content[START + int.from_bytes(content[len(MAGIC) : len(MAGIC) + 4], "little") :]
    edge, kind, cache_salt = _checked(form, header)
    num_bytes = form.layout.num_bytes(edge // form.layout.page_len)
    if len(payload) != num_bytes:
        message = (
            f"packed has {len(payload)} bytes behind its header, a prefix of {edge} tokens has {num_bytes}"
        )
        raise Refused("damaged", "packed", message=message, way_out=AGAIN)
    if hashlib.sha256(payload).hexdigest() != header["sha256"]:
        raise Refused("damaged", "packed", message="packed is damaged: its sha256 is another", way_out=AGAIN)
    numbers = np.frombuffer(payload, np.uint8)
    ids = np.frombuffer(numbers[: 4 * edge].tobytes(), np.int32)
    if int(ids.min()) < 0 or int(ids.max()) >= form.vocab_size:
        message = f"packed holds token ids outside of the vocabulary 0..{form.vocab_size - 1}"
        raise Refused("out_of_range", "packed", message=message, way_out=AGAIN)
    return PackedPrefix(edge, kind, cache_salt, ids, numbers)


def _header_bytes(header: dict[str, Any]) -> bytes:
    return json.dumps(header).encode()


def _header(content: memoryview) -> dict[str, Any]:
    """Of the first bytes."""
    if bytes(content[: len(MAGIC)]) != MAGIC:
        way_out = f"pass what export_prefix returned; {AGAIN}"
        raise Refused("malformed", "packed", message="packed is no prefix of this format", way_out=way_out)
    length = int.from_bytes(content[len(MAGIC) : START - SHA], "little")
    text = bytes(content[START : START + length]) if length <= MAX_HEADER else b""
    if len(text) != length or hashlib.sha256(text).digest() != content[START - SHA : START]:
        raise Refused(
            "damaged", "packed", message="packed is damaged or cut short in its header", way_out=AGAIN
        )
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise Refused(
            "malformed", "packed", message="packed has a header that is no JSON object", way_out=AGAIN
        )
    return header


def _checked(form: PackedForm, header: dict[str, Any]) -> tuple[int, str, str]:
    """Edge, kind and salt. All else of a header follows from them and the engine."""
    for name, ours in form.fields.items():
        if header.get(name) != ours or type(header.get(name)) is not type(ours):
            message = f"packed has {name} {shown(header.get(name))}, this engine {shown(ours)}"
            raise Refused("conflict", "packed", message=message, way_out=f"use an engine like it; {AGAIN}")
    edge, kind, salt = header.get("edge"), header.get("kind"), header.get("cache_salt")
    sha256 = header.get("sha256")
    page_len = form.layout.page_len
    if type(edge) is not int or edge <= 0 or edge % page_len or edge >= form.max_len:
        limit = f"edges here are multiples of {page_len} below max_len={form.max_len}"
        raise Refused(
            "out_of_range", "packed", message=f"packed has edge {shown(edge)}, {limit}", way_out=AGAIN
        )
    kinds = KINDS if form.layout.slot_bytes else ("",)
    if not isinstance(kind, str) or not isinstance(salt, str) or not isinstance(sha256, str):
        kind, salt, sha256 = "?", "", ""
    if kind not in kinds:
        raise Refused(
            "malformed", "packed", message="packed has another header than this format", way_out=AGAIN
        )
    try:
        SamplingParams(cache_salt=salt)
    except Refused as error:
        message = f"packed has a cache_salt that no request has: {error}"
        raise Refused("malformed", "packed", message=message, way_out=AGAIN) from None
    ours = form.header(edge, kind, salt, sha256)
    for name in sorted(ours.keys() | header.keys()):
        if header.get(name) != ours.get(name):
            message = (
                f"packed has other {name} than this engine: {_difference(header.get(name), ours.get(name))}"
            )
            raise Refused("conflict", "packed", message=message, way_out=AGAIN)
    return edge, kind, salt


def _difference(packed: object, expected: object) -> str:
    if isinstance(packed, list) and isinstance(expected, list):
        for theirs, ours in zip(packed, expected, strict=False):
            if theirs != ours:
                return f"{shown(theirs)} for {shown(ours)}"
        return f"{len(packed)} for {len(expected)}"
    return f"{shown(packed)} for {shown(expected)}"

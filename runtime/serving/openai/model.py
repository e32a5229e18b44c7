"""What the front knows of an engine: its text, its longest context, the bytes of its tokens."""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hemiola.runtime import outline
from hemiola.runtime.errors import Name, Refused, shown
from hemiola.runtime.serving.openai.errors import ApiError
from hemiola.runtime.text import BROKEN, Text


@dataclass(frozen=True)
class ServedModel:
    """A model that tritonserver serves under this name."""

    name: str
    max_len: int
    identity: str  # the engine's
    text: Text | None  # None: it takes and gives token ids
    created: int = 0  # seconds since 1970

    def need_text(self, field: str) -> Text:
        if self.text is None:
            message = (Name(field), f" is text, but model {self.name} has no tokenizer")
            raise Refused("unsupported", field, message=message, way_out="pass token ids to /v1/completions")
        return self.text

    @cached_property
    def tokens(self) -> "Tokens":
        return Tokens(self.need_text("logprobs"))

    @property
    def parts(self) -> dict[str, object]:
        """What choices and replies hold of it, by names that no other model has."""
        parts = {"model": self} | ({} if self.text is None else {"text": self.text, "tokens": self.tokens})
        return {f"{part} of {self.name}": value for part, value in parts.items()}


def find_model(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    if name not in models:
        message = f"no model {shown(name)}, there is {', '.join(models)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return models[name]


class Tokens:
    """Tokens as text and as bytes. A token may be a part of a character."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._bytes = {char: byte for byte, char in byte_alphabet().items()}

    def name(self, token_id: int) -> str:
        """Its text, or for a part of a character its bytes: `bytes:\\xe2\\x82`."""
        name = self._text.tokenizer.decode([token_id], skip_special_tokens=False)
        if BROKEN not in name:
            return name
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes(token_id))

    def bytes(self, token_id: int) -> bytes:
        token = self._text.tokenizer.id_to_token(token_id) or ""
        if all(char in self._bytes for char in token):  # byte-level BPE
            return bytes(self._bytes[char] for char in token)
        return self._text.tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def offsets(self, token_ids: Sequence[int], start: int, decoder: codecs.IncrementalDecoder) -> list[int]:
        """Where each begins in the text, which itself begins at `start`, and where it ends. decoder: has the
        part of a character that the tokens before end in."""
        offsets = [start]
        for token_id in token_ids:
            start += len(decoder.decode(self.bytes(token_id)))
            offsets.append(start)
        return offsets


def make_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def byte_alphabet() -> dict[int, str]:
    """Byte-level BPE's printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def read_model(name: str, engine_dir: Path, max_len: int | None = None) -> ServedModel:
    """max_len: if the server was started with a smaller one than the engine's."""
    path = engine_dir / outline.FILE
    engine = outline.parse(path)
    text = Text(engine_dir / "tokenizer") if engine.has_tokenizer else None
    return ServedModel(
        name, max_len or engine.limits.max_len, engine.identity, text, int(path.stat().st_mtime)
    )

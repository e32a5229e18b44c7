"""A checkpoint's tokenizer, read as transformers reads it, and how much text one of its tokens can hold."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from hemiola.runtime.errors import one_line
from hemiola.runtime.json_file import parse_json

# Bytes of each file at most; the largest known have 35 MB, 1 MB and 0.1 MB. To compile a template takes up to
# 2,000 bytes for each of its own.
FILES = {"tokenizer.json": 2**26, "tokenizer_config.json": 2**24, "chat_template.jinja": 2**18}
MARKS = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>"}
SHRINKS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1}  # characters that may become one
# How many characters one may become by a step of a tokenizer, roughly; a step that is not here makes none.
GROWTH = {
    "BPEDecoder": 2, "BertNormalizer": 2, "ByteLevel": 2, "CTC": 2, "Lowercase": 2, "NFC": 2, "NFD": 2,
    "NFKC": 4, "NFKD": 4, "Precompiled": 4,
}  # fmt: skip
MAX_GROWTH = 64  # by all steps of a kind
MAX_AROUND = 2**12  # ids and their characters that one step puts around each text
# Of tokenizer.json: the library takes up to 300 and 1,400 bytes of memory for each. The largest known has
# some 1.5 million commas and 10,000 braces.
MAX_COMMAS, MAX_BRACES = 2**22, 2**17
MAX_TOKEN = 2**12  # characters of one token, which an answer may repeat; the longest known have some 500
# Of a model that has this prefix, or may have it under a name with escapes.
PREFIX = re.compile(rb'continuing_subword_prefix"\s*:\s*"[^"]|\\u00[2-7]')
STEPS = ("normalizers", "pretokenizers", "processors", "decoders")  # of a sequence


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """The library's panics are BaseExceptions: they would pass everybody who answers for an error."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(one_line(error)) from None


def checked_tokenizer(path: Path) -> Tokenizer:
    """As it stands in its file. Raises ValueError for one that would take gigabytes."""
    text = path.read_bytes()
    for sign, most in ((b",", MAX_COMMAS), (b"{", MAX_BRACES)):
        if (num := text.count(sign)) > most:
            raise ValueError(f"it has {num} times {sign.decode()!r}, at most {most} are read")
    if PREFIX.search(text):
        _check_merges(parse_json(text.decode(), unique=True))
    tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    _check_growth(tokenizer)
    return tokenizer


def _check_merges(content: Any) -> None:
    """The library cuts as many bytes off a merge's second part as the prefix has. If half a character is
    left, it cannot say so, and ends the process. Raises ValueError for such a merge, and any other error for
    what is no tokenizer."""
    model = content["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in model.get("merges") or ():
        second = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if not second.startswith(prefix):
            raise ValueError(f"a merge adds {second!r}, which does not begin with {prefix!r}")


def _check_growth(tokenizer: Tokenizer) -> None:
    """Raises ValueError where the steps of a kind make far more of a text than it is: seven that write ten
    letters for one make ten million. So do long tokens, and many ids around each text."""
    kinds = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    for kind, part in ((kind, getattr(tokenizer, kind)) for kind in kinds):
        steps = [] if part is None else list(_steps(json.loads(part.__getstate__())))
        growth = math.prod(map(_growth, steps))
        if growth > MAX_GROWTH:
            raise ValueError(
                f"its {kind} may turn one character into {growth:.3g}, at most {MAX_GROWTH} are allowed"
            )
        if (around := max(map(_around, steps), default=0)) > MAX_AROUND:
            raise ValueError(
                f"its {kind} puts {around} ids and characters around each text, at most {MAX_AROUND} are"
                " allowed"
            )
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    if longest > MAX_TOKEN:
        raise ValueError(f"it has a token of {longest} characters, at most {MAX_TOKEN} are allowed")


def _steps(entry: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if entry["type"] != "Sequence":
        yield entry
    for inner in (inner for key in STEPS for inner in entry.get(key, ())):
        yield from _steps(inner)


def _growth(step: Mapping[str, Any]) -> float:
    match step["type"]:
        case "Replace":
            made, pattern = len(step["content"]), step["pattern"].get("String", "")
            return max(1.0, made / len(pattern)) if pattern else 1 + made  # others match nothing, too
        case "Prepend":
            return 1 + len(step["prepend"])
        case "TemplateProcessing":
            return sum("Sequence" in piece for piece in step["single"])
        case kind:
            return GROWTH.get(kind, 1)


def _around(step: Mapping[str, Any]) -> int:
    if step["type"] != "TemplateProcessing":
        return 0
    sizes = {  # the library does not ask for as many tokens as ids
        name: len(special["ids"]) + sum(map(len, special["tokens"]))
        for name, special in step["special_tokens"].items()
    }
    return sum(sizes[piece["SpecialToken"]["id"]] for piece in step["single"] if "SpecialToken" in piece)


@panics_as_errors()
def read_tokenizer(path: Path) -> Tokenizer:
    """Without the truncation and padding of its training.

    Marks of thoughts and tool calls become text: `decode` drops special tokens.
    """
    tokenizer = checked_tokenizer(path)
    if any(
        token.special and token.content in MARKS for token in tokenizer.get_added_tokens_decoder().values()
    ):
        content = json.loads(path.read_text(encoding="utf-8"))
        for token in content["added_tokens"]:
            token["special"] = token["special"] and token["content"] not in MARKS
        tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def most_characters(content: Mapping[str, Any]) -> int | None:
    """That one token can stand for; None where a tokenizer may leave some of a text out.

    Known for bytes in a BPE (Qwen, Nemotron): each character of a text becomes one or more of its tokens'.
    NFC and NFKC make one of at most four: none that they write decomposes further.
    """
    model, vocab = content["model"], content["model"].get("vocab", {})
    before = _parts(content["normalizer"], "normalizers")
    cuts = _parts(content["pre_tokenizer"], "pretokenizers")
    whole = (
        model["type"] == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and any(cut["type"] == "ByteLevel" for cut in cuts)
        and all(cut["type"] == "ByteLevel" or _keeps(cut) for cut in cuts)
        and vocab.keys() >= set(ByteLevel.alphabet())
        and all(form["type"] in SHRINKS for form in before)
        and not any(token["lstrip"] or token["rstrip"] for token in content["added_tokens"])
    )
    if not whole:
        return None
    longest = max(map(len, [*vocab, *(token["content"] for token in content["added_tokens"])]))
    return longest * math.prod(SHRINKS[form["type"]] for form in before)


def _parts(entry: Mapping[str, Any] | None, several: str) -> list[Mapping[str, Any]]:
    if entry is None:
        return []
    return entry[several] if entry["type"] == "Sequence" else [entry]


def _keeps(cut: Mapping[str, Any]) -> bool:
    return cut["type"] == "Digits" or (cut["type"] == "Split" and cut["behavior"] != "Removed")

"""Grammars as regular expressions that another library matches; and a vocabulary of short texts to try."""

import functools
from collections.abc import Sequence
from unittest import mock

import regex
import torch
from kit.fake_session import VOCAB, hashed
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hemiola.runtime.api import StructuredOutputsParams
from hemiola.runtime.choose import grammar
from hemiola.runtime.choose.grammar import Grammar, Grammars

WORDS = 'ab cd abc aa aaa xx =1 ,a ye yes est no may be 12 00 99 1} {" ": a" {"a":'
TEXTS = [*'abcdefghijklmnopqrstuvwxyz0123456789{}":,=-+.^$\\', " ", "\n", *WORDS.split(" ")]
EOS = VOCAB - 1
SPACE = r"[ \n\r\t]*"
INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
RULES = 'root ::= item ("," item)*\nitem ::= [a-z]+ "=" [0-9]  # one of them\n'
ASKED = {  # by what the whole output must match
    r"(ab|cd)+[0-9]{2,9}": {"regex": "(ab|cd)+[0-9]{2,9}"},
    r"[a-f]{2,}x?": {"regex": "[a-f]{2,}x?"},
    r'"[^"\\\x00-\x1F\x7F]{0,5}"': {"regex": r'"[^"\\\x00-\x1F\x7F]{0,5}"'},  # cut into SLICES
    r"a*b": {"regex": "(a|aa|aaa)*b"},
    r"[a-z]+=[0-9](,[a-z]+=[0-9])*": {"grammar": RULES},
    r"yes|no|maybe|yesterday": {"choice": ["yes", "no", "maybe", "yesterday"]},
    rf'\{{{SPACE}"a"{SPACE}:{SPACE}-?(0|[1-9][0-9]*){SPACE}\}}': {
        "json": INTEGER | {"additionalProperties": False}
    },
}


def tokenizer() -> Tokenizer:
    """Of VOCAB tokens: TEXTS, some that stand for nothing, and the end."""
    spelt = [text.replace(" ", "Ġ").replace("\n", "Ċ") for text in TEXTS]
    made = Tokenizer(models.BPE({text: i for i, text in enumerate(spelt)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    specials = [f"<|{i}|>" for i in range(len(TEXTS), VOCAB)]
    made.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    assert made.get_vocab_size() == VOCAB and len(set(TEXTS)) == len(TEXTS) < EOS
    return made


@functools.cache
def compiled(pattern: str, vocab_size: int = VOCAB) -> Grammar:
    """However busy the machine is."""
    with mock.patch.object(grammar, "MOST_SECONDS", 300.0):
        return grammars(vocab_size).compile(StructuredOutputsParams(**ASKED[pattern]))


@functools.cache
def grammars(vocab_size: int = VOCAB) -> Grammars:
    """For an engine of so many ids; those behind VOCAB stand for nothing."""
    return Grammars(tokenizer(), vocab_size)


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(TEXTS[token_id] for token_id in token_ids if token_id < len(TEXTS))


@functools.cache
def allowed(pattern: str, text: str) -> list[int]:
    """Every token is tried; the end, where the text is whole."""
    fits = [
        i for i, token in enumerate(TEXTS) if regex.fullmatch(pattern, text + token, partial=True) is not None
    ]
    return fits + [EOS] * (regex.fullmatch(pattern, text) is not None)


def fitting(pattern: str, output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] from which an output was chosen, with -inf for tokens that do not fit."""
    may = torch.zeros(logits.shape, dtype=torch.bool)
    for at in range(len(output)):
        may[at, allowed(pattern, text_of(output[:at]))] = True
    return logits.masked_fill(~may.to(logits.device), -torch.inf)


def guided_oracle(prompt: Sequence[int], num_tokens: int, pattern: str) -> list[int]:
    """What the fake session says under a grammar: its own answer, or else the lowest id that is allowed."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens and ids[len(prompt) :][-1:] != [EOS]:
        may, wanted = allowed(pattern, text_of(ids[len(prompt) :])), hashed(ids)
        ids.append(wanted if wanted in may else min(may))
    return ids[len(prompt) :]

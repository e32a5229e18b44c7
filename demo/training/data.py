"""Text for the demo checkpoints: Python's own standard library, its split, chat samples and tokenizer.

python demo/training/data.py pack .data/stdlib.tar.xz        # the running interpreter's library
python demo/training/data.py tokenizer .data/stdlib.tar.xz demo/nemotron-h-code
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import random
import re
import sysconfig
import tarfile
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]
VOCAB_SIZE = 4096

# A newline keeps the indent that follows it, an identifier keeps its underscores, a digit stands alone.
PRE_TOKEN = (
    r"(?:\r?\n)+[ \t]*"
    r"|[ ]?[\p{L}\p{M}_]+"
    r"|\p{N}"
    r"|[ ]?[^\s\p{L}\p{M}\p{N}_]+"
    r"|[ \t]+(?=[ \t]\S)|[ \t]+|\s+"
)

# Tables and test inputs that would teach the model columns of numbers, or are not meant to parse.
SKIPPED = re.compile(
    r"(^|/)(site-packages|__pycache__)/|^encodings/(cp|mac_|iso8859|koi8|ptcp|kz|tis|hp_|palmos)"
    r"|^pydoc_data/topics|lib2to3/tests/data|/bad_|badsyntax|test/encoded_modules|^_sysconfigdata"
)


class Corpus(NamedTuple):
    train: list[str]  # library files
    train_tests: list[str]  # the library's own tests: Python too, but plainer and more repetitive
    held_out: list[str]  # ~2 % of all files, chosen by a hash of the path, so that it never moves
    train_chats: list[str]
    held_out_chats: list[str]


def list_sources(source: Path) -> dict[str, str]:
    """Relative path to text, for every usable .py file in a folder or tar archive."""
    found: dict[str, str] = {}
    if source.is_dir():
        items = [(p.relative_to(source).as_posix(), p.read_bytes()) for p in sorted(source.rglob("*.py"))]
    else:
        with tarfile.open(source) as archive:
            members = [m for m in archive.getmembers() if m.isfile()]
            items = [(m.name, archive.extractfile(m).read()) for m in members]  # type: ignore[union-attr]
        items.sort()
    for name, raw in items:
        if SKIPPED.search(name) or not name.endswith(".py"):
            continue
        try:
            text = raw.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if len(text) > 200:
            found[name] = text
    return found


def is_held_out(name: str) -> bool:
    return int(hashlib.sha1(name.encode()).hexdigest(), 16) % 50 == 0


def is_test(name: str) -> bool:
    return re.search(r"(^|/)(test|tests|idle_test|testmock)/", name) is not None


def render_chat(user: str, assistant: str) -> str:
    """As the chat templates of the demo checkpoints do without tools."""
    return f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n{assistant}{IM_END}\n"


def chats_of(text: str, rng: random.Random) -> list[str]:
    """One question and answer per documented or plainly named function of a module."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    chats = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        code = ast.get_source_segment(text, node, padded=True)
        if code is None:
            continue
        code = textwrap.dedent(code).strip()
        if not 60 <= len(code) <= 1200:
            continue
        arguments = ", ".join(a.arg for a in node.args.args if a.arg != "self")
        first_line = (ast.get_docstring(node) or "").strip().split("\n")[0]
        plain = f"Write a Python function {node.name}({arguments})."
        if len(first_line) > 15:
            question = rng.choice(
                [first_line, f"Write a Python function that does this: {first_line}", plain]
            )
        elif node.name.startswith("_") or rng.random() < 0.6:
            continue
        else:
            question = plain
        chats.append(render_chat(question, code))
    return chats


def load_corpus(source: Path, seed: int) -> Corpus:
    rng = random.Random(seed)
    corpus = Corpus([], [], [], [], [])
    for name, text in list_sources(source).items():
        if is_held_out(name):
            corpus.held_out.append(text)
            corpus.held_out_chats.extend(chats_of(text, rng))
        elif is_test(name):
            corpus.train_tests.append(text)
        else:
            corpus.train.append(text)
            corpus.train_chats.extend(chats_of(text, rng))
    return corpus


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_len: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [IM_START, IM_END],
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_len,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
                "special": True,
            }
            for token in SPECIAL_TOKENS
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_stream(tokenizer: Tokenizer, documents: list[str], seed: int) -> np.ndarray:
    """All documents in a shuffled order, each closed by <|endoftext|>."""
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[int] = []
    for encoding in tokenizer.encode_batch([documents[i] for i in order], add_special_tokens=False):
        pieces.extend(encoding.ids)
        pieces.append(end)
    return np.asarray(pieces, dtype=np.int32)


def split_indents(tokenizer: Tokenizer, stream: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Writes some newline-and-indent tokens as two, since a prompt may end at the newline."""
    first = np.full(tokenizer.get_vocab_size(), -1, dtype=np.int32)
    second = first.copy()
    vocab = tokenizer.get_vocab()
    for token, token_id in vocab.items():
        newlines = token.rstrip("Ġ")
        spaces = token[len(newlines) :]
        if spaces and newlines and not newlines.strip("Ċ") and newlines in vocab and spaces in vocab:
            first[token_id], second[token_id] = vocab[newlines], vocab[spaces]
    chosen = (first[stream] >= 0) & (np.random.default_rng(seed).random(len(stream)) < share)
    head = np.where(chosen, first[stream], stream)
    positions = np.flatnonzero(chosen)
    return np.insert(head, positions + 1, second[stream[positions]])


def train_stream(tokenizer: Tokenizer, corpus: Corpus, seed: int) -> np.ndarray:
    """One epoch: library, tests, and the chats in groups of six."""
    chats = list(corpus.train_chats)
    random.Random(seed).shuffle(chats)
    groups = ["".join(chats[i : i + 6]) for i in range(0, len(chats), 6)]
    stream = encode_stream(tokenizer, corpus.train + corpus.train_tests + groups, seed)
    return split_indents(tokenizer, stream, 0.08, seed)


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes per token id: a byte-level token has one character per byte; specials count as none."""
    vocab = tokenizer.get_vocab()
    sizes = np.zeros(len(vocab), dtype=np.int64)
    for token, token_id in vocab.items():
        sizes[token_id] = 0 if token in SPECIAL_TOKENS else len(token)
    return sizes


def pack(target: Path) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    with tarfile.open(target, "w:xz", preset=6) as archive:
        for name, text in list_sources(root).items():
            raw = text.encode("utf-8")
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["pack", "tokenizer", "stats"])
    parser.add_argument("data", type=Path, help="archive to write (pack), folder or archive to read (others)")
    parser.add_argument("out", type=Path, nargs="?", help="folder that receives the tokenizer files")
    arguments = parser.parse_args()
    if arguments.command == "pack":
        pack(arguments.data)
        return
    corpus = load_corpus(arguments.data, seed=0)
    if arguments.command == "tokenizer":
        tokenizer = train_tokenizer(corpus.train + corpus.train_tests[::3] + corpus.train_chats)
        save_tokenizer(tokenizer, arguments.out, max_len=4096)
    for field, texts in corpus._asdict().items():
        print(f"{field:15} {len(texts):6} documents {sum(map(len, texts)) / 1e6:8.2f} M characters")


if __name__ == "__main__":
    main()

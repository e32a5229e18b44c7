"""What a saved demo checkpoint is worth: held-out loss, draft acceptance, answers that parse, samples."""

from __future__ import annotations

import ast
import math
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from data import END_OF_TEXT, IM_END, IM_START, Corpus, encode_stream, token_bytes
from model import END_ID, IM_END_ID, Mtp, draft_step, load_checkpoint, trunk_hidden
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

NUM_DRAFTS = 3
NEW_TOKENS = 128
PROMPT_LENS = (200, 300, 400, 500)

SAMPLE_PROMPTS = [
    "import math\n\n\ndef fibonacci(n):",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    if n < 2:\n        return n\n',
    'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a text file as a list."""\n',
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):\n",
    f"{IM_START}user\nWrite a Python function is_empty(path).{IM_END}\n{IM_START}assistant\n",
]


class Acceptance(NamedTuple):
    rates: list[float]  # share of verify steps in which at least draft 1, 2, .. was accepted
    mean: float  # accepted drafts per verify step
    num_steps: int
    teacher_forced_match: float  # share of generated tokens that one full forward pass would choose again


def generate_greedy(
    model: PreTrainedModel, prompts: Tensor, num_new: int, stop: bool = False, mask: Tensor | None = None
) -> Tensor:
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=num_new,
        eos_token_id=[END_ID, IM_END_ID] if stop else None,
        pad_token_id=END_ID,
    )
    # passed as an argument, a config without stop tokens would inherit those of the checkpoint
    model.generation_config = config
    mask = torch.ones_like(prompts) if mask is None else mask
    with torch.no_grad():
        return model.generate(prompts, attention_mask=mask)


def held_out_loss(
    model: PreTrainedModel, tokenizer: Tokenizer, stream: np.ndarray, window: int, max_windows: int
) -> dict[str, float]:
    """Teacher-forced windows without overlap; the first token of each is context only."""
    sizes = token_bytes(tokenizer)
    num_windows = min(max_windows, (len(stream) - 1) // window)
    nats, num_tokens, num_bytes = 0.0, 0, 0
    device = next(model.parameters()).device
    for start in range(0, num_windows, 8):
        rows = [stream[i * window : (i + 1) * window] for i in range(start, min(start + 8, num_windows))]
        token_ids = torch.from_numpy(np.stack(rows)).long().to(device)
        with torch.no_grad():
            logits = model.lm_head(trunk_hidden(model, token_ids)).float()
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten(), reduction="sum"
        )
        nats += losses.item()
        num_tokens += token_ids[:, 1:].numel()
        num_bytes += int(sizes[token_ids[:, 1:].cpu().numpy()].sum())
    return {
        "nats_per_token": nats / num_tokens,
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "tokens": num_tokens,
    }


def draft_table(model: PreTrainedModel, mtp: Mtp, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts [B, T-1, K] a server would make after every prefix, and the trunk's own greedy choice [B, T]."""
    embed = model.get_input_embeddings()
    with torch.no_grad():
        hidden = trunk_hidden(model, token_ids)
        greedy = model.lm_head(hidden).argmax(-1)
        hidden, draft, past, columns = hidden[:, :-1], token_ids[:, 1:], [], []
        for _ in range(NUM_DRAFTS):
            hidden = draft_step(mtp, embed(draft), hidden, past)
            draft = model.lm_head(hidden).argmax(-1)
            columns.append(draft)
    return torch.stack(columns, dim=-1), greedy


def walk(drafts: list[list[int]], text: list[int], prompt_len: int) -> list[int]:
    """Accepted drafts per verify step: slot i knows text[: i + 2], its drafts stand for text[i + 2 :]."""
    accepted, i = [], prompt_len - 1
    while i + 2 + NUM_DRAFTS <= len(text):
        kept = 0
        while kept < NUM_DRAFTS and drafts[i][kept] == text[i + 2 + kept]:
            kept += 1
        accepted.append(kept)
        i += kept + 1
    return accepted


def held_out_prompts(
    tokenizer: Tokenizer, corpus: Corpus, count: int, length: int, rng: random.Random
) -> Tensor:
    """Prompts that begin at a line's start somewhere in a held-out file."""
    rows = []
    while len(rows) < count:
        text = rng.choice(corpus.held_out)
        start = text.find("\n", rng.randrange(len(text))) + 1
        token_ids = tokenizer.encode(text[start : start + 8 * length], add_special_tokens=False).ids
        if len(token_ids) > length:
            rows.append(token_ids[:length])
    return torch.tensor(rows)


def acceptance(
    model: PreTrainedModel, mtp: Mtp, tokenizer: Tokenizer, corpus: Corpus, num_prompts: int
) -> Acceptance:
    rng = random.Random(20)
    device = next(model.parameters()).device
    counts: list[int] = []
    same, total = 0, 0
    for length in PROMPT_LENS:
        prompts = held_out_prompts(tokenizer, corpus, num_prompts // len(PROMPT_LENS), length, rng).to(device)
        text = generate_greedy(model, prompts, NEW_TOKENS)
        drafts, greedy = draft_table(model, mtp, text)
        same += (greedy[:, length - 1 : -1] == text[:, length:]).sum().item()
        total += text[:, length:].numel()
        for row_drafts, row in zip(drafts.tolist(), text.tolist(), strict=True):
            counts.extend(walk(row_drafts, row, length))
    rates = [sum(c > k for c in counts) / len(counts) for k in range(NUM_DRAFTS)]
    return Acceptance(rates, sum(counts) / len(counts), len(counts), same / total)


def parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return True


def chat_answers(
    model: PreTrainedModel, tokenizer: Tokenizer, corpus: Corpus, count: int
) -> dict[str, float]:
    """Held-out questions: how many greedy answers end, and how many of those are valid Python."""
    marker = f"{IM_START}assistant\n"
    questions = [c.split(marker)[0] + marker for c in random.Random(21).sample(corpus.held_out_chats, count)]
    rows = [tokenizer.encode(q, add_special_tokens=False).ids for q in questions]
    width = max(map(len, rows))
    device = next(model.parameters()).device
    prompts = torch.tensor([[END_ID] * (width - len(r)) + r for r in rows], device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
    answers = generate_greedy(model, prompts, 256, stop=True, mask=mask)[:, width:].tolist()
    ended = [a[: a.index(IM_END_ID)] for a in answers if IM_END_ID in a]
    valid = sum(parses(tokenizer.decode(a)) for a in ended)
    return {"questions": count, "ended": len(ended) / count, "valid_of_ended": valid / max(1, len(ended))}


def samples(model: PreTrainedModel, tokenizer: Tokenizer, num_new: int) -> list[str]:
    device = next(model.parameters()).device
    texts = []
    for prompt in SAMPLE_PROMPTS:
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        text = generate_greedy(model, torch.tensor([prompt_ids], device=device), num_new, stop=True)[
            0
        ].tolist()
        texts.append(tokenizer.decode(text, skip_special_tokens=False).replace(END_OF_TEXT, ""))
    return texts


def evaluate(
    folder: Path, corpus: Corpus, device: str, num_prompts: int, max_windows: int
) -> dict[str, object]:
    """Everything above on the stored bf16 weights, upcast to fp32, through transformers' own code paths."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    model, mtp = load_checkpoint(folder, device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream = encode_stream(tokenizer, corpus.held_out, seed=0)
    return {
        "held_out": held_out_loss(model, tokenizer, stream, 1024, max_windows),
        "acceptance": acceptance(model, mtp, tokenizer, corpus, num_prompts)._asdict(),
        "chat": chat_answers(model, tokenizer, corpus, num_prompts),
        "samples": samples(model, tokenizer, 96),
    }

"""Train a small hybrid code model with a draft (MTP) head on Python's standard library.

    python demo/training/data.py pack .data/stdlib.tar.xz
    python demo/training/train.py --family qwen3.5 --data .data/stdlib.tar.xz --out demo/qwen3.5-code
    python demo/training/train.py --family qwen3.5 --data .data/stdlib.tar.xz --out demo/qwen3.5-code \\
        --eval-only

Stage 1 trains trunk and head together; the head unrolls three draft steps exactly as a server does. Then the
trunk is rounded to bf16 and frozen, continues some of its training text greedily, and stage 2 distils it into
the head. Works on a GPU (bf16 autocast, torch.compile) and, for smoke tests, on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from data import Corpus, encode_stream, load_corpus, save_tokenizer, train_stream, train_tokenizer
from evaluation import NUM_DRAFTS, evaluate, generate_greedy, held_out_loss
from fast import Optimizer, check_fast_paths, fast_training_paths
from model import (
    FAMILIES,
    MAX_LEN,
    draft_step,
    load_checkpoint,
    make_model,
    make_mtp,
    nemotron,
    run_layer,
    save_checkpoint,
    stored_tensors,
    trunk_hidden,
)
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

DROPOUT = 0.1
BALANCE_RATE = 1e-3
MTP_WEIGHT = 0.3
JOINT_SHARE = 0.74  # of the minutes; the rest is the head's own stage
SAVE_SECONDS = 90
GENERATED_PER_ROW = 256  # tokens of greedy text at the end of a row of stage 2
GENERATED_EMPHASIS = 3.0


def dropped_layer(layer: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """A layer with dropout on what it adds to the residual stream: the corpus is read more than ten times."""
    y = run_layer(layer, x, rotary)
    return x + F.dropout(y - x, DROPOUT) if layer.training else y


def trunk_loss(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    logits = model.lm_head(hidden)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    return loss, logits[:num_rows].detach()


def mtp_loss(
    model: PreTrainedModel,
    mtp: nn.Module,
    hidden: Tensor,
    token_ids: Tensor,
    teacher: Tensor,
    emphasis: Tensor,
) -> Tensor:
    """Mean over three draft steps of half cross-entropy with the text, half with the trunk's distribution.

    Start i fuses (x[i+1], h[i]); step j drafts x[i+j+1], for which the trunk's view stands at position i+j.
    """
    embed = model.get_input_embeddings()
    num_starts = hidden.shape[1] - NUM_DRAFTS - 1
    hidden, past, total = hidden[:, :num_starts], [], hidden.new_zeros(())
    weights = emphasis[:, :num_starts] / emphasis[:, :num_starts].sum()
    for j in range(NUM_DRAFTS):
        hidden = draft_step(mtp, embed(token_ids[:, 1 + j : 1 + j + num_starts]), hidden, past)
        logs = model.lm_head(hidden).float().log_softmax(-1)
        target = token_ids[:, 2 + j : 2 + j + num_starts, None]
        trunk_view = teacher[:, 1 + j : 1 + j + num_starts].float().softmax(-1)
        nats = -0.5 * (logs.gather(-1, target)[..., 0] + (trunk_view * logs).sum(-1))
        total = total + (weights * nats).sum() / NUM_DRAFTS
    return total


@dataclass
class Progress:
    """Time decides: a stage ends when its minutes are over, and learning rates follow the clock."""

    name: str
    seconds: float
    rate_floor: float = 0.01
    step: int = 0
    tokens: int = 0
    last_print: float = 0.0

    def __post_init__(self) -> None:
        self.start = self.end = time.monotonic()
        self.end += self.seconds
        self.first_token_time = self.start

    def share(self) -> float:
        return min(1.0, (time.monotonic() - self.start) / self.seconds)

    def rate(self) -> float:
        """Warm up over 40 steps, hold, then fall linearly from 40 % of the time on."""
        decay = min(1.0, (1.0 - self.share()) / 0.6)
        return min(1.0, (self.step + 1) / 40) * max(self.rate_floor, decay)

    def done(self) -> bool:
        return time.monotonic() >= self.end

    def advance(self, num_tokens: int, losses: Callable[[], str]) -> None:
        self.step += 1
        if self.step == 2:
            # the first steps compile; they would spoil the throughput shown
            self.first_token_time, self.tokens = time.monotonic(), -num_tokens
        self.tokens += num_tokens
        now = time.monotonic()
        if now - self.last_print < 10 and not self.done():
            return
        text = losses()  # waits for the device, so the clock is read after it
        now = self.last_print = time.monotonic()
        speed = self.tokens / max(1e-9, now - self.first_token_time)
        left = max(0.0, self.end - now)
        print(
            f"{self.name} step {self.step:5} {text} {speed / 1e3:7.1f} k tokens/s, {left:4.0f} s left",
            flush=True,
        )


class Trainer:
    def __init__(self, arguments: argparse.Namespace, tokenizer: Tokenizer, corpus: Corpus) -> None:
        self.device = arguments.device
        self.num_rows, self.length, self.seed = arguments.rows, arguments.length, arguments.seed
        self.out, self.tokenizer_folder = arguments.out, arguments.tokenizer
        torch.manual_seed(self.seed)
        if arguments.init is None:
            self.model = make_model(arguments.family).to(self.device)
            self.mtp = make_mtp(self.model).to(self.device)
        else:
            self.model, self.mtp = load_checkpoint(arguments.init, self.device)
        self.stream = torch.from_numpy(train_stream(tokenizer, corpus, self.seed)).to(self.device)
        self.tokenizer, self.held_out = tokenizer, encode_stream(tokenizer, corpus.held_out, seed=0)
        self.experts = [
            m for p in (self.model, self.mtp) for m in p.modules() if isinstance(m, nemotron.NemotronHMoE)
        ]
        for layer in self.experts:
            load = torch.zeros(layer.experts.num_experts, device=self.device)
            layer.experts.register_buffer("load", load, persistent=False)
        self.run_layer, self.trunk_loss, self.mtp_loss = dropped_layer, trunk_loss, mtp_loss
        if arguments.compile:
            torch._dynamo.config.recompile_limit = 64
            self.run_layer = torch.compile(dropped_layer, dynamic=False)
            self.trunk_loss = torch.compile(trunk_loss, dynamic=False)
            self.mtp_loss = torch.compile(mtp_loss, dynamic=False)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        return (
            torch.autocast("cuda", dtype=torch.bfloat16)
            if self.device == "cuda"
            else contextlib.nullcontext()
        )

    def windows(self, num_rows: int, length: int) -> Tensor:
        starts = torch.randint(0, len(self.stream) - length, (num_rows, 1), device=self.device)
        return self.stream[starts + torch.arange(length, device=self.device)].long()

    @torch.no_grad()
    def balance(self, factor: float) -> None:
        """Loss-free balancing: nudge the selection bias of over- and underused experts."""
        for layer in self.experts:
            load = layer.experts.load
            layer.gate.e_score_correction_bias += BALANCE_RATE * factor * (load.mean() - load).sign()
            load.zero_()

    def named(self, *modules: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return [pair for module in modules for pair in module.named_parameters() if pair[1].requires_grad]

    def joint_stage(self, seconds: float) -> Progress:
        optimizer = Optimizer(self.named(self.model, self.mtp))
        progress = Progress("joint", seconds)
        mtp_rows = max(1, self.num_rows // 4)
        emphasis = torch.ones(mtp_rows, self.length, device=self.device)
        next_save = time.monotonic() + SAVE_SECONDS
        self.model.train()
        self.mtp.train()
        while not progress.done():
            token_ids = self.windows(self.num_rows, self.length + 1)
            with self.autocast():
                hidden = trunk_hidden(self.model, token_ids[:, :-1], self.run_layer)
                loss, logits = self.trunk_loss(self.model, hidden, token_ids[:, 1:], mtp_rows)
                draft_loss = self.mtp_loss(
                    self.model, self.mtp, hidden[:mtp_rows], token_ids[:mtp_rows], logits, emphasis
                )
            (loss + MTP_WEIGHT * draft_loss).backward()
            factor = progress.rate()
            optimizer.step(factor)
            self.balance(factor)
            progress.advance(
                self.num_rows * self.length,
                lambda a=loss, b=draft_loss: f"loss {a.item():.3f} draft {b.item():.3f}",
            )
            if time.monotonic() > next_save:
                next_save = time.monotonic() + SAVE_SECONDS
                self.save()
                self.probe()
        return progress

    @torch.no_grad()
    def round_trunk(self) -> None:
        """The trunk as it will be read back, so that the head learns to follow that one."""
        rounded = stored_tensors(self.model, nn.Module())
        stored = {k.replace("backbone.", "model.", 1): v for k, v in rounded.items()}
        for name, weight in self.model.named_parameters():
            if name in stored and stored[name].dtype == torch.float32:
                continue
            weight.copy_(weight.bfloat16())

    def generated_rows(self, num_rows: int) -> Tensor:
        """Training text, continued greedily by the trunk for the last GENERATED_PER_ROW tokens."""
        num_new = min(GENERATED_PER_ROW, self.length // 2)
        prompts = self.windows(num_rows, self.length + 1 - num_new)
        with self.autocast():
            return generate_greedy(self.model, prompts, num_new)

    def head_stage(self, seconds: float) -> Progress:
        started = time.monotonic()
        self.round_trunk()
        self.model.eval().requires_grad_(False)
        generated = torch.cat([self.generated_rows(32 * self.num_rows) for _ in range(3)])
        generate_seconds = time.monotonic() - started
        print(f"generated {len(generated)} rows in {generate_seconds:.0f} s", flush=True)
        half = max(1, self.num_rows // 2)
        emphasis = torch.ones(2 * half, self.length, device=self.device)
        emphasis[half:, -min(GENERATED_PER_ROW, self.length // 2) - 1 :] = GENERATED_EMPHASIS
        optimizer = Optimizer(self.named(self.mtp))
        progress = Progress("head ", max(1.0, seconds - generate_seconds))
        while not progress.done():
            chosen = generated[torch.randint(0, len(generated), (half,), device=self.device)]
            token_ids = torch.cat([self.windows(half, self.length + 1), chosen])
            with self.autocast():
                with torch.no_grad():
                    hidden = trunk_hidden(self.model, token_ids[:, :-1], self.run_layer)
                    logits = self.model.lm_head(hidden)
                loss = self.mtp_loss(self.model, self.mtp, hidden, token_ids, logits, emphasis)
            loss.backward()
            # gentler than stage 1: the head is trained already
            factor = 0.5 * progress.rate()
            optimizer.step(factor)
            self.balance(factor)
            progress.advance(token_ids[:, :-1].numel(), lambda a=loss: f"draft {a.item():.3f}")
        return progress

    def probe(self) -> None:
        """Held-out loss on the way, in a few windows: shows when more epochs stop helping."""
        self.model.eval()
        loss = held_out_loss(self.model, self.tokenizer, self.held_out, self.length, max_windows=32)
        self.model.train()
        print(f"held out: {loss['nats_per_token']:.3f} nats per token", flush=True)

    def save(self) -> None:
        save_checkpoint(self.model, self.mtp, self.out, self.tokenizer_folder)


def prepare_tokenizer(folder: Path | None, out: Path, corpus: Corpus) -> Path:
    if folder is not None:
        return folder
    print("training the tokenizer", flush=True)
    save_tokenizer(train_tokenizer(corpus.train + corpus.train_tests[::3] + corpus.train_chats), out, MAX_LEN)
    return out


def train(arguments: argparse.Namespace, corpus: Corpus) -> dict[str, object]:
    arguments.tokenizer = prepare_tokenizer(arguments.tokenizer, arguments.out, corpus)
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    trainer = Trainer(arguments, tokenizer, corpus)
    num_weights = sum(w.numel() for _, w in trainer.named(trainer.model, trainer.mtp))
    print(
        f"seed {arguments.seed}, {num_weights / 1e6:.2f} M weights, "
        f"{len(trainer.stream) / 1e6:.2f} M tokens an epoch"
    )
    difference = check_fast_paths(trainer.model, trainer.windows(2, 150))
    print(f"largest logit difference to transformers' own forward: {difference:.2e}", flush=True)
    if difference > 1e-3:
        raise SystemExit("the training forward does not compute what transformers computes")
    torch.set_float32_matmul_precision("high")
    seconds = arguments.minutes * 60
    with fast_training_paths():
        joint = trainer.joint_stage(seconds * JOINT_SHARE)
        trainer.save()
        head = trainer.head_stage(seconds * (1 - JOINT_SHARE))
    trainer.save()
    return {
        "family": arguments.family,
        "seed": arguments.seed,
        "minutes": arguments.minutes,
        "rows": arguments.rows,
        "length": arguments.length,
        "tokens_per_epoch": len(trainer.stream),
        "joint_steps": joint.step,
        "joint_tokens": joint.step * arguments.rows * arguments.length,
        "head_steps": head.step,
        "max_logit_difference_to_transformers": difference,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder or tar archive of .py files")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write (or to evaluate)")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer files; default: train one")
    parser.add_argument("--init", type=Path, help="checkpoint folder to start from instead of random weights")
    parser.add_argument("--minutes", type=float, default=8.0, help="training time, both stages (default 8)")
    parser.add_argument("--rows", type=int, default=32, help="sequences per step (default 32)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence (default 1024)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument(
        "--eval-only", action="store_true", help="measure the checkpoint in --out, train nothing"
    )
    parser.add_argument(
        "--eval-prompts", type=int, default=40, help="held-out prompts for acceptance (default 40)"
    )
    parser.add_argument(
        "--eval-windows", type=int, default=128, help="held-out windows of 1024 tokens (default 128)"
    )
    arguments = parser.parse_args()
    started = time.monotonic()
    corpus = load_corpus(arguments.data, seed=0)
    report: dict[str, object] = {} if arguments.eval_only else train(arguments, corpus)
    evaluation = evaluate(
        arguments.out, corpus, arguments.device, arguments.eval_prompts, arguments.eval_windows
    )
    report |= evaluation | {"wall_seconds": round(time.monotonic() - started)}
    if not arguments.eval_only:
        (arguments.out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    for text in report.pop("samples"):  # type: ignore[attr-defined]
        print("-" * 40, text, sep="\n")
    print(json.dumps(report, indent=2), flush=True)


if __name__ == "__main__":
    main()

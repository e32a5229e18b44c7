"""Collectives between processes in a loop: every result is compared with the reference's, bit for bit.

    python benchmarks/collectives_cpu.py --ranks 2 --count 100000

Of five calls three are sums (of 1 to 64 lines), one agrees on the best tokens, one gathers logits. Inputs
come from a seed, so each rank knows what all have. Ends with status 1 where a result is wrong.
"""

import argparse
import random
import subprocess
import sys
import time

import torch

from hemiola.plugins import OPS
from hemiola.plugins.step import forms
from hemiola.plugins.sum.reference import tree
from hemiola.runtime.device.ranks import SharedMemory

KINDS = ["sum", "sum", "sum", "agree", "gather"]
WIDTH, VOCAB = 256, 96
NUM_SETS = 50  # of inputs, used in turns


def make_sets(size: int, seed: int) -> list[tuple[str, list[torch.Tensor], list[torch.Tensor]]]:
    """A kind, each rank's lines, and what every rank must get."""
    dice, made = random.Random(seed), []
    for n in range(NUM_SETS):
        kind = KINDS[n % len(KINDS)]
        lines = dice.choice([1, 1, 4, 64]) if kind == "sum" else dice.choice([1, 4])
        generator = torch.Generator().manual_seed(dice.getrandbits(32))
        width = WIDTH if kind == "sum" else VOCAB
        parts = [torch.randn(lines, width, generator=generator) for _ in range(size)]
        whole = torch.cat(parts, 1)
        if kind == "sum":
            wanted = [tree(parts)]
        elif kind == "agree":
            wanted = [whole.amax(1), whole.argmax(1)]
        else:
            wanted = [whole]
        made.append((kind, parts, wanted))
    return made


def run(rank: int, memory: SharedMemory, count: int, seed: int) -> int:
    """How many results were wrong."""
    torch.set_num_threads(1)
    group, sets, ops = memory.group(rank), make_sets(memory.size, seed), forms("compiled")
    add, wrong = OPS["sum"].bind("compiled", ()), 0
    for n in range(count):
        kind, parts, wanted = sets[n % NUM_SETS]
        own = parts[rank]
        if kind == "sum":
            found = [add(own, group)]
        elif kind == "agree":
            found = [*ops.agree(*ops.best(own), group, VOCAB)]
        else:
            found = [ops.gather(own, group)]
        wrong += not all(map(torch.equal, found, wanted))
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--follow", type=int, nargs=3, help="rank, descriptor and token; for itself")
    given = parser.parse_args()
    if given.follow:
        rank, fd, token = given.follow
        sys.exit(run(rank, SharedMemory(fd, given.ranks, token), given.count, given.seed) > 0)
    memory = SharedMemory.make(given.ranks)
    rest = [f"--ranks={given.ranks}", f"--count={given.count}", f"--seed={given.seed}"]
    followers = [
        subprocess.Popen(
            [sys.executable, __file__, *rest, "--follow", str(rank), str(memory.fd), str(memory.token)],
            pass_fds=[memory.fd],
        )
        for rank in range(1, given.ranks)
    ]
    try:
        start = time.perf_counter()
        wrong = run(0, memory, given.count, given.seed)
        seconds = time.perf_counter() - start
        statuses = [follower.wait(60) for follower in followers]
    finally:
        memory.stop()
        for follower in followers:
            follower.kill()
            follower.wait()
    print(f"{given.ranks} ranks, {given.count} collectives, {seconds:.1f} s with the start of the others")
    print(f"wrong on the first rank: {wrong}; others that found a wrong one: {sum(map(bool, statuses))}")
    sys.exit(wrong > 0 or any(statuses))


if __name__ == "__main__":
    main()

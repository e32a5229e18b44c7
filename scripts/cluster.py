"""Workers behind Dynamo's frontend, killed, drained and added all the time; every answer is compared.

    make cluster [TURNS=2000]

Needs .venv/cluster (cluster_environment.py). Random conversations go through the frontend's
OpenAI door by the `openai` package; no turn may be lost, each must be the plain run's text (and its
log-probabilities, where asked). At the end workers are idle and nothing is left. Exit status 1 otherwise.
"""

import random
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from cluster_environment import environment

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from kit import conversations  # noqa: E402
from kit.cluster import ENVIRONMENT, ROUTER, Cluster, Member, until  # noqa: E402


class Churn:
    """What happens to workers while conversations go on: never fewer than two are ready."""

    def __init__(self, cluster: Cluster, size: int, seed: int) -> None:
        self.cluster, self.size, self.dice = cluster, size, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.gone_at: dict[int, float] = {}  # ids of workers, by time.monotonic
        self.members = [cluster.add() for _ in range(size)]
        cluster.await_workers(size)
        self._known = set(cluster.instances())

    def step(self) -> None:
        """End one worker, and wait until another has taken its place."""
        member = self.members.pop(self.dice.randrange(len(self.members)))
        how = self.dice.choice(["killed", "killed", "drained"])
        self.counts[how] += 1
        start = time.monotonic()
        if how == "killed":
            self.cluster.kill(member)
        else:
            self.cluster.drain(member)
            until(lambda: member.health() == 503 or not member.lives, "a drain")
        self._await(self.size - 1)
        self.gone_at |= dict.fromkeys(
            self._known - set(self.cluster.instances()) - self.gone_at.keys(), start
        )
        self.members.append(self.cluster.add())
        self.counts["added"] += 1
        self._await(self.size)
        until(lambda: how == "killed" or not member.lives, "the end of a drained worker")
        if how == "drained" and member.process.returncode:
            raise SystemExit(f"{member.name} ended with {member.process.returncode}: {member.log}")

    def _await(self, num: int) -> None:
        """The frontend forgets a killed worker when its lease ends."""
        until(lambda: len(self.cluster.instances()) == num, f"{num} workers")
        self._known |= set(self.cluster.instances())


def main(
    engine_dir: Path,
    turns: Annotated[int, typer.Option(help="of all conversations together")] = 2000,
    workers: Annotated[int, typer.Option(help="that serve at once")] = 3,
    concurrency: Annotated[int, typer.Option(help="conversations at once")] = 12,
    tokens: Annotated[int, typer.Option(help="maximum of an answer")] = 96,
    pause: Annotated[float, typer.Option(help="seconds between an answer and the next turn")] = 0.5,
    seed: int = 0,
    router: Annotated[str, typer.Option(help="options of the frontend's router")] = " ".join(ROUTER),
) -> None:
    python = environment()
    print(f"seed {seed}: the plain run of {turns} turns", flush=True)
    said = conversations.make(engine_dir, turns, seed, tokens)
    folder = Path(tempfile.mkdtemp(prefix="hemiola-cluster-"))
    before = shared_memory()
    tiers = ("--num-pages", "130", "--host-cache-bytes", str(32 << 20))
    with Cluster(python, engine_dir, folder, *tiers, router=shlex.split(router), tells=True) as cluster:
        churn = Churn(cluster, workers, seed)
        load = conversations.Load(cluster.url, said, concurrency, pause, partial(starts, cluster))
        asking = threading.Thread(target=load.run)
        start = time.monotonic()
        asking.start()
        while asking.is_alive():
            churn.step()
            shown = ", ".join(f"{num} {what}" for what, num in churn.counts.items())
            share = f"{100 * load.deepest_share(churn.gone_at):.1f} % on the deepest"
            done = f"{load.num_done} turns, {len(load.faults)} wrong or lost"
            print(f"{done}, {share}; workers: {shown}", flush=True)
        seconds = time.monotonic() - start
        faults = [*load.faults, *not_idle(churn.members)]
        for member in churn.members:
            cluster.drain(member)
        until(lambda: not any(member.lives for member in churn.members), "the end of all workers")
        until(lambda: not left(cluster), "an empty store")
    faults += [f"left in /dev/shm: {name}" for name in shared_memory() - before]
    report(load, churn, seconds)
    for fault in faults[:9]:
        print(f"fault: {fault}")
    if faults:
        raise SystemExit(1)
    shutil.rmtree(folder)


def starts(cluster: Cluster, turn: conversations.Turn) -> dict[int, int]:
    """Behind how many tokens of a turn each worker that lives would start now."""
    asked = turn.prompt, turn.params.cache_salt
    lengths = [member.would_start(*asked) for member in cluster.members if member.lives]
    return dict(one for one in lengths if one is not None)


def not_idle(members: list[Member]) -> list[str]:
    """Each worker's pages are free again, or kept for later prompts."""
    name, busy = "dynamo_component_gpu_cache_usage_percent", []
    for member in members:
        end = time.monotonic() + 30
        while member.gauge(name) != 0.0 and time.monotonic() < end:
            time.sleep(0.2)
        if member.gauge(name) != 0.0:
            busy.append(f"{member.name} is idle, and {name} is {member.gauge(name)}")
    return busy


def left(cluster: Cluster) -> list[Path]:
    """What workers have left where Dynamo finds them."""
    entries = [path for path in cluster.store.rglob("*") if path.is_file()]
    return [path for path in entries if "generate" in path.name and "active%5F" not in path.name]


def shared_memory() -> set[str]:
    """But for what servers of somebody else have there."""
    others = ("hemiola-serve", "triton_python_backend")
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(others)}


def report(load: conversations.Load, churn: Churn, seconds: float) -> None:
    kinds = load.kinds(churn.gone_at)
    stayed = sum(kinds.values()) - kinds["its worker went"]
    share = kinds["same worker"] / max(1, stayed)
    print(f"{load.num_done} turns in {seconds:.0f} s, ai-dynamo {metadata_version()}")
    print(f"wrong or lost: {len(load.faults)}; workers: {dict(churn.counts)}")
    print(f"later turns: {dict(kinds)}")
    print(f"of those whose worker lived, on it and from its cache: {100 * share:.1f} %")
    deepest = [turn.is_on_deepest(churn.gone_at) for turn in load.later]
    share, known = load.deepest_share(churn.gone_at), len(deepest) - deepest.count(None)
    print(f"of {known} of which a worker had anything, on one than which none had more: {100 * share:.1f} %")


def metadata_version() -> str:
    folder = next(ENVIRONMENT.glob("lib/python*/site-packages"))
    distributions = metadata.distributions(name="ai-dynamo-runtime", path=[str(folder)])
    return next(iter(distributions)).version


if __name__ == "__main__":
    typer.run(main)

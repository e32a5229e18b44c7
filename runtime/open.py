"""Opens an engine: makes the parts that run it and puts them together."""

import logging
import sys
import traceback
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import torch

import hemiola
from hemiola.plugins import OPS
from hemiola.runtime import manifest as manifests
from hemiola.runtime.abi import widths
from hemiola.runtime.cache.disk import Content, DiskTier
from hemiola.runtime.cache.eviction import Cost, Evictor
from hemiola.runtime.cache.layout import PrefixLayout
from hemiola.runtime.cache.packed import PackedForm
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.cache.slots import SlotPool
from hemiola.runtime.cache.tier import Tier
from hemiola.runtime.config import Resolved, state_bytes
from hemiola.runtime.device.followers import FollowerProcesses
from hemiola.runtime.device.memory import CPU, Storage, close_all, give_back
from hemiola.runtime.device.session import Session
from hemiola.runtime.device.windows import Windows
from hemiola.runtime.errors import Refused, counted
from hemiola.runtime.outline import check_same
from hemiola.runtime.progress import Report, silent
from hemiola.runtime.same_bits import SameBits
from hemiola.runtime.schedule.loop import Loop
from hemiola.runtime.schedule.outbox import Outbox
from hemiola.runtime.schedule.pace import Pace
from hemiola.runtime.schedule.scheduler import Scheduler
from hemiola.runtime.step.ahead import compile_ahead
from hemiola.runtime.step.follower import build
from hemiola.runtime.step.ranked import Followers, RankedSteps, RankedUnits
from hemiola.runtime.step.steps import Engine, make_steps
from hemiola.runtime.text import Text

log = logging.getLogger("hemiola")


def make_loop(
    config: Resolved,
    storage: Storage,
    session: Engine,
    text: Text | None,
    cost: Cost,
    identity: str = "",
    device: torch.device = CPU,
    held: ExitStack | None = None,
    report: Report = silent,
    followers: Followers | None = None,
) -> Loop:
    """The parts of a running engine, put together; not started. held: gets what must be closed behind it.
    followers: of an engine for several ranks."""
    slots = SlotPool(config.num_slots, config.chunk_len, storage.free_slots)
    table_width = widths(config, "trunk")["W"]
    pages = PagePool(config.num_pages, config.page_len, config.num_slots, table_width, storage.free_pages)
    evictor = Evictor(cost, config.page_len)
    held = held or ExitStack()
    tiers = make_tiers(config, storage, cost, identity, device, held, followers)
    given = identity, config.snapshot_interval, config.prefix_cache
    prefix = PrefixCache(pages, slots, evictor, *given, *tiers)
    scheduler = Scheduler(config, prefix, Pace(config.num_drafts, config.adaptive_drafts))
    steps = make_steps(config, storage, session, pages, device, held, report)
    if followers is None:
        return Loop(config, scheduler, storage, steps, Outbox(text), device)
    ranked = RankedSteps(steps, storage, pages, followers, config.drafts == "mtp")
    return Loop(config, scheduler, ranked, ranked, Outbox(text), device)


def make_tiers(
    config: Resolved,
    storage: Storage,
    cost: Cost,
    identity: str,
    device: torch.device,
    held: ExitStack,
    followers: Followers | None,
) -> tuple[Tier | None, DiskTier | None, Content | None]:
    """Where pages and snapshots go that the cache gives up: the host's memory, a file; and the former's
    content."""
    if config.host_cache_bytes == 0:
        return None, None, None
    if followers is None:
        units = storage.host_units(config.host_cache_bytes)
    else:
        units = RankedUnits(storage.host_units(config.host_cache_bytes, followers.share()), followers)
    host = Tier(cost, config.page_len, units)
    if config.disk_cache_dir is None:
        return host, None, units
    form = content_form(config, identity, device)
    path = Path(config.disk_cache_dir) / f"{form[:32]}.prefixes"
    disk = DiskTier(path, config.disk_cache_bytes, form, cost, config.page_len, host, units)
    held.callback(disk.close)
    return host, disk, units


def content_fields(config: Resolved, identity: str, device: torch.device) -> dict[str, str | bool | int]:
    """What the bits of a page and of a snapshot depend on, besides the tokens before them."""
    machine = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    return {
        "hemiola": hemiola.__version__,
        "engine": identity,
        "machine": machine,
        "mtp_head": config.drafts == "mtp",
        "page_len": config.page_len,
        "chunk_len": config.chunk_len,
    }


def content_form(config: Resolved, identity: str, device: torch.device) -> str:
    """The same in one word."""
    parts = tuple(content_fields(config, identity, device).values())
    return sha256(repr(parts).encode()).hexdigest()


def packed_form(
    config: Resolved, manifest: manifests.Manifest, device: torch.device, same: SameBits | None = None
) -> PackedForm:
    """Of the engine's prefixes. same: what it has in common with engines of other numbers of ranks."""
    ranks = {"ranks": manifest.tp if same is None else "any"}
    fields = content_fields(config, manifest.identity if same is None else same.bits, device)
    parts = manifest.tp, None if same is None else same.num_kv_parts
    layout = PrefixLayout(manifest.states, manifest.limits, config.drafts == "mtp", *parts)
    return PackedForm(ranks | fields, layout, config.vocab_size, config.max_len)


def prefix_cost(manifest: manifests.Manifest) -> Cost:
    """Bytes of what the prefix cache keeps. Every token counts as the same work, whatever its position."""
    return Cost(state_bytes(manifest.states, "page"), state_bytes(manifest.states, "slot"))


def shown_sizes(config: Resolved, manifest: manifests.Manifest, free: int) -> str:
    """What an engine will take of the free memory."""
    taken = config.num_pages * state_bytes(manifest.states, "page")
    taken += config.num_slots * state_bytes(manifest.states, "slot")
    return (
        f"{config.num_pages} pages of {config.page_len} tokens and {config.num_slots} slots take"
        f" {taken / 2**30:.2f} GiB of {free / 2**30:.2f} free beside the weights and what a step takes"
    )


def open_loop(
    engine_dir: Path,
    manifest: manifests.Manifest,
    config: Resolved,
    text: Text | None,
    device: torch.device,
    report: Report = silent,
    followers: FollowerProcesses | None = None,
) -> Loop:
    """An engine that runs. What it takes is given back when it is closed, or here, where opening fails."""
    held, callers = ExitStack(), sys.exc_info()[1]
    held.callback(give_back, device)
    if followers is not None:
        held.callback(followers.close)
    try:
        return _open_loop(engine_dir, manifest, config, text, device, held, report, followers)
    except BaseException as error:
        clear_frames(error, callers)
        close_all(held)
        raise


def _open_loop(
    engine_dir: Path,
    manifest: manifests.Manifest,
    config: Resolved,
    text: Text | None,
    device: torch.device,
    held: ExitStack,
    report: Report,
    followers: FollowerProcesses | None,
) -> Loop:
    if device.type == "cpu":
        ops = {call.op for segment in manifest.segments for call in segment.calls}
        compile_ahead(OPS.keys() & ops, report)
    if followers is not None:
        followers.configure(config.model_dump(), max(1, torch.get_num_threads() // manifest.tp))
    group = None if followers is None else _group_of(followers, device)
    report("taking memory for the cache", 0, 0)
    storage = Storage(manifest.states, config.num_pages, config.num_slots, device=device)
    held.callback(storage.close)
    session = Session(engine_dir, manifest, storage, config.drafts, report, group)
    held.callback(session.close)
    check_same(engine_dir, manifest.identity)
    cost, identity = prefix_cost(manifest), manifest.identity
    ends = {"device": device, "held": held, "report": report, "followers": followers}
    loop = make_loop(config, storage, session, text, cost, identity, **ends)
    if followers is not None:
        report("waiting for the other ranks", 0, 0)
        followers.ready(loop.lose)
    loop.start(held)
    return loop


def _group_of(followers: FollowerProcesses, device: torch.device) -> torch.Tensor:
    """The leader's."""
    if device.type == "cpu":
        return followers.memory.group(0)
    followers.windows = windows = Windows(followers.memory, 0, device)
    return windows.open(followers.exchange(windows.handle))


def start_followers(
    engine_dir: Path, manifest: manifests.Manifest, report: Report
) -> FollowerProcesses | None:
    """The other ranks of an engine that has several."""
    if manifest.tp == 1:
        return None
    report("starting the other ranks", 0, 0)
    if manifest.arch == "cpu":
        _warn_of_few_cores(manifest.tp)
    on_gpus = manifest.arch != "cpu"
    return FollowerProcesses(engine_dir, manifest.tp, manifest.identity, build(), on_gpus)


def _warn_of_few_cores(num_ranks: int) -> None:
    from hemiola.plugins.cpu.team import quota  # numba is not needed elsewhere

    if num_ranks > (num_cores := quota()):
        shared = counted(num_cores, "core", "cores")
        log.warning("%d ranks share %s and wait for each other in every layer", num_ranks, shared)


def open_text(engine_dir: Path, manifest: manifests.Manifest) -> Text | None:
    """The engine's tokenizer, if it has one: every id that it makes is one that the model knows."""
    if not manifest.has_tokenizer:
        return None
    text = Text(engine_dir / "tokenizer")
    max_id = max(text.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if max_id >= manifest.vocab_size:
        path = engine_dir / "tokenizer/tokenizer.json"
        message = f"{path} has ids up to {max_id}, but vocab_size is {manifest.vocab_size}"
        raise Refused("damaged", message=message, way_out="run build-engine again")
    return text


def clear_frames(error: BaseException, callers: BaseException | None) -> None:
    """Who keeps an error keeps its frames, and with them the tensors that these have. callers: what the
    caller handles meanwhile; its frames are not ours."""
    errors = [error]
    for one in errors:
        traceback.clear_frames(one.__traceback__)
        for other in (one.__cause__, one.__context__):
            if other is not None and other is not callers and other not in errors:
                errors.append(other)

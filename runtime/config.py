"""The sizes that an engine runs with: a pure function turns "auto" into numbers."""

from collections.abc import Sequence

from hemiola.runtime.api import Strict
from hemiola.runtime.arch import ARCHS, split
from hemiola.runtime.errors import Name, Refused, any_of
from hemiola.runtime.options import Auto, Drafts, ServeConfig
from hemiola.runtime.outline import Outline, State

ENDLESS = 2**60  # bytes: as if memory were no limit


class Resolved(Strict):
    """A ServeConfig without "auto": the sizes that the runtime's parts are made with."""

    max_len: int
    max_rows: int
    max_step_tokens: int
    num_pages: int  # the dump page included
    num_slots: int  # the dump slot included
    page_len: int
    chunk_len: int
    drafts: Drafts
    num_drafts: int
    adaptive_drafts: bool
    ngram_min: int
    ngram_max: int
    prefix_cache: bool
    snapshot_interval: int
    pipeline_depth: int
    cuda_graphs: bool
    vocab_size: int
    aging_s: float
    host_cache_bytes: int
    disk_cache_dir: str | None
    disk_cache_bytes: int


def state_bytes(states: Sequence[State], kind: str) -> int:
    """Bytes of one page or one slot over all layers."""
    return sum(state.num_bytes for state in states if state.kind == kind)


def resolve(config: ServeConfig, engine: Outline, free_bytes: int) -> Resolved:
    """The sizes to run with: what was asked, bounded by the engine's limits and by the memory given."""
    limits = engine.limits
    max_len = _bounded("max_len", config.max_len, 2, limits.max_len)
    max_rows = _bounded("max_rows", config.max_rows, 1, limits.max_rows)
    max_step_tokens = _bounded("max_step_tokens", config.max_step_tokens, 1, limits.max_step_tokens)
    if max_rows > max_step_tokens:
        limit = (Name("max_step_tokens"), f" is {max_step_tokens}: each row needs a token per step")
        way_out = ("lower ", Name("max_rows"), " or raise ", Name("max_step_tokens"))
        raise Refused("conflict", "max_rows", max_rows, limit, way_out)
    drafts, num_drafts = _drafts(config, engine)
    prefix_cache = _prefix_cache(config, engine, max_len)
    num_slots, num_pages = _cache_sizes(config, engine, max_len, max_rows, prefix_cache, free_bytes)
    return Resolved(
        max_len=max_len,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        num_pages=num_pages,
        num_slots=num_slots,
        page_len=limits.page_len,
        chunk_len=limits.chunk_len,
        drafts=drafts,
        num_drafts=num_drafts,
        adaptive_drafts=config.adaptive_drafts,
        ngram_min=config.ngram_min,
        ngram_max=config.ngram_max,
        prefix_cache=prefix_cache,
        snapshot_interval=config.snapshot_interval,
        pipeline_depth=_pipeline_depth(config, engine),
        cuda_graphs=_cuda_graphs(config, engine),
        vocab_size=engine.vocab_size,
        aging_s=config.aging_s,
        host_cache_bytes=_tier_bytes("host_cache_bytes", config.host_cache_bytes, engine, prefix_cache),
        disk_cache_dir=_disk_cache_dir(config),
        disk_cache_bytes=_tier_bytes("disk_cache_bytes", config.disk_cache_bytes, engine, prefix_cache),
    )


def _pipeline_depth(config: ServeConfig, engine: Outline) -> int:
    """A CPU does what it is told before the host goes on; a GPU would stand still meanwhile."""
    if config.pipeline_depth == "auto":
        return int(ARCHS[split(engine.arch)[0]].device == "cuda")
    if not 0 <= config.pipeline_depth <= 2:
        raise Refused("out_of_range", "pipeline_depth", config.pipeline_depth, way_out="use 0, 1 or 2")
    return config.pipeline_depth


def _cuda_graphs(config: ServeConfig, engine: Outline) -> bool:
    """A host launches a step's kernels one by one more slowly than a GPU runs them."""
    on_gpu = ARCHS[split(engine.arch)[0]].device == "cuda"
    if config.cuda_graphs is True and not on_gpu:
        message = (Name("cuda_graphs"), f" is on, but the engine was built for {engine.arch}")
        raise Refused("conflict", "cuda_graphs", message=message, way_out="leave it out")
    return on_gpu if config.cuda_graphs == "auto" else config.cuda_graphs


def _drafts(config: ServeConfig, engine: Outline) -> tuple[Drafts, int]:
    """Who drafts, and how many per row and step."""
    built = engine.limits.num_drafts
    drafts = engine.drafts if config.drafts == "auto" else config.drafts
    if drafts == "none":
        if config.num_drafts not in ("auto", 0):
            limit = ("but ", Name("drafts"), " is none")
            raise Refused("conflict", "num_drafts", config.num_drafts, limit, "leave it out")
        return "none", 0
    if drafts == "mtp" and engine.drafts != "mtp":
        limit = "but the engine was built without an MTP head"
        raise Refused("unsupported", "drafts", drafts, limit, "rebuild with --drafts mtp")
    if built == 0:
        limit = "but the engine was built for num_drafts=0"
        raise Refused("unsupported", "drafts", drafts, limit, "rebuild with --num-drafts 3")
    if config.num_drafts == 0:
        way_out = ("give at least 1, or ", Name("drafts", "none"), " to run without drafts")
        raise Refused("out_of_range", "num_drafts", 0, way_out=way_out)
    if config.ngram_min > config.ngram_max:
        limit = (Name("ngram_max"), f" is {config.ngram_max}")
        raise Refused("conflict", "ngram_min", config.ngram_min, limit, ("raise ", Name("ngram_max")))
    return drafts, _bounded("num_drafts", config.num_drafts, 1, built)


def _bounded(name: str, value: int | Auto, least: int, limit: int) -> int:
    if value == "auto":
        return limit
    if value < least:
        raise Refused("out_of_range", name, value, way_out=f"give at least {least}")
    if value > limit:
        rebuilt = (
            rebuilt_for(value) if name == "max_len" else f"rebuild with --{name.replace('_', '-')} {value}"
        )
        raise Refused("out_of_range", name, value, f"the engine was built for {limit}", rebuilt)
    return value


def rebuilt_for(max_len: int) -> str:
    """The way out for longer texts; an engine does not know how long its checkpoint's may be."""
    return f"rebuild with --max-len {max_len}, if the checkpoint's max_position_embeddings allow so many"


def _prefix_cache(config: ServeConfig, engine: Outline, max_len: int) -> bool:
    """Whether to look for hits; refuses a cache that could never have one."""
    page_len = engine.limits.page_len
    can_hit = max_len >= page_len + 2
    if config.prefix_cache is True and not can_hit:
        page = f" leaves no token behind a page of {page_len}: nothing would ever be found"
        message = (Name("prefix_cache"), " is on, but ", Name("max_len", max_len), page)
        ways = ("raise ", Name("max_len"), f" to {page_len + 2}, rebuild with a smaller --page-len")
        raise Refused("conflict", "prefix_cache", message=message, way_out=(*ways, ", or leave it out"))
    used = can_hit if config.prefix_cache == "auto" else config.prefix_cache
    if not used and config.num_snapshots not in ("auto", 0):
        limit = ("but ", Name("prefix_cache"), " is off")
        raise Refused("conflict", "num_snapshots", config.num_snapshots, limit, "leave it out")
    if config.snapshot_interval % page_len:
        below = config.snapshot_interval // page_len * page_len
        limit, way_out = f"pages are {page_len} tokens", f"choose a multiple, such as {max(below, page_len)}"
        raise Refused("out_of_range", "snapshot_interval", config.snapshot_interval, limit, way_out)
    return used


def _tier_bytes(field: str, num_bytes: int, engine: Outline, prefix_cache: bool) -> int:
    """Refused where nothing would ever be kept there."""
    if num_bytes == 0:
        return 0
    if not prefix_cache:
        message = (Name(field), " is given, but ", Name("prefix_cache"), " is off")
        raise Refused("conflict", field, message=message, way_out="leave it out")
    if state_bytes(engine.states, "page") == 0:
        message = (Name(field), " is given, but the engine's pages have no bytes: no layer attends")
        raise Refused("unsupported", field, message=message, way_out="leave it out")
    least = engine.tp * sum(state_bytes(engine.states, kind) for kind in ("page", "slot"))
    if num_bytes < 2 * least:
        limit = f"a page and a state take {least}, and it needs twice that"
        raise Refused("out_of_range", field, num_bytes, limit, "raise it")
    return num_bytes


def _disk_cache_dir(config: ServeConfig) -> str | None:
    """What is on disk comes and goes through the host's memory."""
    if (config.disk_cache_dir is None) != (config.disk_cache_bytes == 0):
        message = (Name("disk_cache_dir"), " and ", Name("disk_cache_bytes"), " go together")
        raise Refused("conflict", "disk_cache_dir", message=message, way_out="give both or none")
    if config.disk_cache_dir is not None and config.host_cache_bytes == 0:
        message = (Name("disk_cache_dir"), " needs ", Name("host_cache_bytes"))
        raise Refused(
            "conflict", "disk_cache_dir", message=message, way_out=("give ", Name("host_cache_bytes"))
        )
    return config.disk_cache_dir


def _cache_sizes(
    config: ServeConfig,
    engine: Outline,
    max_len: int,
    max_rows: int,
    prefix_cache: bool,
    free_bytes: int,
) -> tuple[int, int]:
    """Slots and pages, the dump ones included: as many as can be used, within the bytes given."""
    per_request = -(-max_len // engine.limits.page_len)
    wanted = (2 if prefix_cache else 1) * max_rows * per_request + 1
    slot_bytes, page_bytes = (state_bytes(engine.states, kind) for kind in ("slot", "page"))
    if config.num_pages != "auto" and config.cache_bytes != "auto":
        message = (Name("num_pages"), " and ", Name("cache_bytes"), " were both given")
        raise Refused("conflict", "num_pages", message=message, way_out="choose one")
    if config.cache_bytes != "auto" and config.cache_bytes <= 0:
        raise Refused("out_of_range", "cache_bytes", config.cache_bytes, way_out="give more than 0")
    given = int(free_bytes * config.memory_fraction) if config.cache_bytes == "auto" else config.cache_bytes
    left = given - (max_rows + 1) * slot_bytes
    num_snapshots = _num_snapshots(config, prefix_cache and slot_bytes > 0, 4 * max_rows, left, slot_bytes)
    if config.num_pages != "auto":
        num_pages, given_by = config.num_pages, "num_pages"
        source: tuple[str | Name, ...] = (Name("num_pages"), f" is {config.num_pages}")
    else:
        left -= num_snapshots * slot_bytes
        fitting = left // page_bytes if page_bytes else (wanted if left >= 0 else 0)
        num_pages = min(wanted, fitting)
        source = (f"the cache may take {given} bytes, room for {max(fitting, 0)} pages",)
        given_by = "memory_fraction" if config.cache_bytes == "auto" else "cache_bytes"
    if num_pages < per_request + 1:
        limit = (", but one request of ", Name("max_len", max_len), f" needs {per_request + 1}")
        more = ("raise ", *any_of("num_pages", "cache_bytes", "memory_fraction"))
        less = (", or lower ", *any_of("max_len", "max_rows"))
        message = (*source, *limit, ", including one for padding")
        raise Refused("exhausted", given_by, num_pages, message=message, way_out=(*more, *less))
    return max_rows + 1 + num_snapshots, num_pages


def _num_snapshots(config: ServeConfig, useful: bool, max_snapshots: int, left: int, slot_bytes: int) -> int:
    """As many as were asked for; else up to `max_snapshots`, in a quarter of the bytes that are left."""
    if not useful:
        return 0
    if config.num_snapshots == "auto":
        return max(0, min(max_snapshots, left // 4 // slot_bytes))
    if config.num_snapshots < 1:
        limit, way_out = (
            "and without one nothing is ever found",
            ("raise it or switch ", Name("prefix_cache"), " off"),
        )
        raise Refused("out_of_range", "num_snapshots", config.num_snapshots, limit, way_out)
    if config.num_snapshots * slot_bytes > left:
        room = f"but the cache may take {max(left, 0)} beside the slots of its rows"
        limit = f"each of {slot_bytes} bytes, {room}"
        way_out = ("lower it or raise ", *any_of("cache_bytes", "memory_fraction"))
        raise Refused("exhausted", "num_snapshots", config.num_snapshots, limit, way_out)
    return config.num_snapshots

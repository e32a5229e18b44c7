"""The memory behind pages and slots: the state tensors that an engine updates in place."""

import logging
import mmap
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from math import prod
from pathlib import Path

import torch

from hemiola.plugins.cpu import cgroups
from hemiola.runtime.config import state_bytes
from hemiola.runtime.device.graphs import one_at_a_time
from hemiola.runtime.device.host_units import ALL, HostUnits, Share
from hemiola.runtime.device.lines import StateLines
from hemiola.runtime.device.pinned import PINNED
from hemiola.runtime.device.transfer import upload_ints
from hemiola.runtime.errors import Refused, any_of
from hemiola.runtime.outline import State

log = logging.getLogger("hemiola")
CPU = torch.device("cpu")
NAN_BYTES = {torch.float8_e4m3fn: 0x7F, torch.uint8: 0xFF}  # torch fills no such numbers; fp16 of 0xFF is NaN
# A control group's limit, what it has taken, and what of it the kernel gives back first: versions 2 and 1.
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

FEWER = ("lower ", *any_of("num_pages", "cache_bytes", "max_rows"))


class Storage:
    """Tensors by state name, [num_pages or num_slots, *shape].

    With `poison`, fresh and freed pages and slots hold NaN, so that reading what was never written shows.
    """

    def __init__(
        self,
        states: Sequence[State],
        num_pages: int,
        num_slots: int,
        poison: bool = False,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        counts = {"page": num_pages, "slot": num_slots}
        if device.type == "cpu":
            needed = sum(counts[kind] * state_bytes(states, kind) for kind in counts)
            _check_host(needed, f"{num_pages} pages and {num_slots} slots")
        try:
            self.tensors = {
                s.name: _zeros((counts[s.kind], *s.shape), getattr(torch, s.dtype), device) for s in states
            }
        except (RuntimeError, OSError, TypeError, OverflowError):  # the latter two: sizes beyond 64 bits
            message = f"there is no memory for {num_pages} pages and {num_slots} slots"
            raise Refused("exhausted", "num_pages", message=message, way_out=FEWER) from None
        self._pages = [self.tensors[s.name] for s in states if s.kind == "page"]
        self._slots = [self.tensors[s.name] for s in states if s.kind == "slot"]
        self._slot_lines = StateLines(self._slots)
        self._held = ExitStack()
        self.poison = poison
        if poison:
            self.free_pages(list(range(num_pages)))
            self.free_slots(list(range(num_slots)))

    def close(self) -> None:
        """Give the memory back; pools of pages and slots still name this."""
        self._held.close()
        self.tensors, self._pages, self._slots = {}, [], []
        self._slot_lines = StateLines([])

    def host_units(self, num_bytes: int, share: Share = ALL) -> HostUnits:
        """Memory of the host for pages and slots, of all ranks; closed with this."""
        if self.device.type == "cpu":
            _check_host(num_bytes, f"host_cache_bytes={num_bytes}")
        units = HostUnits(self._pages, self._slots, num_bytes, self.device, share)
        self._held.callback(units.close)
        return units

    def free_pages(self, page_ids: list[int]) -> None:
        if self.poison:
            _fill(self._pages, page_ids)

    def free_slots(self, slot_ids: list[int]) -> None:
        if self.poison:
            _fill(self._slots, slot_ids)

    def copy_slot(self, source: int, target: int) -> None:
        """A slot at an edge is a snapshot: copying it whole restores or keeps one."""
        self._slot_lines.copy(source, target)


def _check_host(needed: int, what: str) -> None:
    """The kernel would promise more than it has, and kill a process once the promised pages are written."""
    free = free_bytes_of_host()
    if needed > free:
        message = f"there is no memory for {what}: they take {needed} bytes, and {free} are free"
        raise Refused(
            "exhausted", "num_pages", message=message, way_out=(*FEWER, ", or close what else is open")
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """All of it is taken now, so that who asks next what is free finds it gone."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE  # 2/3 of the time that torch takes
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _fill(tensors: list[torch.Tensor], ids: list[int]) -> None:
    if not tensors:
        return
    where = upload_ints(tensors[0].device, ids)
    for tensor in tensors:  # `tensor[ids] = ` would make a GPU wait for the host twice
        if tensor.dtype in NAN_BYTES:
            tensor.view(torch.uint8).index_fill_(0, where, NAN_BYTES[tensor.dtype])
            continue
        number = torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
        tensor.index_fill_(0, where, number)


def free_bytes(
    device: torch.device, weights: Sequence[Path], drawn_bytes: int = 0, work_bytes: int = 0
) -> int:
    """Memory for pages and slots, and to choose tokens, beside the weights in these files and those drawn,
    and what a step of a program takes."""
    if device.type == "cpu":
        return max(free_bytes_of_host() - drawn_bytes, 0)  # the file is mapped
    free, total = torch.cuda.mem_get_info(device)
    needed = sum(file.stat().st_size for file in weights) + drawn_bytes
    if free <= needed + work_bytes:
        message = (
            f"{weights[0]} has {needed} bytes of weights and a step takes up to {work_bytes}, but of the"
            f" GPU's {total} bytes {free} are free"
        )
        way_out = (
            "stop what else runs there, use a larger GPU, or build the engine with a smaller"
            " --max-step-tokens or --max-rows"
        )
        raise Refused("exhausted", message=message, way_out=way_out)
    return free - needed - work_bytes


def give_back(device: torch.device) -> None:
    """Let the driver have what torch keeps for later: other engines ask the driver what is free."""
    if device.type == "cuda":
        with one_at_a_time():
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()
            PINNED.give_back()


def close_all(held: ExitStack) -> None:
    """What an engine has on the device. That this fails takes no other error's place."""
    try:
        held.close()
    except Exception:  # of a device that is lost
        log.exception("the engine could not give all of its memory back")


def free_bytes_of_host(
    meminfo: Path = Path("/proc/meminfo"), root: Path = cgroups.ROOT, cgroup_file: Path = cgroups.OWN
) -> int:
    """Memory that can be taken without swapping, within the limits of our control groups."""
    free = int(_fields(meminfo)["MemAvailable:"]) * 1024
    for group in cgroups.folders("memory", root, cgroup_file):
        for limit, usage, cached in _LIMITS:
            with suppress(OSError, ValueError):  # "max" is no number
                max_bytes = int((group / limit).read_text())
                kept = int((group / usage).read_text()) - int(_fields(group / "memory.stat")[cached])
                free = min(free, max_bytes - kept)
    return max(free, 0)


def _fields(path: Path) -> dict[str, str]:
    return {words[0]: words[1] for words in map(str.split, path.read_text().splitlines())}

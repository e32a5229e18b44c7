"""How fast this machine's disk gives a prefix of the disk cache, by how it is read: benchmarks/cluster.md.

    PYTHONPATH=. python benchmarks/disk_reads.py [--folder DIR] [--mib 304] [--rounds 3]

Units of 2 MiB and their headers, as runtime/cache/disk.py has them, read by so many threads, each unit's
sha256 taken or not. Before each row the operating system drops what it has of the file. raw: O_DIRECT, the
whole unit in one call. The goal is a prefix of 304 MiB in 112 ms, half of computing it on an H200: 2.8 GB/s.
"""

import argparse
import hashlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HEADER, CONTENT = 4096, 2 << 20
UNIT = HEADER + CONTENT
THREADS = (1, 2, 4, 8, 16, 32)


def as_it_comes(file: int, num_units: int) -> None: ...


def at_random(file: int, num_units: int) -> None:
    """The kernel reads nothing ahead, and each call as a whole."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def wanted(file: int, num_units: int) -> None:
    """The kernel is told of all units before the first is read."""
    for unit in range(num_units):
        os.posix_fadvise(file, unit * UNIT, UNIT, os.POSIX_FADV_WILLNEED)


WAYS: dict[str, tuple[int, Callable[[int, int], None]]] = {
    "as it comes": (0, as_it_comes),
    "POSIX_FADV_RANDOM": (0, at_random),
    "POSIX_FADV_WILLNEED": (0, wanted),
    "raw (O_DIRECT)": (os.O_DIRECT, as_it_comes),
}


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | flags)
    try:
        yield file
    finally:
        os.close(file)


def write(path: Path, num_units: int) -> None:
    with path.open("wb") as file:
        for _ in range(num_units):
            file.write(os.urandom(UNIT))
        file.flush()
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    with opened(path, 0) as file:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def gb_per_s(path: Path, num_units: int, way: str, threads: int, with_sum: bool) -> float:
    flags, prepare = WAYS[way]
    rooms = [mmap.mmap(-1, UNIT) for _ in range(num_units)]  # aligned, as O_DIRECT wants it
    for room in rooms:
        room.write(bytes(UNIT))  # the host's memory is there before
    forget(path)
    with opened(path, flags) as file, ThreadPoolExecutor(threads) as pool:

        def read(unit: int) -> None:
            assert os.preadv(file, [rooms[unit]], unit * UNIT) == UNIT
            if with_sum:
                hashlib.sha256(rooms[unit]).digest()

        list(pool.map(time.sleep, [0.01] * threads))  # all threads are there
        start = time.perf_counter()
        prepare(file, num_units)
        list(pool.map(read, range(num_units)))
        return num_units * UNIT / (time.perf_counter() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", help="on the disk in question")
    parser.add_argument("--mib", type=int, default=304)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    num_units = asked.mib // 2
    print("GB/s, the best of the rounds\n")
    print(f"| | sha256 | {' | '.join(f'{n} at once' for n in THREADS)} |\n|---|---|{'---|' * len(THREADS)}")
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        path = Path(folder) / "units"
        write(path, num_units)
        for with_sum in (False, True):
            for way in WAYS:
                best = [
                    max(gb_per_s(path, num_units, way, threads, with_sum) for _ in range(asked.rounds))
                    for threads in THREADS
                ]
                cells = " | ".join(f"{rate:.2f}" for rate in best)
                print(f"| {way} | {'yes' if with_sum else 'no'} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

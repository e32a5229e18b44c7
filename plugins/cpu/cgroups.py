"""Control groups: the folders in which the kernel says what a process may have."""

from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, own: Path = OWN) -> set[Path]:
    """Our groups and all above them: of version 2, and of version 1 those of this controller."""
    found = {root, root / controller}
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(",") or not controllers:
                top = root / controller if controllers else root
                group = top / path.strip("/")
                found |= {group, *(folder for folder in group.parents if folder.is_relative_to(top))}
    return found

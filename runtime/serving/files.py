"""Files that this process may have open, and how many of them callers may take by opening connections.

Without a limit, some thousand idle connections left the launcher none to look at its engines with, and it
ended its server.
"""

import resource

from hemiola.runtime.errors import Refused

WANTED = 2**16
KEPT = 256  # for the process itself: heartbeats, logs, connections to its own tritonserver
SHARES = 4  # a door gets a quarter of the rest: there are two doors, and a connection may need a second file
LEAST_SHARES = 8  # but at least an eighth of all, for a limit near KEPT


def raise_limit() -> None:
    """As far as the system lets us, for us and for the processes that we start: many a shell says 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < KEPT:
        message = f"this process may have {hard} files open (ulimit -Hn), and a server needs {KEPT}"
        raise Refused("exhausted", message=message, way_out="raise the limit")
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """How many connections one door may have at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    usable = WANTED if soft == resource.RLIM_INFINITY else min(soft, WANTED)
    return max(usable // LEAST_SHARES, (usable - KEPT) // SHARES)

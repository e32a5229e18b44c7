"""Files that this process may have open, and how many of them callers may take by opening connections.

Without a limit, some thousand idle connections left the launcher none to look at its engines with, and it
ended its server.
"""

import resource

WANTED = 2**16
KEPT = 256  # for the process itself: heartbeats, logs, connections to its own tritonserver
SHARES = 4  # of the rest: there are two doors, and a connection may need another file on its way
LEAST_SHARES = 8  # of all, where so few are allowed that hardly any would be left


def raise_limit() -> None:
    """As far as the system lets us, for us and for the processes that we start: many a shell says 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """Of one door at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    usable = WANTED if soft == resource.RLIM_INFINITY else min(soft, WANTED)
    return max(usable // LEAST_SHARES, (usable - KEPT) // SHARES)

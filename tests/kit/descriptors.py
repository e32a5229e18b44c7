"""Descriptors of a process that has very many, as a server with a thousand connections does."""

import fcntl
import resource

MOST_OF_SELECT = 1024


def high(descriptor: int) -> int:
    """The same file by a number that select() cannot take. The caller closes both."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= MOST_OF_SELECT:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * MOST_OF_SELECT), hard))
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, MOST_OF_SELECT)

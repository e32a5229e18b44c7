"""Writes to a client that reads slowly: it may take its time, but not read nothing for a minute."""

import asyncio
import contextlib
import fcntl
import sys
import termios
from collections.abc import AsyncIterator

WRITE_TIMEOUT_S = 60.0  # for a client to read anything of what is held for it
LOOKS = 20  # within that time, at what it has read
NEVER_WAITS = 2**15  # bytes; asyncio holds twice as many back before a writer has to wait


@contextlib.asynccontextmanager
async def writing(transport: asyncio.BaseTransport | None) -> AsyncIterator[None]:
    """Around a write, or a wait for one: ConnectionResetError once the client reads nothing any more."""
    watch = None
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S) as limit:
            watch = asyncio.create_task(_extend(limit, transport))
            yield
    except TimeoutError:
        raise ConnectionResetError(f"the client read nothing for {WRITE_TIMEOUT_S:g} s") from None
    finally:
        if watch is not None:
            watch.cancel()


def never_waits(transport: asyncio.BaseTransport | None, num_bytes: int) -> bool:
    """So few bytes more that no watch over them is needed."""
    held = transport.get_write_buffer_size() if isinstance(transport, asyncio.WriteTransport) else 0
    return held + num_bytes < NEVER_WAITS


async def _extend(limit: asyncio.Timeout, transport: asyncio.BaseTransport | None) -> None:
    """Moves the limit whenever the client has read something."""
    before = _unread(transport)
    while True:
        await asyncio.sleep(WRITE_TIMEOUT_S / LOOKS)
        if limit.expired():
            return
        if (now := _unread(transport)) != before:
            before = now
            limit.reschedule(asyncio.get_running_loop().time() + WRITE_TIMEOUT_S)


def _unread(transport: asyncio.BaseTransport | None) -> int:
    """Bytes that the client's machine has not taken yet: those of asyncio, and those of the kernel."""
    if not isinstance(transport, asyncio.WriteTransport) or transport.is_closing():
        return 0
    queued = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

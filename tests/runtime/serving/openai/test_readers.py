"""Threads that read for all callers."""

import asyncio

from hemiola.runtime.serving.openai.readers import LARGE, SMALL, Readers


class Panic(BaseException):
    """A library's."""


def test_a_panic_ends_the_thread_that_reads_for_everybody() -> None:
    def panic() -> None:
        raise Panic

    async def read() -> list[object]:
        readers = Readers()
        found: list[object] = []
        for size in (SMALL + 1, SMALL + 1, SMALL + 1, LARGE + 1, LARGE + 1):
            try:
                await readers.run(size, panic)
            except Panic:
                found.append(await readers.run(size, lambda: "next"))
        readers.close()
        return found

    assert asyncio.run(asyncio.wait_for(read(), 60)) == ["next"] * 5

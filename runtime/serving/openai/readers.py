"""Threads that read large bodies and write large answers, while the event loop serves everybody else."""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

SMALL = 2**12  # bytes of a body, or tokens of an answer: less work than to wake a thread
LARGE = 2**18  # these have a thread of their own, so that others do not wait behind them
NUM_THREADS = 2  # for those between; more would take the interpreter's lock from the loop more often

Made = TypeVar("Made")
Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class Readers:
    """To be used within one event loop. No end of the process waits for its threads."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._large_jobs: SimpleQueue[Job | None] = SimpleQueue()
        for number, jobs in enumerate([self._large_jobs, *[self._jobs] * NUM_THREADS]):
            threading.Thread(target=_work, args=(jobs,), name=f"openai-reader-{number}", daemon=True).start()

    async def run(self, size: int, work: Callable[[], Made]) -> Made:
        """size: of a body in bytes, or of an answer in tokens."""
        if size <= SMALL:
            return work()
        loop = asyncio.get_running_loop()
        made: asyncio.Future[Made] = loop.create_future()
        jobs = self._large_jobs if size > LARGE else self._jobs
        jobs.put((work, loop, made))
        return await made

    def close(self) -> None:
        """Its threads end once they have nothing more to do."""
        self._large_jobs.put(None)
        for _ in range(NUM_THREADS):
            self._jobs.put(None)


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        work, loop, made = job
        if made.cancelled():  # its client has left
            continue
        try:
            result, error = work(), None
        except BaseException as caught:  # a library's panic, too: this thread reads for all callers
            result, error = None, caught
        try:
            loop.call_soon_threadsafe(_tell, made, result, error)
        except RuntimeError:  # the loop has ended
            return
        del job, work, made, result, error  # which may be large, and the next job may be long in coming


def _tell(made: "asyncio.Future[Any]", result: object, error: BaseException | None) -> None:
    if made.cancelled():
        return
    if error is not None:
        made.set_exception(error)
    else:
        made.set_result(result)

"""A thread and its helpers: tasks in order, faults that stay their own, and an end that waits for nobody."""

import subprocess
import sys
import threading
import weakref
from queue import SimpleQueue

import pytest
from kit.served import until

from hemiola.runtime.cache.worker import Worker


def test_tasks_are_done_in_order_and_the_last_thing_is_on_end() -> None:
    done: list[object] = []
    worker = Worker("test", 2, lambda: done.append("end"))
    for number in range(5):
        worker.ask(lambda number=number: done.append(number))
    assert worker.close(60) and done == [0, 1, 2, 3, 4, "end"] and worker.stalled_s == 0


def test_a_piece_that_raises_is_not_done_well_and_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    found: list[object] = []

    def raises(piece: int) -> bool:
        found.append(piece)
        if piece == 1:
            raise SystemExit("one")
        return piece != 2

    worker = Worker("test", 3, lambda: None)
    worker.ask(lambda: found.append(worker.share(raises, [0, 1, 3])))
    worker.ask(lambda: found.append(worker.share(raises, [2])))
    worker.ask(lambda: found.append(worker.share(raises, [0, 3])))
    worker.ask(lambda: [][0])
    worker.ask(lambda: found.append(worker.share(raises, [])))
    assert worker.close(60)
    assert [each for each in found if isinstance(each, bool)] == [False, False, True, True]
    assert caplog.text.count("Traceback") == 2


def test_threads_that_wait_keep_what_they_have_done() -> None:
    class Thing:
        def use(self, _: object) -> bool:
            return True

    thing, worker, done = Thing(), Worker("test", 1, lambda: None), threading.Event()
    worker.ask(lambda thing=thing: worker.share(thing.use, [1]))
    worker.ask(done.set)
    assert done.wait(60)
    gone = weakref.ref(thing)
    del thing
    until(lambda: gone() is None)
    assert worker.close(60)


def test_a_thread_that_rested_long_seems_to_hang_when_it_is_asked() -> None:
    """Until it began: the disk was switched off by who asked in between."""
    worker, tasks = Worker("test", 1, lambda: None), SimpleQueue()
    asked, worker._tasks = worker._tasks, tasks  # which the thread does not see
    worker.clock = lambda: 1000.0
    worker.ask(lambda: None)
    assert worker.stalled_s == 0
    worker._tasks = asked
    asked.put(tasks.get())
    assert worker.close(60)


def test_what_is_stalled_is_what_was_asked_and_does_not_move() -> None:
    now, gate, seen = [0.0], threading.Semaphore(0), threading.Semaphore(0)

    def waits(_: object) -> bool:
        seen.release()
        return gate.acquire(timeout=60)

    worker = Worker("test", 1, lambda: None)
    worker.clock = lambda: now[0]
    now[0] = 5.0
    assert worker.stalled_s == 0, "nothing was asked"
    worker.ask(lambda: worker.share(waits, [1, 2]))
    seen.acquire()
    now[0] = 8.0
    assert worker.stalled_s == 3
    gate.release()
    seen.acquire()  # the first piece has ended at 8, the second began
    now[0] = 20.0
    assert worker.stalled_s == 12
    assert not worker.close(0.0), "it waits for a piece"
    gate.release()
    worker._thread.join(60)
    assert worker.stalled_s == 0


def test_a_read_that_never_returns_holds_up_the_end_of_the_process() -> None:
    """The threads of an executor do: Python waits for them when it ends."""
    code = """if True:
        import os
        from hemiola.runtime.cache.worker import Worker
        source, _ = os.pipe()
        worker = Worker("test", 2, lambda: None)
        worker.ask(lambda: worker.share(lambda _: bool(os.read(source, 1)), [1, 2]))
        assert not worker.close(0.1)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)

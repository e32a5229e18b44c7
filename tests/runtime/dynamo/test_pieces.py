"""All pieces come, in order, to the task that awaits them, as if it waited for a future of asyncio's."""

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from unittest.mock import Mock

import pytest

from hemiola.runtime.api import Piece
from hemiola.runtime.dynamo.pieces import Doorbell, PieceStream

NUM_STREAMS, NUM_PIECES = 8, 200
NAME: ContextVar[int] = ContextVar("name")


def piece(number: int) -> Piece:
    return Piece("", [number])


async def read(pieces: PieceStream, count: int) -> list[int]:
    return [(await pieces).token_ids[0] for _ in range(count)]


def test_all_pieces_of_a_thread_come_in_order_to_tasks_that_are_told_apart() -> None:
    """Each task runs in its own context, though one call of the loop steps them all."""

    async def named(number: int, pieces: PieceStream) -> list[int]:
        NAME.set(number)
        found = []
        for _ in range(NUM_PIECES):
            found += (await pieces).token_ids
            task = asyncio.current_task()
            assert (NAME.get(), task and task.get_name()) == (number, f"stream {number}")
            if found[-1] % 7 == 0:
                await asyncio.sleep(0)  # then several wait for it
        return found

    async def main() -> None:
        bell = Doorbell(asyncio.get_running_loop())
        streams = [PieceStream(bell) for _ in range(NUM_STREAMS)]
        tasks = [asyncio.create_task(named(n, s), name=f"stream {n}") for n, s in enumerate(streams)]

        def put() -> None:
            for number in range(NUM_PIECES):
                for stream in streams:
                    stream.put(piece(number))

        thread = threading.Thread(target=put)
        thread.start()
        async with asyncio.timeout(60):
            assert await asyncio.gather(*tasks) == [list(range(NUM_PIECES))] * NUM_STREAMS
        thread.join()

    asyncio.run(main())


def test_a_step_wakes_the_loop_once_and_each_task_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop, calls = asyncio.get_running_loop(), list[Callable[[], object]]()
        bell = Doorbell(loop)
        monkeypatch.setattr(PieceStream, "get_loop", lambda _: loop)
        bell.loop = Mock(call_soon_threadsafe=calls.append)
        streams = [PieceStream(bell) for _ in range(NUM_STREAMS)]
        tasks = [asyncio.create_task(read(stream, 2)) for stream in streams]
        for number in range(2):
            await asyncio.sleep(0)
            for stream in streams:
                stream.put(piece(number))
            assert len(calls) == number + 1
            loop.call_soon(calls[-1])
            await asyncio.sleep(0)
        assert [task.done() and task.result() for task in tasks] == [[0, 1]] * NUM_STREAMS

    asyncio.run(main())


@pytest.mark.parametrize("piece_comes", [False, True], ids=["nothing", "a piece in the same turn"])
def test_a_task_that_is_cancelled_while_it_waits_ends(piece_comes: bool) -> None:
    """And what comes for it afterwards disturbs nobody; who awaits again gets it."""

    async def main() -> None:
        pieces = PieceStream(Doorbell(asyncio.get_running_loop()))
        task = asyncio.create_task(read(pieces, 1))
        await asyncio.sleep(0)
        if piece_comes:
            pieces.put(piece(0))
        assert task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if not piece_comes:
            pieces.put(piece(0))
        async with asyncio.timeout(60):
            assert await read(pieces, 1) == [0]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await read(pieces, 1)

    asyncio.run(main())


def test_a_task_that_is_interrupted_leaves_those_behind_it_asleep() -> None:
    """Until another piece comes, which may be never."""

    async def interrupted(pieces: PieceStream) -> None:
        await pieces
        raise KeyboardInterrupt

    loop = asyncio.new_event_loop()
    bell = Doorbell(loop)
    streams = [PieceStream(bell) for _ in range(3)]
    first, *others = [
        loop.create_task(interrupted(stream) if n == 0 else read(stream, 1))
        for n, stream in enumerate(streams)
    ]
    loop.run_until_complete(asyncio.sleep(0))
    for stream in streams:
        stream.put(piece(5))
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    assert loop.run_until_complete(asyncio.wait_for(asyncio.gather(*others), 60)) == [[5], [5]]
    assert isinstance(first.exception(), KeyboardInterrupt)
    loop.close()

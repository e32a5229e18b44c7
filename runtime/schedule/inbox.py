"""What other threads ask of the loop, in the order in which they asked."""

import copy
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.errors import Failed, Refused
from hemiola.runtime.schedule.outbox import Letter


@dataclass(frozen=True, slots=True)
class Submit:
    letter: Letter


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: int


class Fetched:
    """The file has been read for requests."""


class Flush:
    pass


@dataclass(frozen=True, slots=True)
class Look:
    """Something to do with the prefix cache, between two steps."""

    act: Callable[[PrefixCache], Any]
    done: "Future[Any]"


@dataclass(frozen=True, slots=True)
class Close:
    drain: bool


@dataclass(frozen=True, slots=True)
class Lose:
    """The engine cannot go on."""

    error: Failed


Message = Submit | Abort | Fetched | Flush | Look | Close | Lose


class Inbox:
    """Any thread puts, one takes. Behind a refusal no request comes in."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._gate = threading.Lock()  # nobody enters while the refusal changes
        self._refusal: Exception | None = None
        self._pid = os.getpid()

    def __len__(self) -> int:
        return self._messages.qsize()

    @property
    def failure(self) -> str:
        return str(self._refusal) if isinstance(self._refusal, Failed) else ""

    def submit(self, letter: Letter) -> None:
        self.check_owner()
        with self._gate:
            self.check()
            self._messages.put(Submit(letter))

    def look(self, act: Callable[[PrefixCache], Any]) -> "Future[Any]":
        """Raises the refusal. The future has what act returns or raises."""
        self.check_owner()
        message = Look(act, Future())
        with self._gate:
            self.check()
            self._messages.put(message)
        return message.done

    def check(self) -> None:
        """Raise the refusal, if there is one."""
        self.check_owner()
        if self._refusal is not None:
            raise copy.copy(self._refusal)  # an error keeps the frames of all to whom it was raised

    def check_owner(self) -> None:
        """Raise Refused in a fork, whose copy of the gate may be shut, and where nobody takes messages."""
        if os.getpid() != self._pid:
            message = f"process {self._pid} opened this engine, and this is a fork of it"
            raise Refused("closed", message=message, way_out="open it again in this process")

    def put(self, message: Abort | Fetched | Flush | Look | Close | Lose) -> None:
        self._messages.put(message)

    def refuse(self, refusal: Exception) -> None:
        """Raise this for every request to come. A failure stays, and takes the place of anything else."""
        with self._gate:
            if self._refusal is None or isinstance(refusal, Failed):
                self._refusal = refusal

    def wait(self, seconds: float, on_idle: Callable[[], bool]) -> Message:
        """The next message. on_idle is called when none has come after so many seconds, and as long as it
        returns True again and again."""
        looks = True
        while looks:
            try:
                return self._messages.get(timeout=seconds)
            except Empty:
                looks = on_idle()
        return self._messages.get()

    def take(self) -> Iterator[Message]:
        """All messages there are; those that come meanwhile are for the next turn, lest no step is done."""
        for _ in range(self._messages.qsize()):
            yield self._messages.get()

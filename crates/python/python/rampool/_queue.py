"""Messages between programs: queues at the servers, whose messages have a head and perhaps a body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rampool import _native
from rampool._errors import Timeout

if TYPE_CHECKING:
    from rampool._pool import Pool

__all__ = ["Message", "Queue"]


class Message:
    """A message that was taken. It is this program's until it is done with it, or gives it back; with the
    program it goes back by itself.

    As a context manager it is done with at the end, and given back where an exception ends the block.
    """

    def __init__(self, native: _native.Message) -> None:
        self._native = native

    @property
    def head(self) -> bytes:
        """At most 256 bytes, which are here."""
        return self._native.head

    @property
    def nbytes(self) -> int:
        """Bytes of its body, which is at the servers until it is asked for."""
        return self._native.body_bytes

    @property
    def redelivered(self) -> bool:
        """Whether another receiver had it before and was not done with it."""
        return self._native.redelivered

    @property
    def number(self) -> int:
        """Later messages of a queue have greater ones."""
        return self._native.number

    def body(self, timeout: float | None = None) -> memoryview:
        """The body, in fresh memory.

        Raises:
            rampool.Timeout: its sender has not sent all of it within so many seconds.
            rampool.ServerLost: its sender ended before.
        """
        return memoryview(self._native.body(timeout))

    def prefetch(self) -> None:
        """Begins to bring the body here. Does not block."""
        self._native.prefetch()

    def done(self) -> None:
        """It is not delivered again. Does not block: the server hears of it with the next request, or
        :meth:`Queue.flush`."""
        self._native.done()

    def give_back(self) -> None:
        """The next receiver gets it, before what came later."""
        self._native.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.done()
        else:
            self.give_back()


class Queue:
    """A queue of the lease, known by its name to every member. Made by :meth:`rampool.Pool.queue`.

    Messages of one sender arrive in the order of its sends. Each is delivered at least once: until its
    receiver is done with it, it stays in the queue. It has connections of its own; a thread that waits here
    keeps no other waiting.

    >>> pool = connect(SERVERS, memory="16M", local="1M")
    >>> jobs = pool.queue("jobs", messages=100, bytes="1M")
    >>> jobs.send(b"first", b"a body")
    >>> with jobs.take() as job:
    ...     print(job.head, bytes(job.body()))
    b'first' b'a body'
    >>> jobs.close(); pool.close()
    """

    def __init__(self, pool: Pool, name: str, messages: int, bytes: str | int) -> None:
        self._native = pool._native.queue(name, messages, str(bytes))
        self._pool = pool
        self.name = name
        """The name that others open it by."""
        pool._parts.add(self)

    def __reduce__(self) -> Any:
        return type(self), (self._pool, self.name, *self._native.bounds)

    def send(self, head: bytes, body: Any = None, timeout: float | None = 0) -> None:
        """Appends a message.

        Args:
            head: at most 256 bytes, which a receiver has as soon as the message.
            body: a contiguous buffer of any length; it is copied into the pool.
            timeout: for how many seconds to wait for room in the queue; None: for ever.

        Raises:
            rampool.Timeout: the queue is full.
            rampool.NoRoom: the lease has no room for the body.
        """
        view = None if body is None else memoryview(body)
        self._native.send(head, view.cast("B") if view is not None and view.nbytes else None, timeout)

    def take(self, timeout: float | None = None) -> Message:
        """Takes the next message; waits for one, at most ``timeout`` seconds.

        Raises:
            rampool.Timeout: there was none.
        """
        message = self._native.take(timeout)
        if message is None:
            raise Timeout(f"queue {self.name} had no message for {timeout} s")
        return Message(message)

    def __iter__(self) -> Iterator[Message]:
        while True:
            yield self.take()

    async def get(self) -> Message:
        """Takes the next message, in an event loop: it waits without a thread."""
        loop = asyncio.get_running_loop()
        while (message := self._native.poll()) is None:
            descriptors, due = self._native.watch()
            ready: asyncio.Future[None] = loop.create_future()

            def wake(ready: asyncio.Future[None] = ready) -> None:
                if not ready.done():
                    ready.set_result(None)

            timer = loop.call_later(min(due, 0.1), wake)
            for descriptor, events in descriptors:
                loop.add_reader(descriptor, wake)
                if events & 4:
                    loop.add_writer(descriptor, wake)
            try:
                await ready
            finally:
                timer.cancel()
                for descriptor, events in descriptors:
                    loop.remove_reader(descriptor)
                    if events & 4:
                        loop.remove_writer(descriptor)
        return Message(message)

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            yield await self.get()

    def flush(self) -> None:
        """Blocks until the server knows of every message that is done with."""
        self._native.flush()

    def free(self) -> None:
        """Gives the queue up with all that is in it, for every member."""
        self._native.free()

    def close(self) -> None:
        """Leaves; what was taken and is not done with goes back."""
        self._native.close()

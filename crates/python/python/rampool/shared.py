"""Memory that the processes of a parallel program have in common, as NumPy arrays.

>>> import rampool.shared
>>> def count(ranks, times):
...     cell = ranks.array(1, "i8")
...     for _ in range(times):
...         with ranks.lock(1):
...             cell[0] += 1
...     ranks.barrier()
...     return int(cell[0])
>>> rampool.shared.launch(count, 2, 10)  # doctest: +SKIP
[20, 20]

The model is Li and Hudak's shared virtual memory; which protocol keeps which region consistent, and the
papers that they come from, are in docs/guide/parallel.md.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import secrets
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from rampool import _native
from rampool._errors import Error

__all__ = ["Ranks", "join", "launch"]

P = ParamSpec("P")
T = TypeVar("T")
# How long a rank's failure waits for that of the rank that caused it.
_FIRST_CAUSE_S = 1.0


class Ranks:
    """This process as one rank of a run. Made by :func:`join`, or handed to the function that :func:`launch`
    runs.

    Accesses to the same bytes by two ranks, at least one of which writes, must be ordered by a lock or a
    barrier. Any thread may use it; a thread has one call at a time. A forked child is no rank: its calls
    raise :class:`rampool.ForkError`.

    Ctrl-C in a rank that waits ends the run on all ranks: an operation that others take part in cannot be
    taken back.
    """

    def __init__(self, native: _native.Shared) -> None:
        self._native = native

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._native.rank

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self._native.ranks

    def array(
        self,
        shape: int | Sequence[int],
        dtype: npt.DTypeLike = np.float64,
        *,
        protocol: str | None = None,
        blocked: bool = False,
        page_bytes: int | None = None,
    ) -> npt.NDArray[Any]:
        """An array that all ranks have at the same address, all zero. Every rank makes the same call, in the
        same order among such calls. Only pages that are touched take memory.

        Args:
            shape: its dimensions.
            dtype: any that holds no Python objects.
            protocol: ``sc``, ``lrc``, ``hlrc``, ``aurc``, ``ibec`` or ``auto``; None: the run's.
            blocked: whether each rank is the home of consecutive pages, not of every n-th.
            page_bytes: the unit that travels, a power of two from 4096 on; None: the run's.

        Raises:
            TypeError: the dtype holds Python objects.
            ValueError: there is no such protocol, or no element.
            rampool.NoRoom: the range of shared addresses is used up (``RAMPOOL_SHARED_RANGE``).
        """
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError(f"{kind} holds Python objects, which other processes do not have; use numbers")
        sizes = tuple(int(n) for n in shape) if isinstance(shape, Sequence) else (int(shape),)
        nbytes = kind.itemsize
        for n in sizes:
            nbytes *= n
        if nbytes <= 0 or any(n < 0 for n in sizes):
            raise ValueError(f"a shared array has at least one element, not shape {sizes}")
        region = self._native.alloc(nbytes, protocol, blocked, page_bytes)
        return np.ndarray(sizes, kind, buffer=memoryview(region))

    def part(self, n: int) -> slice:
        """This rank's share of ``n`` rows: consecutive, and as many as the others' or one more.

        >>> [list(range(10)[s]) for s in (slice(0, 4), slice(4, 7), slice(7, 10))]  # of 3 ranks
        [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
        """
        each, more = divmod(n, self.ranks)
        first = self.rank * each + min(self.rank, more)
        return slice(first, first + each + (self.rank < more))

    @contextlib.contextmanager
    def lock(self, number: int, *, readers: bool = False) -> Iterator[None]:
        """``with ranks.lock(7):`` holds a lock, which any number below 2**62 names; with ``readers`` together
        with other readers. What was written before its last release is visible in the block.

        Raises:
            ValueError: this thread holds it already.
            rampool.Error: the run is over.
        """
        self._native.lock(number, readers, True)
        try:
            yield
        finally:
            self._native.unlock(number)

    @contextlib.contextmanager
    def try_lock(self, number: int, *, readers: bool = False) -> Iterator[bool]:
        """As :meth:`lock`, without waiting: the block is told whether it has the lock."""
        has = self._native.lock(number, readers, False)
        try:
            yield has
        finally:
            if has:
                self._native.unlock(number)

    def barrier(self, number: int = 0, *, keep: bool = False) -> None:
        """Waits for all ranks. After it every write is visible everywhere. With ``keep``, pages that one rank
        alone wrote stay writable there."""
        self._native.barrier(number, keep)

    @contextlib.contextmanager
    def epoch(self, number: int = 0, *, keep: bool = False) -> Iterator[None]:
        """``with ranks.epoch():`` is work between two barriers: all ranks meet at the end of the block. A
        block that ends by an exception does not wait."""
        yield
        self._native.barrier(number, keep)

    def wait(self, condition: int, lock: int) -> None:
        """Releases a lock that this thread holds, waits for a :meth:`signal`, and takes it again. Look in a
        loop whether what you wait for is so."""
        self._native.wait(condition, lock)

    def signal(self, condition: int, lock: int, *, every: bool = False) -> None:
        """Wakes one thread that waits for the condition of a lock, or every one."""
        self._native.signal(condition, lock, every)

    def set_threads(self, threads: int) -> None:
        """From now on so many threads of this rank meet at barriers. At the start it is one."""
        self._native.set_threads(threads)

    def fetch_add(self, array: npt.NDArray[Any], index: Any, value: Any) -> Any:
        """Adds to one element as one step of all ranks; gives what it was before. Integers of 1 to 8 bytes,
        and doubles."""
        kind, places = array.dtype, index if isinstance(index, tuple) else (index,)
        if len(places) != array.ndim:
            raise IndexError(f"fetch_add takes one element: {array.ndim} indices, not {len(places)}")
        if not kind.isnative or not (kind.kind in "iu" or kind == np.float64):
            raise TypeError(f"fetch_add takes integers of 1 to 8 bytes and doubles, not {kind}")
        address = array.__array_interface__["data"][0]
        for place, n, stride in zip(places, array.shape, array.strides, strict=True):
            address += range(n)[place] * stride
        operand = int.from_bytes(np.array(value, kind).tobytes(), sys.byteorder)
        before = self._native.fetch_add(address, kind.itemsize, kind.kind == "f", operand)
        # The lowest bytes; memory here is little-endian, as everywhere that rampool runs.
        return np.frombuffer(before.to_bytes(8, "little"), kind)[0]

    def close(self) -> None:
        """Leaves the run; every rank calls it once. Waits for the others. Afterwards a touch of shared memory
        ends the process."""
        self._native.close()

    def abort(self, why: str) -> None:
        """Ends the run on every rank, with this reason."""
        self._native.abort(why)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort(f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        return f"<rampool.shared.Ranks, rank {self.rank} of {self.ranks}>"


def join() -> Ranks:
    """Joins the run that the environment describes: that of ``rampool launch``, torchrun, mpirun, srun and
    others (docs/reference/shared.md). Without a launcher this process is the only rank. Waits for all ranks,
    for 60 seconds (``RAMPOOL_JOIN_S``).

    Raises:
        ValueError: a variable makes no sense.
        rampool.Timeout: a rank did not come.
        rampool.NotAllowed: the ranks have no key in common.

    >>> with join() as ranks:  # doctest: +SKIP
    ...     a = ranks.array((1000, 1000))
    """
    return Ranks(_native.Shared.join())


def launch(
    f: Callable[Concatenate[Ranks, P], T], n: int, /, *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """Runs ``f(ranks, *args)`` in ``n`` new processes that share memory; gives what each returns, by rank.

    The processes are started as multiprocessing's "spawn" does: ``f`` and its arguments are pickled, so ``f``
    is a function of a module, and a script that launches has ``if __name__ == "__main__":``. Settings come
    from the environment (``RAMPOOL_PROTOCOL=ibec``, ...). When a rank fails, all others are ended.

    Raises:
        rampool.Error: a rank failed; the message has its traceback.
        ValueError: ``n`` is not from 1 to 4096.
    """
    if not 1 <= n <= 4096:
        raise ValueError(f"a run has 1 to 4096 ranks, not {n}")
    context = multiprocessing.get_context("spawn")
    listener = socket.create_server(("127.0.0.1", 0))
    place = {
        "RAMPOOL_RANKS": str(n),
        "RAMPOOL_LOCAL_RANKS": str(n),
        "RAMPOOL_RENDEZVOUS": "127.0.0.1:{}".format(listener.getsockname()[1]),
        "RAMPOOL_RUN": f"{os.getpid()}-{secrets.token_hex(8)}",
        "RAMPOOL_RUN_KEY": secrets.token_hex(32),
    }
    processes: list[Any] = []
    results: list[multiprocessing.connection.Connection[Any, Any]] = []
    ended: dict[int, T] = {}
    try:
        for rank in range(n):
            here, there = context.Pipe(duplex=False)
            words = (
                there, {**place, "RAMPOOL_RANK": str(rank)}, listener if rank == 0 else None, f, args, kwargs
            )
            process = context.Process(target=_rank, args=words, name=f"rampool-rank-{rank}")
            process.start()
            there.close()
            processes.append(process)
            results.append(here)
        listener.close()
        failed: dict[int, tuple[bool, str]] = {}
        while len(ended) + len(failed) < n:
            waiting = {results[rank]: rank for rank in range(n) if rank not in ended and rank not in failed}
            # Ranks that fail because another did are heard, too, and perhaps first.
            ready = multiprocessing.connection.wait(list(waiting), _FIRST_CAUSE_S if failed else None)
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    kind, value = results[rank].recv()
                except EOFError:
                    processes[rank].join()
                    kind, value = "failed", f"its process ended with {processes[rank].exitcode}"
                if kind == "value":
                    ended[rank] = value
                else:
                    failed[rank] = (kind == "followed", value)
            if failed and (not ready or not all(followed for followed, _ in failed.values())):
                break
        if failed:
            rank = min(failed, key=lambda rank: failed[rank][0])
            raise Error(f"rank {rank} failed: {failed[rank][1]}")
        for process in processes:
            process.join()
        return [ended[rank] for rank in range(n)]
    finally:
        listener.close()
        for process in processes:
            process.kill()
            process.join()


def _rank(
    result: Any, place: dict[str, str], listener: socket.socket | None, f: Any, args: Any, kwargs: Any
) -> None:
    """What each process of :func:`launch` does."""
    os.environ.update(place)
    if listener is not None:
        os.environ["RAMPOOL_RENDEZVOUS_FD"] = str(listener.detach())
    ranks = None
    try:
        ranks = join()
        value = f(ranks, *args, **kwargs)
        ranks.close()
        result.send(("value", value))
    except BaseException as error:
        # This class itself is raised when the run ends for another rank's reason.
        kind = "followed" if type(error) is Error else "failed"
        result.send((kind, "".join(traceback.format_exception(error))))
        if ranks is not None:
            ranks.abort(f"{type(error).__name__}: {error}")

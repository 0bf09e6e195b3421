"""A lease on memory servers, and arrays in it."""

from __future__ import annotations

import atexit
import builtins
import dataclasses
import math
import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rampool import _about, _names, _native
from rampool._errors import Error, ForkError, NotFound
from rampool._table import RemoteArray, contiguous_strides

if TYPE_CHECKING:
    from rampool._queue import Queue
    from rampool._shared_store import SharedStore
    from rampool._store import Store

__all__ = ["Pool", "Shared", "connect", "share"]

Amount = str | int
Shape = int | Sequence[int]

_open: weakref.WeakSet[Pool] = weakref.WeakSet()
_warned_of_system_calls = False


def connect(
    servers: str | Sequence[str] | None = None,
    *,
    memory: Amount | None = None,
    local: Amount = "1G",
    **options: Amount,
) -> Pool:
    """Leases memory from servers (``rampool serve``).

    Args:
        servers: ``"HOST[:PORT][=AMOUNT]"`` or ``"unix:/PATH"``; several as a list or separated by commas.
            None: ``RAMPOOL_SERVERS``.
        memory: how much to lease, such as ``"64G"``, or bytes. None, where the servers have no amounts of
            their own either: four times ``local``, at least 1 GiB, at most what is free.
        local: how much of this machine's memory all paged arrays of the pool together may use; at least 256
            KiB.
        options: those of docs/guide/library.md with underscores: ``key_file="..."``, ``page_size="64K"``,
            ``encryption="on"``, ``op_deadline_ms=2000``, ...

    Raises:
        rampool.ServerLost: a server cannot be reached.
        rampool.NoRoom: the servers cannot lend that much.
        rampool.NotAllowed: the key cannot be read, or a server refuses.
        ValueError: an option's value makes no sense, or no server is named.
        TypeError: there is no such option.

    >>> import rampool
    >>> with rampool.connect(SERVERS, memory="16M", local="1M") as pool:
    ...     a = pool.from_array(range(5))
    ...     print(a.sum())
    10
    """
    named = os.environ.get("RAMPOOL_SERVERS") if servers is None else servers
    if not named:
        raise ValueError(
            "no memory server is named: connect('HOST=64G'), or set RAMPOOL_SERVERS; `rampool serve` starts "
            "one"
        )
    texts = [("server", named if isinstance(named, str) else ",".join(named)), ("local", str(local))]
    if memory is not None:
        texts.append(("memory", str(memory)))
    others = _texts({"name": _program(), **options})
    native, direct = _native.Pool.open(texts + others)
    return Pool(native, direct, [("local", str(local)), *others])


def _texts(options: dict[str, Amount]) -> list[tuple[str, str]]:
    def text(value: Amount | bool) -> str:
        return ("on" if value else "off") if isinstance(value, bool) else str(value)

    return [(name.replace("_", "-"), text(value)) for name, value in options.items()]


def _program() -> str:
    import sys

    return os.path.basename(sys.argv[0] or "python")[:64] or "python"


class Pool:
    """A lease on memory servers. Made by :func:`connect`; a context manager that closes it.

    Threads may share it. A forked child may not: each call there raises :class:`rampool.ForkError`, and
    arrays are what docs/internals/faults.md says. Arrays keep their memory, and the lease, until the last of
    them is
    gone.
    """

    def __init__(
        self, native: _native.Pool, direct: _native.Direct, options: Sequence[tuple[str, str]]
    ) -> None:
        self._native = native
        self._direct = direct
        self._options = options
        self._pid = os.getpid()
        # Queues and stores, which have connections of their own and leave with the pool.
        self._parts: weakref.WeakSet[Queue | Store | SharedStore] = weakref.WeakSet()
        _open.add(self)

    # --- arrays whose pages come and go --------------------------------------------------------------------

    def empty(self, shape: Shape, dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
        """A paged array, all zero: memory that is fresh costs nothing.

        Args:
            shape: its dimensions.
            dtype: any that holds no Python objects.

        Raises:
            TypeError: the dtype holds Python objects.
            rampool.NoRoom: it is larger than what is left of the lease.

        >>> pool = connect(SERVERS, memory="16M", local="1M")
        >>> pool.empty((2, 3), "i4").tolist()
        [[0, 0, 0], [0, 0, 0]]
        >>> pool.close()
        """
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError(
                f"{kind} holds Python objects, which are pointers: their memory cannot be in a pool; use "
                "numbers, or rampool.attach"
            )
        sizes = tuple(int(n) for n in shape) if isinstance(shape, Sequence) else (int(shape),)
        if any(n < 0 for n in sizes):
            raise ValueError(f"negative dimensions are not allowed: {sizes}")
        nbytes = kind.itemsize
        for n in sizes:
            nbytes *= n
        if nbytes == 0:
            return np.empty(sizes, kind)
        region = self._native.alloc(nbytes)
        self._warn_below_full()
        return np.ndarray(sizes, kind, buffer=memoryview(region))

    zeros = empty

    def full(self, shape: Shape, value: Any, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
        """A paged array of one value."""
        array = self.empty(shape, np.asarray(value).dtype if dtype is None else dtype)
        array[...] = value
        return array

    def from_array(self, array: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
        """A paged copy of an array, in C order.

        >>> with connect(SERVERS, memory="16M", local="1M") as pool:
        ...     print(pool.from_array([[1, 2], [3, 4]]).T.sum())
        10
        """
        source = np.asarray(array)
        copy = self.empty(source.shape, source.dtype if dtype is None else dtype)
        np.copyto(copy, source, casting="same_kind")
        return copy

    def _warn_below_full(self) -> None:
        global _warned_of_system_calls
        paging = self._native.paging()
        if paging is not None and not paging[1] and not _warned_of_system_calls:
            _warned_of_system_calls = True
            warnings.warn(
                f"page faults are caught by `{paging[0]}` here, so system calls given a paged array fail "
                "with EFAULT (tofile, readinto); "
                "start the program with `python -m rampool`, or see `rampool doctor`",
                RuntimeWarning,
                stacklevel=4,
            )

    # --- arrays at the servers -----------------------------------------------------------------------------

    def remote(self, name: str | None, shape: Shape, dtype: npt.DTypeLike | None = None) -> RemoteArray:
        """An array that lies at the servers: nothing of it is cached here, and every member of the lease may
        open it.

        It is made, all zero, if there is none of that name. Its shape and dtype are kept with the name:
        :meth:`open` needs neither.

        Args:
            name: 1 to 255 bytes; None: a new one without a name.
            shape: its dimensions.
            dtype: any that holds no Python objects; None: that of the one that is there, float64 for a new
                one. Servers compute with i4, u4, i8, u8, f4 and f8.

        Raises:
            ValueError: the name is in use for an array of another shape, dtype or length.
            rampool.NoRoom: there is no page left that says what it is.
        """
        kind = None if dtype is None else _remote_dtype(dtype)
        sizes = _sizes(shape)
        if name is None:
            return self._region_array(None, sizes, np.dtype(np.float64) if kind is None else kind)
        _names.check(name)
        if kind is None:
            try:
                there = _about.known(self._direct, self._direct.open(name, None))
            except NotFound:
                there = None
            kind = np.dtype(np.float64) if there is None else there[1][1]
        try:
            array = self._region_array(name, sizes, kind)
        except ValueError:
            # Of another length: what is there says more, if anything does.
            there = _about.known(self._direct, self._direct.open(name, None))
            if there is not None:
                _about.check(name, there[1], sizes, kind)
            raise
        array._about, is_new = _about.record(self._direct, array._region, name, sizes, kind)
        if is_new:
            _names.add(self._direct, name)
        return array

    def open(self, name: str, dtype: npt.DTypeLike | None = None) -> RemoteArray:
        """The array of that name, with its shape and dtype.

        Args:
            name: what :meth:`remote` was given, in any process.
            dtype: what a region holds that was not made by Python, which has one dimension then; else
                checked.

        Raises:
            rampool.NotFound: there is none.
            ValueError: it holds something else, or nobody said what.

        >>> with connect(SERVERS, memory="16M") as pool:
        ...     t = pool.remote("prices", (10, 4), "f4")
        ...     print(pool.open("prices"), pool.list())
        ...     pool.delete("prices")
        <rampool.RemoteArray 'prices', shape (10, 4), dtype float32> ['prices']
        """
        kind = None if dtype is None else _remote_dtype(dtype)
        region = self._direct.open(name, None)
        there = _about.known(self._direct, region)
        if there is None:
            if kind is None:
                raise ValueError(
                    f"{name!r} was not made by Python, and nobody said what it holds: give its dtype"
                )
            return self._region_array(name, None, kind)
        about, known = there
        _about.check(name, known, None, kind)
        return self._named(region, known[0], known[1] if kind is None else kind, name, about)

    def list(self) -> list[str]:
        """The names of the lease's arrays that Python programs made with :meth:`remote`."""
        return _names.names(self._direct)

    def delete(self, name: str) -> None:
        """Frees the array or region of that name, for every member of the lease.

        Raises:
            rampool.NotFound: there is none.
        """
        self._region_array(name, None, np.dtype(np.uint8)).free()

    def _region_array(
        self, name: str | None, sizes: tuple[int, ...] | None, kind: np.dtype[Any]
    ) -> RemoteArray:
        """A region as an array of a shape, or of one dimension; nothing is said about it to others."""
        if sizes is None:
            region = self._direct.open(name, None)
            sizes = (region.nbytes // kind.itemsize,)
        else:
            region = self._direct.open(name, kind.itemsize * math.prod(sizes))
        return self._named(region, sizes, kind, name, None)

    def _named(
        self,
        region: _native.DirectRegion,
        sizes: tuple[int, ...],
        kind: np.dtype[Any],
        name: str | None,
        about: _native.DirectRegion | None,
    ) -> RemoteArray:
        strides = contiguous_strides(sizes, kind.itemsize)
        array = RemoteArray(self._direct, region, 0, sizes, strides, kind, name)
        array._about, array._keeps = about, self
        return array

    def queue(self, name: str, messages: int = 1000, bytes: Amount = "256M") -> Queue:
        """The queue of this name, which is made with these bounds if there is none. See
        :class:`rampool.Queue`."""
        from rampool._queue import Queue

        return Queue(self, name, messages, bytes)

    def store(self) -> Store:
        """A mapping from keys to bytes in the pool, for this process alone. See :class:`rampool.Store`."""
        from rampool._store import Store

        return Store(self)

    def shared_store(self, name: str, keys: int | None = None, stale: float = 60) -> SharedStore:
        """The mapping of this name from keys to bytes, for every process of the lease; made if there is none.
        See :class:`rampool.SharedStore`.

        Args:
            name: 1 to 200 bytes.
            keys: for how many keys at most, 100,000 by default; the same in every process that says it.
            stale: after how many seconds of silence of a process its room may be taken over.

        Raises:
            ValueError: there is one of that name for another number of keys.
        """
        from rampool._shared_store import SharedStore

        return SharedStore(self, name, keys, stale)

    # --- the lease -----------------------------------------------------------------------------------------

    @property
    def ticket(self) -> str:
        """What another process needs to join the lease (:meth:`join`). Keep it as a password."""
        return self._native.ticket

    @classmethod
    def join(cls, ticket: str, *, local: Amount = "1G", **options: Amount) -> Pool:
        """A pool on the lease of a ticket, with local memory of its own."""
        texts = _texts({"local": local, "name": _program(), **options})
        native, direct = _native.Pool.join(ticket, texts)
        return cls(native, direct, texts)

    def stats(self) -> dict[str, int]:
        """Counters of the paged arrays, by the names that ``rampool top`` uses; empty before the first."""
        return dict(self._native.stats())

    def servers(self) -> builtins.list[dict[str, Any]]:
        """Each server with what the direct view asked of it."""
        names = ("name", "alive", "lease_bytes", "requests", "sent_bytes", "received_bytes")
        return [dict(zip(names, each, strict=True)) for each in self._direct.servers()]

    def close(self) -> None:
        """Leaves the lease. Arrays at the servers are gone with its last member; paged arrays stay usable as
        long as they live."""
        _open.discard(self)
        for part in tuple(self._parts):
            part._native.close()
        self._direct.close()
        self._native.close()

    def __reduce__(self) -> Any:
        # The lease's tokens, and where the key is: never the key.
        return _joined, (self.ticket, tuple(self._options))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            names = ", ".join(server["name"] for server in self.servers())
        except (Error, ForkError):
            return "<rampool.Pool, closed>"
        return f"<rampool.Pool on {names}>"


# Pools of leases that this process joined because it was sent something of theirs; left when it ends.
_of_tickets: dict[str, Pool] = {}
_joining = threading.Lock()


def _joined(ticket: str, options: Sequence[tuple[str, str]]) -> Pool:
    """This process's pool of a lease, of which it was sent the ticket."""
    with _joining:
        for pool in (*_open, _of_tickets.get(ticket)):
            # A forked child has its parent's pools, and may not use them.
            if pool is not None and pool._pid == os.getpid() and pool in _open and pool.ticket == ticket:
                return pool
        texts = [(name, value) for name, value in options if name not in ("memory", "stripe")]
        _of_tickets[ticket] = pool = Pool(*_native.Pool.join(ticket, texts), texts)
        return pool


def reopened(
    pool: Pool,
    region: str,
    place: tuple[int, tuple[int, ...], tuple[int, ...], np.dtype[Any], str | None],
) -> RemoteArray:
    """An array, or a part of one, that was pickled: its offset, shape, strides, dtype and name."""
    array = RemoteArray(pool._direct, pool._direct.open_ticket(region), *place)
    array._keeps = pool
    return array


def _remote_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    if kind.hasobject or kind.itemsize == 0 or kind.subdtype is not None:
        raise TypeError(f"{kind} cannot lie at a server; use numbers or fixed-size records")
    return kind


def _sizes(shape: Shape) -> tuple[int, ...]:
    sizes = tuple(int(n) for n in shape) if isinstance(shape, Sequence) else (int(shape),)
    if any(n <= 0 for n in sizes):
        raise ValueError(f"an array at the servers has at least one element, not shape {sizes}")
    return sizes


@atexit.register
def _close_all() -> None:
    # A pool that is dropped without a word keeps its lease for the servers' grace time.
    for pool in list(_open):
        pool.close()


@dataclasses.dataclass(frozen=True)
class Shared:
    """A copy of a paged array at its servers, which any process of this user may open. Pickle it; it holds
    the lease's tokens."""

    handed_over: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    options: tuple[tuple[str, str], ...] = ()

    @property
    def ticket(self) -> str:
        """That of the lease."""
        # `mark offset bytes region lease`; see rampool::region::HandedOver.
        return self.handed_over.split(" ", 4)[4]

    def open(self, pool: Pool | None = None) -> RemoteArray:
        """The copy as an array at the servers. Without a pool of the same lease, the lease is joined."""
        if pool is None:
            pool = _joined(self.ticket, self.options)
        region, start, _ = pool._direct.open_handed(self.handed_over)
        kind = np.dtype(self.dtype)
        strides = contiguous_strides(self.shape, kind.itemsize)
        array = RemoteArray(pool._direct, region, start + self.offset, self.shape, strides, kind, None)
        array._keeps = pool
        return array


def share(array: npt.NDArray[Any], pool: Pool | None = None) -> Shared:
    """A picklable handle to a copy of a paged array at its servers. The copy is the array as it is now.

    What is in local memory is stored first; nothing is sent twice. The copy lives until it is freed
    (``handle.open().free()``) or the lease's last member leaves.

    Args:
        array: one that :meth:`Pool.empty` and the like made, or a C-contiguous part of one.
        pool: its pool, whose key and encryption the handle's receiver uses.

    Raises:
        TypeError: it is not a paged array, or not contiguous.

    >>> with connect(SERVERS, memory="16M", local="1M") as pool:
    ...     handle = share(pool.from_array([1, 2, 3]), pool)
    ...     print(np.asarray(handle.open(pool)[1:]))
    [2 3]
    """
    region = _region_of(array)
    if region is None:
        raise TypeError("this array does not lie in a pool; copy it there with pool.from_array")
    if not array.flags.c_contiguous:
        raise TypeError("only C-contiguous arrays can be shared; copy this one with pool.from_array")
    offset = array.__array_interface__["data"][0] - region.address
    options = () if pool is None else tuple(pool._options)
    return Shared(region.hand_over(), array.shape, array.dtype.str, offset, options)


def _region_of(array: npt.NDArray[Any]) -> _native.Region | None:
    base: Any = array
    while base is not None and not isinstance(base, _native.Region):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return base

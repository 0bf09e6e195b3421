"""A mapping from keys to bytes in the pool, for many processes at once."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rampool._store import Buffer, Key, _bytes, _key

if TYPE_CHECKING:
    from rampool._pool import Pool

__all__ = ["SharedStore"]


class SharedStore(MutableMapping[Key, Buffer]):
    """From keys to bytes that lie in the pool, for every process of the lease, also those in Rust and C. Made
    by :meth:`rampool.Pool.shared_store`.

    Each operation takes effect at once for all processes. A process that is killed in the middle of a put
    leaves the key with its old value or with the new one. Room that it had is found again when another
    process needs it, once the dead one has not been heard of for ``stale`` seconds. The store is gone with
    the last process that has the lease.

    Reading gives a writable ``memoryview`` of fresh memory. Keys are ``bytes``; a ``str`` is its UTF-8.
    Threads may share it, one at a time.

    >>> import rampool
    >>> with connect(SERVERS, memory="64M") as pool, rampool.Pool.join(pool.ticket) as other:
    ...     here, there = pool.shared_store("cache"), other.shared_store("cache")
    ...     here["a"] = b"some bytes"
    ...     print(bytes(there["a"]), len(there), "b" in there)
    b'some bytes' 1 False
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> Any:
        return type(self), (self._pool, self.name, None, self._stale)

    def __init__(self, pool: Pool, name: str, keys: int | None, stale: float) -> None:
        self.name = name
        """The name that others open it by."""
        self._stale = stale
        self._native = pool._native.shared_store(name, keys, stale)
        # A process that ends leaves through its pool.
        self._pool = pool
        pool._parts.add(self)

    def put(self, key: Key, parts: Sequence[Buffer]) -> None:
        """Makes buffers, one after the other, the value of a key.

        Raises:
            rampool.NoRoom: the lease, or the index, has no room for it; the key has the value that it had.
            rampool.ServerLost: a server is lost.
        """
        self._native.put(_key(key), [_bytes(part) for part in parts])

    def __setitem__(self, key: Key, value: Buffer) -> None:
        self.put(key, [value])

    def __getitem__(self, key: Key) -> memoryview:
        value = self._native.get(_key(key))
        if value is None:
            raise KeyError(key)
        return memoryview(value)

    def __delitem__(self, key: Key) -> None:
        if not self._native.remove(_key(key)):
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, (str, bytes)) and self._native.contains(_key(key))

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._native.keys())

    def __len__(self) -> int:
        return self._native.count()

    def adopt(self) -> int:
        """Takes over the room of processes that have not been heard of for ``stale`` seconds, and gives the
        room of those back that it took over so long ago; how many pieces of both. A put that finds no room
        does it by itself.

        Raises:
            rampool.NoRoom: there is none to move values to.
        """
        return self._native.adopt()

    def close(self) -> None:
        """Lets go of it; the values stay. Other processes take this one's room over when they need it."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""A mapping from keys to bytes in the pool."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rampool._pool import Pool

__all__ = ["Store"]

Key = str | bytes
# collections.abc.Buffer, which came with Python 3.12.
Buffer = Any


class Store(MutableMapping[Key, Buffer]):
    """From keys to bytes that lie in the pool: for what would otherwise be spilled to a disk. Made by
    :meth:`rampool.Pool.store`.

    It is this process's alone, and gone with it. A value may be any contiguous buffer, or with :meth:`put`
    several that are not joined first; it must not change during the call. Reading gives a writable
    ``memoryview`` of fresh memory. Keys are ``bytes``; a ``str`` is its UTF-8.

    >>> pool = connect(SERVERS, memory="16M", local="1M")
    >>> store = pool.store()
    >>> store["a"] = b"some bytes"
    >>> store.put("b", [b"in ", b"parts"])
    >>> bytes(store["a"]), bytes(store["b"]), sorted(store), store.nbytes
    (b'some bytes', b'in parts', [b'a', b'b'], 18)
    >>> del store["a"]
    >>> "a" in store
    False
    >>> store.close(); pool.close()
    """

    # Not by content, which would have to be fetched.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, pool: Pool) -> None:
        self._native = pool._native.store()
        # A process that ends leaves through its pool.
        self._pool = pool
        pool._parts.add(self)

    def put(self, key: Key, parts: Sequence[Buffer]) -> None:
        """Makes buffers, one after the other, the value of a key, in one operation.

        Raises:
            rampool.NoRoom: the lease has no room for it; the key has the value that it had before.
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
        return isinstance(key, (str, bytes)) and self._native.value_bytes(_key(key)) is not None

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._native.keys())

    def __len__(self) -> int:
        return len(self._native)

    @property
    def nbytes(self) -> int:
        """Bytes of all values together."""
        return self._native.nbytes

    def value_nbytes(self, key: Key) -> int:
        """Bytes of one value."""
        nbytes = self._native.value_bytes(_key(key))
        if nbytes is None:
            raise KeyError(key)
        return nbytes

    def close(self) -> None:
        """Gives everything back."""
        for key in self._native.keys():
            self._native.remove(key)
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _key(key: Key) -> bytes:
    return key.encode() if isinstance(key, str) else bytes(key)


def _bytes(part: Buffer) -> memoryview:
    view = memoryview(part)
    if not view.contiguous:
        raise ValueError("a value is a contiguous buffer; copy this one first")
    # An empty view of several dimensions cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")

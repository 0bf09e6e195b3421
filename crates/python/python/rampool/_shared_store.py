"""A mapping from keys to bytes in the pool, for many processes at once.

Everything lies in named regions of the lease. Nothing else connects the processes, so one that is killed at any
moment leaves the others a whole store.

::

    NAME.head      words: the number of buckets, the number of extents, then for each extent its slots' length
                   and its owner
    NAME.index     buckets of 16 words. A key belongs into two of them. A word is the place of a value:
                   18 bits of the key's hash, 14 bits that change with each value in the slot, 16 bits of slot,
                   16 bits of extent
    NAME.N         extent N: slots of one length. Its owner alone puts values there

A put writes the value into a free slot of an extent of its own, and then makes it visible by one
``compare_exchange`` of a word. A get reads the word, the value, and the word again: if that is the same, the
slot has been the value's all the time. An extent of an owner that has not been heard of for a while is taken
over: what is visible in it is moved, and after as long again its region is freed. An owner that is slow, and not
dead, finds that the extent is no longer its own, and puts again. (It looks just before it makes a value visible,
and once more after that. If it sleeps for that long between two neighbouring requests, the key has no value
until it goes on.)
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import threading
import time
from collections.abc import Iterator, MutableMapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rampool._errors import Error, NoRoom, NotAllowed, NotFound
from rampool._store import Buffer, Key, _bytes, _key
from rampool._table import RemoteArray

if TYPE_CHECKING:
    from rampool._pool import Pool

__all__ = ["SharedStore"]

_WORD, _BYTE = np.dtype("u8"), np.dtype("u1")
_BUCKET = 16
_MOST_EXTENTS = 1 << 16
_MOST_SLOTS = 1 << 16
_VERSIONS = 1 << 14
# Words of NAME.head: buckets, extents; then those of each extent.
_BUCKETS, _EXTENTS, _FIRST, _EACH = 0, 1, 8, 3
_SLOT_BYTES, _OWNER, _HEARD = 0, 1, 2
# Of a slot, before the key and the value: a mark, the length of the key, and that of the value.
_HEADER = struct.Struct("<8sQQ")
_MARK = b"rampool1"
_LEAST_EXTENT, _MOST_EXTENT = 1 << 20, 64 << 20
# An owner writes its time this often, when it puts.
_HEARD_EVERY_S = 5
_TRIES = 1000


class SharedStore(MutableMapping[Key, Buffer]):
    """From keys to bytes that lie in the pool, for every process of the lease. Made by
    :meth:`rampool.Pool.shared_store`.

    Each operation takes effect at once for all processes. A process that is killed in the middle of a put leaves
    the key with its old value or with the new one. Room that it had is found again when another process needs
    it, once the dead one has not been heard of for ``stale`` seconds. The store is gone with the last process that
    has the lease.

    Reading gives a writable ``memoryview`` of fresh memory. Keys are ``bytes``; a ``str`` is its UTF-8. Threads
    may share it.

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
        self._pool, self._stale = pool, stale
        self.name = name
        """The name that others open it by."""
        # With two buckets for each key, one is full only when nearly all are.
        buckets = 1 << (max((keys or 100_000) * 5 // 4 // _BUCKET, 2) - 1).bit_length()
        self._head = pool._region_array(f"{name}.head", (_FIRST + _EACH * _MOST_EXTENTS,), _WORD)
        has = int(self._head.compare_exchange(_BUCKETS, 0, buckets))
        if has and keys is None:
            buckets = has
        elif has not in (0, buckets):
            raise ValueError(f"the store {name!r} is for another number of keys: its index has {has * _BUCKET} places")
        self._buckets = buckets
        self._index = pool._region_array(f"{name}.index", (buckets, _BUCKET), _WORD)
        self._me = secrets.randbits(63) | 1
        self._lock = threading.RLock()
        # Extents that are open here, by number; those of its own, with what it knows of their slots.
        self._open: dict[int, tuple[RemoteArray, int]] = {}
        self._own: dict[int, _Extent] = {}
        # Extents that it has taken over, and when.
        self._retired: dict[int, float] = {}
        self._heard = 0.0

    # --- keys and words
    # -------------------------------------------------------------------------------------------------

    def _places(self, key: bytes) -> tuple[tuple[int, int], int]:
        """The buckets of a key, and its part of a word."""
        a, b, tag = struct.unpack("<QQQ", hashlib.blake2b(key, digest_size=24).digest())
        first, second = a % self._buckets, b % self._buckets
        if second == first:
            second = (first + 1) % self._buckets
        # Never 0: that is an empty word.
        return (min(first, second), max(first, second)), (tag % ((1 << 18) - 1) + 1) << 46

    def _find(self, key: bytes) -> tuple[list[tuple[tuple[int, int], int]], list[tuple[int, int]]]:
        """The words of a key with their places, and places that are empty."""
        buckets, tag = self._places(key)
        for _ in range(_TRIES):
            rows = self._index[list(buckets)].tolist()
            found, empty, again = [], [], False
            for bucket, row in zip(buckets, rows, strict=True):
                for at, word in enumerate(row):
                    place = (bucket, at)
                    if word == 0:
                        empty.append(place)
                    elif word >> 46 << 46 != tag:
                        continue
                    elif self._extent(word) is None:
                        # Its owner made it visible when it was too late: it is no value.
                        self._index.compare_exchange(place, word, 0)
                        again = True
                    elif self._holds(word, key):
                        found.append((place, word))
                    else:
                        # Another key, mostly; or the slot has another value by now, and the key another slot.
                        again = again or int(self._index[place]) != word
            if not again:
                return found, empty
        raise Error(f"{key!r} changes too often")

    def _extent(self, word: int) -> tuple[RemoteArray, int] | None:
        """The extent of a word and the length of its slots; none if it is gone."""
        number = word & 0xFFFF
        if number not in self._open:
            try:
                slot_bytes = int(self._head[_FIRST + _EACH * number + _SLOT_BYTES])
                array = self._pool._region_array(f"{self.name}.{number}", None, _BYTE)
                self._open[number] = (array, slot_bytes)
            except NotFound:
                return None
        return self._open[number]

    def _slot(self, word: int, first: int, nbytes: int) -> Any:
        """Bytes of a slot; none if its extent is gone."""
        extent = self._extent(word)
        if extent is None:
            return None
        array, slot_bytes = extent
        start = (word >> 16 & 0xFFFF) * slot_bytes + first
        try:
            return np.asarray(array[start : start + min(nbytes, slot_bytes - first)])
        except (NotFound, NotAllowed):
            self._open.pop(word & 0xFFFF, None)
            if self._extent(word) is not None:
                raise
            return None

    def _header(self, word: int) -> tuple[bytes, int] | None:
        """The key of a value and the value's length."""
        slot = self._slot(word, 0, 512)
        if slot is None:
            return None
        mark, key_bytes, nbytes = _HEADER.unpack_from(slot)
        if mark != _MARK or key_bytes > 1 << 20:
            return None
        if key_bytes > 512 - _HEADER.size:
            slot = self._slot(word, 0, _HEADER.size + key_bytes)
            if slot is None:
                return None
        return slot[_HEADER.size : _HEADER.size + key_bytes].tobytes(), nbytes

    def _holds(self, word: int, key: bytes) -> bool:
        header = self._header(word)
        return header is not None and header[0] == key

    # --- the mapping
    # ----------------------------------------------------------------------------------------------------

    def put(self, key: Key, parts: Sequence[Buffer]) -> None:
        """Makes buffers, one after the other, the value of a key.

        Raises:
            rampool.NoRoom: the lease, or the index, has no room for it; the key has the value that it had.
            rampool.ServerLost: a server is lost.
        """
        name, views = _key(key), [_bytes(part) for part in parts]
        nbytes = sum(view.nbytes for view in views)
        head = _HEADER.pack(_MARK, len(name), nbytes) + name
        with self._lock:
            for _ in range(_TRIES):
                number, slot = self._take(len(head) + nbytes)
                if self._write(number, slot, [memoryview(head), *views]) and self._show(name, number, slot):
                    return
        raise Error(f"{key!r} changes too often")

    def _write(self, number: int, slot: int, parts: list[memoryview]) -> bool:
        """Fills a slot; false if its extent is no longer this process's, or there may be room elsewhere."""
        extent = self._own[number]
        at = slot * extent.slot_bytes
        try:
            for part in parts:
                if part.nbytes:
                    extent.array[at : at + part.nbytes] = np.frombuffer(part, "u1")
                    at += part.nbytes
        except (NotFound, NotAllowed):
            if self._is_owner(number):
                raise
            # Another process has taken it over and freed it.
            self._own.pop(number, None)
            self._open.pop(number, None)
            return False
        except NoRoom:
            extent.free.insert(0, slot)
            # A slot that was written before has room already.
            if slot not in extent.versions and self._collect(extent.slot_bytes):
                return False
            if not self.adopt():
                raise
            return False
        return True

    def _show(self, name: bytes, number: int, slot: int) -> bool:
        """Makes a value that was written visible; false if its extent is no longer this process's."""
        word = self._word(self._places(name)[1], number, slot)
        for _ in range(_TRIES):
            found, empty = self._find(name)
            if found:
                place, before = found[0]
            elif empty:
                place, before = empty[0], 0
            else:
                raise NoRoom(f"the index of the store {self.name!r} is full: make it for more keys")
            if not self._is_owner(number):
                self._own.pop(number, None)
                return False
            if int(self._index.compare_exchange(place, before, word)) == before:
                self._gone(before)
                break
        else:
            raise Error(f"{name!r} changes too often")
        # Two processes may have put a new key into two places. The first is the key's.
        found, _ = self._find(name)
        for place, other in found[1:]:
            if int(self._index.compare_exchange(place, other, 0)) == other:
                self._gone(other)
        # A process that takes an extent over says so first, and then moves what is visible.
        if self._is_owner(number):
            return True
        self._own.pop(number, None)
        return False

    def _is_owner(self, number: int) -> bool:
        return int(self._head[_FIRST + _EACH * number + _OWNER]) == self._me

    def _gone(self, word: int) -> None:
        """A value is not visible any more: if its slot is this process's, it is free."""
        own = self._own.get(word & 0xFFFF) if word else None
        if own is not None:
            own.free.append(word >> 16 & 0xFFFF)

    def __setitem__(self, key: Key, value: Buffer) -> None:
        self.put(key, [value])

    def __getitem__(self, key: Key) -> memoryview:
        name = _key(key)
        for _ in range(_TRIES):
            found, _ = self._find(name)
            if not found:
                raise KeyError(key)
            place, word = found[0]
            header = self._header(word)
            value = None if header is None else self._slot(word, _HEADER.size + len(name), header[1])
            if int(self._index[place]) == word and header is not None and header[0] == name and value is not None:
                return memoryview(value).cast("B") if header[1] else memoryview(bytearray())
        raise Error(f"{key!r} changes too often")

    def __delitem__(self, key: Key) -> None:
        name, removed = _key(key), False
        with self._lock:
            for _ in range(_TRIES):
                found, _ = self._find(name)
                if not found:
                    if not removed:
                        raise KeyError(key)
                    return
                # The others first: what is left is the key's value.
                place, word = found[-1]
                if int(self._index.compare_exchange(place, word, 0)) == word:
                    removed = True
                    self._gone(word)
        raise Error(f"{key!r} changes too often")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, (str, bytes)) and bool(self._find(_key(key))[0])

    def __iter__(self) -> Iterator[bytes]:
        seen = set()
        for word in self._words().tolist():
            header = self._header(word)
            if header is not None and header[0] not in seen and header[0] in self:
                seen.add(header[0])
                yield header[0]

    def __len__(self) -> int:
        return self._index.count(self._index != 0)

    def _words(self) -> Any:
        words = np.asarray(self._index).reshape(-1)
        return words[words != 0]

    # --- extents
    # --------------------------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> tuple[int, int]:
        """A free slot of an extent of this process's."""
        self._beat()
        slot_bytes = _class(nbytes)
        for number, extent in self._own.items():
            if extent.slot_bytes == slot_bytes and extent.free:
                return number, extent.free.pop()
        if not self._collect(slot_bytes):
            self._make(slot_bytes)
        return self._take(nbytes)

    def _collect(self, slot_bytes: int) -> bool:
        """Looks which values of this process others have replaced or removed; whether that gives slots that
        were written before."""
        mine = {number: extent for number, extent in self._own.items() if extent.slot_bytes == slot_bytes}
        if not mine:
            return False
        used: dict[int, set[int]] = {number: set() for number in mine}
        for word in self._words().tolist():
            if word & 0xFFFF in used:
                used[word & 0xFFFF].add(word >> 16 & 0xFFFF)
        for number, extent in mine.items():
            # No put is under way: this one has the lock, and has taken nothing yet.
            free = [slot for slot in range(extent.slots) if slot not in used[number]]
            extent.free = sorted(free, key=lambda slot: (slot in extent.versions, -slot))
        return any(extent.free and extent.free[-1] in extent.versions for extent in mine.values())

    def _make(self, slot_bytes: int) -> None:
        number = int(self._head.fetch_add(_EXTENTS, 1))
        if number >= _MOST_EXTENTS:
            raise NoRoom(f"the store {self.name!r} has had {_MOST_EXTENTS} extents")
        slots = max(min(max(64 * slot_bytes, _LEAST_EXTENT), _MOST_EXTENT) // slot_bytes, 1)
        slots = min(slots, _MOST_SLOTS)
        words = _FIRST + _EACH * number
        self._head[words : words + _EACH] = [slot_bytes, self._me, int(time.time())]
        array = self._pool._region_array(f"{self.name}.{number}", (slots * slot_bytes,), _BYTE)
        self._own[number] = _Extent(array, slot_bytes, slots)
        self._open[number] = (array, slot_bytes)

    def _beat(self) -> None:
        now = time.time()
        if now - self._heard > _HEARD_EVERY_S:
            self._heard = now
            for number in (*self._own, *self._retired):
                self._head[_FIRST + _EACH * number + _HEARD] = int(now)

    def adopt(self) -> int:
        """Takes over the extents of processes that have not been heard of for ``stale`` seconds, and gives the
        room of those back that it took over so long ago; how many of both. A put that finds no room does it by
        itself.

        Raises:
            rampool.NoRoom: there is none to move values to.
        """
        with self._lock:
            adopted = 0
            for number, since in list(self._retired.items()):
                if time.time() - since > self._stale:
                    self._free(number)
                    adopted += 1
            count = min(int(self._head[_EXTENTS]), _MOST_EXTENTS)
            rows = self._head[_FIRST : _FIRST + _EACH * count].reshape(-1, _EACH).tolist()
            for number, (_, owner, heard) in enumerate(rows):
                is_stale = owner not in (0, self._me) and time.time() - heard > self._stale
                words = _FIRST + _EACH * number
                if is_stale and int(self._head.compare_exchange(words + _OWNER, owner, self._me)) == owner:
                    self._retired[number] = time.time()
                    self._head[words + _HEARD] = int(time.time())
                    self._move_all(number)
                    adopted += 1
            return adopted

    def _free(self, number: int) -> None:
        """Gives the room of an extent back that it took over."""
        extent = self._extent(number)
        if extent is not None:
            # Its former owner may have made something visible since.
            self._move_all(number)
            self._open.pop(number, None)
            extent[0].free()
        del self._retired[number]
        self._head[_FIRST + _EACH * number + _OWNER] = 0

    def _move_all(self, number: int) -> None:
        """Moves what is visible in an extent that it took over. The former owner may still write to its slots,
        so that none of them can be used."""
        if self._extent(number) is not None:
            for word in self._words().tolist():
                if word & 0xFFFF == number:
                    self._move(word)

    def _move(self, word: int) -> None:
        """Moves a value to an extent of this process's."""
        header = self._header(word)
        value = None if header is None else self._slot(word, _HEADER.size + len(header[0]), header[1])
        if header is None or value is None:
            return
        name, nbytes = header
        head = _HEADER.pack(_MARK, len(name), nbytes) + name
        slot_bytes = _class(len(head) + nbytes)
        if not any(extent.slot_bytes == slot_bytes and extent.free for extent in self._own.values()):
            self._make(slot_bytes)
        number, extent = next(
            (n, extent) for n, extent in self._own.items() if extent.slot_bytes == slot_bytes and extent.free
        )
        slot = extent.free.pop()
        at = slot * slot_bytes
        extent.array[at : at + len(head) + nbytes] = np.concatenate([np.frombuffer(head, "u1"), value])
        buckets, tag = self._places(name)
        moved = self._word(tag, number, slot)
        for bucket in buckets:
            for place, there in enumerate(self._index[bucket].tolist()):
                if there == word and int(self._index.compare_exchange((bucket, place), word, moved)) == word:
                    return
        # It was replaced or removed meanwhile.
        extent.free.append(slot)

    def _word(self, tag: int, number: int, slot: int) -> int:
        versions = self._own[number].versions
        versions[slot] = (versions.get(slot, secrets.randbelow(_VERSIONS)) + 1) % _VERSIONS
        return tag | versions[slot] << 32 | slot << 16 | number

    def close(self) -> None:
        """Lets go of it; the values stay. Other processes take this one's extents over when they need room."""
        with self._lock:
            self._own.clear()
            self._retired.clear()
            self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Extent:
    """An extent of this process's own."""

    def __init__(self, array: RemoteArray, slot_bytes: int, slots: int) -> None:
        self.array, self.slot_bytes, self.slots = array, slot_bytes, slots
        self.free = list(range(slots - 1, -1, -1))
        self.versions: dict[int, int] = {}


def _class(nbytes: int) -> int:
    """How long the slot of so many bytes is: whole pages, four classes to each power of two."""
    pages = max(-(-nbytes // 4096), 1)
    step = 1 << max(pages.bit_length() - 3, 0)
    return -(-pages // step) * step * 4096

"""The names of a lease's arrays, for :meth:`rampool.Pool.list`: servers find a region by its name, and do not
list them.

Each has a slot in a small region: a hash of the name, set by one ``compare_exchange``, then the name. A slot
whose hash is not that of its name is being written, or its writer has ended; it is not listed. Slots may
outlive their arrays, which other programs can free: who lists looks which are there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from rampool import _native
from rampool._errors import NotFound

__all__ = ["add", "check", "names", "remove"]

_OURS = "rampool."
_SLOT = 512
_SLOTS = 128
# More names than a lease has room for.
_REGIONS = 10_000


def check(name: str) -> None:
    """Refuses a name that rampool itself uses."""
    if name.startswith(_OURS):
        raise ValueError(
            f"names that begin with {_OURS!r} are rampool's own: call the array something else than {name!r}"
        )


def add(direct: _native.Direct, name: str) -> None:
    """Lists a name; it may be listed already.

    Raises:
        rampool.NoRoom: there is no page left for it.
    """
    mark = _mark(name.encode())
    for number in range(_REGIONS):
        region = direct.open(f"{_OURS}names.{number}", _SLOT * _SLOTS)
        for place, there, text in _slots(direct, region):
            if there == mark and text == name.encode():
                return
            if there == 0 and direct.compare_exchange(region, place, "u8", 0, mark) == 0:
                data = np.frombuffer(len(name.encode()).to_bytes(8, "little") + name.encode(), np.uint8)
                direct.put(region, place + 8, _native.Layout.strided(data.size, []), data)
                return


def remove(direct: _native.Direct, name: str) -> None:
    """Does not list a name any more."""
    for region in _regions(direct):
        for place, there, text in _slots(direct, region):
            if there and text == name.encode():
                direct.compare_exchange(region, place, "u8", there, 0)


def names(direct: _native.Direct) -> list[str]:
    """The names of arrays that are there, sorted."""
    found = set()
    for region in _regions(direct):
        for _, there, text in _slots(direct, region):
            if there and _mark(text) == there:
                found.add(text.decode())
    return sorted(name for name in found if _is_there(direct, name))


def _is_there(direct: _native.Direct, name: str) -> bool:
    try:
        direct.open(name, None)
    except NotFound:
        return False
    return True


def _regions(direct: _native.Direct) -> Iterator[_native.DirectRegion]:
    for number in range(_REGIONS):
        try:
            yield direct.open(f"{_OURS}names.{number}", None)
        except NotFound:
            return


def _slots(direct: _native.Direct, region: _native.DirectRegion) -> Iterator[tuple[int, int, bytes]]:
    """Each slot's place, hash and name."""
    every = direct.get_bytes(region, 0, _SLOT * _SLOTS)
    for place in range(0, len(every), _SLOT):
        mark, length = (int.from_bytes(every[at : at + 8], "little") for at in (place, place + 8))
        yield place, mark, every[place + 16 : place + 16 + min(length, _SLOT - 16)]


def _mark(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1

"""What a named array at the servers holds: its shape and dtype, kept next to it.

They lie in a small region of their own, so that the array's has nothing but its elements, as programs in
Rust and C expect. It is named by the array's region, not by the array's name: what is left of an array that
was freed says nothing about the next one of that name. Its first word is a hash of the text, set by one
``compare_exchange``: of two processes that make an array at once, one says what it is, and a process that
ends in between leaves no doubt. The text is for who does not know, and for messages.
"""

from __future__ import annotations

import ast
import hashlib
import math
import time
import warnings
from typing import Any

import numpy as np
from numpy.lib import format as npy

from rampool import _native
from rampool._errors import Error, NotFound

__all__ = ["called", "check", "known", "place", "record"]

# Only pages that are written take memory.
_BYTES = 1 << 20
# The hash and the length of the text.
_HEAD = 16
_SHORT = 4096
# Between the moment when a region is there and the one when it is said what is in it.
_UNTOLD_S = 0.5

Known = tuple[tuple[int, ...], np.dtype[Any]]


def record(
    direct: _native.Direct,
    region: _native.DirectRegion,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> tuple[_native.DirectRegion, bool]:
    """Says what a region holds, unless that was said; gives the region that says so, and whether this call
    was
    the first.

    Raises:
        ValueError: it holds something else.
        TypeError: the dtype cannot be described.
        rampool.NoRoom: there is no page left for it.
    """
    text = _text(shape, dtype)
    about = direct.open(_name(direct, region), _BYTES)
    mark = _mark(text)
    before = direct.compare_exchange(about, 0, "u8", 0, mark)
    if before not in (0, mark):
        check(name, _read(direct, about, before), shape, dtype)
        return about, False
    # The same bytes, whoever writes them: one that was here before may have ended in between.
    data = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    direct.put(about, 8, _native.Layout.strided(data.size, []), data)
    return about, before == 0


def known(direct: _native.Direct, region: _native.DirectRegion) -> tuple[_native.DirectRegion, Known] | None:
    """What was said about a region, and where; none if nothing was."""
    end = time.monotonic() + _UNTOLD_S
    while True:
        try:
            about = direct.open(_name(direct, region), None)
            mark = int.from_bytes(direct.get_bytes(about, 0, 8), "little")
            if mark:
                return about, _read(direct, about, mark)
        except NotFound:
            pass
        if time.monotonic() > end:
            return None
        time.sleep(0.01)


def place(direct: _native.Direct, region: _native.DirectRegion) -> _native.DirectRegion | None:
    """Where it is said what a region holds; none if it is not."""
    try:
        return direct.open(_name(direct, region), None)
    except NotFound:
        return None


def check(name: str, there: Known, shape: tuple[int, ...] | None, dtype: np.dtype[Any] | None) -> None:
    """Refuses to open an array as what it is not."""
    same_shape = shape is None or shape == there[0]
    # A dtype of an extension is described by its bytes.
    if same_shape and (dtype is None or dtype == there[1] or _text((), dtype) == _text((), there[1])):
        return
    wanted = ([] if shape is None else [f"shape {shape}"]) + ([] if dtype is None else [f"dtype {dtype}"])
    raise ValueError(
        f"the array {name!r} has shape {there[0]} and dtype {there[1]}, and is not opened with "
        f"{' and '.join(wanted)}: pool.open({name!r}) opens it as it is, pool.delete({name!r}) makes room "
        "for another"
    )


def _read(direct: _native.Direct, about: _native.DirectRegion, mark: int) -> Known:
    end = time.monotonic() + 10
    while True:
        start = direct.get_bytes(about, 0, _SHORT)
        length = int.from_bytes(start[8:_HEAD], "little")
        if 0 < length <= _BYTES - _HEAD:
            text = start[_HEAD : _HEAD + length]
            if len(text) < length:
                text = direct.get_bytes(about, _HEAD, length)
            if _mark(text) == mark:
                return _parsed(text)
        if time.monotonic() > end:
            raise Error(
                "a process ended while it made this array: open it with the shape and the dtype that it gave"
            )
        time.sleep(0.01)


def _text(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    with warnings.catch_warnings():
        # Metadata of a dtype are not kept.
        warnings.simplefilter("ignore")
        try:
            text = repr((shape, npy.dtype_to_descr(dtype))).encode()
        except ValueError as error:
            raise TypeError(
                f"{dtype} cannot be described to others: {error}; use an array without a name"
            ) from error
    if len(text) > _BYTES - _HEAD:
        raise TypeError(f"a dtype of {len(dtype.names or ())} fields is too long to be kept with a name")
    return text


def _parsed(text: bytes) -> Known:
    try:
        shape, described = ast.literal_eval(text.decode())
        dtype = npy.descr_to_dtype(described)
        sizes = tuple(int(n) for n in shape)
        if dtype.hasobject or dtype.itemsize == 0 or any(n < 0 for n in sizes) or math.prod(sizes) == 0:
            raise ValueError("it is none")
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise Error(f"what is said about this array makes no sense: {error}") from error
    return sizes, dtype


def _mark(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1


def called(direct: _native.Direct, region: _native.DirectRegion) -> str:
    """What the region is called at each server; not what is stored there, which changes."""
    return ";".join(word for word in direct.ticket(region).split(";") if word[:1] not in "sm")


def _name(direct: _native.Direct, region: _native.DirectRegion) -> str:
    return "rampool.about." + hashlib.blake2b(called(direct, region).encode(), digest_size=16).hexdigest()

"""Arrays at the servers, with NumPy's habits: slices, index arrays and masks become layouts that the servers
execute.

Only the elements that are asked for travel. Slices become nested strides, with a dense innermost run; index
arrays and masks become lists of places, sorted and without repetitions, and what was repeated is repeated
here. DIMMnet-3 (Tanabe et al.) has such commands at the memory; MPI has the layouts' terms.
"""

from __future__ import annotations

import asyncio
import operator
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from rampool import _native
from rampool._errors import Error, Timeout

__all__ = ["Condition", "Pending", "RemoteArray", "contiguous_strides"]

Array = npt.NDArray[Any]

# One request's worth of what is copied on its way out, and how many are under way at once.
_PIECE_BYTES = 8 << 20
_PIECES = 4
# Elements of one scan: an interruption waits for one.
_SCAN_ELEMENTS = 1 << 24
_warned: set[str] = set()


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides of an array in C order, in bytes."""
    strides: list[int] = []
    stride = itemsize
    for n in reversed(shape):
        strides.append(stride)
        stride *= n
    return tuple(reversed(strides))


def _kind(dtype: np.dtype[Any]) -> str | None:
    """What servers call the dtype, if they compute with it."""
    if dtype.isnative and dtype.kind in "iuf" and dtype.itemsize in (4, 8):
        return f"{dtype.kind}{dtype.itemsize}"
    return None


def _bits(value: Any, dtype: np.dtype[Any]) -> int:
    """The bits of an element, in the lowest bytes."""
    return int.from_bytes(np.asarray(value).astype(dtype).tobytes(), "little")


def _from_bits(bits: int, dtype: np.dtype[Any]) -> Any:
    return np.frombuffer(bits.to_bytes(8, "little")[: dtype.itemsize], dtype)[0]


def _warn_once(what: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"rampool: {what}", RuntimeWarning, stacklevel=4)


class Pending:
    """An operation under way: ``await`` it, or ask for its :meth:`result`.

    One that is dropped goes on; what it wrote is written.
    """

    def __init__(
        self,
        direct: _native.Direct,
        steps: list[_native.Pending],
        finish: Callable[[list[_native.Bytes]], Any],
    ) -> None:
        self._direct = direct
        self._steps = steps
        self._taken: list[_native.Bytes] = []
        self._finish = finish
        self._value: Any = None
        self._ended = False

    def done(self) -> bool:
        """Whether it has ended. Does not block, and lets everything under way go on."""
        return self._ended or all(step.done() for step in self._steps[len(self._taken) :])

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end, at most ``timeout`` seconds, and gives the array that was asked for; ``None`` of
        an assignment.

        Raises:
            rampool.Timeout: it has not ended by then. Ask again.
            rampool.ServerLost: a server was lost meanwhile.
        """
        while not self._ended:
            if len(self._taken) == len(self._steps):
                self._value = self._finish(self._taken)
                self._ended, self._steps, self._taken = True, [], []
                break
            taken = self._steps[len(self._taken)].take(timeout)
            if taken is None:
                raise Timeout(f"not done within {timeout} s")
            self._taken.append(taken)
        return self._value

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            yield from _Driver.of(asyncio.get_running_loop(), self._direct).wait(self).__await__()
        return self.result()


class _Driver:
    """Lets the operations of one direct view go on in an event loop, without a thread."""

    _drivers: dict[tuple[int, int], _Driver] = {}

    def __init__(self, loop: asyncio.AbstractEventLoop, direct: _native.Direct) -> None:
        self._loop = loop
        self._direct = direct
        self._waiting: list[tuple[Pending, asyncio.Future[None]]] = []
        self._watched: list[tuple[int, bool]] = []
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop, direct: _native.Direct) -> _Driver:
        # It is in the table while it waits, which keeps both objects and so their numbers.
        return cls._drivers.setdefault((id(loop), id(direct)), cls(loop, direct))

    async def wait(self, pending: Pending) -> None:
        future = self._loop.create_future()
        self._waiting.append((pending, future))
        self._step()
        await future

    def _step(self) -> None:
        self._unwatch()
        still = []
        for pending, future in self._waiting:
            try:
                done = future.done() or pending.done()
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
                continue
            if not done:
                still.append((pending, future))
            elif not future.done():
                future.set_result(None)
        self._waiting = still
        if not still:
            self._drivers.pop((id(self._loop), id(self._direct)), None)
            return
        descriptors, due = self._direct.watch()
        for descriptor, events in descriptors:
            self._loop.add_reader(descriptor, self._step)
            write = bool(events & 4)
            if write:
                self._loop.add_writer(descriptor, self._step)
            self._watched.append((descriptor, write))
        self._timer = self._loop.call_later(min(due, 0.1), self._step)

    def _unwatch(self) -> None:
        for descriptor, write in self._watched:
            self._loop.remove_reader(descriptor)
            if write:
                self._loop.remove_writer(descriptor)
        self._watched = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Condition:
    """Which elements of a column count, such as ``t.at[:, 5] > 100``: for ``where=``, and for
    :meth:`RemoteArray.where`."""

    def __init__(self, column: RemoteArray, test: str, operand: Any) -> None:
        self.column = column
        self.test = test
        self.operand = operand

    def __bool__(self) -> bool:
        raise ValueError(
            "a condition at the servers is neither true nor false: give it to where=, or fetch the column first"
        )

    def positions(self) -> npt.NDArray[np.int64]:
        """The positions of the elements that count, in C order of the column; found at the servers where they
        can."""
        column = self.column
        test = column._test(self.test, self.operand)
        kind = column._computes()
        if kind is None or test is None:
            values = column._fetched("compare").ravel()
            return np.flatnonzero(_compare(values, self.test, self.operand)).astype(np.int64)
        found = []
        for first, part in column._parts():
            some = np.frombuffer(
                memoryview(part._direct.select(part._region, part._low(), part._layout(), kind, test)),
                np.int64,
            )
            found.append(part._in_order(some) + first)
        return np.concatenate(found) if found else np.empty(0, np.int64)


def _compare(values: Array, test: str, operand: Any) -> npt.NDArray[np.bool_]:
    operations: dict[str, Callable[[Any, Any], Any]] = {
        "==": operator.eq,
        "!=": operator.ne,
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
    }
    found = operations[test](values, operand)
    if not isinstance(found, np.ndarray) or found.dtype != np.bool_ or found.shape != values.shape:
        raise TypeError(f"{values.dtype} is not compared with {operand!r}")
    return cast(npt.NDArray[np.bool_], found)


class RemoteArray:
    """An array, or a part of one, that lies at memory servers. Made by :meth:`rampool.Pool.remote`.

    ``t[key]`` fetches, ``t[key] = values`` writes, with NumPy's slices, index arrays, masks, ``...`` and
    ``None``. ``t.at[key]`` fetches nothing: it is that part of the array, for sums and conditions that
    servers work out. Writes to the same elements take effect in the order of the calls.

    >>> pool = connect(SERVERS, memory="16M", local="1M")
    >>> t = pool.remote("numbers", (100, 4), "i8")
    >>> t[:, 0] = range(100)
    >>> t[::-40, 0].tolist()
    [99, 59, 19]
    >>> t[[5, 5, 7], 0].tolist()
    [5, 5, 7]
    >>> t.add_at(([5, 5], 0), 10)           # both count, as with np.add.at
    >>> int(t[5, 0])
    25
    >>> int(t.at[:, 0].max(where=t.at[:, 0] < 50))
    49
    >>> pool.close()
    """

    __array_priority__ = 10.0
    __hash__ = object.__hash__

    def __init__(
        self,
        direct: _native.Direct,
        region: _native.DirectRegion,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        name: str | None,
    ) -> None:
        self._direct = direct
        self._region = region
        self._offset = offset
        self._strides = strides
        self._keeps: Any = None
        # Where others read what it is.
        self._about: _native.DirectRegion | None = None
        self.shape = shape
        """Its dimensions."""
        self.dtype = dtype
        """What its elements are."""
        self.name = name
        """The name that others open it by, if it has one."""

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have."""
        return self.size * self.dtype.itemsize

    @property
    def at(self) -> _At:
        """``t.at[key]`` is a part of the array at the servers: nothing is fetched. The key has slices and
        numbers only."""
        return _At(self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<rampool.RemoteArray{name}, shape {self.shape}, dtype {self.dtype}>"

    def __iter__(self) -> Iterator[Any]:
        rows = max(1, _PIECE_BYTES * self.shape[0] // max(self.nbytes, 1)) if self.shape else len(self)
        for first in range(0, len(self), rows):
            yield from self[first : first + rows]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("an array at the servers cannot be used without a copy")
        return np.asarray(self[...], dtype)

    # --- reading
    # ------------------------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        place = self._place(key)
        if place is None:
            return self.start_get(key).result()
        taken = self._direct.get_bytes(self._region, place, self.dtype.itemsize)
        return np.ndarray((), self.dtype, taken)[()]

    def _place(self, key: Any) -> int | None:
        """Where one element lies, if the key is its numbers."""
        numbers = (key,) if type(key) is int else key
        if type(numbers) is not tuple or len(numbers) != len(self.shape):
            return None
        place, axis = self._offset, 0
        for number in numbers:
            if type(number) is not int:
                return None
            place += _bounded(number, self.shape[axis], axis) * self._strides[axis]
            axis += 1
        return place

    def start_get(self, key: Any = ...) -> Pending:
        """Begins to fetch ``t[key]``; ``await`` it, or ask for its result.

        >>> pool = connect(SERVERS, memory="16M", local="1M")
        >>> t = pool.remote(None, 10, "i4")
        >>> soon = t.start_get(np.s_[::3])
        >>> soon.result().tolist()
        [0, 0, 0, 0]
        >>> pool.close()
        """
        view, picks, scalar = self._resolve(key)
        if picks is None:
            shape = view.shape
            if view.size == 0:
                return Pending(self._direct, [], lambda _: np.empty(shape, self.dtype))
            step = self._direct.start_get(self._region, view._low(), view._layout())
            flips = view._flips()

            def finish(taken: list[_native.Bytes]) -> Any:
                array = np.ndarray(shape, self.dtype, buffer=memoryview(taken[0]))
                return array[()] if scalar else array[flips]

            return Pending(self._direct, [step], finish)
        return self._start_gather(picks, scalar)

    def _start_gather(self, picks: _Picks, scalar: bool) -> Pending:
        offsets, inner, shape = picks.offsets, picks.inner, picks.shape
        if picks.size == 0:
            return Pending(self._direct, [], lambda _: np.empty(shape, self.dtype))
        flat = offsets.ravel()
        again: npt.NDArray[np.intp] | None = None
        if flat.size > 1 and not bool(np.all(flat[1:] > flat[:-1])):
            flat, again = np.unique(flat, return_inverse=True)
        layout = inner._layout().at_each(np.ascontiguousarray(flat))
        step = self._direct.start_get(self._region, inner._low(), layout)
        flips = inner._flips()
        each = (flat.size, *inner.shape)

        def finish(taken: list[_native.Bytes]) -> Any:
            array = np.ndarray(each, self.dtype, buffer=memoryview(taken[0]))[(slice(None), *flips)]
            if again is not None:
                array = array[again.ravel()]
            array = array.reshape(shape)
            return array[()] if scalar else array

        return Pending(self._direct, [step], finish)

    # --- writing
    # ------------------------------------------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: npt.ArrayLike) -> None:
        self.start_put(key, value).result()

    def start_put(self, key: Any, value: npt.ArrayLike) -> Pending:
        """Begins ``t[key] = value``. The values are copied: they may change at once. Where a key selects an
        element twice, the last value stays."""
        view, picks, _ = self._resolve(key)
        source = _broadcast(value, view.shape if picks is None else picks.shape, self.dtype)
        if picks is None:
            steps: list[_native.Pending] = []
            for part, values in _pieces(view, source):
                if len(steps) >= _PIECES:
                    # Before its turn, so that no more than a few pieces are held here.
                    _settle(steps[-_PIECES])
                layout = part._layout()
                steps.append(
                    self._direct.start_put(
                        self._region, part._low(), layout, _as_bytes(values[part._flips()])
                    )
                )
            return Pending(self._direct, steps[-_PIECES:], lambda _: None)
        if picks.size == 0:
            return Pending(self._direct, [], lambda _: None)
        flat = picks.offsets.ravel()
        rows = source.reshape((flat.size, *picks.inner.shape))
        if flat.size > 1 and not bool(np.all(flat[1:] > flat[:-1])):
            flat, last = np.unique(flat[::-1], return_index=True)
            rows = rows[rows.shape[0] - 1 - last]
        rows = rows[(slice(None), *picks.inner._flips())]
        layout = picks.inner._layout().at_each(np.ascontiguousarray(flat))
        step = self._direct.start_put(self._region, picks.inner._low(), layout, _as_bytes(rows))
        return Pending(self._direct, [step], lambda _: None)

    def add_at(self, key: Any, value: npt.ArrayLike) -> None:
        """``np.add.at(t, key, value)``, each element updated at its server, at once: an element that is
        selected twice is updated twice.

        dtypes that servers do not compute with are fetched, updated here and written back, which other
        members may come between.
        """
        self._update("add", np.add, key, value)

    def minimum_at(self, key: Any, value: npt.ArrayLike) -> None:
        """``np.minimum.at(t, key, value)``, at the servers."""
        self._update("minimum", np.minimum, key, value)

    def maximum_at(self, key: Any, value: npt.ArrayLike) -> None:
        """``np.maximum.at(t, key, value)``, at the servers."""
        self._update("maximum", np.maximum, key, value)

    def bitwise_or_at(self, key: Any, value: npt.ArrayLike) -> None:
        """``np.bitwise_or.at(t, key, value)``, at the servers; integers only."""
        self._update("or", np.bitwise_or, key, value)

    def bitwise_and_at(self, key: Any, value: npt.ArrayLike) -> None:
        """``np.bitwise_and.at(t, key, value)``, at the servers; integers only."""
        self._update("and", np.bitwise_and, key, value)

    def _update(self, how: str, here: np.ufunc, key: Any, value: npt.ArrayLike) -> None:
        view, picks, _ = self._resolve(key)
        source = _broadcast(value, view.shape if picks is None else picks.shape, self.dtype)
        if source.size == 0:
            return
        kind = self._computes()
        if kind is None:
            _warn_once(f"servers do not compute with {self.dtype}: it is updated here, which is not atomic")
            old = self[key]
            if picks is None:
                self[key] = here(old, source).astype(self.dtype)
                return
            flat, again = np.unique(picks.offsets.ravel(), return_inverse=True)
            rows = np.asarray(old).reshape((again.size, *picks.inner.shape))
            values = np.empty((flat.size, *picks.inner.shape), self.dtype)
            values[again.ravel()] = rows
            here.at(values, again.ravel(), source.reshape(rows.shape))
            self[key] = values[again.ravel()].reshape(picks.shape)
            return
        if picks is None:
            for part, values in _pieces(view, source):
                data = _as_bytes(values[part._flips()])
                self._direct.accumulate(self._region, part._low(), part._layout(), kind, how, data)
            return
        rows = source.reshape((picks.offsets.size, *picks.inner.shape))[(slice(None), *picks.inner._flips())]
        layout = picks.inner._layout().at_each(np.ascontiguousarray(picks.offsets.ravel()))
        self._direct.accumulate(self._region, picks.inner._low(), layout, kind, how, _as_bytes(rows))

    def fetch_add(self, key: Any, value: Any) -> Any:
        """Adds to one element at its server, and gives what it was before."""
        place, kind = self._one(key)
        operand = _bits(_broadcast(value, (), self.dtype), self.dtype)
        return _from_bits(self._direct.fetch_op(self._region, place, kind, "add", operand), self.dtype)

    def compare_exchange(self, key: Any, expected: Any, new: Any) -> Any:
        """Writes ``new`` to one element if it is ``expected``, bit by bit, at its server; gives what it was
        before."""
        place, kind = self._one(key)
        bits = [_bits(_broadcast(value, (), self.dtype), self.dtype) for value in (expected, new)]
        before = self._direct.compare_exchange(self._region, place, kind, *bits)
        return _from_bits(before, self.dtype)

    def _one(self, key: Any) -> tuple[int, str]:
        view, picks, _ = self._resolve(key)
        kind = self._computes()
        if picks is not None or view.shape != ():
            raise IndexError("one element is updated: give one number for each dimension")
        if kind is None:
            raise TypeError(
                f"servers compute with i4, u4, i8, u8, f4 and f8, aligned and native, not with {self.dtype}"
            )
        return view._offset, kind

    # --- computing at the servers
    # -------------------------------------------------------------------------------------------------

    def sum(self, *, where: Condition | npt.ArrayLike | None = None) -> Any:
        """The sum of all elements, or of those where a condition holds, worked out at the servers.

        The value and its type are NumPy's: integers and booleans add up to 64 bits and wrap. Floats may
        differ by rounding: they are added up in double precision there, one after the other, and rounded
        once.

        Args:
            where: a condition on this column or on another of the same shape, or an array of booleans.

        Raises:
            TypeError: such elements have no sum.
        """
        values = self._here("sum", where)
        if values is not None:
            return values.sum()
        whole = self.dtype.kind in "iu"
        _, total = self._reduce("sum", lambda a, b: a + b, 0 if whole else 0.0, where)
        if whole:
            bits = np.array(int(total) & (2**64 - 1), np.uint64)
            return bits.view(f"{self.dtype.kind}8")[()]
        return self.dtype.type(total)

    def count(self, where: Condition | npt.ArrayLike | None = None) -> int:
        """How many elements there are, or for how many a condition holds, counted at the servers."""
        count, _ = self._reduce("count", lambda a, b: None, None, where)
        return count

    def mean(self, *, where: Condition | npt.ArrayLike | None = None) -> Any:
        """The mean, worked out at the servers, of the type that NumPy's has; NaN of nothing.

        Raises:
            TypeError: such elements have no mean.
        """
        values = self._here("mean", where)
        if values is not None:
            return values.mean()
        count, total = self._reduce("sum", lambda a, b: a + b, 0, where)
        kind = self.dtype.type if self.dtype.kind == "f" else np.float64
        return kind(total / count) if count else kind(np.nan)

    def min(self, *, where: Condition | npt.ArrayLike | None = None) -> Any:
        """The least element, found at the servers; NaN if one is NaN, as with NumPy.

        Raises:
            ValueError: there is none.
            TypeError: such elements have no order.
        """
        return self._extreme("min", min, where)

    def max(self, *, where: Condition | npt.ArrayLike | None = None) -> Any:
        """The greatest element, found at the servers; NaN if one is NaN, as with NumPy.

        Raises:
            ValueError: there is none.
            TypeError: such elements have no order.
        """
        return self._extreme("max", max, where)

    def _extreme(
        self,
        what: Literal["min", "max"],
        pick: Callable[[Any, Any], Any],
        where: Condition | npt.ArrayLike | None,
    ) -> Any:
        values = self._here(what, where)
        if values is not None:
            return values.min() if what == "min" else values.max()

        def join(a: Any, b: Any) -> Any:
            # A NaN stays, on whichever side it is.
            return b if a is None or b != b else a if a != a else pick(a, b)

        count, found = self._reduce(what, join, None, where)
        if count == 0:
            raise ValueError(f"there is no {what} of no elements")
        return found

    def where(self, condition: Condition) -> Array:
        """The elements at the positions where a condition holds, in C order: found there, and only they
        travel."""
        flat = self._flat(condition.positions(), condition.column)
        return cast(Array, self._start_gather(flat, False).result())

    def __lt__(self, other: Any) -> Condition:
        return Condition(self, "<", other)

    def __le__(self, other: Any) -> Condition:
        return Condition(self, "<=", other)

    def __gt__(self, other: Any) -> Condition:
        return Condition(self, ">", other)

    def __ge__(self, other: Any) -> Condition:
        return Condition(self, ">=", other)

    def __eq__(self, other: object) -> Condition:  # type: ignore[override]
        return Condition(self, "==", other)

    def __ne__(self, other: object) -> Condition:  # type: ignore[override]
        return Condition(self, "!=", other)

    def free(self) -> None:
        """Frees the whole array at its servers, for every member of the lease."""
        self._direct.free(self._region)
        if self._about is not None:
            self._direct.free(self._about)

    # --- under the hood
    # -----------------------------------------------------------------------------------------------------------

    def _reduce(
        self, what: str, join: Callable[[Any, Any], Any], start: Any, where: Condition | npt.ArrayLike | None
    ) -> tuple[int, Any]:
        """How many elements count, and what they come to."""
        own, picks = self._which(where)
        kind = self._computes()
        if kind is None:
            assert what == "count"
            if picks is not None:
                return picks.size, None
            if not isinstance(where, Condition):
                return self.size, None
            return where.positions().size, None
        count, total = 0, start
        for low, layout in self._scans(picks):
            if what == "count":
                count += self._direct.count(self._region, low, layout, kind, own)
            elif what == "sum":
                some, value = self._direct.sum(self._region, low, layout, kind, own)
                count, total = count + some, join(total, value)
            elif self._has_nan(low, layout, kind, own):
                count, total = count + 1, join(total, self.dtype.type(np.nan))
            else:
                bits = self._direct.extreme(self._region, low, layout, kind, own, what == "max")
                if bits is not None:
                    count, total = count + 1, join(total, _from_bits(bits, self.dtype))
        return count, total

    def _has_nan(self, low: int, layout: _native.Layout, kind: str, test: tuple[str, int]) -> bool:
        """Whether a NaN is among the elements that count: servers skip them where they look for an
        extreme."""
        # No other test holds for a NaN.
        if self.dtype.kind != "f" or test[0] not in ("all", "!="):
            return False
        numbers = self._direct.count(self._region, low, layout, kind, (">=", _bits(-np.inf, self.dtype)))
        return numbers < layout.nbytes // self.dtype.itemsize

    def _which(self, where: Condition | npt.ArrayLike | None) -> tuple[tuple[str, int], _Picks | None]:
        """Which elements count: those that pass a test at the servers; or, if there are picks, those."""
        every = ("all", 0)
        if where is None:
            return every, None
        if isinstance(where, Condition):
            own = where.column._test(where.test, where.operand) if where.column._same(self) else None
            return (every, self._flat(where.positions(), where.column)) if own is None else (own, None)
        mask = np.broadcast_to(np.asarray(where), self.shape)
        if mask.dtype != np.bool_:
            raise TypeError(f"where is a condition or an array of booleans, not of {mask.dtype}")
        return every, self._flat(np.flatnonzero(mask), self)

    def _here(self, what: str, where: Condition | npt.ArrayLike | None) -> Array | None:
        """The elements that count, fetched, if servers do not compute with them: NumPy does."""
        if self._computes() is not None:
            return None
        picks = self._which(where)[1]
        if picks is not None:
            return cast(Array, self._start_gather(picks, False).result()).ravel()
        values = self._fetched(what).ravel()
        return values[_compare(values, where.test, where.operand)] if isinstance(where, Condition) else values

    def _scans(self, picks: _Picks | None) -> Iterator[tuple[int, _native.Layout]]:
        if picks is None:
            for _, part in self._parts():
                yield part._low(), part._layout()
            return
        flat = picks.offsets.ravel()
        for first in range(0, flat.size, _SCAN_ELEMENTS):
            some = np.ascontiguousarray(flat[first : first + _SCAN_ELEMENTS])
            yield picks.inner._low(), picks.inner._layout().at_each(some)

    def _parts(self) -> Iterator[tuple[int, RemoteArray]]:
        """The array in parts of a bounded number of elements, each with the position of its first."""
        if self.size <= _SCAN_ELEMENTS:
            if self.size:
                yield 0, self
            return
        each = self.size // self.shape[0]
        rows = max(1, _SCAN_ELEMENTS // each)
        for first in range(0, self.shape[0], rows):
            part = self._sliced(slice(first, first + rows))
            for position, smaller in (
                part._parts() if part.shape[0] > 1 or each <= _SCAN_ELEMENTS else part._row()._parts()
            ):
                yield first * each + position, smaller

    def _row(self) -> RemoteArray:
        return self._derived(self._offset, self.shape[1:], self._strides[1:])

    def _in_order(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions in the ascending order that servers know, as positions in this array's own."""
        if positions.size == 0 or not any(stride < 0 for stride in self._strides):
            return positions
        indices = np.unravel_index(positions, self.shape)
        flipped = tuple(
            n - 1 - index if stride < 0 else index
            for index, n, stride in zip(indices, self.shape, self._strides, strict=True)
        )
        return np.sort(np.ravel_multi_index(flipped, self.shape)).astype(np.int64)

    def _sliced(self, rows: slice) -> RemoteArray:
        start, stop, step = rows.indices(self.shape[0])
        count = len(range(start, stop, step))
        strides = (self._strides[0] * step, *self._strides[1:])
        return self._derived(self._offset + start * self._strides[0], (count, *self.shape[1:]), strides)

    def _derived(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> RemoteArray:
        part = RemoteArray(self._direct, self._region, offset, shape, strides, self.dtype, self.name)
        part._keeps, part._about = self._keeps, self._about
        return part

    def _same(self, other: RemoteArray) -> bool:
        return (self._region is other._region and self._offset == other._offset and self.shape == other.shape
                and self._strides == other._strides and self.dtype == other.dtype)  # fmt: skip

    def _computes(self) -> str | None:
        """What servers call the dtype, if they compute with it where it lies."""
        kind = _kind(self.dtype)
        aligned = not any(n % self.dtype.itemsize for n in (self._offset, *self._strides))
        return kind if aligned else None

    def _test(self, test: str, operand: Any) -> tuple[str, int] | None:
        """The condition as servers know it; none if the operand is not exactly a number of this dtype."""
        scalar = np.asarray(operand)
        if scalar.ndim != 0:
            raise TypeError("a condition at the servers compares with one number")
        if _kind(self.dtype) is None:
            return None
        if scalar.dtype.kind not in "iufb":
            raise TypeError("a condition at the servers compares with one number")
        if self.dtype.kind in "iu" and scalar.dtype.kind == "f" and not abs(scalar) < 2**53:
            # NumPy compares both as floats, which are not exact there.
            return None
        with np.errstate(all="ignore"):
            try:
                cast_to = scalar.astype(self.dtype)
            except (OverflowError, ValueError):
                return None
        exact = bool(cast_to == scalar) or (self.dtype.kind == "f" and bool(np.isnan(scalar)))
        return (test, _bits(operand, self.dtype)) if exact else None

    def _fetched(self, what: str) -> Array:
        _warn_once(f"servers do not {what} {self.dtype} as it lies there: the array is fetched")
        return cast(Array, self[...])

    def _flat(self, positions: npt.NDArray[np.int64], of: RemoteArray) -> _Picks:
        """The elements at these positions of a column of the same shape."""
        if of.shape != self.shape:
            raise ValueError(f"a condition on shape {of.shape} does not fit an array of shape {self.shape}")
        offsets = np.zeros(positions.shape, np.int64)
        if self.shape:
            for index, stride in zip(np.unravel_index(positions, self.shape), self._strides, strict=True):
                offsets += index.astype(np.int64) * stride
        inner = self._derived(self._offset, (), ())
        return _Picks(offsets, inner, positions.shape)

    def _low(self) -> int:
        """Its lowest byte."""
        return self._offset + sum(
            stride * (n - 1) for n, stride in zip(self.shape, self._strides, strict=True) if stride < 0
        )

    def _flips(self) -> tuple[Any, ...]:
        """Turns what lies there in ascending order into the order asked for, and back."""
        # With "..." an array without dimensions stays one; a scalar has no byte order, and no length.
        return (..., *(slice(None, None, -1) if stride < 0 else slice(None) for stride in self._strides))

    def _layout(self) -> _native.Layout:
        dims = [(n, abs(stride)) for n, stride in zip(self.shape, self._strides, strict=True)]
        inner = self.dtype.itemsize
        while dims and dims[-1][1] == inner:
            inner *= dims.pop()[0]
        return _native.Layout.strided(inner, dims)

    def _resolve(self, key: Any) -> tuple[RemoteArray, _Picks | None, bool]:
        """What a key selects: a view; or, for index arrays and masks, picks. The last: whether it is one
        element, not an array."""
        entries = _entries(key, self.ndim)
        if any(isinstance(entry, np.ndarray) for entry in entries):
            picks = _picks(self, entries)
            return self, picks, picks.shape == ()
        view = _basic(self, entries)
        return view, None, view.shape == () and not _has_dots(key)


class _At:
    def __init__(self, array: RemoteArray) -> None:
        self._array = array

    def __getitem__(self, key: Any) -> RemoteArray:
        view, picks, _ = self._array._resolve(key)
        if picks is not None:
            raise IndexError(
                "a part at the servers is given by slices and numbers; index arrays fetch: t[...]"
            )
        return view


class _Picks:
    """Elements at places of their own: `inner` at each of the offsets."""

    def __init__(self, offsets: npt.NDArray[np.int64], inner: RemoteArray, shape: tuple[int, ...]) -> None:
        self.offsets = offsets
        self.inner = inner
        self.shape = shape

    @property
    def size(self) -> int:
        return self.offsets.size * self.inner.size


def _has_dots(key: Any) -> bool:
    return any(word is ... for word in key) if isinstance(key, tuple) else key is ...


def _entries(key: Any, ndim: int) -> list[Any]:
    """A key as one entry a dimension: a number, a slice or an array of numbers; and None for each new
    dimension."""
    words = list(key) if isinstance(key, tuple) else [key]
    plain: list[Any] = []
    for word in words:
        if word is None or word is ... or isinstance(word, slice):
            plain.append(word)
        elif isinstance(word, (bool, np.bool_)):
            raise IndexError("a boolean does not select elements; give a mask of the array's shape")
        elif isinstance(word, (int, np.integer)):
            plain.append(int(word))
        elif isinstance(word, Condition):
            shape = word.column.shape
            plain += [index.astype(np.int64) for index in np.unravel_index(word.positions(), shape)]
        else:
            array = np.asarray(word)
            if array.size == 0 and not isinstance(word, np.ndarray):
                array = array.astype(np.int64)
            if array.dtype == np.bool_:
                plain.append(array)
            elif array.dtype.kind in "iu":
                plain.append(array.astype(np.int64))
            else:
                raise IndexError(
                    f"elements are selected by integers, slices, None, ... and masks, not by {array.dtype}"
                )
    taken = sum(
        word.ndim if isinstance(word, np.ndarray) and word.dtype == np.bool_ else 1
        for word in plain
        if word is not None and word is not ...
    )
    rest = ndim - taken
    if rest < 0:
        raise IndexError(f"too many indices: the array has {ndim} dimensions, {taken} are given")
    dots = [at for at, word in enumerate(plain) if word is ...]
    if len(dots) > 1:
        raise IndexError("a key has ... once at most")
    at = dots[0] if dots else len(plain)
    return plain[:at] + [slice(None)] * rest + plain[at + 1 :]


def _bounded(index: int, size: int, axis: int) -> int:
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for axis {axis} with size {size}")
    return index % size


def _basic(array: RemoteArray, entries: list[Any]) -> RemoteArray:
    offset, shape, strides, axis = array._offset, [], [], 0
    for entry in entries:
        if entry is None:
            shape.append(1)
            strides.append(array.dtype.itemsize)
            continue
        size, stride = array.shape[axis], array._strides[axis]
        if isinstance(entry, int):
            offset += _bounded(entry, size, axis) * stride
        else:
            start, stop, step = entry.indices(size)
            count = len(range(start, stop, step))
            offset += start * stride if count else 0
            shape.append(count)
            strides.append(stride * step)
        axis += 1
    return array._derived(offset, tuple(shape), tuple(strides))


def _picks(array: RemoteArray, entries: list[Any]) -> _Picks:
    # Slices at the end stay as they are: a whole row is one place.
    split = len(entries)
    while isinstance(entries[split - 1], slice):
        split -= 1
    trailing = entries[split:]
    leading_axes = array.ndim - len(trailing)
    rest = array._derived(array._offset, array.shape[leading_axes:], array._strides[leading_axes:])
    inner = _basic(rest, trailing)
    # NumPy itself says what the others select, on a lattice as large as what is selected, of which nothing
    # but its places along each dimension is there.
    contents: list[Array] = []
    key: list[Any] = []
    axis = 0
    for entry in entries[:split]:
        if entry is None:
            key.append(None)
            continue
        if isinstance(entry, np.ndarray) and entry.dtype == np.bool_:
            sizes = array.shape[axis : axis + entry.ndim]
            if entry.shape != sizes:
                raise IndexError(f"a mask of shape {entry.shape} does not fit dimensions {sizes}")
            for index in np.nonzero(entry):
                contents.append(index.astype(np.int64) * array._strides[axis])
                key.append(np.arange(index.size))
                axis += 1
            continue
        size, stride = array.shape[axis], array._strides[axis]
        if isinstance(entry, int):
            contents.append(np.array([_bounded(entry, size, axis) * stride], np.int64))
            key.append(0)
        elif isinstance(entry, slice):
            contents.append(np.arange(*entry.indices(size), dtype=np.int64) * stride)
            key.append(slice(None))
        else:
            if entry.size and not (-size <= int(entry.min()) and int(entry.max()) < size):
                raise IndexError(
                    f"an index of {int(entry.min())} to {int(entry.max())} is out of bounds for axis {axis} with size {size}"
                )
            contents.append((entry.ravel() % max(size, 1)) * stride)
            key.append(np.arange(entry.size).reshape(entry.shape))
        axis += 1
    lattice = tuple(content.size for content in contents)
    offsets: Any = 0
    for at, content in enumerate(contents):
        along = content.reshape([-1 if axis == at else 1 for axis in range(len(contents))])
        offsets = offsets + np.broadcast_to(along, lattice)[tuple(key)]
    places = np.asarray(offsets, np.int64)
    return _Picks(places, inner, places.shape + inner.shape)


def _broadcast(value: npt.ArrayLike, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    plain = not isinstance(value, (np.ndarray, np.generic))
    # Tuples are records, as with NumPy.
    source = np.asarray(value, dtype) if plain and dtype.kind == "V" else np.asarray(value)
    if plain and source.dtype.kind in "iu" and dtype.kind in "iu" and source.size:
        # As NumPy, which lets arrays alone wrap.
        bounds = np.iinfo(dtype)
        for number in (int(source.min()), int(source.max())):
            if not bounds.min <= number <= bounds.max:
                raise OverflowError(f"{number} is out of bounds for {dtype}")
    if not np.can_cast(source.dtype, dtype, "same_kind") and not (
        source.dtype.kind in "iub" and dtype.kind in "iuf"
    ):
        raise TypeError(
            f"{source.dtype} does not become {dtype} without saying so: use .astype({str(dtype)!r})"
        )
    # As NumPy: dimensions of 1 in front are dropped.
    while source.ndim > len(shape) and source.shape[0] == 1:
        source = source[0]
    return np.broadcast_to(source.astype(dtype, copy=False), shape)


def _pieces(view: RemoteArray, source: Array) -> Iterator[tuple[RemoteArray, Array]]:
    """A view and its values in pieces that are copied one by one."""
    if view.size == 0:
        return
    if view.nbytes <= _PIECE_BYTES or not view.shape:
        yield view, source
        return
    rows = _PIECE_BYTES * view.shape[0] // view.nbytes
    if rows == 0:
        for row in range(view.shape[0]):
            yield from _pieces(view._sliced(slice(row, row + 1))._row(), source[row])
        return
    for first in range(0, view.shape[0], rows):
        yield view._sliced(slice(first, first + rows)), source[first : first + rows]


def _as_bytes(values: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _settle(step: _native.Pending) -> None:
    if step.take() is None:
        raise Error("an operation was waited for and has not ended")

"""Arrays at the servers, with NumPy's habits: slices, index arrays and masks become layouts that the servers
execute.

Only the elements that are asked for travel. Slices become nested strides, with a dense innermost run; index
arrays and masks become lists of places, sorted and without repetitions, and what was repeated is repeated
here. DIMMnet-3 (Tanabe et al.) has such commands at the memory; MPI has the layouts' terms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from rampool import _about, _names, _native
from rampool._duck import Duck, fetched, phantom, placed
from rampool._errors import Error, Timeout
from rampool._lazy import Condition, settle, wrapped

__all__ = ["Pending", "RemoteArray", "computes_with", "contiguous_strides"]

Array = npt.NDArray[Any]

# One request's worth of what is copied on its way out, and how many are under way at once.
_PIECE_BYTES = 8 << 20
_PIECES = 4
# Elements of one scan: an interruption waits for one.
_SCAN_ELEMENTS = 1 << 24


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


def computes_with(dtype: np.dtype[Any]) -> bool:
    """Whether servers compute with such elements."""
    return _kind(dtype) is not None


def _bits(value: Any, dtype: np.dtype[Any]) -> int:
    """The bits of an element, in the lowest bytes."""
    return int.from_bytes(np.asarray(value).astype(dtype).tobytes(), "little")


def _from_bits(bits: int, dtype: np.dtype[Any]) -> Any:
    return np.frombuffer(bits.to_bytes(8, "little")[: dtype.itemsize], dtype)[0]


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


class RemoteArray(Duck):
    """An array, or a part of one, that lies at memory servers. Made by :meth:`rampool.Pool.remote`.

    Keys mean what they mean in NumPy: what is a view there (slices, numbers for some dimensions, ``...``,
    ``None``, a field's name) is a view at the servers, and nothing travels; what is a copy there (index
    arrays, masks) is fetched, and so is one element. ``np.asarray(t)`` fetches. ``t[key] = values`` writes.
    Writes to the same elements take effect in the order of the calls.

    NumPy's operators and functions take it. What servers work out, they do: sums, least and greatest
    elements, counts, ``t += 1``, and sums of ``t * 2 + 1``. Else the array is fetched, and a
    :class:`rampool.FetchWarning` says so once.

    >>> pool = connect(SERVERS, memory="16M", local="1M")
    >>> t = pool.remote("numbers", (1000, 4), "i8")
    >>> t[:, 0] = range(1000)
    >>> t[::-400, 0].tolist()
    [999, 599, 199]
    >>> t[[5, 5, 7], 0]
    array([5, 5, 7])
    >>> t[:, 1] += 7                        # at the servers
    >>> t.sum(axis=0).tolist()
    [499500, 7000, 0, 0]
    >>> int((t[:, 0] * 2 + 1).max())        # so is this
    1999
    >>> t.add_at(([5, 5], 0), 10)           # both count, as with np.add.at
    >>> int(t[5, 0])
    25
    >>> int(t[:, 0].max(where=t[:, 0] < 50))
    49
    >>> pool.close()
    """

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
        # What the region is called at the servers, once somebody asked.
        self._called: list[str] = []
        # Where others read what it is.
        self._about: _native.DirectRegion | None = None
        self.shape = shape
        """Its dimensions."""
        self.dtype = dtype
        """What its elements are."""
        self.name = name
        """The name that others open it by, if it has one."""

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<rampool.RemoteArray{name}, shape {self.shape}, dtype {self.dtype}>"

    def __reduce__(self) -> Any:
        from rampool._pool import reopened

        pool = self._keeps
        if pool is None:
            raise TypeError("this array's pool is gone: keep the pool, and pickle then")
        place = (self._offset, self.shape, self._strides, self.dtype, self.name)
        return reopened, (pool, self._direct.ticket(self._region), place)

    # --- reading -------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        place = self._place(key)
        if place is not None:
            taken = self._direct.get_bytes(self._region, place, self.dtype.itemsize)
            return np.ndarray((), self.dtype, taken)[()]
        if isinstance(key, str) or isinstance(key, list) and key and isinstance(key[0], str):
            return self._viewed(lambda array: array[key])
        view, picks, scalar = self._resolve(key)
        return self.start_get(key).result() if picks is not None or scalar else view

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
            lies = view._lies(shape)

            def finish(taken: list[_native.Bytes]) -> Any:
                array = np.ndarray(lies, self.dtype, buffer=memoryview(taken[0]))
                return _scalar(array) if scalar else view._as_asked(array)

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
        each = (flat.size, *inner._lies(inner.shape))

        def finish(taken: list[_native.Bytes]) -> Any:
            array = inner._as_asked(np.ndarray(each, self.dtype, buffer=memoryview(taken[0])))
            if again is not None:
                array = array[again.ravel()]
            array = array.reshape(shape)
            return _scalar(array) if scalar else array

        return Pending(self._direct, [step], finish)

    # --- writing -------------------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: npt.ArrayLike) -> None:
        self.start_put(key, value).result()

    def start_put(self, key: Any, value: npt.ArrayLike) -> Pending:
        """Begins ``t[key] = value``. The values are copied: they may change at once. Where a key selects an
        element twice, the last value stays."""
        if isinstance(key, str):
            return self._viewed(lambda array: array[key]).start_put(..., value)
        view, picks, _ = self._resolve(key)
        if picks is None and isinstance(value, RemoteArray) and value._same(view):
            # The end of `t[key] += 1`, which has happened.
            return Pending(self._direct, [], lambda _: None)
        source = _broadcast(value, view.shape if picks is None else picks.shape, self.dtype)
        settle(view)
        if _has_holes(self.dtype):
            return self._put_fields(key, source)
        if picks is None:
            steps: list[_native.Pending] = []
            for part, values in _pieces(view, source):
                if len(steps) >= _PIECES:
                    # Before its turn, so that no more than a few pieces are held here.
                    _settle(steps[-_PIECES])
                layout = part._layout()
                steps.append(
                    self._direct.start_put(
                        self._region,
                        part._low(),
                        layout,
                        _as_bytes(part._as_it_lies(values)),
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
        rows = picks.inner._as_it_lies(rows)
        layout = picks.inner._layout().at_each(np.ascontiguousarray(flat))
        step = self._direct.start_put(self._region, picks.inner._low(), layout, _as_bytes(rows))
        return Pending(self._direct, [step], lambda _: None)

    def view(self, dtype: npt.DTypeLike | None = None) -> Self:
        """The same bytes as another dtype, as a view at the servers."""
        return self._viewed(lambda array: array if dtype is None else array.view(dtype))

    def _put_fields(self, key: Any, source: Array) -> Pending:
        """Field by field: what lies in between is not this array's, or nobody's."""
        names = self.dtype.names or ()
        puts = [
            self._viewed(lambda a, name=name: a[name]).start_put(key, source[name])  # type: ignore[misc]
            for name in names
        ]
        return Pending(self._direct, [step for put in puts for step in put._steps], lambda _: None)

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
        settle(view)
        kind = self._computes()
        if kind is None:
            old = self.start_get(key).result()
            fetched(
                f"an update of {self.dtype}, which is not atomic then,",
                old.nbytes,
                self._about_it(),
            )
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
            view._accumulate(how, source)
            return
        rows = picks.inner._as_it_lies(source.reshape((picks.offsets.size, *picks.inner.shape)))
        layout = picks.inner._layout().at_each(np.ascontiguousarray(picks.offsets.ravel()))
        self._direct.accumulate(self._region, picks.inner._low(), layout, kind, how, _as_bytes(rows))

    def _accumulate(self, how: str, operand: Array) -> None:
        """Updates every element of this view at its server."""
        kind = self._computes()
        assert kind is not None, "asked before"
        settle(self)
        for part, values in _pieces(self, np.broadcast_to(operand, self.shape)):
            data = _as_bytes(part._as_it_lies(values))
            self._direct.accumulate(self._region, part._low(), part._layout(), kind, how, data)

    def fetch_add(self, key: Any, value: Any) -> Any:
        """Adds to one element at its server, and gives what it was before."""
        place, kind = self._element(key)
        operand = _bits(_broadcast(value, (), self.dtype), self.dtype)
        return _from_bits(self._direct.fetch_op(self._region, place, kind, "add", operand), self.dtype)

    def compare_exchange(self, key: Any, expected: Any, new: Any) -> Any:
        """Writes ``new`` to one element if it is ``expected``, bit by bit, at its server; gives what it was
        before."""
        place, kind = self._element(key)
        bits = [_bits(_broadcast(value, (), self.dtype), self.dtype) for value in (expected, new)]
        before = self._direct.compare_exchange(self._region, place, kind, *bits)
        return _from_bits(before, self.dtype)

    def _element(self, key: Any) -> tuple[int, str]:
        view, picks, _ = self._resolve(key)
        settle(view)
        kind = self._computes()
        if picks is not None or view.shape != ():
            raise IndexError("one element is updated: give one number for each dimension")
        if kind is None:
            raise TypeError(
                f"servers compute with i4, u4, i8, u8, f4 and f8, aligned and native, not with {self.dtype}"
            )
        return view._offset, kind

    # --- computing at the servers --------------------------------------------------------------------------

    def count(self, where: Condition | npt.ArrayLike | None = None) -> int:
        """How many elements there are, or for how many a condition holds, counted at the servers."""
        if where is None:
            return self.size
        if not isinstance(where, Condition) or where._settled is not None:
            mask = np.asarray(where)
            if mask.dtype != np.bool_:
                raise TypeError(f"where is a condition or an array of booleans, not of {mask.dtype}")
            return int(np.count_nonzero(np.broadcast_to(mask, self.shape)))
        count = self._counted(where)
        return where.positions().size if count is None else count

    def group_by(self, keys: RemoteArray, where: Condition | npt.ArrayLike | None = None) -> Array:
        """For each key, how many elements of this column have it, and their sum, least and greatest: added up
        at the servers.

        Args:
            keys: a column of integers of the same length, at the same servers: the key of each element.
            where: a condition on a column of the same length, or an array of booleans.

        Returns:
            An array of records with the fields ``key``, ``count``, ``sum``, ``min`` and ``max``, by ascending
            keys. Sums are as :meth:`sum` says; a NaN is no least or greatest where there is another number.

        Raises:
            TypeError: servers do not compute with such columns.
            ValueError: their lengths differ.
            Error: more than 2**20 different keys in 2**24 elements.
        """
        kind, by = self._computes(), keys._computes()
        if kind is None or by is None or keys.dtype.kind == "f":
            raise TypeError(f"servers do not group {self.dtype} by {keys.dtype}; np.asarray fetches both")
        if self.ndim != 1 or self.shape != keys.shape:
            raise ValueError(f"columns have one dimension and one length, not {self.shape} and {keys.shape}")
        if self._direct is not keys._direct or min(self._strides[0], keys._strides[0]) <= 0:
            raise ValueError("the two columns lie in one pool, and neither backwards")
        own, picks = self._which(where)
        same = None if picks is None else keys._flat((picks.offsets // self._strides[0]).ravel(), keys)
        wide = np.dtype(self.dtype.kind + "8")
        found: dict[int, list[Any]] = {}
        for at, (low, layout) in zip(keys._scans(same), self._scans(picks), strict=True):
            column = (self._region, low, layout, kind)
            for key, count, total, least, greatest in self._direct.group(
                (keys._region, *at, by), column, own
            ):
                ends = _from_bits(least, self.dtype), _from_bits(greatest, self.dtype)
                group = found.setdefault(key, [0, 0, *ends])
                group[0], group[1] = group[0] + count, group[1] + total
                group[2], group[3] = np.fmin(group[2], ends[0]), np.fmax(group[3], ends[1])
        fields = [
            ("key", keys.dtype),
            ("count", "u8"),
            ("sum", wide),
            ("min", self.dtype),
            ("max", self.dtype),
        ]
        result = np.empty(len(found), fields)
        for row, key in enumerate(sorted(found)):
            count, total, least, greatest = found[key]
            result[row] = (
                key,
                count,
                wrapped(total, wide) if wide.kind in "iu" else total,
                least,
                greatest,
            )
        return result

    def free(self) -> None:
        """Frees the whole array at its servers, for every member of the lease."""
        if self.name is not None:
            _names.remove(self._direct, self.name)
            if self._about is None:
                self._about = _about.place(self._direct, self._region)
        self._direct.free(self._region)
        if self._about is not None:
            self._direct.free(self._about)

    # --- under the hood ------------------------------------------------------------------------------------

    def _values(self) -> Array:
        return cast(Array, self.start_get(...).result())

    def _viewed(self, view: Callable[[Array], Array]) -> Self:
        offset, shape, strides, dtype = placed(view(self._phantom()))
        part = self._derived(offset if 0 not in shape else self._offset, shape, strides)
        part.dtype = dtype
        return part

    def _phantom(self) -> Array:
        return phantom(self._offset, self.shape, self._strides, self.dtype)

    def _whole(self) -> str:
        """What the region is called at the servers."""
        if not self._called:
            self._called.append(_about.called(self._direct, self._region))
        return self._called[0]

    def _overlaps(self, other: RemoteArray) -> bool:
        return self._whole() == other._whole() and np.may_share_memory(self._phantom(), other._phantom())

    def _about_it(self) -> str:
        return repr(self.name) if self.name else f"an array of {self.dtype}"

    def _check_writable(self) -> None:
        """It is."""

    def _total(self, what: str, dtype: np.dtype[Any], where: Any) -> Array | None:
        if self._computes() is None:
            return None
        match what:
            case "min" | "max":
                return self._extreme(what == "max", where)
            case "any" | "all" if where is None:
                count = self._counted(("!=", 0)) or 0
                return np.asarray([count > 0 if what == "any" else count == self.size])
            case "sum" | "mean":
                return self._sum(what, dtype, where)
        return None

    def _sum(self, what: str, dtype: np.dtype[Any], where: Any) -> Array | None:
        whole = self.dtype.kind in "iu"
        # NumPy casts each element: of floats to narrower ones, and to whole numbers, that is another sum.
        if dtype.kind in "iu" and (not whole or what == "mean") or dtype.kind not in "iuf":
            return None
        if dtype.kind == "f" and (
            dtype.itemsize not in (4, 8) or not whole and dtype.itemsize < self.dtype.itemsize
        ):
            return None
        found = self._count_and_sum(where)
        if found is None:
            return None
        count, total = found
        if dtype.kind in "iu":
            return np.asarray([wrapped(int(total), dtype)])
        if what == "mean":
            return np.asarray([total / count], dtype) if count else np.empty(0, dtype)
        with np.errstate(over="ignore"):
            return np.asarray([total]).astype(dtype)

    def _count_and_sum(self, where: Any) -> tuple[int, int | float] | None:
        """How many elements count, and what they add up to: exactly, or in double precision. None: servers
        cannot say."""
        kind = self._computes()
        if kind is None:
            return None
        own, picks = self._which(where)
        count, total = 0, 0 if self.dtype.kind in "iu" else 0.0
        for low, layout in self._scans(picks):
            some, value = self._direct.sum(self._region, low, layout, kind, own)
            count, total = count + some, total + value
        return count, total

    def _counted(self, where: Condition | tuple[str, Any]) -> int | None:
        """For how many elements a condition holds. None: servers cannot say."""
        if isinstance(where, Condition) and not where.column._same(self):
            if where.shape != self.shape:
                raise ValueError(
                    f"a condition on shape {where.shape} does not fit an array of shape {self.shape}"
                )
            return where.column._counted(where)
        kind = self._computes()
        test = self._test(*((where.test, where.operand) if isinstance(where, Condition) else where))
        if kind is None or test is None:
            return None
        return sum(
            self._direct.count(self._region, low, layout, kind, test) for low, layout in self._scans(None)
        )

    def _selected(self, test: str, operand: Any) -> npt.NDArray[np.int64] | None:
        """The positions where a condition holds. None: servers cannot say."""
        bits, kind = self._test(test, operand), self._computes()
        if bits is None or kind is None:
            return None
        found = []
        for first, part in self._parts():
            taken = part._direct.select(part._region, part._low(), part._layout(), kind, bits)
            found.append(part._in_order(np.frombuffer(memoryview(taken), np.int64)) + first)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _ends(self, where: Any) -> Array | None:
        """The least and the greatest element that count; empty if none does. None: servers cannot say."""
        if self._computes() is None:
            return None
        least = self._extreme(False, where)
        greatest = self._extreme(True, where)
        return least if least is None or greatest is None or least.size == 0 else np.append(least, greatest)

    def _extreme(self, greatest: bool, where: Any) -> Array | None:
        kind = self._computes()
        if kind is None:
            return None
        own, picks = self._which(where)
        found = []
        for low, layout in self._scans(picks):
            if self._has_nan(low, layout, kind, own):
                return np.asarray([np.nan], self.dtype)
            bits = self._direct.extreme(self._region, low, layout, kind, own, greatest)
            if bits is not None:
                found.append(_from_bits(bits, self.dtype))
        ends = np.asarray(found, self.dtype)
        return ends if ends.size == 0 else np.asarray([ends.max() if greatest else ends.min()])

    def _has_nan(self, low: int, layout: _native.Layout, kind: str, test: tuple[str, int]) -> bool:
        """Whether a NaN is among the elements that count: servers skip them where they look for an
        extreme."""
        # No other test holds for a NaN.
        if self.dtype.kind != "f" or test[0] not in ("all", "!="):
            return False
        numbers = self._direct.count(self._region, low, layout, kind, (">=", _bits(-np.inf, self.dtype)))
        return numbers < layout.nbytes // self.dtype.itemsize

    def _which(self, where: Condition | Array | None) -> tuple[tuple[str, int], _Picks | None]:
        """Which elements count: those that pass a test at the servers; or, if there are picks, those."""
        every = ("all", 0)
        if where is None:
            return every, None
        if isinstance(where, Condition):
            own = where.column._test(where.test, where.operand) if where.column._same(self) else None
            return (every, self._flat(where.positions(), where.column)) if own is None else (own, None)
        return every, self._flat(np.flatnonzero(where), self)

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
        order = self._order()
        plain = order == tuple(range(self.ndim)) and not any(stride < 0 for stride in self._strides)
        if positions.size == 0 or plain:
            return positions
        indices: list[Any] = [None] * self.ndim
        for axis, index in zip(order, np.unravel_index(positions, self._lies(self.shape)), strict=True):
            indices[axis] = self.shape[axis] - 1 - index if self._strides[axis] < 0 else index
        return np.sort(np.ravel_multi_index(tuple(indices), self.shape)).astype(np.int64)

    def _sliced(self, rows: slice) -> RemoteArray:
        start, stop, step = rows.indices(self.shape[0])
        count = len(range(start, stop, step))
        strides = (self._strides[0] * step, *self._strides[1:])
        return self._derived(self._offset + start * self._strides[0], (count, *self.shape[1:]), strides)

    def _derived(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Self:
        part = type(self)(self._direct, self._region, offset, shape, strides, self.dtype, self.name)
        part._keeps, part._about, part._called = self._keeps, self._about, self._called
        return part

    def _same(self, other: RemoteArray) -> bool:
        same = self._region is other._region or self._whole() == other._whole()
        return (same and self._offset == other._offset and self.shape == other.shape
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

    def _order(self) -> tuple[int, ...]:
        """Its dimensions as they lie, the densest last."""
        strides = [abs(stride) for stride in self._strides]
        if all(a >= b for a, b in zip(strides, strides[1:], strict=False)):
            return tuple(range(self.ndim))
        return tuple(sorted(range(self.ndim), key=lambda axis: -strides[axis]))

    def _lies(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape with its dimensions as they lie."""
        return tuple(shape[axis] for axis in self._order())

    def _flips(self) -> tuple[Any, ...]:
        # With "..." an array without dimensions stays one; a scalar has no byte order, and no length.
        return (
            ...,
            *(slice(None, None, -1) if stride < 0 else slice(None) for stride in self._strides),
        )

    def _as_asked(self, array: Array) -> Array:
        """Elements as they lie there, turned into the order asked for, in the last dimensions."""
        front = array.ndim - self.ndim
        back = np.argsort(self._order()) + front
        turned: Array = array.transpose(*range(front), *back.tolist())[self._flips()]
        return turned

    def _as_it_lies(self, array: Array) -> Array:
        """The other way."""
        front = array.ndim - self.ndim
        flipped: Array = array[self._flips()]
        return flipped.transpose(*range(front), *(axis + front for axis in self._order()))

    def _layout(self) -> _native.Layout:
        dims = [(self.shape[axis], abs(self._strides[axis])) for axis in self._order()]
        inner = self.dtype.itemsize
        while dims and (dims[-1][1] == inner or dims[-1][0] == 1):
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
            plain.append(np.asarray(word))
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
            if entry.ndim == 0:
                key.append(entry)
                continue
            if any(n not in (size, 0) for n, size in zip(entry.shape, sizes, strict=True)):
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
                    f"an index of {int(entry.min())} to {int(entry.max())} is out of bounds for axis {axis} "
                    f"with size {size}"
                )
            contents.append((entry.ravel() % max(size, 1)) * stride)
            key.append(np.arange(entry.size).reshape(entry.shape))
        axis += 1
    lattice = tuple(content.size for content in contents)
    offsets: Any = np.zeros(lattice, np.int64)[tuple(key)]
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


def _scalar(array: Array) -> Any:
    """One element. A record is not a view of one, as NumPy's is: it cannot be changed."""
    array.flags.writeable = False
    return array[()]


def _has_holes(dtype: np.dtype[Any]) -> bool:
    """Whether a record has bytes that are no field's: those of another field, in a view of some."""
    fields = dtype.fields
    return fields is not None and sum(field[0].itemsize for field in fields.values()) < dtype.itemsize


def _as_bytes(values: Array) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _settle(step: _native.Pending) -> None:
    if step.take() is None:
        raise Error("an operation was waited for and has not ended")

"""Expressions that servers work out: one array of theirs, changed by numbers; and conditions on one.

They are as NumPy's arrays, which have their values from the moment when they are made: before this process
writes to what one is made of, its values are fetched. What other members write in between, it may see.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt

from rampool._duck import Duck, fetched

if TYPE_CHECKING:
    from rampool._table import RemoteArray

__all__ = ["MIRRORED", "TESTS", "Condition", "Expression", "Lazy", "compare", "settle", "wrapped"]

Array = npt.NDArray[Any]

# What waits to be worked out, by the region that it is made of.
_live: dict[str, dict[int, weakref.ref[Lazy]]] = {}
# What comparisons are called at the servers; and with the operands exchanged.
TESTS: dict[Any, str] = {
    np.equal: "==", np.not_equal: "!=", np.less: "<", np.less_equal: "<=", np.greater: ">",
    np.greater_equal: ">=",
}  # fmt: skip
MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


def settle(array: RemoteArray) -> None:
    """Before elements of this array change."""
    if not _live:
        return
    waiting = _live.get(array._whole(), {})
    for ref in list(waiting.values()):
        lazy = ref()
        if lazy is not None and _overlap(lazy.column, array):
            lazy._settle()


def _overlap(one: RemoteArray, other: RemoteArray) -> bool:
    try:
        return np.shares_memory(one._phantom(), other._phantom(), cast(Any, 10_000))
    except (np.exceptions.TooHardError, ValueError):
        return True


class Lazy(Duck):
    """What is worked out when it is needed."""

    column: RemoteArray

    def _wait(self) -> None:
        """From now on its column must not change before it has its values."""
        self._settled: Array | None = None
        region, key = self.column._whole(), id(self)
        waiting = _live.setdefault(region, {})

        def gone(_: Any) -> None:
            waiting.pop(key, None)
            if not waiting and _live.get(region) is waiting:
                del _live[region]

        waiting[key] = weakref.ref(self, gone)

    def _settle(self) -> None:
        if self._settled is None:
            self._settled = self._worked_out()

    def _worked_out(self) -> Array:
        raise NotImplementedError

    def _of(self, column: RemoteArray) -> Self:
        """The same of another column."""
        raise NotImplementedError

    def _values(self) -> Array:
        return self._worked_out() if self._settled is None else self._settled.copy()

    def _fetches(self) -> int:
        return self.column.nbytes if self._settled is None else 0

    def _about_it(self) -> str:
        return self.column._about_it()

    def _viewed(self, view: Callable[[Array], Array]) -> Self:
        part = self._of(self.column._viewed(view))
        if self._settled is not None:
            part._settled = view(self._settled)
        return part

    def __getitem__(self, key: Any) -> Any:
        if self._settled is not None:
            return self._settled[key]
        part = self.column[key]
        if isinstance(part, Duck):
            return self._of(cast("RemoteArray", part))
        return self._changed(part)

    def _changed(self, elements: Any) -> Any:
        """Its elements from those of the column."""
        raise NotImplementedError

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError(
            "this is worked out from an array at the servers: write to that array, or to np.asarray of this"
        )

    def _check_writable(self) -> None:
        self[...] = None

    def __reduce__(self) -> Any:
        # With its values of now: elsewhere nobody knows when the column changes.
        return np.asarray, (self._values(),)


class Expression(Lazy):
    """A column changed by numbers, such as ``t[:, 3] * 2 + 1``. Made by ``+``, ``-``, ``*`` and ``/`` with a
    number. Its sum, mean, least and greatest element are worked out at the servers; for everything else it is
    fetched."""

    def __init__(self, column: RemoteArray, steps: tuple[Any, ...], dtype: np.dtype[Any]) -> None:
        self.column = column
        # Each a ufunc and its inputs, where None stands for what was before, and its dtype.
        self.steps = steps
        self.dtype = dtype
        self.shape = column.shape
        self._wait()

    def _of(self, column: RemoteArray) -> Self:
        return type(self)(column, self.steps, self.dtype)

    def then(self, ufunc: np.ufunc, inputs: tuple[Any, ...], dtype: np.dtype[Any]) -> Expression:
        """One more step."""
        return Expression(self.column, (*self.steps, (ufunc, inputs, dtype)), dtype)

    def _changed(self, elements: Any) -> Any:
        for ufunc, inputs, _ in self.steps:
            elements = ufunc(*(elements if each is None else each for each in inputs))
        return elements

    def _worked_out(self) -> Array:
        return np.asarray(self._changed(self.column._values()))

    def _total(self, what: str, dtype: np.dtype[Any], where: Any) -> Array | None:
        if what not in ("sum", "mean", "min", "max") or self._settled is not None:
            return None
        if what in ("sum", "mean"):
            return self._sum(what, dtype, where)
        ends = self._ends(where)
        return None if ends is None else ends if ends.size == 0 else np.asarray([getattr(ends, what)()])

    def _sum(self, what: str, dtype: np.dtype[Any], where: Any) -> Array | None:
        # Whole numbers wrap, and so does their sum: only the last bits count.
        wraps = (
            all(step in (self.dtype, dtype) for *_, step in self.steps) and self.dtype == self.column.dtype
        )
        wraps = wraps and self.dtype.kind in "iu" and dtype.kind in "iu" and what == "sum"
        if not (wraps and self.dtype.itemsize == 8) and self._ends(where) is None:
            return None
        found = self.column._count_and_sum(where)
        if found is None:
            return None
        count, total = found
        if isinstance(total, float) and not np.isfinite(total):
            return None
        scale, more = Fraction(1), Fraction(0)
        for ufunc, inputs, kind in self.steps:
            scale, more = _affine(ufunc, inputs, kind, scale, more)
        exact = scale * Fraction(total) + count * more
        if what == "mean":
            return _mean(exact, count, dtype)
        return np.asarray([wrapped(int(exact), dtype) if dtype.kind in "iu" else _rounded(exact, dtype)])

    def _ends(self, where: Any) -> Array | None:
        """The least and the greatest element: steps change them as all in between; none if one of those
        overflows or is no number."""
        ends = self.column._ends(where)
        if ends is None or ends.size == 0:
            return ends
        with np.errstate(all="ignore"):
            exact = [Fraction(int(end)) if ends.dtype.kind in "iu" else end for end in ends]
            for ufunc, inputs, kind in self.steps:
                ends = ufunc(*(ends if each is None else each for each in inputs))
                if kind.kind in "iu":
                    scale, more = _affine(ufunc, inputs, kind, Fraction(1), Fraction(0))
                    exact = [Fraction(end) * scale + more for end in exact]
                    if any(int(end) != value for end, value in zip(ends, exact, strict=True)):
                        return None
                else:
                    exact = list(ends)
        return np.sort(ends) if np.all(np.isfinite(ends)) else None


def _affine(
    ufunc: np.ufunc, inputs: tuple[Any, ...], kind: np.dtype[Any], scale: Fraction, more: Fraction
) -> tuple[Fraction, Fraction]:
    """What a step makes of `scale` times an element and `more`."""
    if ufunc is np.negative:
        return -scale, -more
    if ufunc is np.positive:
        return scale, more
    number = next(each for each in inputs if each is not None)
    by = Fraction(kind.type(number).item())
    if ufunc is np.multiply:
        return scale * by, more * by
    if ufunc is np.true_divide:
        return scale / by, more / by
    if ufunc is np.add:
        return scale, more + by
    return (scale, more - by) if inputs[0] is None else (-scale, by - more)


def wrapped(number: int, dtype: np.dtype[Any]) -> Any:
    """The last bits of a whole number."""
    bits = 8 * dtype.itemsize
    unsigned = np.array(number & ((1 << bits) - 1), f"u{dtype.itemsize}")
    return unsigned.view(dtype.newbyteorder("="))[()]


def _rounded(number: Fraction, dtype: np.dtype[Any]) -> Any:
    try:
        return dtype.type(float(number))
    except OverflowError:
        return dtype.type(np.inf if number > 0 else -np.inf)


def _mean(exact: Fraction, count: int, dtype: np.dtype[Any]) -> Array:
    return np.asarray([_rounded(exact / count, dtype)]) if count else np.empty(0, dtype)


class Condition(Lazy):
    """Which elements of a column count, such as ``t[:, 5] > 100``: an array of booleans, for ``where=``, as a
    key, and for :func:`numpy.count_nonzero`, ``any`` and ``all``, which servers work out."""

    def __init__(self, column: RemoteArray, test: str, operand: Any) -> None:
        self.column = column
        self.test = test
        self.operand = operand
        self.dtype = np.dtype(np.bool_)
        self.shape = column.shape
        self._wait()

    def _of(self, column: RemoteArray) -> Self:
        return type(self)(column, self.test, self.operand)

    def _changed(self, elements: Any) -> Any:
        return compare(elements, self.test, self.operand)

    def _worked_out(self) -> Array:
        return np.asarray(self._changed(self.column._values()))

    def _total(self, what: str, dtype: np.dtype[Any], where: Any) -> Array | None:
        if self._settled is not None or where is not None or what not in ("sum", "mean", "any", "all"):
            return None
        count = self.column._counted(self)
        if count is None:
            return None
        match what:
            case "sum" if dtype.kind in "iu":
                return np.asarray([count]).astype(dtype)
            case "mean" if dtype.kind == "f" and dtype.itemsize == 8:
                return np.asarray([count / self.size], dtype) if self.size else np.empty(0, dtype)
            case "any":
                return np.asarray([count > 0])
            case "all":
                return np.asarray([count == self.size])
        return None

    def positions(self) -> npt.NDArray[np.int64]:
        """The positions of the elements that count, in C order of the column; found at the servers where they
        can."""
        if self._settled is not None:
            return np.flatnonzero(self._settled).astype(np.int64)
        found = self.column._selected(self.test, self.operand)
        if found is None:
            fetched(f"{self.test} of {self.column.dtype}", self.column.nbytes, self._about_it())
            return np.flatnonzero(self._worked_out()).astype(np.int64)
        return found


def compare(values: Any, test: str, operand: Any) -> Any:
    """NumPy's comparison.

    Raises:
        TypeError: NumPy's says nothing about each element.
    """
    operations: dict[str, Callable[[Any, Any], Any]] = {
        "==": operator.eq,
        "!=": operator.ne,
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
    }
    found = operations[test](values, operand)
    if (
        not isinstance(found, (np.ndarray, np.bool_))
        or found.dtype != np.bool_
        or found.shape != values.shape
    ):
        raise TypeError(f"{values.dtype} is not compared with {operand!r}")
    return found

"""What arrays at the servers have of NumPy's arrays: operators, NumPy's functions and methods.

A ufunc or function is worked out at the servers where they can; else its arrays are fetched, NumPy computes,
and a :class:`rampool.FetchWarning` says so once. What NumPy does by a view is a view at the servers; NumPy
itself says which, on an array of the same strides that has no memory.
"""

from __future__ import annotations

import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self, cast

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from rampool._errors import FetchWarning

__all__ = ["Duck", "call", "fetched", "phantom", "placed", "put_result"]

Array = npt.NDArray[Any]

# Where arrays without memory begin: nothing is read or written there.
_NOWHERE = 1 << 44
_warned: set[str] = set()
_HERE = (os.path.dirname(__file__) + os.sep, os.path.dirname(np.__file__) + os.sep)


def fetched(what: str, nbytes: int, of: str) -> None:
    """Says, once for each kind of it, that NumPy computes here what the servers do not."""
    if what in _warned or nbytes == 0:
        return
    _warned.add(what)
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"{what} is not worked out at the servers: {nbytes} bytes of {of} were fetched for it. "
        "This is said once; np.asarray(array) fetches without a warning",
        FetchWarning,
        stacklevel=level,
    )


class _Phantom:
    def __init__(
        self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.__array_interface__ = {
            "data": (_NOWHERE + offset, False), "shape": shape, "strides": strides,
            "typestr": f"|V{dtype.itemsize}", "version": 3,
        }  # fmt: skip


def phantom(offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array that looks so and has no memory: views of it may be made, its elements may not be touched."""
    array = np.asarray(_Phantom(offset, shape, strides, dtype))
    # Of an array without dimensions the interface's strides are not used, and need not be.
    return array.view(dtype)


def placed(view: Array) -> tuple[int, tuple[int, ...], tuple[int, ...], np.dtype[Any]]:
    """Offset, shape, strides and dtype of a view of an array without memory."""
    return int(view.__array_interface__["data"][0]) - _NOWHERE, view.shape, view.strides, view.dtype


def _by_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """NumPy's function of that name as a method."""

    def method(self: Duck, *words: Any, **named: Any) -> Any:
        return function(self, *words, **named)

    method.__doc__ = f"As :func:`numpy.{function.__name__}`."
    method.__name__ = function.__name__
    return method


class Duck(NDArrayOperatorsMixin):
    """An array that is elsewhere, with NumPy's operators and functions."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    # Not by content, which would have to be fetched.
    __hash__ = object.__hash__
    __array_priority__ = 10.0

    # --- what each kind of array says ----------------------------------------------------------------------

    def _values(self) -> Array:
        """Its elements, fetched: an array of this process's own."""
        raise NotImplementedError

    def _viewed(self, view: Callable[[Array], Array]) -> Self:
        """The part or arrangement of it that `view` makes of an array of its shape."""
        raise NotImplementedError

    def _about_it(self) -> str:
        """What warnings call it."""
        raise NotImplementedError

    def _fetches(self) -> int:
        """How many bytes travel when it is fetched."""
        return self.nbytes

    def _total(self, what: str, dtype: np.dtype[Any], where: Any) -> Array | None:
        """The values, at most one, that NumPy's reduction of them gives this reduction of all elements; found
        at the servers. None: they cannot."""
        return None

    # --- what follows from that ----------------------------------------------------------------------------

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
    def itemsize(self) -> int:
        """How many bytes each element has."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have."""
        return self.size * self.dtype.itemsize

    @property
    def T(self) -> Self:  # noqa: N802
        """Its dimensions in reverse, as a view at the servers."""
        return self._viewed(np.transpose)

    @property
    def mT(self) -> Self:  # noqa: N802
        """The last two dimensions exchanged, as a view at the servers."""
        if self.ndim < 2:
            raise ValueError("matrix transpose needs two dimensions or more")
        return self._viewed(lambda array: np.swapaxes(array, -1, -2))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        rows = max(1, (8 << 20) * len(self) // max(self.nbytes, 1))
        for first in range(0, len(self), rows):
            some = self._viewed(lambda array, at=first: array[at : at + rows])._values()  # type: ignore[misc]
            # A row is a copy: what is written to it would be lost.
            some.flags.writeable = False
            yield from some

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("an array at the servers cannot be used without a copy")
        return np.asarray(self._values(), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **named: Any) -> Any:
        from rampool import _ufuncs

        return _ufuncs.ufunc(ufunc, method, inputs, named)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, words: Sequence[Any], named: dict[str, Any]
    ) -> Any:
        from rampool import _functions

        if not all(issubclass(kind, (Duck, np.ndarray)) for kind in types):
            return NotImplemented
        return _functions.function(function, words, named)

    def _one(self, kind: Callable[[Any], Any]) -> Any:
        if self.size != 1:
            raise TypeError("only an array of one element becomes a Python number")
        return kind(self._values().reshape(())[()])

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(
                "an array of more than one element, or of none, is neither true nor false: use .any() or "
                ".all(), "
                "or give a condition to where="
            )
        return bool(self._one(bool))

    def __int__(self) -> int:
        return int(self._one(int))

    def __float__(self) -> float:
        return float(self._one(float))

    def __complex__(self) -> complex:
        return complex(self._one(complex))

    def __index__(self) -> int:
        if self.shape or self.dtype.kind not in "iu":
            raise TypeError("only an array of one whole number, without dimensions, is an index")
        return int(self._one(operator.index))

    def __eq__(self, other: object) -> Any:
        return self._compared(np.equal, operator.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._compared(np.not_equal, operator.ne, other)

    def _compared(self, ufunc: np.ufunc, compare: Callable[[Any, Any], Any], other: Any) -> Any:
        if getattr(type(other), "__array_ufunc__", ...) is None:
            return NotImplemented
        try:
            return ufunc(self, other)
        except TypeError:
            # Of what no ufunc compares, NumPy's arrays know more: records, and what is never equal.
            fetched(f"{ufunc.__name__} of {self.dtype}", self._fetches(), self._about_it())
            return compare(self._values(), np.asarray(other) if isinstance(other, Duck) else other)

    def __contains__(self, value: object) -> bool:
        return bool(np.any(cast(Any, self) == value))

    def tolist(self) -> Any:
        """Its elements, fetched, as Python's lists and numbers."""
        return self._values().tolist()

    def item(self, *place: Any) -> Any:
        """One element as Python's number: the only one, or that at a place."""
        return self._values().item(*place)

    def copy(self, order: Literal["K", "A", "C", "F"] = "C") -> Array:
        """Its elements, fetched, as an array of this process's own."""
        if sys._getframe(1).f_globals.get("__name__") == "dask.array.core":
            fetched(
                "dask.array.from_array", self._fetches(), f"{self._about_it()} (see rampool.dask.from_array)"
            )
        return self._values().copy(order)

    def astype(
        self,
        dtype: npt.DTypeLike,
        order: Literal["K", "A", "C", "F"] = "K",
        casting: Any = "unsafe",
        subok: bool = True,
        copy: bool = True,
    ) -> Array:
        """Its elements, fetched, as another dtype."""
        return self._values().astype(dtype, order, casting, subok)

    def transpose(self, *axes: Any) -> Self:
        """Its dimensions in another order, as a view at the servers."""
        return self._viewed(lambda array: array.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> Self:
        """Two dimensions exchanged, as a view at the servers."""
        return self._viewed(lambda array: array.swapaxes(axis1, axis2))

    def squeeze(self, axis: Any = None) -> Self:
        """Without dimensions of 1, as a view at the servers."""
        return self._viewed(lambda array: array.squeeze(axis))

    def reshape(self, *shape: Any, order: Any = "C", copy: bool | None = None) -> Any:
        """Another shape of the same elements. As NumPy's it is a view where strides can say it, and else a
        copy: that is fetched."""
        sizes = shape[0] if len(shape) == 1 else shape
        if copy is not True:
            try:
                return self._viewed(lambda array: _reshaped(array, sizes, order))
            except _Copies:
                if copy is False:
                    raise ValueError(f"shape {self.shape} becomes {sizes} by a copy only") from None
            fetched("reshape of a part that is not contiguous", self._fetches(), self._about_it())
        return self._values().reshape(sizes, order=order)

    def ravel(self, order: Any = "C") -> Any:
        """In one dimension; a view where it can be."""
        return self.reshape(-1, order=order)

    def flatten(self, order: Any = "C") -> Array:
        """Its elements, fetched, in one dimension."""
        return self._values().flatten(order)

    def fill(self, value: Any) -> None:
        """Sets every element."""
        cast(Any, self)[...] = value

    @property
    def real(self) -> Any:
        """The real parts, as a view at the servers."""
        return self._viewed(lambda array: array.real) if self.dtype.kind == "c" else self

    @property
    def imag(self) -> Any:
        """The imaginary parts: a view at the servers, or zeroes."""
        return (
            self._viewed(lambda array: array.imag)
            if self.dtype.kind == "c"
            else np.zeros(self.shape, self.dtype)
        )

    # --- reductions ----------------------------------------------------------------------------------------

    def sum(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False, **rest: Any
    ) -> Any:
        """As :meth:`numpy.ndarray.sum`, with ``initial`` and ``where``: worked out at the servers where they
        compute with the dtype, of all elements or of few long rows or columns.

        The value and its type are NumPy's: integers and booleans add up to 64 bits and wrap. Floats may
        differ by rounding: they are added up in double precision there, one after the other, and rounded
        once.

        Args:
            where: a condition on this array or on another of the same shape, or an array of booleans.

        Raises:
            TypeError: such elements have no sum.
        """
        return _reduced(self, "sum", axis, out, keepdims, {"dtype": dtype, **rest})

    def mean(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False, **rest: Any
    ) -> Any:
        """As :meth:`numpy.ndarray.mean`, with ``where``: worked out where :meth:`sum` is; NaN of nothing.

        Raises:
            TypeError: such elements have no mean.
        """
        return _reduced(self, "mean", axis, out, keepdims, {"dtype": dtype, **rest})

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False, **rest: Any) -> Any:
        """As :meth:`numpy.ndarray.min`, with ``initial`` and ``where``: the least element; NaN if one is NaN.

        Raises:
            ValueError: there is none.
            TypeError: such elements have no order.
        """
        return _reduced(self, "min", axis, out, keepdims, rest)

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False, **rest: Any) -> Any:
        """As :meth:`numpy.ndarray.max`, with ``initial`` and ``where``: the greatest element; NaN if one is
        NaN.

        Raises:
            ValueError: there is none.
            TypeError: such elements have no order.
        """
        return _reduced(self, "max", axis, out, keepdims, rest)

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False, **rest: Any) -> Any:
        """Whether an element is true, counted at the servers."""
        return _reduced(self, "any", axis, out, keepdims, rest)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False, **rest: Any) -> Any:
        """Whether every element is true, counted at the servers."""
        return _reduced(self, "all", axis, out, keepdims, rest)

    # What NumPy computes here.
    argmax = _by_numpy(np.argmax)
    argmin = _by_numpy(np.argmin)
    argsort = _by_numpy(np.argsort)
    clip = _by_numpy(np.clip)
    conj = conjugate = _by_numpy(np.conjugate)
    cumprod = _by_numpy(np.cumprod)
    cumsum = _by_numpy(np.cumsum)
    diagonal = _by_numpy(np.diagonal)
    dot = _by_numpy(np.dot)
    nonzero = _by_numpy(np.nonzero)
    prod = _by_numpy(np.prod)
    repeat = _by_numpy(np.repeat)
    round = _by_numpy(np.round)
    searchsorted = _by_numpy(np.searchsorted)
    std = _by_numpy(np.std)
    take = _by_numpy(np.take)
    trace = _by_numpy(np.trace)
    var = _by_numpy(np.var)


def _reduced(array: Duck, what: str, axis: Any, out: Any, keepdims: bool, named: dict[str, Any]) -> Any:
    from rampool import _reduce

    return _reduce.reduced(array, what, axis, out, keepdims, named)


class _Copies(Exception):
    """NumPy would copy."""


def _reshaped(array: Array, shape: Any, order: Any) -> Array:
    """A view of another shape. NumPy's own `reshape` of before 2.1 copies first, and looks then whether it
    had
    to: of an array without memory it must not."""
    if order == "A":
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    if order == "F":
        return _reshaped(array.T, _whole(shape, array.size)[::-1], "C").T
    sizes = _whole(shape, array.size)
    strides = _reshaped_strides(array, sizes)
    return np.lib.stride_tricks.as_strided(array, sizes, strides)


def _whole(shape: Any, size: int) -> tuple[int, ...]:
    """A shape with what -1 stands for."""
    sizes = [operator.index(n) for n in (shape if isinstance(shape, (tuple, list)) else (shape,))]
    rest = math.prod(n for n in sizes if n != -1)
    if sizes.count(-1) == 1 and rest > 0 and size % rest == 0:
        sizes[sizes.index(-1)] = size // rest
    if any(n < 0 for n in sizes) or math.prod(sizes) != size:
        raise ValueError(f"cannot reshape an array of {size} elements into shape {tuple(sizes)}")
    return tuple(sizes)


def _reshaped_strides(array: Array, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the same elements in another shape, in C order: groups of dimensions with as many elements are
    found on both sides, and those of the array must be dense."""
    strides = [array.itemsize] * len(sizes)
    if array.size == 0:
        return tuple(strides)
    old = [(n, stride) for n, stride in zip(array.shape, array.strides, strict=True) if n != 1]
    first, start = 0, 0
    while first < len(old):
        last, stop, have, want = first + 1, start + 1, old[first][0], sizes[start]
        while have != want:
            if want < have:
                want *= sizes[stop]
                stop += 1
            else:
                have *= old[last][0]
                last += 1
        for (_, outer), (n, stride) in zip(old[first : last - 1], old[first + 1 : last], strict=True):
            if outer != n * stride:
                raise _Copies
        stride = old[last - 1][1]
        for at in range(stop - 1, start - 1, -1):
            strides[at] = stride
            stride *= sizes[at]
        first, start = last, stop
    return tuple(strides)


def put_result(result: Any, out: Any, casting: Any = "same_kind") -> Any:
    """NumPy's ``out=``, wherever that lies."""
    if isinstance(out, tuple):
        (out,) = out
    if not isinstance(out, Duck):
        if np.shape(result) != out.shape:
            raise ValueError(f"out has shape {out.shape}, and the result {np.shape(result)}")
        np.copyto(out, result, casting=casting)
        return out
    if np.shape(result) != out.shape:
        raise ValueError(f"out has shape {out.shape}, and the result {np.shape(result)}")
    here = np.empty(out.shape, out.dtype)
    np.copyto(here, result, casting=casting)
    cast(Any, out)[...] = here
    return out


def call(name: str, function: Callable[..., Any], words: Sequence[Any], named: dict[str, Any]) -> Any:
    """Calls NumPy with arrays fetched, and writes back what `out` says."""
    met: list[Duck] = []
    out = named.get("out")
    outs = out if isinstance(out, tuple) else (out,)
    if any(isinstance(each, Duck) for each in outs):
        for each in outs:
            if isinstance(each, Duck):
                cast(Any, each)._check_writable()
        # Elements that a `where` leaves out keep what they are.
        places = [each._values() if isinstance(each, Duck) else each for each in outs]
        rest = {key: value for key, value in named.items() if key != "out"}
        here = _fetched_in(list(words), met), _fetched_in(rest, met)
        function(*here[0], **here[1], out=tuple(places) if isinstance(out, tuple) else places[0])
        for each, place in zip(outs, places, strict=True):
            if isinstance(each, Duck):
                cast(Any, each)[...] = place
        _say(name, [*met, *(each for each in outs if isinstance(each, Duck))])
        return out[0] if isinstance(out, tuple) and len(out) == 1 else out
    result = function(*_fetched_in(list(words), met), **_fetched_in(named, met))
    _say(name, met)
    return result


def _say(name: str, met: list[Duck]) -> None:
    if met:
        names = " and ".join(dict.fromkeys(each._about_it() for each in met))
        fetched(name, sum(each._fetches() for each in met), names)


def _fetched_in(value: Any, met: list[Duck]) -> Any:
    """The same with arrays in place of what lies elsewhere."""
    if isinstance(value, Duck):
        met.append(value)
        array = value._values()
        # A view of a copy: what is written to it would be lost.
        array.flags.writeable = False
        return array
    if type(value) in (list, tuple):
        return type(value)(_fetched_in(each, met) for each in value)
    if type(value) is dict:
        return {key: _fetched_in(each, met) for key, each in value.items()}
    return value

"""ufuncs of arrays at the servers: by a number lazily, in place there, else here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rampool._duck import Duck, call, fetched
from rampool._lazy import MIRRORED, TESTS, Condition, Expression
from rampool._reduce import reduced
from rampool._table import RemoteArray, computes_with

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ufunc"]

Array = npt.NDArray[Any]

_STEPS = {np.add, np.subtract, np.multiply, np.true_divide, np.negative, np.positive}
# What servers do to elements in place.
_UPDATES: dict[Any, str] = {
    np.add: "add", np.subtract: "add", np.minimum: "minimum", np.maximum: "maximum",
    np.bitwise_and: "and", np.bitwise_or: "or", np.bitwise_xor: "xor",
}  # fmt: skip
_REDUCTIONS: dict[Any, str] = {
    np.add: "sum", np.minimum: "min", np.maximum: "max", np.logical_or: "any", np.logical_and: "all",
}  # fmt: skip
# Elements of one piece of an update that is made here.
_PIECE_BYTES = 8 << 20


def ufunc(function: np.ufunc, method: str, inputs: Sequence[Any], named: dict[str, Any]) -> Any:
    """What NumPy asks of an array for each ufunc."""
    outs = named.get("out", ())
    for each in (*inputs, *outs):
        # Another library's array knows better what to do with ours.
        if hasattr(type(each), "__array_ufunc__") and not isinstance(each, (Duck, np.ndarray, np.generic)):
            return NotImplemented
    if method == "__call__":
        if not named:
            lazy = _lazy(function, inputs)
            if lazy is not None:
                return lazy
        if len(outs) == 1 and isinstance(outs[0], Duck):
            return _into(function, inputs, outs[0], named)
        return call(f"np.{function.__name__}", function, inputs, named)
    if method == "at" and isinstance(inputs[0], Duck):
        return _at(function, *inputs)
    if method == "reduce" and function in _REDUCTIONS and isinstance(inputs[0], Duck):
        return _reduce(function, inputs[0], *inputs[1:], **named)
    return call(f"np.{function.__name__}.{method}", getattr(function, method), inputs, named)


def _reduce(
    function: np.ufunc, array: Duck, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: Any = False,
    **rest: Any
) -> Any:  # fmt: skip
    what = _REDUCTIONS[function]
    if dtype is not None and what != "sum":
        return call(
            f"np.{function.__name__}.reduce", function.reduce, (array, axis, dtype, out, keepdims), rest
        )
    out = out[0] if isinstance(out, tuple) else out
    return reduced(array, what, axis, out, keepdims, {"dtype": dtype, **rest})


def _number(value: Any) -> Any:
    """A real number, as NumPy's promotion knows it; none if it is something else."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    return value if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)) else None


def _lazy(function: np.ufunc, inputs: Sequence[Any]) -> Duck | None:
    """A condition, or a column changed by a number; none if it is something else."""
    ours = [each for each in inputs if isinstance(each, Duck)]
    if len(ours) != 1 or not ours[0].shape or not isinstance(ours[0], (RemoteArray, Expression)):
        return None
    column = ours[0]
    if function in TESTS and isinstance(column, RemoteArray):
        return _condition(function, inputs, column)
    if function not in _STEPS or not computes_with(column.dtype):
        return None
    others = [each for each in inputs if not isinstance(each, Duck)]
    if isinstance(column, RemoteArray) and column._computes() is None:
        return None
    if others:
        number = _number(others[0])
        if number is None or isinstance(number, (float, np.floating)) and not np.isfinite(number):
            return None
        if function is np.true_divide and (number == 0 or inputs[0] is not column):
            return None
        others = [number]
    words = tuple(None if each is column else others[0] for each in inputs)
    # NumPy says the type, and what makes no sense.
    dtype = function(*(np.ones(1, column.dtype) if each is None else each for each in words)).dtype
    if not computes_with(dtype):
        return None
    return (
        Expression(column, ((function, words, dtype),), dtype)
        if isinstance(column, RemoteArray)
        else column.then(function, words, dtype)
    )


def _condition(function: np.ufunc, inputs: Sequence[Any], column: RemoteArray) -> Condition | None:
    mine = inputs[0] is column
    other = inputs[1] if mine else inputs[0]
    if isinstance(other, np.ndarray):
        other = other[()]
    if other is None or np.ndim(other) or np.asarray(other).dtype.kind == "O" and not isinstance(other, int):
        return None
    found = function(*(np.zeros(1, column.dtype) if each is column else other for each in inputs))
    if found.dtype != np.bool_:
        return None
    return Condition(column, TESTS[function] if mine else MIRRORED[TESTS[function]], other)


def _into(function: np.ufunc, inputs: Sequence[Any], out: Duck, named: dict[str, Any]) -> Duck:
    """The result is written to an array at the servers."""
    if not isinstance(out, RemoteArray):
        raise TypeError("out= is an array, or an array at the servers, not what is worked out from one")
    shape = np.broadcast_shapes(out.shape, *(np.shape(each) for each in inputs))
    if shape != out.shape:
        raise ValueError(
            f"non-broadcastable output operand with shape {out.shape}: the result has shape {shape}"
        )
    rest = {key: value for key, value in named.items() if key != "out"}
    # NumPy says what is not cast.
    with np.errstate(all="ignore"):
        probes = [
            np.ones((1,) * np.ndim(each), each.dtype) if isinstance(each, (Duck, np.ndarray)) else each
            for each in inputs
        ]
        plain = {key: value for key, value in rest.items() if key != "where"}
        function(
            *(_first(each) for each in probes), out=np.ones(out.shape and (1,) * out.ndim, out.dtype), **plain
        )
    if not rest and _update(function, inputs, out):
        return out
    _in_pieces(function, inputs, out, rest)
    return out


def _first(probe: Any) -> Any:
    """A list as one element of its kind."""
    return np.asarray(probe).reshape(-1)[:1] if isinstance(probe, (list, tuple)) else probe


def _update(function: np.ufunc, inputs: Sequence[Any], out: RemoteArray) -> bool:
    """``t += 1`` where the servers do it, each element at once; whether they did."""
    how = _UPDATES.get(function)
    if how is None or out._computes() is None or len(inputs) != 2:
        return False
    first, second = inputs
    if not (isinstance(first, RemoteArray) and first._same(out)):
        if function is np.subtract or not (isinstance(second, RemoteArray) and second._same(out)):
            return False
        first, second = second, first
    if isinstance(second, Duck):
        return False
    probe = (
        second
        if isinstance(second, (int, float, np.generic))
        else np.ones((1,) * np.ndim(second), np.asarray(second).dtype)
    )
    if function(np.ones(1, out.dtype), probe).dtype != out.dtype:
        return False
    operand = np.asarray(second).astype(out.dtype)
    out._accumulate(how, np.negative(operand) if function is np.subtract else operand)
    return True


def _in_pieces(function: np.ufunc, inputs: Sequence[Any], out: RemoteArray, rest: dict[str, Any]) -> None:
    where = rest.pop("where", True)
    moved = 0
    words: list[Callable[[Any], Any]] = []
    for each in inputs:
        word, nbytes = _by_rows(each, out)
        words.append(word)
        moved += nbytes
    mask, _ = _by_rows(where, out)
    rows = max(1, _PIECE_BYTES * len(out) // max(out.nbytes, 1)) if out.shape else 1
    for first in range(0, len(out) if out.shape else 1, rows):
        key = slice(first, first + rows) if out.shape else ...
        part = out._viewed(lambda array, key=key: array[key])  # type: ignore[misc]
        # Elements that a `where` leaves out keep what they are.
        here = np.empty(part.shape, out.dtype) if where is True else part._values()
        function(*(word(key) for word in words), out=here, where=mask(key), **rest)
        part[...] = here
    fetched(f"np.{function.__name__} in place", moved, out._about_it())


def _by_rows(value: Any, out: RemoteArray) -> tuple[Callable[[Any], Any], int]:
    """Gives the rows of an operand that rows of the result are made of; and how many bytes travel for it."""
    if isinstance(value, Duck):
        if (
            value.shape == out.shape
            and isinstance(value, RemoteArray)
            and (value._same(out) or not value._overlaps(out))
        ):
            return lambda key: value._viewed(lambda array: array[key])._values(), value.nbytes
        # What is written must not change what is read later.
        array = np.broadcast_to(value._values(), out.shape)
        return lambda key: array[key], value._fetches()
    if np.ndim(value) == 0:
        return lambda key: value, 0
    rows = np.broadcast_to(np.asarray(value), out.shape)
    return lambda key: rows[key], 0


def _at(function: np.ufunc, array: Any, key: Any, *operands: Any) -> None:
    """``np.add.at(t, key, values)``."""
    if not isinstance(array, RemoteArray):
        raise TypeError(
            "what is worked out from an array at the servers cannot be changed: change that array"
        )
    how = _UPDATES.get(function)
    if (
        how is not None
        and function is not np.subtract
        and array._computes() is not None
        and len(operands) == 1
    ):
        operand = np.asarray(operands[0])
        if (
            function(
                np.ones(1, array.dtype), operands[0] if operand.ndim == 0 else np.ones(1, operand.dtype)
            ).dtype
            == array.dtype
        ):
            array._update(how, function, key, operands[0])
            return
    values = array._values()
    fetched(f"np.{function.__name__}.at", array.nbytes, array._about_it())
    function.at(values, key, *(np.asarray(each) if isinstance(each, Duck) else each for each in operands))
    array[...] = values

"""Reductions: of all elements at the servers, of few long rows or columns too; else NumPy's, here."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from rampool._duck import Duck, fetched, put_result
from rampool._lazy import Condition

__all__ = ["reduced"]

Array = npt.NDArray[Any]

# Results of one reduction that are asked for one by one, and what each must save.
_MOST_PARTS = 256
_LEAST_PART_BYTES = 4096


def reduced(array: Duck, what: str, axis: Any, out: Any, keepdims: Any, named: dict[str, Any]) -> Any:
    """NumPy's reduction of that name; `named` has dtype, initial and where, if they are given."""
    keepdims = keepdims is not np._NoValue and bool(keepdims)
    mask = _mask(array, named.get("where"))
    unsaid = {"dtype": None, "initial": np._NoValue}
    named = {key: each for key, each in named.items() if key != "where" and each is not unsaid.get(key, ...)}
    # NumPy says what comes out, and what makes no sense.
    probe = np.zeros((1,) * array.ndim, array.dtype)
    kind = np.asarray(getattr(np, what)(probe, axis=axis, **named)).dtype
    axes = _axes(axis, array.ndim)
    if what in ("min", "max") and mask is not None and "initial" not in named and len(axes) < array.ndim:
        raise ValueError(f"{what} along an axis with where= needs initial=, for where no element counts")
    result = None
    if array.size and (axes or not array.shape):
        result = _there(array, what, axes, kind, mask, named)
    if result is None:
        result = _here(array, what, axes, mask, named)
    if keepdims:
        result = np.reshape(result, tuple(1 if at in axes else n for at, n in enumerate(array.shape)))
    return result if out is None else put_result(result, out)


def _mask(array: Duck, where: Any) -> Any:
    if where is True or where is None or where is np._NoValue:
        return None
    if isinstance(where, Condition) and where._settled is None:
        if where.shape == array.shape:
            return where
        if where.column.ndim > array.ndim or where.size > array.size:
            raise ValueError(
                f"a condition on shape {where.shape} does not fit an array of shape {array.shape}"
            )
    mask = np.asarray(where)
    if mask.dtype != np.bool_:
        raise TypeError(f"where is a condition or an array of booleans, not of {mask.dtype}")
    return np.broadcast_to(mask, array.shape)


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Dimensions that NumPy has accepted."""
    every = tuple(range(ndim))
    if axis is None or not every:
        return every
    return tuple(operator.index(each) % ndim for each in (axis if isinstance(axis, tuple) else (axis,)))


def _there(
    array: Duck, what: str, axes: tuple[int, ...], kind: np.dtype[Any], mask: Any, named: dict[str, Any]
) -> Any:
    kept = tuple(n for at, n in enumerate(array.shape) if at not in axes)
    parts = math.prod(kept)
    if parts > 1 and (parts > _MOST_PARTS or array.nbytes // parts < _LEAST_PART_BYTES):
        return None
    result = np.empty(kept, kind)
    for place in np.ndindex(kept):
        numbers = iter(place)
        key = tuple(slice(None) if at in axes else next(numbers) for at in range(array.ndim))
        part = array._viewed(lambda whole, key=key: whole[(..., *key)])  # type: ignore[misc]
        some = mask[(..., *key)] if isinstance(mask, np.ndarray) else mask
        if isinstance(mask, Condition):
            some = mask._viewed(lambda whole, key=key: whole[(..., *key)])  # type: ignore[misc]
        values = part._total(what, kind, some)
        if values is None:
            return None
        result[place] = getattr(np, what)(values, **named)
    return result[()]


def _here(array: Duck, what: str, axes: tuple[int, ...], mask: Any, named: dict[str, Any]) -> Any:
    reason = f"{what} along an axis" if len(axes) < array.ndim else f"{what} of {array.dtype}"
    values = array._values()
    fetched(reason, array._fetches(), array._about_it())
    if mask is None:
        return getattr(np, what)(values, axis=axes, **named)
    mask = np.asarray(mask)
    if what in ("min", "max") and "initial" not in named and len(axes) == array.ndim:
        return getattr(np, what)(values[mask])
    return getattr(np, what)(values, axis=axes, where=mask, **named)

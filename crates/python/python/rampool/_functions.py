"""NumPy's functions of arrays at the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rampool._duck import Duck, call, fetched
from rampool._lazy import Condition
from rampool._table import RemoteArray

__all__ = ["function"]

Function = Callable[..., Any]

# What NumPy does by a view of its first argument.
_VIEWS = {
    getattr(np, name)
    for name in (
        "transpose", "permute_dims", "matrix_transpose", "swapaxes", "moveaxis", "rollaxis", "squeeze",
        "expand_dims",
        "flip", "fliplr", "flipud", "rot90",
    )
    if hasattr(np, name)
}  # fmt: skip
# Methods of an array with the same arguments.
_METHODS = {
    np.sum: "sum", np.mean: "mean", np.min: "min", np.max: "max", np.amin: "min", np.amax: "max",
    np.any: "any", np.all: "all",
    np.reshape: "reshape", np.ravel: "ravel", np.copy: "copy", np.real: "real", np.imag: "imag",
}  # fmt: skip
# They change their first argument.
_WRITERS = {np.put, np.place, np.putmask, np.put_along_axis, np.fill_diagonal}
_LIKE = {np.empty_like, np.zeros_like, np.ones_like, np.full_like}


def function(called: Function, words: Sequence[Any], named: dict[str, Any]) -> Any:
    """What NumPy asks of an array for each function."""
    first = words[0] if words else named.get("a")
    if isinstance(first, Duck):
        if called in _VIEWS and words and _is_view(called, first, words, named):
            return first._viewed(lambda array: called(array, *words[1:], **named))
        if called in _METHODS:
            return _method(
                _METHODS[called], first, words[1:], {key: each for key, each in named.items() if key != "a"}
            )
        if called in _LIKE and words:
            return called(_one_element(first), *words[1:], **named)
        if called in _WRITERS and words:
            return _write(called, first, words[1:], named)
    own = _OWN.get(called)
    if own is not None:
        result = own(*words, **named)
        if result is not NotImplemented:
            return result
    return call(f"np.{called.__name__}", called, words, named)


def _is_view(called: Function, array: Duck, words: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether NumPy makes a view, tried with one element of memory: of an array without memory nothing may be
    read. Of no dimensions it makes a scalar."""
    result = called(_one_element(array), *words[1:], **named)
    return isinstance(result, np.ndarray) and result.base is not None


def _one_element(array: Duck) -> Any:
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _method(name: str, array: Duck, words: Sequence[Any], named: dict[str, Any]) -> Any:
    if name in ("real", "imag"):
        return getattr(array, name)
    if name == "reshape" and "newshape" in named:
        named["shape"] = named.pop("newshape")
    if name == "reshape" and "shape" in named:
        words, named = (named["shape"], *words), {key: each for key, each in named.items() if key != "shape"}
    if name == "reshape" and len(words) == 2:
        words, named = words[:1], {**named, "order": words[1]}
    if name == "copy":
        named.pop("subok", None)
    return getattr(array, name)(*words, **named)


def _write(called: Function, array: Duck, words: Sequence[Any], named: dict[str, Any]) -> None:
    if not isinstance(array, RemoteArray):
        raise TypeError(
            "what is worked out from an array at the servers cannot be changed: change that array"
        )
    values = array._values()
    fetched(f"np.{called.__name__}", array.nbytes, array._about_it())
    called(values, *(np.asarray(each) if isinstance(each, Duck) else each for each in words), **named)
    array[...] = values


# --- functions that need no element, or few ---------------------------------------------------------------


def _shape(a: Any) -> Any:
    return a.shape if isinstance(a, Duck) else NotImplemented


def _ndim(a: Any) -> Any:
    return a.ndim if isinstance(a, Duck) else NotImplemented


def _size(a: Any, axis: Any = None) -> Any:
    if not isinstance(a, Duck):
        return NotImplemented
    return np.size(np.broadcast_to(np.zeros(()), a.shape), axis)


def _result_type(*arrays_and_dtypes: Any) -> Any:
    return np.result_type(*(each.dtype if isinstance(each, Duck) else each for each in arrays_and_dtypes))


def _can_cast(from_: Any, to: Any, casting: Any = "safe") -> Any:
    return np.can_cast(from_.dtype if isinstance(from_, Duck) else from_, to, casting)


def _iscomplexobj(x: Any) -> Any:
    return x.dtype.kind == "c" if isinstance(x, Duck) else NotImplemented


def _isrealobj(x: Any) -> Any:
    return x.dtype.kind != "c" if isinstance(x, Duck) else NotImplemented


def _may_share_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    # An array here shares no memory with one at the servers.
    return isinstance(a, RemoteArray) and isinstance(b, RemoteArray) and a._overlaps(b)


def _count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    if isinstance(a, RemoteArray) and axis is None and not keepdims and a._computes() is not None:
        return np.intp(a._counted(("!=", 0)) or 0)
    if isinstance(a, Condition):
        return a.sum(axis, np.intp, keepdims=keepdims)
    return NotImplemented


def _nonzero(a: Any) -> Any:
    return (
        np.unravel_index(a.positions(), a.shape) if isinstance(a, Condition) and a.shape else NotImplemented
    )


def _flatnonzero(a: Any) -> Any:
    return a.positions() if isinstance(a, Condition) else NotImplemented


def _where(condition: Any, *choices: Any) -> Any:
    return NotImplemented if choices else _nonzero(condition)


def _ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    if not isinstance(a, Duck) or out is not None or a.dtype.kind not in "iuf":
        return NotImplemented
    return np.subtract(a.max(axis, keepdims=keepdims), a.min(axis, keepdims=keepdims))


def _copyto(dst: Any, src: Any, casting: Any = "same_kind", where: Any = True) -> Any:
    if not isinstance(dst, RemoteArray):
        if isinstance(dst, Duck):
            raise TypeError(
                "what is worked out from an array at the servers cannot be changed: change that array"
            )
        return NotImplemented
    values = (
        src if np.ndim(src) == 0 and not isinstance(src, (Duck, np.ndarray, np.generic)) else np.asarray(src)
    )
    kept = np.empty(dst.shape, dst.dtype)
    np.copyto(kept, values, casting=casting)
    if where is True:
        dst[...] = kept
    else:
        mask = np.broadcast_to(np.asarray(where, np.bool_), dst.shape)
        dst[mask] = kept[mask]
    return None


_OWN: dict[Function, Function] = {
    np.shape: _shape, np.ndim: _ndim, np.size: _size, np.result_type: _result_type, np.can_cast: _can_cast,
    np.iscomplexobj: _iscomplexobj, np.isrealobj: _isrealobj, np.may_share_memory: _may_share_memory,
    np.shares_memory: _may_share_memory, np.count_nonzero: _count_nonzero, np.nonzero: _nonzero,
    np.flatnonzero: _flatnonzero, np.where: _where, np.ptp: _ptp, np.copyto: _copyto,
}  # fmt: skip

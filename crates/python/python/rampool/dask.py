"""Dask arrays of arrays at the servers, and workers that spill to the pool instead of their disk.

    blocks = rampool.dask.from_array(pool.open("orders"), chunks=(1000, 16))

    cluster = LocalCluster(n_workers=4, memory_limit="2GiB", data=rampool.dask.spill("memhost1", memory="64G",
    target="1200MiB"))

Needs ``rampool[dask]``.
"""

from __future__ import annotations

import itertools
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any, cast

import numpy as np
import zict
from dask.utils import parse_bytes
from distributed.protocol.serialize import deserialize_bytes, serialize_bytelist
from distributed.sizeof import safe_sizeof
from distributed.spill import Slow, SpillBuffer, SpilledSize

from rampool._errors import NoRoom
from rampool._pool import Pool, connect
from rampool._store import Store
from rampool._table import RemoteArray

__all__ = ["Spill", "from_array", "spill"]


def from_array(array: RemoteArray, chunks: Any = "auto", **options: Any) -> Any:
    """A Dask array of an array at the servers: each block is fetched where it is computed, in any process.

    ``dask.array.from_array`` copies what has NumPy's functions first, all of it.

    Args:
        array: what every block is fetched from, as it is then.
        chunks: as ``dask.array.from_array`` takes them.
        options: others of its arguments.
    """
    import dask.array as da

    make: Any = da.from_array
    return make(_Blocks(array), chunks, asarray=True, **options)


class _Blocks:
    """An array of which nothing but its blocks can be asked for."""

    def __init__(self, array: RemoteArray) -> None:
        self._array = array
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, key: Any) -> Any:
        return np.asarray(self._array[key])

    def __dask_tokenize__(self) -> str:
        # Others may change it at any time: no result for it is one for later.
        return uuid.uuid4().hex


def spill(
    servers: str | None = None, *, memory: str | int, target: str | int, **options: str | int
) -> tuple[Any, dict[str, Any]]:
    """What a worker's ``data=`` takes; each worker leases ``memory`` of its own.

    Args:
        servers: as :func:`rampool.connect` takes them.
        memory: how much each worker leases.
        target: how many bytes of values stay in a worker, such as 60 % of its memory limit, which is what
            Dask does with a disk.
        options: those of :func:`rampool.connect`.
    """
    return Spill, {"servers": servers, "memory": memory, "target": target, **options}


class Spill(SpillBuffer):
    """Dask's own buffer, with the pool where it has a directory: a value that does not fit is in the pool
    until it is asked for."""

    def __init__(
        self,
        servers: str | None = None,
        *,
        memory: str | int,
        target: str | int,
        pool: Pool | None = None,
        **options: str | int,
    ) -> None:
        self._pool = pool if pool is not None else connect(servers, memory=memory, **options)
        slow = _Slow(self._pool.store())
        zict.Buffer.__init__(
            self,
            fast={},
            slow=zict.Cache(slow, zict.WeakValueMapping()),
            n=parse_bytes(target),
            weight=lambda _, value: _weight(value),
        )
        self.logged_pickle_errors: set[Any] = set()
        self.cumulative_metrics: defaultdict[tuple[str, str], float] = defaultdict(float)

    def close(self) -> None:
        """Gives the lease back."""
        self._pool.close()


def _weight(value: object) -> int:
    return safe_sizeof(value)


class _Bytes(MutableMapping[Any, Any]):
    """What zict.File is for a directory. Keys stay what they are: a name in the store is a number of
    theirs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: dict[Any, bytes] = {}
        self._numbers = itertools.count()

    def __setitem__(self, key: Any, frames: list[Any]) -> None:
        name = self._names.get(key) or b"%d" % next(self._numbers)
        try:
            self._store.put(name, frames)
        except NoRoom as error:
            # As a full disk: the value stays in memory, and the worker says so.
            raise OSError(str(error)) from error
        self._names[key] = name

    def __getitem__(self, key: Any) -> memoryview:
        return self._store[self._names[key]]

    def __delitem__(self, key: Any) -> None:
        del self._store[self._names.pop(key)]

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._names))

    def __len__(self) -> int:
        return len(self._names)


class _Slow(Slow):
    def __init__(self, store: Store) -> None:
        dump = cast(
            Callable[[object], bytes], partial(serialize_bytelist, compression=None, on_error="raise")
        )
        zict.Func.__init__(self, dump, deserialize_bytes, _Bytes(store))
        self.max_weight = False
        self.weight_by_key = {}
        self.total_weight = SpilledSize(0, 0)

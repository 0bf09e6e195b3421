"""joblib's results in the pool: ``joblib.Memory("cache", backend="rampool", backend_options={"pool":
pool})``.

What a function returned lies at the memory servers, and is there as long as this process. Needs
``rampool[joblib]``.
"""

from __future__ import annotations

import datetime
import io
from typing import Any

import joblib  # type: ignore[import-untyped]
from joblib._store_backends import (  # type: ignore[import-untyped]
    CacheItemInfo,
    StoreBackendBase,
    StoreBackendMixin,
)

from rampool._pool import Pool
from rampool._store import Store

__all__ = ["RampoolStoreBackend", "register"]

# A Memory makes a backend for each of its functions; those of one pool share what is there.
_stores: dict[int, tuple[Pool, Store, dict[str, datetime.datetime]]] = {}


class _Writer(io.BytesIO):
    """Becomes a value when it is closed."""

    def __init__(self, backend: RampoolStoreBackend, name: str) -> None:
        super().__init__()
        self._backend, self._name = backend, name

    def close(self) -> None:
        if not self.closed:
            self._backend._put(self._name, self.getbuffer())
        super().close()


class RampoolStoreBackend(StoreBackendBase, StoreBackendMixin):  # type: ignore[misc]
    """A joblib store in a pool."""

    def configure(
        self, location: str, verbose: int = 1, backend_options: dict[str, Any] | None = None
    ) -> None:
        """Called by joblib; ``backend_options`` has the pool."""
        pool = (backend_options or {}).get("pool")
        if not isinstance(pool, Pool):
            raise ValueError(
                "joblib.Memory(..., backend='rampool', backend_options={'pool': pool}) needs a pool"
            )
        if id(pool) not in _stores:
            _stores[id(pool)] = (pool, pool.store(), {})
        _, self._store, self._used = _stores[id(pool)]
        self.location, self.verbose, self.mmap_mode, self.compress = str(location), verbose, None, False

    def _put(self, name: str, value: memoryview) -> None:
        self._store[name] = value
        self._used[name] = datetime.datetime.now()

    def _open_item(self, name: str, mode: str) -> Any:
        if "w" in mode:
            return _Writer(self, name)
        try:
            value = self._store[name]
        except KeyError:
            raise FileNotFoundError(name) from None
        self._used[name] = datetime.datetime.now()
        return io.BytesIO(value)

    def _item_exists(self, location: str) -> bool:
        return location in self._store or any(name.startswith(f"{location}/") for name in self._used)

    def _move_item(self, src: str, dst: str) -> None:
        self._put(dst, self._store[src])
        self._remove(src)

    def _remove(self, name: str) -> None:
        del self._store[name]
        self._used.pop(name, None)

    def create_location(self, location: str) -> None:
        """There are no directories here."""

    def clear_location(self, location: str) -> None:
        """Removes what is below a name."""
        for name in [name for name in self._used if name == location or name.startswith(f"{location}/")]:
            self._remove(name)

    def get_items(self) -> list[Any]:
        """Each result with its size and when it was used last."""
        items = []
        for name in list(self._used):
            if name.endswith("/output.pkl"):
                items.append(
                    CacheItemInfo(
                        name.removesuffix("/output.pkl"), self._store.value_nbytes(name), self._used[name]
                    )
                )
        return items


def register() -> None:
    """Makes ``backend="rampool"`` known to joblib."""
    joblib.register_store_backend("rampool", RampoolStoreBackend)

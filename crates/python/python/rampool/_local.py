"""NumPy's own allocations in the pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from rampool._pool import Pool, connect

__all__ = ["Given", "local"]


class Given:
    """What :func:`local` gave NumPy so far."""

    def __init__(self, native: Any) -> None:
        self._native = native

    @property
    def live(self) -> int:
        """Allocations in the pool that are not freed."""
        return int(self._native.counts()[0])

    @property
    def nbytes(self) -> int:
        """Their bytes, in whole pages."""
        return int(self._native.counts()[1])

    @property
    def refused(self) -> int:
        """Allocations that the lease had no room for: they are ordinary memory."""
        return int(self._native.counts()[2])


@contextlib.contextmanager
def local(
    amount: str | int, over: str | int = "16M", pool: Pool | None = None, **options: str | int
) -> Iterator[Given]:
    """Within the block, NumPy's arrays of ``over`` bytes and more lie in the pool; ``amount`` of them is in
    this machine's memory.

    That is what NumPy itself allocates: results, copies, sorts, pandas' columns. Arrow, Polars, torch and
    Python objects are not; :func:`rampool.attach` has those too. It holds for this context (a thread, or an
    asyncio task and what ``asyncio.to_thread`` runs for it), as NEP 49 says; threads that start in the block
    begin without it. Arrays stay in the pool when the block has ended, as long as they live. Where the lease
    has no room, NumPy gets ordinary memory.

    Args:
        amount: local memory for these arrays together; at least 256 KiB.
        over: how large an array is at least.
        pool: where they lie. None: a lease of its own, for which ``options`` are those of
            :func:`rampool.connect`.

    >>> with connect(SERVERS, memory="32M") as pool, local("1M", over="1M", pool=pool) as given:
    ...     a = np.ones(1_000_000)
    ...     print(given.live, a.sum())
    1 1000000.0
    """
    own = connect(local=amount, **options) if pool is None else None  # type: ignore[arg-type]
    given = (own or pool)._native.allocator(str(amount), str(over))  # type: ignore[union-attr]
    api = _array_api()
    before = given.enter(api)
    try:
        yield Given(given)
    finally:
        given.leave(api, before)
        if own is not None:
            own.close()


def _array_api() -> Any:
    # NumPy 2 has it in _core, 1.26 in core.
    core = getattr(np, "_core", None) or np.core
    return core.multiarray._ARRAY_API

"""The RAM of many machines as one pool.

>>> import rampool
>>> pool = rampool.connect(SERVERS, memory="64M", local="8M")
>>> a = pool.zeros((1000, 64), "f8")        # a numpy.ndarray whose pages come and go
>>> a[:, 3] = 7
>>> float(a.sum())
7000.0
>>> t = pool.remote("orders", (1000, 16), "i8")  # at the servers; nothing is cached here
>>> t[:, 3] = range(1000)
>>> int(t[:, 3].sum(where=t[:, 3] >= 998))  # computed at the servers
1997
>>> del a; pool.close()

``rampool.attach("4G")`` gives the running interpreter or notebook more memory than this machine has. See
docs/guide/python.md.
"""

from __future__ import annotations

import importlib

from rampool._errors import (
    Closed,
    Damaged,
    Error,
    FetchWarning,
    ForkError,
    NoRoom,
    NotAllowed,
    NotFound,
    ServerLost,
    Timeout,
)

# As typing's, which takes longer to import than all of this.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rampool._attach import Attachment, attach, status
    from rampool._local import local
    from rampool._pool import Pool, Shared, connect, share
    from rampool._queue import Message, Queue
    from rampool._shared_store import SharedStore
    from rampool._stats import Picture, Stats, stats
    from rampool._store import Store
    from rampool._lazy import Condition, Expression
    from rampool._table import Pending, RemoteArray

__all__ = [
    "Attachment",
    "Closed",
    "Condition",
    "Damaged",
    "Error",
    "Expression",
    "FetchWarning",
    "ForkError",
    "Message",
    "NoRoom",
    "NotAllowed",
    "NotFound",
    "Pending",
    "Picture",
    "Pool",
    "Queue",
    "RemoteArray",
    "ServerLost",
    "Shared",
    "SharedStore",
    "Stats",
    "Store",
    "Timeout",
    "attach",
    "connect",
    "load_ipython_extension",
    "local",
    "share",
    "stats",
    "status",
]

# Importing rampool imports neither NumPy nor the extension: what is asked for first does.
_HOMES = {
    "Attachment": "_attach",
    "Condition": "_lazy",
    "Expression": "_lazy",
    "Message": "_queue",
    "Pending": "_table",
    "Picture": "_stats",
    "Pool": "_pool",
    "Queue": "_queue",
    "RemoteArray": "_table",
    "Shared": "_pool",
    "SharedStore": "_shared_store",
    "Stats": "_stats",
    "Store": "_store",
    "attach": "_attach",
    "connect": "_pool",
    "local": "_local",
    "share": "_pool",
    "stats": "_stats",
    "status": "_attach",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rampool' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rampool.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext rampool`` in IPython and Jupyter: brings the magics ``%rampool 4G`` and ``%rampool
    status``."""
    from rampool._magic import register

    register(shell)

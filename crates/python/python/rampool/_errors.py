"""What can go wrong. Each exception is of the built-in kind that programs catch already."""

__all__ = [
    "Closed",
    "Damaged",
    "Error",
    "FetchWarning",
    "ForkError",
    "NoRoom",
    "NotAllowed",
    "NotFound",
    "ServerLost",
    "Timeout",
]


class Error(Exception):
    """Any failure of rampool's own; arguments that make no sense raise ValueError, TypeError or
    IndexError."""


class ServerLost(Error, ConnectionError):
    """A memory server cannot be reached, or is lost with what it held. The message names it and what was
    being done."""


class NoRoom(Error, MemoryError):
    """The lease, or a server, has no room for that. Lease more (``memory=``), or free something."""


class NotAllowed(Error, PermissionError):
    """A server refuses that: the key is wrong or cannot be read, or the lease is another one's."""


class Timeout(Error, TimeoutError):
    """It did not happen within the time given. It may still."""


class NotFound(Error, LookupError):
    """There is no region, queue or value of that name."""


class Damaged(Error, OSError):
    """A server sent bytes that are not those that were stored, twice in a row."""


class Closed(Error, ValueError):
    """The pool was closed."""


class ForkError(Error, RuntimeError):
    """This process is a forked child, and the pool is its parent's. Connect anew, or use "spawn" or
    "forkserver"."""


class FetchWarning(RuntimeWarning):
    """An array at the servers was fetched, because NumPy computes here what the servers do not. Said once in
    a
    process for each kind of computation, with what was fetched and how many bytes."""

"""The command `rampool`, which the wheel brings along."""

import functools
import importlib.metadata
import os
import pathlib
import shutil

__all__ = ["command"]


@functools.cache
def command() -> str:
    """The path of the command `rampool`.

    That is ``RAMPOOL_COMMAND`` if it is set, else the one that was installed with this package, else the
    first in ``PATH``.

    Raises:
        FileNotFoundError: there is none.
    """
    if named := os.environ.get("RAMPOOL_COMMAND"):
        return named
    if installed := _installed("bin/rampool"):
        return installed
    if found := shutil.which("rampool"):
        return found
    raise FileNotFoundError(
        "the command `rampool` is not installed with this package nor in PATH; install the wheel anew, "
        "or set RAMPOOL_COMMAND to its path"
    )


def _installed(end: str) -> str | None:
    """A file of this package's, wherever its installer has put it."""
    try:
        files = importlib.metadata.files("rampool") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = str(file)
        if path == end or path.endswith(f"/{end}"):
            located = pathlib.Path(str(file.locate())).resolve()
            if located.exists():
                return str(located)
    return None

"""``%rampool 4G`` in IPython and Jupyter."""

from __future__ import annotations

import shlex
from typing import Any

from rampool._attach import attach, status

__all__ = ["register"]

_USAGE = """%rampool status            how much of this notebook's memory is here
%rampool 4G [SERVER ...]   attach: at most 4G stay here, the rest goes to the servers, or compressed to this
machine
         [--memory AMOUNT] how much to lease
"""


def rampool_magic(line: str) -> None:
    """``%rampool status`` or ``%rampool SIZE [SERVER ...] [--memory AMOUNT]``."""
    words = shlex.split(line)
    memory: str | None = None
    if "--memory" in words:
        at = words.index("--memory")
        if at + 1 == len(words):
            print(_USAGE, end="")
            return
        memory = words[at + 1]
        del words[at : at + 2]
    if not words or words[0].startswith("-"):
        print(_USAGE, end="")
    elif words[0] == "status":
        print(status())
    else:
        print(attach(words[0], words[1:] or None, memory=memory))


def register(shell: Any) -> None:
    """Gives an IPython shell the magic."""
    shell.register_magic_function(rampool_magic, magic_kind="line", magic_name="rampool")

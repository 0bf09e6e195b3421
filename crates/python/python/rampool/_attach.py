"""More memory for the Python that runs already."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

from rampool._command import command
from rampool._errors import Error, ForkError

__all__ = ["Attachment", "attach", "status"]

_RUN_DIR = "RAMPOOL_RUN_DIR"


@dataclasses.dataclass(frozen=True)
class Attachment:
    """What :func:`attach` gave this process."""

    local: str
    """How much of its memory stays on this machine, as it was asked for."""
    run_dir: str
    """Where the process and its agent publish counters; ``rampool top`` reads them."""
    holder: int
    """The process id of ``rampool hold``, which keeps the lease until this process ends."""

    def __str__(self) -> str:
        used = _anonymous_bytes()
        here = f"{used / 2**20:.0f} MiB of anonymous memory are here, of at most {self.local}"
        return f"rampool: {here}; the rest is in the pool"


_attached: Attachment | None = None
_holder: subprocess.Popen[str] | None = None
# What `rampool hold` says. Not this process's standard error, which in a notebook goes where it is not seen.
_said: IO[str] | None = None


def attach(
    local: str | int,
    servers: str | Sequence[str] | None = None,
    *,
    memory: str | int | None = None,
    children: bool = False,
    **options: str | int,
) -> Attachment:
    """Gives this process more memory than the machine has, from now on and to its end.

    At most ``local`` of its anonymous memory (NumPy's, pandas', Python's own) stays in this machine's RAM;
    the rest lies on memory servers. Nothing of the program changes, and until it needs more than ``local``
    nothing happens at all. It needs userfaultfd in full: see ``rampool doctor``.

    Forked children (``os.fork``, multiprocessing's "fork") have the same memory, with a budget of their own.
    That needs CAP_SYS_PTRACE; without it a fork raises :class:`rampool.ForkError`. Programs that are started
    (subprocess, multiprocessing's "spawn" and "forkserver") run without rampool, unless ``children`` is true:
    then each has ``local`` too.

    Args:
        local: memory that stays here, such as ``"4G"``, or a number of bytes.
        servers: memory servers, ``"HOST[:PORT][=AMOUNT]"``; several as a list or separated by commas. None:
            ``RAMPOOL_SERVERS``, else a private server on this machine, which keeps pages compressed.
        memory: how much to lease. None: as ``rampool run`` does.
        children: whether programs that this process starts get an agent as well.
        options: those of ``rampool hold``, with underscores: ``key_file="..."``, ``page_size="64K"``,
            ``encryption="on"``, ...

    Returns:
        What was attached. Attaching again with the same ``local`` returns it again.

    Raises:
        rampool.Error: the process has an agent already, or the pool cannot be had; the message says why.
        FileNotFoundError: the command or the agent is not installed.

    >>> import rampool
    >>> rampool.attach("4G", SERVERS, memory="64M").local  # doctest: +SKIP
    '4G'
    """
    global _attached, _holder, _said
    text = str(local)
    if _attached is not None:
        if _attached.local == text:
            return _attached
        raise Error(
            f"this process is attached already, with {_attached.local} of local memory; that cannot be "
            "changed"
        )
    if _has_agent():
        raise Error("this process was started by `rampool run`, which manages its memory already")
    said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    holder = _start(text, servers, memory, options, said)
    assert holder.stdout is not None
    run_dir = holder.stdout.readline().rstrip("\n")
    library = holder.stdout.readline().rstrip("\n")
    if not library:
        holder.wait()
        raise Error(_reason(said) or f"`rampool hold` ended with {holder.returncode} and said nothing")
    before = os.environ.get(_RUN_DIR)
    os.environ[_RUN_DIR] = run_dir
    try:
        ctypes.CDLL(library)
    except OSError as error:
        holder.kill()
        raise Error(f"the agent cannot be loaded: {error}") from error
    finally:
        if not children:
            if before is None:
                del os.environ[_RUN_DIR]
            else:
                os.environ[_RUN_DIR] = before
    if children:
        others = os.environ.get("LD_PRELOAD")
        os.environ["LD_PRELOAD"] = f"{library}:{others}" if others else library
    if not _kernel_tells_of_forks():
        sys.addaudithook(_refuse_forks)
    _holder, _said = holder, said
    _attached = Attachment(text, run_dir, holder.pid)
    return _attached


def status() -> str:
    """One line about this process's memory: how much of it is here.

    >>> import rampool
    >>> rampool.status()
    'rampool: this process is not attached; rampool.attach("4G") does that'
    """
    if _attached is None:
        return 'rampool: this process is not attached; rampool.attach("4G") does that'
    if _holder is not None and _holder.poll() is not None:
        why = _reason(_said) if _said is not None else ""
        ended = f"`rampool hold` has ended with {_holder.returncode} ({why})"
        return f"rampool: {ended}: its servers free this process's pages"
    return str(_attached)


def _start(
    local: str,
    servers: str | Sequence[str] | None,
    memory: str | int | None,
    options: dict[str, str | int],
    said: IO[str],
) -> subprocess.Popen[str]:
    words = [command(), "hold", "--for", str(os.getpid()), "--local", local]
    if servers is not None:
        words += ["--server", servers if isinstance(servers, str) else ",".join(servers)]
    if memory is not None:
        words += ["--memory", str(memory)]
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}={value}")
    environment = {name: value for name, value in os.environ.items() if name != _RUN_DIR}
    # A session of its own: Ctrl-C in this terminal, or in a notebook, is not for it.
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=said,
        text=True,
        env=environment,
        start_new_session=True,
    )


def _reason(said: IO[str]) -> str:
    """Why `rampool hold` ended: its last line, or what is wrong with its arguments."""
    said.seek(0)
    lines = said.read().strip().splitlines()
    wrong = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return wrong[0] if wrong else lines[-1].removeprefix("rampool: ") if lines else ""


def _kernel_tells_of_forks() -> bool:
    """Whether this process has CAP_SYS_PTRACE, which the events need."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> 19 & 1)


def _refuse_forks(event: str, _: object) -> None:
    if event in ("os.fork", "os.forkpty"):
        raise ForkError(
            'an attached process can fork only with CAP_SYS_PTRACE: use the start method "spawn" or '
            '"forkserver", or subprocess, '
            "or start the program with `python -m rampool`"
        )


def _has_agent() -> bool:
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return any("librampool_agent.so" in line for line in maps)
    return False


def _anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    sys.stderr.write("rampool: /proc/self/status has no RssAnon\n")
    return 0

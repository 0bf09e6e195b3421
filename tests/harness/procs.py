"""Processes as the kernel shows them: families, memory, stacks. Nothing here blocks."""

import ctypes
import os
import re
import shutil
import signal
import subprocess

PAGE = os.sysconf("SC_PAGE_SIZE")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans():
    """Daemons that a test leaves behind become our children, so that none is overlooked."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent():
    """For preexec_fn: a process of a test does not outlive the driver."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def parents():
    """{pid: parent} of every process that is not a zombie."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = _read(f"/proc/{name}/stat")
            fields = stat[stat.rfind(b")") + 2 :].split()
            if len(fields) > 1 and fields[0] not in (b"Z", b"X"):
                found[int(name)] = int(fields[1])
    return found


# Processes that outlive a test's world: none of its descendants, as far as it knows.
OUTLIVE = set()


def descendants(root):
    """Every live descendant of `root`, without itself and those that OUTLIVE it."""
    children = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found, left = [], list(children.get(root, []))
    while left:
        pid = left.pop()
        if pid in OUTLIVE:
            continue
        found.append(pid)
        left.extend(children.get(pid, []))
    return found


def anonymous_bytes(pid):
    """Resident anonymous memory, as /proc/PID/statm counts it (resident minus file and shared pages)."""
    fields = _read(f"/proc/{pid}/statm").split()
    if len(fields) > 2 and fields[0] == b"0":
        # The first thread has ended, the others go on.
        for task in _tasks(pid):
            fields = _read(f"/proc/{pid}/task/{task}/statm").split()
            if len(fields) > 2 and fields[0] != b"0":
                break
    return (int(fields[1]) - int(fields[2])) * PAGE if len(fields) > 2 else 0


def anonymous_share(pid):
    """Resident anonymous memory; what several processes share is divided among them."""
    found = re.search(rb"^Pss_Anon: +(\d+) kB", _read(f"/proc/{pid}/smaps_rollup"), re.M)
    return int(found.group(1)) * 1024 if found else 0


def _tasks(pid):
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def is_managed(pid):
    """Whether the agent lives in this process."""
    return b"librampool_agent" in _read(f"/proc/{pid}/maps")


def command_of(pid):
    return _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()[:120] or "?"


def stacks(pids):
    """Where these processes are: user stacks by gdb where it is installed, and the kernel's view in any
    case."""
    text = []
    for pid in pids:
        text.append(f"---- process {pid}: {command_of(pid)}")
        tasks = sorted(os.listdir(f"/proc/{pid}/task")) if os.path.isdir(f"/proc/{pid}/task") else []
        for task in tasks[:40]:
            base = f"/proc/{pid}/task/{task}"
            name = _read(f"{base}/comm").decode(errors="replace").strip()
            state = _read(f"{base}/stat")
            state = state[state.rfind(b")") + 2 :][:1].decode()
            text.append(
                f"  thread {task} ({name}) state {state} in {_read(f'{base}/wchan').decode() or '-'}; system "
                f"call {_read(f'{base}/syscall').decode().strip()}"
            )
            kernel = _read(f"{base}/stack").decode(errors="replace").strip()
            text.extend("      " + line for line in kernel.splitlines()[:12])
        if shutil.which("gdb") and tasks:
            try:
                done = subprocess.run(
                    [
                        "gdb", "-batch", "-nx", "-p", str(pid), "-ex", "set pagination off", "-ex",
                        "thread apply all bt 24",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    timeout=30,
                    check=False,
                )
                lines = done.stdout.decode(errors="replace").splitlines()
                text.extend("    " + line[:200] for line in lines if line.startswith(("#", "Thread")))
            except subprocess.TimeoutExpired:
                text.append("    (gdb could not stop it in 30 s)")
    return "\n".join(text)


def kill_all(pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def reap():
    """Collects orphans that ended."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return

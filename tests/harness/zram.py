"""Kernel swap on zram within a memory cgroup (version 1): what a user would take in rampool's place. Root
is needed.
"""

import itertools
import os
import re
import subprocess
import time
from pathlib import Path

from . import procs

CONTROL = Path("/sys/class/zram-control")
CGROUPS = Path("/sys/fs/cgroup/memory")
SIZE = "6G"
# Turns swapping off and takes the device away once its standard input ends: also when we are killed.
GUARD = (
    "cat >/dev/null; swapoff /dev/zram$0; echo 1 >/sys/block/zram$0/reset; "
    "echo $0 >/sys/class/zram-control/hot_remove"
)


class KernelSwap:
    """zram as this machine's swap, until the context ends."""

    def __init__(self):
        """OSError or subprocess.SubprocessError: this machine does not let us."""
        if len(Path("/proc/swaps").read_text().splitlines()) > 1:
            raise OSError("this machine already swaps: it would be unknown where pages go")
        if not (CGROUPS / "memory.limit_in_bytes").exists():
            raise OSError(f"there is no version 1 memory cgroup at {CGROUPS}")
        if not CONTROL.exists():
            subprocess.run(["modprobe", "zram"], check=True, capture_output=True, timeout=60)
        # A device of its own: others may be in use.
        number = (CONTROL / "hot_add").read_text().strip()
        self.guard = subprocess.Popen(
            ["sh", "-c", GUARD, number],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        procs.OUTLIVE.add(self.guard.pid)
        device = f"/dev/zram{number}"
        try:
            Path(f"/sys/block/zram{number}/disksize").write_text(SIZE)
            for command in (["mkswap", device], ["swapon", "-p", "100", device]):
                subprocess.run(command, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError):
            self.end()
            raise
        self.numbers = itertools.count()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        self.guard.stdin.close()
        self.guard.wait()

    def limit(self, byte_count):
        """A group whose processes together keep so many bytes resident, the kernel's for them included."""
        return Limit(CGROUPS / f"rampool-{os.getpid()}-{next(self.numbers)}", byte_count)


class Limit:
    """A memory cgroup, until the context ends."""

    def __init__(self, path, byte_count):
        self.path, self.byte_count = path, byte_count

    def __enter__(self):
        self.path.mkdir()
        (self.path / "memory.limit_in_bytes").write_text(str(self.byte_count))
        return self

    def join(self):
        """Puts the calling process, and all that it starts, into the group."""
        (self.path / "cgroup.procs").write_text("0")

    def killed(self):
        """Whether the kernel has ended one of the group's processes, because there was no memory for it."""
        found = re.search(r"^oom_kill (\d+)", (self.path / "memory.oom_control").read_text(), re.M)
        return found is not None and int(found.group(1)) > 0

    def __exit__(self, *_):
        # A process that ended leaves its group a moment later.
        for _ in range(100):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.02)
        raise OSError(f"{self.path} is left behind")

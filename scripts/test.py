#!/usr/bin/env python3
"""Everything that `make test` runs; stops at the first step that fails.

The output is that of the tools themselves, with a heading before each step. Suites that wait more than they
compute run beside the Rust tests, and their output comes after; those of programs under pressure need the
machine for themselves. Besides what they find, this fails when a test was ignored, or was skipped for want of
something that this machine has: a test that cannot run appends a line `FEATURE: why` to the file named by
RAMPOOL_SKIPS, and this script asks the kernel itself, not rampool, whether the feature is there. What failed,
and how, comes once more at the very end. Python's standard library only.
"""

import ctypes
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARIES = os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target")) + "/release"

PURE = ["wire", "paging", "sharing", "lease", "pinning", "session", "nbd", "files"]
STEPS = {
    "fmt": ["cargo", "fmt", "--all", "--check"],
    "links": [sys.executable, "scripts/check_links.py"],
    "scripts": [sys.executable, "-m", "unittest", "discover", "--start-directory", "scripts"],
    "counts": [sys.executable, "scripts/counts.py"],
    "figures": [sys.executable, "scripts/plot.py", "--check"],
    "clippy": ["cargo", "clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"],
    "pure": [
        "cargo",
        "test",
        "--quiet",
        "--lib",
        *(word for crate in PURE for word in ("-p", f"rampool-{crate}")),
    ],
    "build": [sys.executable, "tests/python/run.py", "--build"],
    "unit": ["cargo", "test", "--workspace", "--quiet", "--no-fail-fast"],
    "installed": [sys.executable, "tests/install/run.py", "--reduced"],
    "failures": [sys.executable, "tests/failures/run.py", "--reduced", "--lane", "computing"],
    "waiting": [sys.executable, "tests/failures/run.py", "--reduced", "--lane", "waiting"],
    "block": [sys.executable, "tests/block/run.py", "--reduced"],
    "files": [sys.executable, "tests/files/run.py", "--reduced"],
    "programs": [sys.executable, "tests/programs/run.py", "--reduced"],
    "python": [sys.executable, "tests/python/run.py", "--brief"],
}
# Beside "unit", one after another.
BESIDE = ["installed", "block", "files", "python", "waiting"]
# No step may hang: a watchdog ends it. Far above what they take, so that no slow machine fails for it.
LIMIT_S = 3600


# --- what the kernel has, asked without any of rampool's own code -------------------------------------------

UFFD_USER_MODE_ONLY = 1
UFFDIO_API = 0xC018AA3F
UFFD_API = 0xAA


def uffd_features(user_mode_only):
    """The feature bits of a new userfaultfd, or None where this user gets none."""
    number = {"x86_64": 323, "aarch64": 282}.get(os.uname().machine)
    if number is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | (UFFD_USER_MODE_ONLY if user_mode_only else 0))
    if fd < 0:
        return None
    try:
        answer = ctypes.create_string_buffer(struct.pack("=QQQ", UFFD_API, 0, 0))
        if libc.ioctl(fd, ctypes.c_ulong(UFFDIO_API), answer) != 0:
            return None
        return struct.unpack("=QQQ", answer.raw[:24])[1]
    finally:
        os.close(fd)


def has_capability(bit):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> bit & 1)
    return False


def io_uring():
    """Whether a ring can be made."""
    number = {"x86_64": 425, "aarch64": 425}.get(os.uname().machine)
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(number, 1, ctypes.create_string_buffer(120))
    if fd >= 0:
        os.close(fd)
    return fd >= 0


def has_mpi4py():
    tried = [str(ROOT / ".venv/bin/python"), "python3"]
    return any(
        os.access(shutil.which(python) or "", os.X_OK)
        and subprocess.run([python, "-c", "from mpi4py import MPI"], capture_output=True).returncode == 0
        for python in tried
    )


def has_nbd_clients():
    """Whether they are here, or could be: as root on Debian they are a command away."""
    could_be = os.geteuid() == 0 and shutil.which("apt-get") is not None
    return could_be or all(
        map(shutil.which, ["nbdcopy", "nbdinfo", "nbdfuse", "qemu-img", "qemu-io", "nbdkit"])
    )


def features_here():
    full = uffd_features(False)
    user = uffd_features(True)
    any_mode = (full or 0) | (user or 0)
    return {
        "uffd": full is not None,
        "uffd-user": user is not None,
        "write-protect": bool(any_mode & 1 << 0),
        "fork-events": full is not None and has_capability(19),
        "poison": bool(any_mode & 1 << 14),
        "move": bool(any_mode & 1 << 16),
        "netns": has_capability(21) and has_capability(12),
        "root": os.geteuid() == 0,
        "helm": shutil.which("helm") is not None,
        "dpkg": shutil.which("dpkg-deb") is not None,
        "browser": any(map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])),
        "cpus": len(os.sched_getaffinity(0)) >= 2,
        "io-uring": io_uring(),
        "mpi": shutil.which("mpicc") is not None,
        "mpi4py": has_mpi4py(),
        "nbd-clients": has_nbd_clients(),
        # As root on Debian they are a command away.
        "allocators": os.geteuid() == 0 and shutil.which("apt-get") is not None,
        "fuse": os.path.exists("/dev/fuse")
        and os.geteuid() == 0
        and any(map(shutil.which, ["fusermount3", "fusermount"])),
    }


def unjustified(skips):
    """The skips that this machine gives no reason for, as lines."""
    here = features_here()
    wrong = []
    for line in skips:
        feature, _, why = line.partition(":")
        if here.get(feature.strip(), True):
            wrong.append(f"skipped for want of `{feature.strip()}`, which this machine has: {why.strip()}")
    return wrong


# --- what failed, once more ---------------------------------------------------------------------------------

MOST_REPEATED = 15


class Failures:
    """The failures in the output of `cargo test`, which come in the middle of it. (The suites of programs
    repeat their own at their end.)"""

    def __init__(self):
        self.found, self.inside = {}, None

    def see(self, line):
        if begins := re.fullmatch(r"---- (.+) stdout ----", line):
            self.inside = self.found.setdefault(begins.group(1), [])
        elif line == "failures:":
            self.inside = None
        elif "process didn't exit successfully" in line:
            self.found[line.strip()] = []
        elif self.inside is not None and line.strip():
            self.inside.append(line)

    def lines(self):
        room = max(MOST_REPEATED // max(len(self.found), 1), 3)
        for name, said in self.found.items():
            yield f"FAILED {name}"
            shown = said if len(said) <= room else [*said[: room - 1], "..."]
            yield from (f"    {line[:200]}" for line in shown)


# --- the steps ----------------------------------------------------------------------------------------------


def run(name, skips_file, say):
    """Runs one step; `say` gets its output, line by line, as it comes. Returns how many tests passed, and
    what is wrong, or None."""
    command = STEPS[name]
    if not all(pathlib.Path(ROOT, part).exists() for part in command if part.endswith(".py")):
        return 0, f"{name}: {command[1]} is missing"
    env = dict(os.environ, RAMPOOL_SKIPS=skips_file, RAMPOOL_BIN=f"{BINARIES}/rampool")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    watchdog = threading.Timer(LIMIT_S, process.kill)
    watchdog.start()
    passed, ignored, failures = 0, 0, Failures()
    try:
        for line in process.stdout:
            say(line)
            failures.see(line.rstrip("\n"))
            # `cargo test` says it of each binary, the suites of programs in their last line.
            if found := re.search(r"(\d+) passed[;,] \d+ failed(?:; (\d+) ignored)?", line):
                passed += int(found.group(1))
                ignored += int(found.group(2) or 0)
            # pytest, whose end says how it went.
            elif found := re.match(r"(\d+) passed\b.* in [\d.]+s", line):
                passed += int(found.group(1))
        status = process.wait()
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
    if status != 0:
        for line in failures.lines():
            say(f"{line}\n")
        return passed, f"{name}: `{' '.join(command)}` ended with {status}"
    if ignored:
        return passed, f"{name}: {ignored} tests are marked as ignored"
    return passed, None


class Steps:
    """Steps, one after another, with their sums."""

    def __init__(self, names, say):
        self.names, self.say = names, say
        self.passed, self.skipped, self.wrong = 0, 0, []

    def go(self):
        with tempfile.NamedTemporaryFile("r", prefix="rampool-skips-") as skips:
            for name in self.names:
                started = time.monotonic()
                self.say(
                    f"==> {name}: "
                    f"{' '.join(pathlib.Path(p).name if p == sys.executable else p for p in STEPS[name])}\n"
                )
                tests, wrong = run(name, skips.name, self.say)
                lines = skips.read().splitlines()
                self.passed, self.skipped = self.passed + tests, self.skipped + len(lines)
                for line in lines:
                    self.say(f"skipped, {line}\n")
                self.wrong = [wrong] if wrong else unjustified(lines)
                if self.wrong:
                    return
                self.say(f"    {name} took {time.monotonic() - started:.0f} s\n")


def main():
    # "unit" has the tests of "pure", too.
    wanted = sys.argv[1:] or [name for name in STEPS if name != "pure"]
    unknown = [name for name in wanted if name not in STEPS]
    if unknown:
        sys.exit(f"no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    began, later = time.monotonic(), []
    apart = "unit" in wanted
    here = Steps(
        [name for name in wanted if not (apart and name in BESIDE)],
        lambda text: print(text, end="", flush=True),
    )
    beside = Steps([name for name in wanted if apart and name in BESIDE], later.append)
    before = Steps([name for name in here.names if apart and name != "unit"], here.say)
    here.names = [name for name in here.names if name not in before.names]
    before.go()
    if not before.wrong:
        thread = threading.Thread(target=beside.go)
        thread.start()
        here.go()
        thread.join()
        print("".join(later), end="", flush=True)
    every = [before, here, beside]
    if wrong := [line for steps in every for line in steps.wrong]:
        sys.exit("\n".join(f"FAILED {line}" for line in wrong))
    passed, skipped = sum(steps.passed for steps in every), sum(steps.skipped for steps in every)
    print(
        f"everything asked for passed in {time.monotonic() - began:.0f} s\n{passed} passed, 0 failed, "
        f"{skipped} skipped",
        flush=True,
    )


if __name__ == "__main__":
    main()

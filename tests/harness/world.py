"""One test's world: a directory, memory servers, runs of programs natively and under `rampool run`.

Every wait has a deadline. A run that passes its deadline is a hang: the stacks of all its processes go into
the failure, then they are killed.
"""

import collections
import hashlib
import itertools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from . import procs

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


class Failure(Exception):
    """A test's verdict: what was expected and what was seen."""


def check(condition, text):
    if not condition:
        raise Failure(text)


TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
SOURCES = ROOT / "tests/programs/src"
FLAGS = ["-O1", "-g", "-Wall", "-pthread"]


def skip(feature, why):
    """Tells `make test` that this test cannot run here; `make test` asks the kernel whether that is true."""
    if skips := os.environ.get("RAMPOOL_SKIPS"):
        with open(skips, "a", encoding="utf-8") as out:
            out.write(f"{feature}: {why}\n")


def built(name):
    """Compiles one of our own small programs, unless it is newer than its source."""
    source = next(p for p in (SOURCES / f"{name}.c", SOURCES / f"{name}.cpp") if p.exists())
    binary = TARGET / "test-programs" / name
    inputs = [source, SOURCES / "common.h"]
    if not binary.exists() or binary.stat().st_mtime < max(p.stat().st_mtime for p in inputs):
        binary.parent.mkdir(parents=True, exist_ok=True)
        compiler = ["g++", "-O2"] if source.suffix == ".cpp" else ["gcc"]
        subprocess.run([*compiler, *FLAGS, "-o", binary, source], check=True, timeout=120)
    return binary


PURGING = {
    "jemalloc": {"MALLOC_CONF": "background_thread:true,dirty_decay_ms:10,muzzy_decay_ms:0"},
    "mimalloc": {"MIMALLOC_PURGE_DELAY": "1", "MIMALLOC_RESET_DELAY": "1", "MIMALLOC_PAGE_RESET": "1"},
}


def allocators():
    """The default allocator and the installed ones, with purging threads if they have any."""
    found = {"glibc": {}}
    ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    libraries = (
        subprocess.run([ldconfig, "-p"], capture_output=True, text=True, timeout=60).stdout
        if ldconfig
        else ""
    )
    for name, env in PURGING.items():
        if path := re.search(rf"^\s*lib{name}\.so\.\S+ .* => (\S+)$", libraries, re.M):
            found[name] = {**env, "LD_PRELOAD": path.group(1)}
    return found


def rampool_binary():
    path = Path(os.environ.get("RAMPOOL_BIN") or TARGET / "release/rampool")
    if not path.exists():
        raise SystemExit(f"{path} is not built: run `make build` (or set RAMPOOL_BIN)")
    return path


def untaken_ports():
    """Ports outside the kernel's ephemeral range, so that no other process gets one before it is used. If the
    range covers all ports, one of them."""
    lowest, kernels = 10000, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    yield from random.sample(range(lowest, kernels), max(kernels - lowest, 0))
    while True:
        yield 0


PORTS = untaken_ports()


def free_port():
    for port in PORTS:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return s.getsockname()[1]


LASTING_S = 0.05
SAMPLE_S = 0.004


class Outcome:
    """How a run ended, and what was seen of it."""

    def __init__(self, code, out, err, wall, usage, peak_anonymous, lasting_anonymous, pids, moments):
        self.code, self.out, self.err, self.wall = code, out, err, wall
        # Processor time of the program and of all that it, and `rampool run`, waited for.
        self.peak_rss, self.cpu, self.pids = usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime, pids
        # The most memory that a managed process held at any moment, and the most that one held
        # for LASTING_S without a break.
        self.peak_anonymous, self.lasting_anonymous = peak_anonymous, lasting_anonymous
        # With `watch="shares"`: what each process held, moment by moment, its share of what it shares.
        self.moments = moments

    def text(self):
        return self.out.read_text(errors="replace")

    def digest(self):
        hasher = hashlib.sha256()
        with open(self.out, "rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
        return hasher.hexdigest()

    def said(self, limit=2500):
        return self.err[-limit:]

    def faults(self):
        """Page faults that the summary counts; 0 when the program never came near its budget."""
        found = re.search(r"^ *faults +(\d+)", self.err, re.M)
        return int(found.group(1)) if found else 0


class Server:
    def __init__(self, process, address, log, name):
        self.process, self.address, self.log, self.name = process, address, log, name

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def said(self, limit=1500):
        return self.log.read_text(errors="replace")[-limit:]


class World:
    def __init__(self, name, keep=False, always=()):
        """`always`: options of every `rampool run`."""
        self.always = always
        base = os.environ.get("RAMPOOL_TEST_DIR")
        self.dir = Path(tempfile.mkdtemp(prefix=f"rampool-{name}-", dir=base))
        self.keep, self.servers, self.running, self.numbers = keep, [], [], itertools.count(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for server in self.servers:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGCONT)
                server.process.terminate()
        late = []
        for server in self.servers:
            try:
                server.process.wait(20)
            except subprocess.TimeoutExpired:
                late.append(server.process.pid)
        text = procs.stacks(late) if late else ""
        procs.kill_all(late + procs.descendants(os.getpid()))
        procs.reap()
        if not self.keep:
            shutil.rmtree(self.dir, ignore_errors=True)
        if late:
            raise Failure(f"a memory server did not end within 20 s of SIGTERM\n{text}")

    def serve(self, memory, *extra, listen=None, name="server", ready_s=20):
        """A memory server process on this machine."""
        listen = listen or f"127.0.0.1:{free_port()}"
        number = next(self.numbers)
        ready, log = self.dir / f"{name}.{number}.ready", self.dir / f"{name}.{number}.log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [
                    rampool_binary(), "serve", "--memory", str(memory), "--listen", listen, "--ready-file",
                    str(ready), *map(str, extra),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=procs.end_with_parent,
            )
        server = Server(process, listen, log, name)
        self.servers.append(server)
        deadline = time.monotonic() + ready_s
        while not ready.exists():
            check(
                process.poll() is None,
                f"the memory server ended at once with {process.returncode}: {server.said()}",
            )
            check(
                time.monotonic() < deadline,
                f"the memory server was not ready in {ready_s} s: {server.said()}",
            )
            time.sleep(0.005)
        return server

    def start(self, argv, *, local=None, servers=(), options=(), env=None, stdin=subprocess.DEVNULL, cwd=None,
              prepare=lambda: None, stats=None, before=(), watch=False):
        """Starts a program, under `rampool run` when `local` (bytes) is given, else natively. The new process
        calls `prepare` first. `stats`: a file for the counters, in place of a summary on standard error.
        `before`: a command that starts the rest of its command line. `watch`: samples the memory of its
        processes natively too; "shares" keeps all that was seen."""
        number = next(self.numbers)
        out, err = self.dir / f"{number}.out", self.dir / f"{number}.err"
        argv = [str(a) for a in argv]
        if local is not None:
            run = [
                str(rampool_binary()), "run", "--local", str(local),
                f"--stats={stats}" if stats else "--stats",
            ]
            for server in servers:
                run += ["--server", server if isinstance(server, str) else server.address]
            argv = run + [str(o) for o in (*self.always, *options)] + ["--"] + argv
        started = time.monotonic()
        with open(out, "wb") as o, open(err, "wb") as e:
            process = subprocess.Popen(
                [*before, *argv],
                stdin=stdin,
                stdout=o,
                stderr=e,
                env={**os.environ, **(env or {})},
                cwd=cwd or self.dir,
                start_new_session=True,
                preexec_fn=lambda: (procs.end_with_parent(), prepare()),
            )
        return Running(self, process, out, err, local, started, watch)

    def run(self, argv, timeout=120, **how):
        return self.start(argv, **how).finish(timeout)


class Running:
    """A program that runs. A thread samples how much anonymous memory each of its managed processes holds;
    natively, if asked to, each process."""

    def __init__(self, world, process, out, err, local, started, watch=False):
        self.world, self.process, self.out, self.err, self.local = world, process, out, err, local
        self.started = started
        self.peaks, self.lasting, self.done = {}, 0, threading.Event()
        self.watch, self.moments = watch, []
        self.sampler = None
        if local is not None or watch:
            self.sampler = threading.Thread(target=self._sample, daemon=True)
            self.sampler.start()

    def _sample(self):
        binary = str(rampool_binary())
        managed, looked, recent = [], 0.0, {}
        while not self.done.is_set():
            now = time.monotonic()
            if now - looked > 0.05:
                looked = now
                managed = []
                for pid in [self.process.pid, *procs.descendants(self.process.pid)]:
                    try:
                        ours = os.readlink(f"/proc/{pid}/exe") == binary
                        if not ours and (self.local is None or procs.is_managed(pid)):
                            managed.append(pid)
                    except OSError:
                        pass
            if self.watch == "shares":
                self.moments.append([procs.anonymous_share(pid) for pid in managed])
            for pid in managed:
                seen = procs.anonymous_bytes(pid)
                if seen > self.peaks.get(pid, 0):
                    self.peaks[pid] = seen
                window = recent.setdefault(pid, collections.deque())
                window.append((now, seen))
                # The window reaches back at least that far, and no farther than it must.
                while len(window) > 1 and window[1][0] <= now - LASTING_S:
                    window.popleft()
                if window[0][0] <= now - LASTING_S:
                    self.lasting = max(self.lasting, min(held for _, held in window))
            self.done.wait(SAMPLE_S)

    def managed_pids(self, count=1, timeout=20):
        """Waits until the sampler has seen `count` managed processes."""
        deadline = time.monotonic() + timeout
        while len(self.peaks) < count:
            check(not self.ended(), f"the program ended early: {self.said()[-2000:]}")
            check(time.monotonic() < deadline, "no managed process was seen")
            time.sleep(0.005)
        return list(self.peaks)

    def said(self):
        return self.err.read_text(errors="replace")

    def ended(self):
        """Whether the program has ended. Does not collect it: `finish` wants its resource usage."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait_for(self, text, timeout=60):
        """Waits until the program wrote `text` to its standard output."""
        deadline = time.monotonic() + timeout
        while text not in self.out.read_text(errors="replace"):
            if self.ended():
                check(
                    text in self.out.read_text(errors="replace"),
                    f"the program ended before it said `{text}`: {self.said()[-2000:]}",
                )
                return
            if time.monotonic() > deadline:
                self.hang(f"the program did not say `{text}` in {timeout} s")
            time.sleep(0.01)

    def hang(self, what):
        pids = procs.descendants(os.getpid())
        text = procs.stacks(pids)
        self.done.set()
        procs.kill_all([p for p in pids if p not in [s.process.pid for s in self.world.servers]])
        os.waitpid(self.process.pid, 0)
        servers = "\n".join(f"{s.name}: {s.said()}" for s in self.world.servers)
        raise Failure(f"HANG: {what}\n{self.said()[-1500:]}\n{servers}\n{text}")

    def finish(self, timeout=120):
        deadline = time.monotonic() + timeout
        while True:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                self.hang(f"still running after {timeout} s")
            time.sleep(0.003)
        wall = time.monotonic() - self.started
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.done.set()
        if self.sampler:
            self.sampler.join(10)
        err = self.said()
        code, peak = self.process.returncode, max(self.peaks.values(), default=0)
        return Outcome(code, self.out, err, wall, usage, peak, self.lasting, list(self.peaks), self.moments)

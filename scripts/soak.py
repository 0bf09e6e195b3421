#!/usr/bin/env python3
"""Programs that check every byte, under memory pressure, with `--verify`, for SECONDS (default 3600), and one
line of verdict at the end.

Each round picks, from a seed, a program, an allocator, a fault mode, a local memory, and what presses
meanwhile: see PRESSURES. For each pressure a number of the kernel says whether it bit; the last lines tell
them, and name what did not bite. What the machine or the user does not allow is left out, and said. Settings
of the kernel are put back at the end, and on SIGINT, SIGTERM and SIGHUP.

    SECONDS=36000 make soak

RAMPOOL_SOAK_SEED=7 repeats the choices of a run, RAMPOOL_SOAK_ONLY=ksm,zram presses with these alone.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/programs"))
import redis_work  # noqa: E402
from harness import procs, world  # noqa: E402
from harness.world import MIB, PURGING, Failure, World, allocators, built, check  # noqa: E402

CORES = Path(tempfile.gettempdir()) / "rampool-soak-core"
HUGE, KSM = Path("/sys/kernel/mm/transparent_hugepage"), Path("/sys/kernel/mm/ksm")
PR_SET_MEMORY_MERGE = 67
libc = ctypes.CDLL(None)


def read(path):
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def memory_cgroups():
    """Where memory cgroups are, and what their files are called: of version 1, or of version 2."""
    if (path := Path("/sys/fs/cgroup/memory")).is_dir():
        return path, "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"
    for path in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if "memory" in read(path / "cgroup.controllers").split():
            return path, "memory.max", "memory.peak", "memory.events"
    return None


def vmstat(*names):
    """The sum of these counters of the kernel."""
    found = dict(line.split() for line in read("/proc/vmstat").splitlines())
    return sum(int(found.get(name, 0)) for name in names)


def current(path):
    """A setting, as it must be written to put it back."""
    value = read(path).strip()
    chosen = re.search(r"\[([\w+-]+)\]", value)
    return chosen.group(1) if chosen else value


@contextlib.contextmanager
def settings(values):
    """Settings of the kernel, put back afterwards."""
    before = {path: current(path) for path in values}
    try:
        for path, value in values.items():
            path.write_text(str(value))
        yield
    finally:
        for path, value in before.items():
            path.write_text(value)


@contextlib.contextmanager
def repeated(action, every_s):
    """A thread that does something again and again."""
    over = threading.Event()

    def repeats():
        while not over.wait(every_s):
            with contextlib.suppress(OSError):
                action()

    thread = threading.Thread(target=repeats)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Pressure:
    """One thing that presses while a program runs. `unit` is what `bit` counts: 0 at the end means that it
    did nothing."""

    name, unit = "", ""

    def __init__(self):
        self.before, self.seen, self.rounds = 0, 0, 0

    def lacks(self):
        """What is missing here, in words; empty where nothing is."""
        return ""

    @contextlib.contextmanager
    def on(self, _round):
        yield

    def count(self):
        """A counter that only grows; `look` is for the others."""
        return 0

    def look(self, _pids):
        """Called now and then with the processes of the program."""

    def prepare(self):
        """Called in the new process, before the program."""

    def killed(self):
        """Whether this has made the kernel kill the program."""
        return False

    @contextlib.contextmanager
    def applied(self, round_):
        self.rounds += 1
        before = self.count()
        with self.on(round_):
            yield
            self.seen += self.count() - before


def root():
    return "" if os.geteuid() == 0 else "needs root"


class Compaction(Pressure):
    name, unit = "compaction", "pages moved by the kernel"

    def lacks(self):
        return root() or (
            "" if Path("/proc/sys/vm/compact_memory").exists() else "this kernel does not compact memory"
        )

    def on(self, _round):
        return repeated(lambda: Path("/proc/sys/vm/compact_memory").write_text("1"), 0.05)

    def count(self):
        return vmstat("pgmigrate_success")


class Khugepaged(Pressure):
    name, unit = "khugepaged", "huge pages made by it"

    def __init__(self):
        super().__init__()
        self.managed_kb = 0

    def lacks(self):
        return root() or ("" if (HUGE / "khugepaged").exists() else "this kernel has no huge pages")

    def on(self, _round):
        return settings({
            HUGE / "enabled": "always",
            HUGE / "defrag": "always",
            HUGE / "khugepaged/scan_sleep_millisecs": 20,
            HUGE / "khugepaged/alloc_sleep_millisecs": 100,
            HUGE / "khugepaged/pages_to_scan": 8192,
        })

    def count(self):
        return vmstat("thp_collapse_alloc")

    def look(self, pids):
        for pid in pids:
            huge = 0
            for line in read(f"/proc/{pid}/smaps").splitlines():
                if line.startswith("AnonHugePages:"):
                    huge = int(line.split()[1])
                elif line.startswith("VmFlags:") and " um" in line:
                    self.managed_kb = max(self.managed_kb, huge)


class Ksm(Pressure):
    name, unit = "ksm", "pages of the programs merged with others, at most"

    def lacks(self):
        return root() or ("" if (KSM / "run").exists() else "this kernel does not merge pages (CONFIG_KSM)")

    def on(self, _round):
        return settings({KSM / "sleep_millisecs": 20, KSM / "pages_to_scan": 4000, KSM / "run": 1})

    def prepare(self):
        # All memory of the program, and of its agent; before Linux 6.7 this does not outlive exec.
        libc.prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0)

    def look(self, pids):
        merged = [read(f"/proc/{pid}/ksm_merging_pages").strip() for pid in pids]
        self.seen = max(self.seen, sum(int(n) for n in merged if n))


class Zram(Pressure):
    """Swap space in memory. Programs page themselves out (MADV_PAGEOUT)."""

    name, unit = "zram", "pages written to swap"

    def lacks(self):
        if root():
            return root()
        if not shutil.which("zramctl"):
            return "needs zramctl"
        if not Path("/sys/class/zram-control").exists():
            subprocess.run(["modprobe", "zram"], capture_output=True, timeout=30)
        return "" if Path("/sys/class/zram-control").exists() else "this kernel has no zram"

    @contextlib.contextmanager
    def on(self, _round):
        device = subprocess.run(
            ["zramctl", "--find", "--size", "768M"], check=True, capture_output=True, text=True, timeout=30
        ).stdout.strip()
        try:
            for tool in ("mkswap", "swapon"):
                subprocess.run([tool, device], check=True, capture_output=True, timeout=30)
            yield
        finally:
            subprocess.run(["swapoff", device], capture_output=True, timeout=300)
            subprocess.run(["zramctl", "--reset", device], capture_output=True, timeout=30)

    def count(self):
        return vmstat("pswpout")


class Cgroup(Pressure):
    """A memory cgroup that is smaller than the program with its agent, so that the kernel reclaims what it
    can, to zram."""

    name, unit = "cgroup", "times that the limit was met"

    def __init__(self):
        super().__init__()
        if found := memory_cgroups():
            self.root, *names = found
            self.path = self.root / "rampool-soak"
            self.most, self.peak, self.events = (self.path / name for name in names)
        self.outside, self.over, self.kills = 0, 0, 0

    def lacks(self):
        return (
            root() or Zram().lacks() or ("" if memory_cgroups() else "needs memory cgroups at /sys/fs/cgroup")
        )

    @contextlib.contextmanager
    def on(self, round_):
        with contextlib.suppress(OSError):
            (self.root / "cgroup.subtree_control").write_text("+memory")
        # The counters are those of a new group.
        self.path.mkdir(exist_ok=True)
        self.limit = round_.local // 2 + 12 * MIB
        self.most.write_text(str(self.limit))
        try:
            yield
            self.seen += int(read(self.path / "memory.failcnt") or self.event("max"))
            self.over += int(read(self.peak) or 0) > self.limit
        finally:
            # The last process may be a moment in leaving.
            for _ in range(100):
                with contextlib.suppress(OSError):
                    self.path.rmdir()
                    break
                time.sleep(0.1)

    def event(self, name):
        found = re.search(rf"^{name} (\d+)", read(self.events), re.M)
        return int(found.group(1)) if found else 0

    def killed(self):
        """In memory of huge pages, or pages that are all in use, the kernel may find nothing to reclaim."""
        killed = bool(self.event("oom_kill"))
        self.kills += killed
        return killed

    def prepare(self):
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def look(self, pids):
        inside = set(map(int, read(self.path / "cgroup.procs").split()))
        # A process may have ended between the two lists.
        self.outside += sum(
            pid not in inside
            and Path(f"/proc/{pid}/cmdline").exists()
            and "rampool-soak" not in read(f"/proc/{pid}/cgroup")
            and bool(read(f"/proc/{pid}/maps"))
            for pid in pids
        )


class Hogs(Pressure):
    """CPU hogs above, at and below the program's priority, and a real-time one; each ends by itself as
    well."""

    name, unit = "hogs", "times that a thread of the programs was preempted, at least"
    SPINS = """if True:
        import os, sys, time
        kind = sys.argv[1]
        try:
            if kind == "real-time":
                os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
            elif kind == "idle":
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            else:
                os.setpriority(os.PRIO_PROCESS, 0, int(kind))
        except OSError:
            pass
        on, off = (0.0005, 0.01) if kind == "real-time" else (0.003, 0.002)
        end = time.time() + 900
        while time.time() < end:
            until = time.time() + on
            while time.time() < until: pass
            time.sleep(off)"""

    @contextlib.contextmanager
    def on(self, _round):
        running = [
            subprocess.Popen([sys.executable, "-c", self.SPINS, kind], preexec_fn=procs.end_with_parent)
            for kind in ("real-time", "0", "10", "idle")
        ]
        self.most = {}
        try:
            yield
        finally:
            for hog in running:
                hog.kill()
                hog.wait()
            self.seen += sum(self.most.values())

    def look(self, pids):
        for pid in pids:
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{pid}/task"):
                    if found := re.search(
                        r"^nonvoluntary_ctxt_switches:\s+(\d+)", read(f"/proc/{pid}/task/{task}/status"), re.M
                    ):
                        self.most[task] = max(self.most.get(task, 0), int(found.group(1)))


class Kill(Pressure):
    """Other clients of the same server, killed one after the other in the middle of what they do."""

    name, unit = "kill", "clients killed that had pages at the server"

    @contextlib.contextmanager
    def on(self, round_):
        over = threading.Event()

        def kills():
            rng = random.Random(round_.seed)
            while not over.is_set():
                victim = round_.world.start(
                    [built("torture"), round_.seed, 8192, 2, 1000000, 4],
                    local=12 * MIB,
                    servers=[round_.server],
                    options=["--memory", "200M"],
                )
                over.wait(0.7 + rng.random() * 2)
                # It has filled twice its local memory by then, or has done nothing yet.
                away = max((held for held in victim.peaks.values()), default=0) > 10 * MIB
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(victim.process.pid, signal.SIGKILL)
                with contextlib.suppress(Failure, ChildProcessError):
                    self.seen += away and victim.finish(60).code == -signal.SIGKILL

        thread = threading.Thread(target=kills)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


# Each is 0 unless a promise is broken.
BROKEN = ("vanished_pages", "missing_pages", "refused_contents")
COUNTS = ("faults", "pages_there", *BROKEN)
PRESSURES = (Compaction, Khugepaged, Ksm, Zram, Cgroup, Hogs, Kill)


class Killed(Exception):
    """The kernel has ended the program, as a limit demands."""


# What is documented, and no wrong answer: each is counted, and said in the last line.
DOCUMENTED = {
    "the server is short of memory": "its machine is short of memory, so it gives no new leases",
    "the order of changes is in doubt": "what is there now cannot be told",
}


class Round:
    def __init__(self, world, rng, seed, seconds, pressures, libraries, chance):
        self.world, self.rng, self.seed, self.seconds = world, rng, seed, seconds
        names = {p.name for p in pressures if rng.random() < chance}
        # What a cgroup reclaims needs a place to go.
        names |= {"zram"} if "cgroup" in names else set()
        self.pressures = [p for p in pressures if p.name in names]
        self.env = {"RAMPOOL_EVICT_BY_COPY": "1"} if rng.random() < 0.25 else {}
        self.allocator = rng.choice(sorted(libraries))
        self.libraries = libraries
        self.local = rng.choice((12, 16, 24, 40)) * MIB
        self.argv, rungs = self.program(names)
        self.fault_mode = rng.choice(rungs)

    def program(self, names):
        rng = self.rng
        threads = rng.choice((1, 3))
        purge = ["free"] * (rng.random() < 0.3) + ["forks"] * (rng.random() < 0.5)
        purge += (
            ["hugepages"] * ("khugepaged" in names)
            + ["merge"] * ("ksm" in names)
            + ["pageout"] * ("zram" in names)
        )
        purger = [built("purge"), self.seed, self.seconds, threads, 48, ",".join(purge) or "none"]
        allocating = [built("allocate"), self.seed, self.seconds, threads, 64]
        others = [
            [built("torture"), self.seed, 3 * self.local // 4096, 4, 3000, 12],
            [built("hashmap"), 24, self.seed],
            [built("threads"), 64, 3, self.seed],
        ]
        # They do what the lower modes do not serve.
        self.port = world.free_port()
        redis = [
            "redis-server", "--port", self.port, "--bind", "127.0.0.1", "--dir", self.world.dir, "--save", "",
            "--appendonly", "no", "--dbfilename", "dump.rdb",
        ]
        full = [
            redis,
            [built("remapped"), self.seed, self.seconds, threads, 48] + ["forks"] * (rng.random() < 0.3),
            [built("mappings"), self.seed, 4000, 4096, 24],
            [built("stacks"), 48, 3],
            [built("freed"), 48],
            [built("processes"), 48, "fork-chain"],
        ]
        argv = rng.choice([purger, purger, allocating, allocating, rng.choice(others), rng.choice(full)])
        return argv, ("uffd",) if argv in full else ("uffd", "uffd", "uffd-user")

    def text(self):
        return " ".join(
            map(
                str,
                [
                    Path(self.argv[0]).name,
                    *self.argv[1:],
                    self.fault_mode,
                    f"{self.local // MIB}M",
                    self.allocator,
                    *self.env,
                    *(f"+{p.name}" for p in self.pressures),
                ],
            )
        )

    def run(self):
        """Returns what the run counted, or nothing if the kernel ended it for want of memory."""
        self.server = self.world.serve(3 << 30)
        file = self.world.dir / "counts.json"
        with contextlib.ExitStack() as held:
            for pressure in self.pressures:
                held.enter_context(pressure.applied(self))
            running = self.world.start(
                self.argv,
                local=self.local,
                servers=[self.server],
                options=["--verify", "--fault-mode", self.fault_mode, "--memory", "1900M"],
                env={**self.env, **self.libraries[self.allocator]},
                stats=file,
                prepare=lambda: [pressure.prepare() for pressure in self.pressures],
            )
            held.enter_context(repeated(lambda: self.look(running), 0.3))
            if self.argv[0] == "redis-server":
                self.drive_redis(running)
            outcome = running.finish(self.seconds * 20 + 600)
            killed = outcome.code == -signal.SIGKILL and any(
                [pressure.killed() for pressure in self.pressures]
            )
        if killed:
            return None
        check(
            outcome.code == 0,
            f"{self.text()} ends with {outcome.code}: {outcome.said()}\nserver: {self.server.said()}",
        )
        processes = json.loads(file.read_text())["processes"]
        return {name: sum(process[name] for process in processes) for name in COUNTS}

    def drive_redis(self, running):
        """Redis, as its users have it: random reads, each checked, and writes, while it saves again and
        again."""
        keys = 3 * self.local // 1200
        versions = [0] * keys
        end = time.monotonic() + self.seconds
        try:
            client = redis_work.Client(self.port)
            redis_work.fill(client, keys)
            for nth in range(1 << 20):
                if time.monotonic() > end:
                    break
                client("BGSAVE")
                redis_work.mix(client, versions, 1000, self.seed + nth)
                while b"rdb_bgsave_in_progress:1" in (info := client("INFO", "persistence")):
                    time.sleep(0.05)
                check(b"rdb_last_bgsave_status:ok" in info, f"BGSAVE fails: {info.decode()}")
            redis_work.verify(client, versions)
            client.send([[b"SHUTDOWN", b"NOSAVE"]])
        except (AssertionError, OSError, RuntimeError) as error:
            if not any(pressure.killed() for pressure in self.pressures):
                raise Failure(
                    f"{self.text()}: {error!r}\n{running.out.read_text()[-1500:]}\n{running.said()[-2500:]}"
                ) from error

    def look(self, running):
        pids = [pid for pid in procs.descendants(running.process.pid) if procs.is_managed(pid)]
        for pressure in self.pressures:
            pressure.look(pids)


def end_in_order(number, _frame):
    """As Control-C: what was set is put back."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(f"soak: ended by {signal.Signals(number).name}; settings are put back")


def main():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_in_order)
    seconds = float(os.environ.get("SECONDS") or 3600)
    seed = int(os.environ.get("RAMPOOL_SOAK_SEED") or int.from_bytes(os.urandom(4), "little"))
    only = set(filter(None, os.environ.get("RAMPOOL_SOAK_ONLY", "").split(",")))
    check_names = only - {p.name for p in PRESSURES}
    if check_names:
        raise SystemExit(
            f"soak: no pressure is called {', '.join(check_names)}; there are "
            f"{', '.join(p.name for p in PRESSURES)}"
        )
    every = [
        pressure()
        for pressure in PRESSURES
        if not only or pressure.name in only or (pressure is Zram and "cgroup" in only)
    ]
    lacking = {p.name: p.lacks() for p in every}
    pressures, libraries = [p for p in every if not lacking[p.name]], allocators()
    left_out = [f"{name} ({why})" for name, why in lacking.items() if why] + [
        f"{name} (not installed)" for name in PURGING if name not in libraries
    ]
    print(
        f"soak: seed {seed}, {seconds:.0f} s; allocators: {', '.join(libraries)}; pressures: "
        f"{', '.join(p.name for p in pressures)}; left out: {'; '.join(left_out) or 'nothing'}",
        flush=True,
    )
    procs.adopt_orphans()
    # How much is held is not what this is about.
    world.SAMPLE_S = 0.25
    began, rounds, failed, sums = time.monotonic(), 0, [], {"faults": 0, "pages_there": 0}
    documented = dict.fromkeys(DOCUMENTED, 0)
    try:
        while time.monotonic() - began < seconds and len(failed) < 10:
            rng = random.Random(f"{seed}-{rounds}")
            started, what = time.monotonic(), ""
            try:
                with World(f"soak-{rounds}") as here:
                    round_ = Round(
                        here, rng, seed + rounds, 10, pressures, libraries, 1 if len(only) == 1 else 0.35
                    )
                    what = round_.text()
                    counts = round_.run()
                if not counts:
                    raise Killed()
                wrong = [f"{name} {counts[name]}" for name in BROKEN if counts[name]]
                check(not wrong, f"promises were broken: {', '.join(wrong)}")
                sums["faults"] += counts["faults"]
                sums["pages_there"] += counts["pages_there"]
                verdict = f"ok, {counts['faults']} faults, {counts['pages_there']} pages there"
            except Killed:
                verdict = "killed by the kernel: no memory in its cgroup"
            except Failure as failure:
                known = next((name for name, said in DOCUMENTED.items() if said in str(failure)), None)
                if known:
                    documented[known] += 1
                    rounds += 1
                    print(
                        f"[{time.monotonic() - began:6.0f} s] round {rounds - 1}: {what} ended: {known}",
                        flush=True,
                    )
                    continue
                cores = [str(core) for core in CORES.parent.glob(f"{CORES.name}.*")]
                verdict = f"FAILED\n{failure}" + "".join(f"\ncore: {core}" for core in cores)
                failed.append(rounds)
            rounds += 1
            print(
                f"[{time.monotonic() - began:6.0f} s] round {rounds - 1}: {what} "
                f"({time.monotonic() - started:.1f} s) {verdict}",
                flush=True,
            )
    finally:
        for p in pressures:
            more = (
                f"; {p.managed_kb} kB of huge pages in managed memory, at most"
                if p.name == "khugepaged"
                else ""
            )
            more += (
                f"; {p.outside} processes seen outside of it, {p.over} rounds over the limit, {p.kills} "
                "programs killed at it"
                if p.name == "cgroup"
                else ""
            )
            print(
                f"  {p.name:<11} {p.rounds} rounds, {p.seen} "
                f"{p.unit}{more}{'' if p.seen else '  DID NOT BITE'}",
                flush=True,
            )
        idle = [p.name for p in pressures if not p.seen]
        print(
            f"soak: {rounds} rounds, {len(failed)} "
            f"failed{': ' + ', '.join(map(str, failed)) if failed else ''}, {sums['faults']} faults, "
            f"{sums['pages_there']} old pages met,"
            f" in {time.monotonic() - began:.0f} s, seed {seed}"
            + "".join(f"; {count} ended: {name}" for name, count in documented.items() if count)
            + ("; did not bite: " + ", ".join(idle) if idle else ""),
            flush=True,
        )
    sys.exit(bool(failed))


if __name__ == "__main__":
    import resource

    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))
    where = Path("/proc/sys/kernel/core_pattern")
    # Without the right to say where, core dumps are where the machine puts them.
    with settings({where: f"{CORES}.%e.%p"} if os.access(where, os.W_OK) else {}):
        main()

#!/usr/bin/env python3
"""Programs that check every byte, under memory pressure, with `--verify`, for SECONDS (default 3600), and one line of verdict at the end.

Each round picks, from a seed, a program, an allocator, a fault mode, a local memory, and what presses meanwhile: compaction, huge pages with khugepaged, merging
(KSM), page-out to zram, reclaim in a memory cgroup, CPU hogs at other priorities, clients that are killed. What the machine or the user does not allow is
left out, and said. Settings of the kernel are put back at the end.

    SECONDS=36000 make soak        RAMPOOL_SOAK_SEED=7 repeats the choices of a run
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness import procs  # noqa: E402
from harness.world import MIB, Failure, World, built, check  # noqa: E402

LIBRARIES = [Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib")]
CGROUP = Path("/sys/fs/cgroup/memory/rampool-soak")


def can_write(path):
    return os.access(path, os.W_OK)


@contextlib.contextmanager
def setting(path, value):
    """A setting of the kernel, put back afterwards. A value that the kernel refuses is skipped."""
    path = Path(path)
    before = path.read_text().strip()
    if chosen := re.search(r"\[(\w+)\]", before):
        before = chosen.group(1)
    with contextlib.suppress(OSError):
        path.write_text(str(value))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.write_text(before)


@contextlib.contextmanager
def compaction():
    over = threading.Event()

    def compacts():
        while not over.wait(0.05):
            Path("/proc/sys/vm/compact_memory").write_text("1")

    thread = threading.Thread(target=compacts)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def hogs(priorities):
    """CPU hogs, each of which ends by itself as well."""
    spins = "import os, sys, time\nos.nice(int(sys.argv[1]))\nend = time.time() + 600\nwhile time.time() < end:\n    until = time.time() + 0.003\n    while time.time() < until: pass\n    time.sleep(0.0005)"
    running = [subprocess.Popen([sys.executable, "-c", spins, str(nice)], preexec_fn=procs.end_with_parent) for nice in priorities]
    try:
        yield
    finally:
        for hog in running:
            hog.kill()
            hog.wait()


@contextlib.contextmanager
def zram():
    """Swap space in memory, so that pages that are paged out go somewhere."""
    made = subprocess.run(["zramctl", "--find", "--size", "512M"], capture_output=True, text=True, timeout=30)
    device = made.stdout.strip()
    ready = made.returncode == 0 and all(subprocess.run([tool, device], capture_output=True, timeout=30).returncode == 0 for tool in ("mkswap", "swapon"))
    try:
        yield ready
    finally:
        if device:
            subprocess.run(["swapoff", device], capture_output=True, timeout=120)
            subprocess.run(["zramctl", "--reset", device], capture_output=True, timeout=30)


def allocators():
    """The default allocator and the installed ones, with purging threads if they have any."""
    found = {"glibc": {}}
    for name, env in (("jemalloc", {"MALLOC_CONF": "background_thread:true,dirty_decay_ms:10,muzzy_decay_ms:0"}), ("mimalloc", {"MIMALLOC_PURGE_DELAY": "1"})):
        for library in (path for root in LIBRARIES for path in root.glob(f"**/lib{name}.so.[0-9]")):
            found[name] = {**env, "LD_PRELOAD": str(library)}
    return found


class Round:
    def __init__(self, world, rng, seed, seconds):
        self.world, self.rng, self.seed, self.seconds = world, rng, seed, seconds
        self.env, self.options, self.pressure, self.cgroup = {}, ["--verify"], [], False

    def choose(self, machine):
        rng = self.rng
        for name, allowed in machine.items():
            if allowed and name not in ("fault_modes", "allocators") and rng.random() < 0.4:
                self.pressure.append(name)
        self.options += ["--fault-mode", rng.choice(machine["fault_modes"])]
        if rng.random() < 0.25:
            self.env["RAMPOOL_EVICT_BY_COPY"] = "1"
        self.allocator = rng.choice(sorted(machine["allocators"]))
        self.local = rng.choice((12, 16, 24, 40)) * MIB

    def program(self):
        rng = self.rng
        purge = ["free"] * (rng.random() < 0.3) + ["forks"] * (rng.random() < 0.5)
        purge += ["hugepages"] * ("khugepaged" in self.pressure) + ["merge"] * ("ksm" in self.pressure) + ["pageout"] * ("zram" in self.pressure)
        return rng.choice(
            [
                [built("purge"), self.seed, self.seconds, rng.choice((1, 3)), 48, ",".join(purge) or "none"],
                [built("torture"), self.seed, 8192, 4, 3000, 12],
                [built("mappings"), self.seed, 4000, 4096, 24],
                [built("stacks"), 32, 3],
                [built("freed"), 24],
                [built("hashmap"), 64, self.seed],
                [built("threads"), 64, 3, self.seed],
                [built("processes"), 32, "fork-chain"],
            ]
        )

    def run(self, machine):
        self.choose(machine)
        argv = self.program()
        killed = "kill" in self.pressure
        with contextlib.ExitStack() as held:
            enter = held.enter_context
            if "compaction" in self.pressure:
                enter(compaction())
            if "khugepaged" in self.pressure:
                for name, value in (("enabled", "always"), ("khugepaged/scan_sleep_millisecs", 10), ("khugepaged/pages_to_scan", 100000)):
                    enter(setting(f"/sys/kernel/mm/transparent_hugepage/{name}", value))
            if "ksm" in self.pressure:
                for name, value in (("sleep_millisecs", 1), ("pages_to_scan", 10000), ("run", 1)):
                    enter(setting(f"/sys/kernel/mm/ksm/{name}", value))
            if "zram" in self.pressure:
                enter(zram())
            if "hogs" in self.pressure:
                enter(hogs((0, 5, 19)))
            server = self.world.serve(2 << 30)
            env = {**self.env, **machine["allocators"][self.allocator]}
            running = self.world.start(argv, local=self.local, servers=[server], options=[*self.options, "--memory", "1900M"], env=env)
            if "cgroup" in self.pressure:
                # Below the memory of the program and its agent, so that the kernel reclaims.
                CGROUP.mkdir(exist_ok=True)
                (CGROUP / "memory.limit_in_bytes").write_text(str(self.local + 192 * MIB))
                with contextlib.suppress(OSError):
                    (CGROUP / "tasks").write_text(str(running.process.pid))
            if killed:
                time.sleep(self.rng.random() * 3)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.process.pid, signal.SIGKILL)
            outcome = running.finish(self.seconds * 20 + 300)
        check(killed or outcome.code == 0, f"{argv} ends with {outcome.code}: {outcome.said()}\n{server.said()}")
        return outcome, " ".join(map(str, [Path(argv[0]).name, *argv[1:], *self.options[1:], self.allocator, *self.env, *self.pressure]))


def what_there_is():
    root = os.geteuid() == 0
    ksm, huge = Path("/sys/kernel/mm/ksm/run"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "compaction": can_write("/proc/sys/vm/compact_memory"),
        "khugepaged": huge.exists() and can_write(huge),
        "ksm": ksm.exists() and can_write(ksm),
        "zram": root and shutil.which("zramctl") is not None and Path("/sys/class/zram-control").exists(),
        "cgroup": root and (CGROUP.parent / "memory.limit_in_bytes").exists(),
        "hogs": True,
        "kill": True,
        "fault_modes": ["auto", "auto", "uffd-user"],
        "allocators": allocators(),
    }


def main():
    seconds = float(os.environ.get("SECONDS") or 3600)
    seed = int(os.environ.get("RAMPOOL_SOAK_SEED") or int.from_bytes(os.urandom(4), "little"))
    machine = what_there_is()
    lacks = [name for name, there in machine.items() if not there]
    print(f"soak: seed {seed}, {seconds:.0f} s; allocators: {', '.join(machine['allocators'])}; left out: {', '.join(lacks) or 'nothing'}", flush=True)
    procs.adopt_orphans()
    began, rounds, failed = time.monotonic(), 0, []
    while time.monotonic() - began < seconds and len(failed) < 10:
        rng = random.Random(f"{seed}-{rounds}")
        started = time.monotonic()
        try:
            with World(f"soak-{rounds}", False) as world:
                outcome, what = Round(world, rng, seed + rounds, 10).run(machine)
            verdict = f"ok, {outcome.faults()} faults" if "kill" not in what.split() else "killed"
        except Failure as failure:
            what, verdict = f"round {rounds}", f"FAILED\n{failure}"
            failed.append(rounds)
        rounds += 1
        print(f"[{time.monotonic() - began:6.0f} s] round {rounds}: {what} ({time.monotonic() - started:.1f} s) {verdict}", flush=True)
    print(f"soak: {rounds} rounds, {len(failed)} failed{': ' + ', '.join(map(str, failed)) if failed else ''}, in {time.monotonic() - began:.0f} s, seed {seed}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    procs.end_with_parent()
    main()

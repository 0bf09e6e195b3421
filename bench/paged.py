#!/usr/bin/env python3
"""Programs whose memory is paged, by turns with the same natively or with kernel swap on zram.

    python3 bench/paged.py fit         programs that fit their budget: the cost of being ready for more
    python3 bench/paged.py programs    programs at a quarter of their own peak
    python3 bench/paged.py miss        random touches of pages that are away
    python3 bench/paged.py redundancy  two copies of each page and one; what is noticed of a server that fails

Answers are compared with native ones. RAMPOOL_BIN names the binary; kernel swap and links need root.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/programs")]
import redis_work  # noqa: E402
from harness import procs  # noqa: E402
from harness.world import MIB, TARGET, Failure, World, check, free_port, rampool_binary  # noqa: E402
from harness.zram import KernelSwap  # noqa: E402
from report import Report, quartiles, ratios  # noqa: E402

WORK = ROOT / "tests/programs/work"
NATIVE, SERVER, SWAP, PRIVATE = "native", "rampool", "kernel swap on zram", "private store"
ONE, TWO, BACKUP = "one copy", "two copies", "rampool with a backup"
# Short names, as ratios have them.
SHORT = {SWAP: "swap", BACKUP: "a backup"}
# A native run that takes longer is worth no more waiting; others have twice as long.
DEADLINE_S = 200
# Servers lend nothing while all tasks wait for memory for this share of the time, in percent.
SHORT_OF_MEMORY = 10
CALM_WITHIN_S = 60


def bench_binary():
    """The benchmark's binary, which has the programs that are measured besides those of others."""
    beside = rampool_binary().with_name("rampool-bench")
    return beside if beside.exists() else TARGET / "release/rampool-bench"


class Ended:
    """A run that ended well: time, processor time, largest resident set (at least our own), what it wrote."""

    def __init__(self, wall, usage, digest, begin):
        self.wall, self.cpu, self.peak = wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
        self.digest, self.begin = digest, begin


class NoEnd(Exception):
    """A run did not end by itself in time, or not well. Says how."""


def run(argv, deadline_s, prepare=lambda: None):
    """Runs a command to its end. The new process calls `prepare` first."""
    started = time.monotonic()
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C"},
        start_new_session=True,
        preexec_fn=lambda: (procs.end_with_parent(), prepare()),
    )
    hasher, begin = hashlib.sha256(), bytearray()

    def read():
        while block := process.stdout.read1(1 << 18):
            hasher.update(block)
            begin.extend(block[: 100 - len(begin)])

    late = threading.Event()
    timer = threading.Timer(deadline_s, lambda: (late.set(), os.killpg(process.pid, signal.SIGKILL)))
    timer.daemon = True
    reader = threading.Thread(target=read, daemon=True)
    timer.start(), reader.start()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - started
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    if late.is_set():
        raise NoEnd(f"there was no end in {deadline_s} s")
    if process.returncode != 0:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode < 0:
        raise NoEnd(f"it was ended by signal {-process.returncode}")
    check(process.returncode == 0, f"`{' '.join(map(str, argv))}` ended with {process.returncode}")
    reader.join()
    return Ended(wall, usage, hasher.hexdigest(), bytes(begin))


def under_rampool(argv, options):
    return [rampool_binary(), "run", *map(str, options), "--", *argv]


def wait_for_calm():
    """Servers give no leases while their machine is short of memory, as after kernel swap."""
    for _ in range(2 * CALM_WITHIN_S):
        text = Path("/proc/pressure/memory").read_text() if Path("/proc/pressure/memory").exists() else ""
        full = next((line for line in text.splitlines() if line.startswith("full ")), "full avg10=0 ")
        if float(full.split("avg10=")[1].split()[0]) < SHORT_OF_MEMORY:
            return
        time.sleep(0.5)
    print("  this machine is short of memory (/proc/pressure/memory): servers will refuse leases", flush=True)


def served(world, memory, listen=None):
    wait_for_calm()
    options = ["--shards", "1", "--log-level", "error", "--encryption", "off", "--spin-us", "100"]
    return world.serve(memory, *options, listen=listen)


def to_servers(servers):
    return [word for server in servers for word in ("--server", server.address)]


def backup():
    """Copies on the disk that the binary is on."""
    return ["--backup", bench_binary().parent]


def mib(count):
    return f"{count / MIB:.3g} MiB" if count < 1000 * MIB else f"{count / MIB:.0f} MiB"


# --- programs -----------------------------------------------------------------------------------------------


def lines(directory, size, least, spread):
    """A file of about `size` bytes: lines of random hexadecimal digits."""
    path, rng, left = directory / "lines", random.Random(3), size
    with open(path, "w", encoding="ascii") as file:
        while left > 0:
            digits, at, block = rng.randbytes(1 << 20).hex(), 0, []
            while at + least + spread < len(digits) and left > 0:
                count = least + rng.randrange(spread)
                block.append(digits[at : at + count])
                at, left = at + count, left - count - 1
            file.write("\n".join(block) + "\n")
    return path


def sort(directory, size, least, spread, buffer):
    return ["sort", "-S", buffer, "--parallel=2", lines(directory, size, least, spread)]


def python(script, *arguments):
    own = ROOT / ".venv/bin/python"
    interpreter = str(own) if own.exists() else "python3"
    probe = subprocess.run([interpreter, "-c", "import numpy, sqlite3"], stderr=subprocess.DEVNULL)
    if probe.returncode != 0:
        raise LookupError(f"{interpreter} lacks NumPy or SQLite")
    return [interpreter, WORK / script, *map(str, arguments), "1"]


def columns(quick):
    return "NumPy column scan, 1 GiB", lambda _: python("numpy_work.py", "columns", 48 if quick else 1024)


def long_lines(quick):
    size = 24_000_000 if quick else 1_000_000_000
    return "GNU sort, 1 GB, lines of 1 kB", lambda directory: sort(directory, size, 500, 1000, "4G")


def hash_map(quick):
    entries = 100_000 if quick else 3_500_000
    argv = [bench_binary(), "bench", "fill-map", "--entries", str(entries)]
    return "HashMap in Rust, 160 MiB", lambda _: argv


def made(report, make, directory):
    """The command line of a program, or None, which is said."""
    try:
        return make(Path(directory))
    except LookupError as reason:
        report.note(f"left out: {reason}")
        return None


# --- programs that fit --------------------------------------------------------------------------------------


def fit(options, report):
    quick, rounds = options.quick, options.rounds or (1 if options.quick else 10)
    report.note(
        "each program natively and under `rampool run --local 4G`, which it does not need; pairs take turns "
        "in who goes first; not pinned"
    )
    size, rows = 2_000_000 if quick else 200_000_000, (5000, 500) if quick else (100_000, 20_000)
    programs = {
        "GNU sort, 200 MB": lambda directory: sort(directory, size, 16, 64, "1G"),
        "NumPy sort, 256 MiB": lambda _: python("numpy_work.py", "sort", 16 if quick else 256),
        "NumPy column scan, 512 MiB": lambda _: python("numpy_work.py", "columns", 16 if quick else 512),
        "SQLite, 100 k rows": lambda _: python("sqlite_work.py", *rows),
    }
    with World("fit") as world:
        how = ["--local", "4G", "--memory", "512M", *to_servers([served(world, "1G")])]
        for name, make in programs.items():
            if not (argv := made(report, make, world.dir)):
                continue
            native, paged = [], []
            for turn in range(rounds):
                for is_native in (turn % 2 == 0, turn % 2 != 0):
                    ways = (argv, native) if is_native else (under_rampool(argv, how), paged)
                    ways[1].append(run(ways[0], 120))
            check(len({seen.digest for seen in native + paged}) == 1, f"WRONG OUTPUT of {name}")
            for label, what, seen in (("native", "native", native), ("under rampool", "rampool", paged)):
                report.series(f"{name}: {label}", "s", [one.wall for one in seen], program=name, what=what)
            for what, of, aim in (("time", "wall", "<= 1.02"), ("CPU time", "cpu", None)):
                ours, theirs = ([getattr(one, of) for one in seen] for seen in (paged, native))
                report.ratio(f"{name}: {what}", ratios(ours, theirs), aim)


# --- programs at a quarter ----------------------------------------------------------------------------------


class Quarter:
    """Programs at a share of their own peak, each way by turns."""

    def __init__(self, report, ways, swap, rounds, percent=25):
        self.report, self.ways, self.swap, self.rounds, self.percent = report, ways, swap, rounds, percent

    def local(self, peak):
        return max(peak * self.percent // 100, 4 * MIB) // 4096 * 4096

    @contextlib.contextmanager
    def started(self, way, argv, peak, stats=None):
        """The command line of a program one way, and what its process calls first. None: no kernel swap."""
        if way == NATIVE:
            yield argv, lambda: None
        elif way == SWAP and self.swap is None:
            yield None
        elif way == SWAP:
            with self.swap.limit(self.local(peak)) as group:
                yield argv, group.join
        else:
            copies = {SERVER: ["--copies", 1], ONE: ["--copies", 1], TWO: ["--copies", 2], BACKUP: backup()}
            how = ["--local", self.local(peak), *([f"--stats={stats}"] if stats else [])]
            with World("quarter") as world:
                if way in copies:
                    count = 2 if way in (ONE, TWO) else 1
                    # Room for every process that the program may become.
                    servers = [served(world, peak * 3 + 512 * MIB) for _ in range(count)]
                    lease = (peak * 5 // 2 + 256 * MIB) // MIB * MIB
                    how += [*to_servers(servers), "--memory", lease, *copies[way]]
                yield under_rampool(argv, how), lambda: None

    def program(self, name, make, aims, least=False):
        with tempfile.TemporaryDirectory(prefix="rampool-bench-") as directory:
            if argv := made(self.report, make, directory):
                self.measure(name, argv, Path(directory, "stats.json"), aims, least)

    def measure(self, name, argv, stats, aims, least):
        report = self.report
        # The first run warms the page cache and says how large the program is.
        first = run(argv, DEADLINE_S)
        report.note(f"{name}: peak {mib(first.peak)}, local {mib(self.local(first.peak))}")
        times, leasts = {way: [] for way in self.ways}, []
        for _ in range(self.rounds):
            for way in self.ways:
                with self.started(way, argv, first.peak, stats) as how:
                    if how is None:
                        continue
                    try:
                        seen = run(how[0], DEADLINE_S * (1 if way == NATIVE else 2), how[1])
                    except NoEnd as said:
                        late = "no end" in str(said)
                        check(way == SWAP or late, f"{name}, {way}: {said}")
                        # As `scripts/plot.py` looks for it.
                        report.note(f"{name}, {way}: {said}" if late else f"{name}: with kernel swap {said}")
                        continue
                check(seen.digest == first.digest, f"WRONG OUTPUT: {name}, {way}")
                times[way].append(seen.wall)
                if least and way == SERVER:
                    leasts += self.least(name, stats, first.peak, times[NATIVE][-1])
        self.tell(name, "s", times)
        if leasts:
            report.series(f"{name}: least", "s", leasts, **self.parameters(name, "least"))
        self.ratios(name, times, aims)
        if leasts:
            report.ratio(f"{name}: least / native", ratios(leasts, times[NATIVE]))

    def least(self, name, stats, peak, native_s):
        """The native time, and what the kernel alone takes for the pages that came: one number, or none."""
        processes = json.loads(stats.read_text())["processes"]
        pages = sum(process["demand_pages"] + process["prefetched_pages"] for process in processes)
        argv = [bench_binary(), "bench", "least", "--pages", str(pages), "--local", str(self.local(peak))]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            self.report.note(f"{name}: no least")
            return []
        took = float(done.stdout)
        came = f"{pages} pages came from the servers; the kernel alone took {took:.3g} s for them"
        self.report.note(f"{name}: {came}")
        return [native_s + took]

    def tell(self, name, unit, times):
        for way, samples in times.items():
            if samples:
                self.report.series(f"{name}: {way}", unit, samples, **self.parameters(name, way))

    def parameters(self, name, what):
        return {"program": name, "what": what, "local_percent": self.percent}

    def ratios(self, name, times, aims):
        """Of each way and the native time, and of pairs, as far as they ended in each round."""
        pairs = [(way, NATIVE) for way in self.ways if way != NATIVE]
        pairs += [(SERVER, SWAP), (PRIVATE, SWAP), (TWO, ONE), (BACKUP, SERVER)]
        for a, b in pairs:
            ours, theirs = times.get(a), times.get(b)
            if ours and theirs and len(ours) == len(theirs):
                reach = aims.get(NATIVE) if b == NATIVE and a != SWAP else aims.get((a, b))
                figure = f"{name}: {SHORT.get(a, a)} / {SHORT.get(b, b)}"
                self.report.ratio(figure, ratios(ours, theirs), reach)


def redis(quarter, quick):
    """The median time of a GET of random values on one connection, each reply compared."""
    name, report = "Redis GET, 1 KB", quarter.report
    keys, gets = (20_000, 1000) if quick else (700_000, 60_000)
    medians, peak = {way: [] for way in quarter.ways}, 0
    for _ in range(quarter.rounds):
        # Native comes first, and says how large it is.
        for way in quarter.ways:
            port = free_port()
            argv = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
            with quarter.started(way, argv, peak) as how:
                if how is None:
                    continue
                try:
                    times, resident = session(how[0], how[1], port, keys, gets)
                except (OSError, RuntimeError) as error:
                    check(way == SWAP, f"{name}, {way}: {error}")
                    report.note(f"{name}: with kernel swap: {error}")
                    continue
            medians[way].append(quartiles(times)[1])
            if way == NATIVE:
                peak = resident
                report.note(f"{name}: {keys} keys, peak {mib(peak)}, local {mib(quarter.local(peak))}")
    quarter.tell(name, "us", medians)
    quarter.ratios(name, medians, {(SERVER, SWAP): "<= 1", (PRIVATE, SWAP): "<= 1"})


def session(argv, prepare, port, keys, gets):
    """Fills a Redis, then times random GETs in microseconds. Also gives the peak of its resident set."""
    server = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: (procs.end_with_parent(), prepare()),
    )
    try:
        client = redis_work.Client(port, timeout=60)
        for first in range(0, keys, 100):
            part = range(first, min(first + 100, keys))
            client.many([[b"SET", b"k%d" % key, redis_work.value(key, 0)] for key in part])
        times, rng = [], random.Random(9)
        for _ in range(gets):
            key = rng.randrange(keys)
            began = time.perf_counter()
            found = client(b"GET", b"k%d" % key)
            times.append((time.perf_counter() - began) * 1e6)
            check(found == redis_work.value(key, 0), f"WRONG VALUE of key {key}")
        status = Path(f"/proc/{server.pid}/status").read_text()
        return times, int(status.split("VmHWM:")[1].split()[0]) * 1024
    finally:
        procs.kill_all([*procs.descendants(server.pid), server.pid])
        server.wait()


def swap_or_not(held, report):
    """Kernel swap until `held` ends, or None where this machine has none for us."""
    try:
        return held.enter_context(KernelSwap())
    except (OSError, subprocess.SubprocessError) as error:
        report.note(f"kernel swap: {error}")
        return None


def programs(options, report):
    quick = options.quick
    report.note(
        "local memory: 25 % of each program's own peak; not pinned; outputs are compared with native ones; "
        "rampool: with one server over loopback TCP"
    )
    with contextlib.ExitStack() as held:
        swap = swap_or_not(held, report)
        # The order tells what comes behind kernel swap, after which servers lend nothing for a moment.
        quarter = Quarter(report, [NATIVE, SERVER, SWAP, PRIVATE], swap, options.rounds or 1)
        size = 24_000_000 if quick else 1_000_000_000
        swapped = {(SERVER, SWAP): "<= 0.5", (PRIVATE, SWAP): "<= 0.5"}
        quarter.program(*long_lines(quick), {NATIVE: "<= 4"}, least=True)
        short = "GNU sort, 1 GB, lines of 100 B"
        quarter.program(short, lambda at: sort(at, size, 99, 1, "4G"), {NATIVE: "<= 15"})
        report.note(
            "GNU sort: least: the native time, and what this kernel takes to copy in and to move out, one by "
            "one, as many scattered pages of 4 KiB as came from the servers in the run before it: one "
            "thread, 64 frames at a time, no network, no other thread, no decision. A pager that puts pages "
            "in and out by userfaultfd and reads as many pays that part whatever else it does"
        )
        quarter.program(*hash_map(quick), {NATIVE: "<= 20"})
        quarter.program(*columns(quick), swapped)
        rows = (60_000, 5000) if quick else (1_000_000, 200_000)
        quarter.program("SQLite, 1 M rows", lambda _: python("sqlite_work.py", *rows), swapped)
        redis(quarter, quick)


# --- random touches -----------------------------------------------------------------------------------------


def touched(memory, local, content, touches, way=None, options=(), world=None, servers=(), swap=None):
    """What a miss takes, in microseconds: time, and processor time."""
    argv = [bench_binary(), "bench", "touch", "--content", content]
    argv += ["--memory", str(memory), "--touches", str(touches)]
    argv += [word for server in servers for word in ("--server-pid", str(server.process.pid))]
    if way == SWAP:
        with swap.limit(local) as group:
            seen = run(argv, 120, group.join)
    else:
        lease = ["--memory", 2 * memory] if servers else []
        how = ["--local", local, *options, *to_servers(servers), *lease]
        seen = run(under_rampool(argv, how), 120)
    # Each page is as likely as any other.
    misses = touches * max(1 - local / memory, 0.01)
    return [float(ns) / 1e3 / misses for ns in seen.begin.split()]


@contextlib.contextmanager
def others(busy):
    """A process for each CPU that never waits, if `busy`. Each has a session of its own: the kernel shares
    the time of a CPU among sessions."""
    count = len(os.sched_getaffinity(0)) if busy else 0
    loop = ["sh", "-c", "while :; do :; done"]
    start = {"preexec_fn": procs.end_with_parent, "start_new_session": True}
    running = [subprocess.Popen(loop, **start) for _ in range(count)]
    procs.OUTLIVE.update(process.pid for process in running)
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
            procs.OUTLIVE.discard(process.pid)


def miss(options, report):
    quick = options.quick
    memory, local, touches = (32 * MIB, 8 * MIB, 4000) if quick else (512 * MIB, 128 * MIB, 100_000)
    report.note(
        f"{memory // MIB} MiB in {local // MIB} MiB, {touches} touches, a fourth of that while the CPUs are "
        "busy, every second one a write; not pinned; a miss is a touch divided by the share of memory that "
        "is not local"
    )
    report.note("busy: each CPU has another process, of a session of its own, that never waits")
    # What a miss may take of kernel swap's time.
    ways = {"private store": 0.9, "Unix socket": 1.1, "TCP": 1.4, "kernel swap": None}
    with contextlib.ExitStack() as held:
        swap = swap_or_not(held, report)
        for content in ("random", "packs"):
            found = {(cpus, way): ([], []) for cpus in ("quiet", "busy") for way in ways}
            for turn in range(options.rounds or (1 if quick else 5)):
                for cpus in ("quiet", "busy"):
                    # Busy rounds take longer, so there are fewer, unless a number is asked for.
                    if cpus == "busy" and turn >= (options.rounds or 3):
                        continue
                    with others(cpus == "busy"):
                        for way in ways:
                            if way == "kernel swap" and swap is None:
                                continue
                            count = touches // 4 if cpus == "busy" else touches
                            times = one_way(way, memory, local, content, count, swap)
                            for samples, one in zip(found[cpus, way], times):
                                samples.append(one)
            tell_misses(report, content, ways, found)


def one_way(way, memory, local, content, touches, swap):
    if way == "kernel swap":
        return touched(memory, local, content, touches, way=SWAP, swap=swap)
    with World("miss") as world:
        listen = {"Unix socket": f"unix:{world.dir}/server", "TCP": f"127.0.0.1:{free_port()}"}.get(way)
        servers = [served(world, 2 * memory + 64 * MIB, listen)] if listen else []
        return touched(memory, local, content, touches, servers=servers)


def tell_misses(report, content, ways, found):
    """The series and ratios of a content, by what the CPUs do besides, and by way."""
    for cpus in ("quiet", "busy"):
        for way in ways:
            for what, samples in zip(("wall", "CPU"), found[cpus, way]):
                if samples:
                    name = f"{content}, {cpus}, {way}: a miss, {what}"
                    report.series(name, "us", samples, content=content, way=way, what=what, cpus=cpus)
        for way, most in ways.items():
            swap = found[cpus, "kernel swap"]
            for what, ours, swaps, reach in zip(("wall", "CPU"), found[cpus, way], swap, (most, 1.5)):
                if way != "kernel swap" and ours and swaps:
                    aim = f"<= {reach}" if cpus == "quiet" else None
                    report.ratio(f"{content}, {cpus}, {way} / kernel swap, {what}", ratios(ours, swaps), aim)
    for way in ways:
        quiet, busy = found["quiet", way][0], found["busy", way][0]
        if quiet and busy:
            aim = "<= 2" if way != "kernel swap" else None
            report.ratio(f"{content}, {way}: busy / quiet, wall", [b / q for b, q in zip(busy, quiet)], aim)


# --- copies -------------------------------------------------------------------------------------------------


def redundancy(options, report):
    quick, rounds = options.quick, options.rounds or 1
    report.note(
        "two servers over loopback TCP on this machine, which share its CPUs with the program; not pinned; "
        "programs at a quarter of their own peak"
    )
    noticed(options, report)
    copied_misses(options, report)
    two = lambda most: {(TWO, ONE): f"<= {most}"}
    # Of a program that only reads, also what a copy on a disk costs.
    reader = Quarter(report, [NATIVE, ONE, TWO, SERVER, BACKUP], None, rounds)
    reader.program(*columns(quick), {**two(1.15), (BACKUP, SERVER): "<= 1.15"})
    writers = Quarter(report, [NATIVE, ONE, TWO], None, rounds)
    writers.program(*long_lines(quick), two(1.7))
    writers.program(*hash_map(quick), two(1.7))


def noticed(options, report):
    """What a reader notices of a server that fails: a client in Rust."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        argv = [bench_binary(), "bench", "redundancy", "--json", file.name]
        argv += ["--quick"] if options.quick else []
        argv += ["--rounds", str(options.rounds)] if options.rounds else []
        subprocess.run(argv, check=True)
        seen = json.loads(Path(file.name).read_text())
    for part in ("series", "ratios", "notes"):
        report.all[part] += seen[part]


def copied_misses(options, report):
    """Random touches, as `miss` has them."""
    quick = options.quick
    memory, local, touches = (32 * MIB, 8 * MIB, 4000) if quick else (512 * MIB, 128 * MIB, 100_000)
    ways = {
        "one copy": (2, ["--copies", 1]),
        "two copies": (2, ["--copies", 2]),
        "one server": (1, ["--copies", 1]),
        "one server and a disk": (1, backup()),
    }
    found = {way: ([], []) for way in ways}
    for _ in range(options.rounds or (1 if quick else 5)):
        for way, (count, how) in ways.items():
            with World("copies") as world:
                servers = [served(world, 2 * memory + 64 * MIB) for _ in range(count)]
                times = touched(memory, local, "random", touches, options=how, servers=servers)
            for samples, one in zip(found[way], times):
                samples.append(one)
    for at, what in enumerate(("wall", "CPU")):
        for way, samples in found.items():
            report.series(f"a miss, {way}, {what}", "us", samples[at], way=way, what=what)
        of = {way: samples[at] for way, samples in found.items()}
        report.ratio(f"a miss, {what}: two copies / one copy", ratios(of["two copies"], of["one copy"]))
        aim = "<= 1.15" if what == "wall" else None
        backed = ratios(of["one server and a disk"], of["one server"])
        report.ratio(f"a miss, {what}: a backup / one server", backed, aim)


PARTS = {part.__name__: part for part in (fit, programs, miss, redundancy)}


def main():
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, help="everything is measured once a round")
    small = "small sizes: shows that it works; the figures mean nothing"
    parser.add_argument("--quick", action="store_true", help=small)
    options = parser.parse_args()
    report = Report(options.part, options.quick)
    try:
        PARTS[options.part](options, report)
    except (Failure, NoEnd) as said:
        sys.exit(f"bench {options.part}: {said}")
    report.finish(options.json)


if __name__ == "__main__":
    procs.adopt_orphans()
    procs.end_with_parent()
    main()

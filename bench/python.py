#!/usr/bin/env python3
"""Measures the Python package: each figure next to what it is compared with, in turns, in one run.

    make wheel && scripts/setup.sh test-python
    .venv/bin/pip install --no-deps --force-reinstall target/wheels/rampool-*.whl
    .venv/bin/python bench/python.py [--json FILE] [--rounds N] [--quick] [PART ...]

PARTs: wheel get strided link attach dask duckdb torch; all by default. What a part needs and is not there is
named, and the part left out. `link` needs root, `ip` and `tc`; dask and duckdb need memory cgroups of version
1. `torch` runs in .venv-torch, where scripts/setup.sh has put Debian's PyTorch. Every answer is checked.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

from report import Report, load, ratios

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute()
RAMPOOL = os.environ.get("RAMPOOL_BIN", str(TARGET / "release/rampool"))
TORCH = ROOT / ".venv-torch/bin/python"
CGROUPS = pathlib.Path("/sys/fs/cgroup/memory")
PARTS = ["wheel", "get", "strided", "link", "attach", "dask", "duckdb", "torch"]


# --- servers, programs, links, cgroups


class Server:
    def __init__(self, listen, memory, prefix=(), key=None):
        words = [
            *prefix, RAMPOOL, "serve", "--listen", listen, "--memory", memory, "--shards", "1",
            "--until-stdin-closes",
        ]
        words += ["--key-file", key, "--encryption", "off"] if key else []
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        line = self.process.stdout.readline()
        assert line, "the server did not start"
        self.address = next(
            word.rstrip(",")
            for word in line.split()
            if ":" in word and (word.startswith("unix:") or word.rstrip(",").split(":")[-1].isdigit())
        )
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def python(program, *words, command=(sys.executable,), group=None, timeout=900, **environment):
    """Runs a program in a Python of its own; what it printed, or None if it was killed."""

    def enter():
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    ended = subprocess.run(
        [*command, "-c", program, *map(str, words)],
        env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout,
        preexec_fn=enter,
    )
    if ended.returncode == -signal.SIGKILL:
        return None
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


@contextlib.contextmanager
def cgroup(megabytes):
    """A memory cgroup of version 1, which counts page cache too."""
    group = CGROUPS / f"rampool-bench-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(megabytes << 20))
    try:
        yield group
    finally:
        for _ in range(200):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def has_cgroups():
    return os.access(CGROUPS / "cgroup.procs", os.W_OK) and (CGROUPS / "memory.limit_in_bytes").exists()


@contextlib.contextmanager
def link():
    """1 Gbit/s between here and a network namespace, as `rampool bench --link 1g` makes it."""
    there, here = f"rpb{os.getpid()}t", f"rpb{os.getpid()}h"
    run = lambda *words: subprocess.run(words, check=True, capture_output=True)
    try:
        for name in (there, here):
            run("ip", "netns", "add", name)
        run("ip", "-n", here, "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", there)
        for name, device, address in ((here, "near", "10.77.0.1/30"), (there, "far", "10.77.0.2/30")):
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "addr", "add", address, "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")
            run(
                "ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate",
                "1gbit", "burst", "5120", "latency", "5ms",
            )
            run(
                "ip", "netns", "exec", name, "sh", "-c",
                "for n in cubic reno; do echo $n > /proc/sys/net/ipv4/tcp_congestion_control && exit; done",
            )
        yield ("ip", "netns", "exec", here), ("ip", "netns", "exec", there)
    finally:
        for name in (there, here):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


# --- the parts

IMPORT = """
import time
before = time.perf_counter(); import rampool; print((time.perf_counter() - before) * 1e3)
"""


def wheel(report, options, _):
    wheels = list((TARGET / "wheels").glob("rampool-*-abi3-*.whl"))
    assert len(wheels) == 1, "one wheel is expected: make wheel"
    size = wheels[0].stat().st_size / 1e6
    report.ratio("wheel, MB", [size], "<= 12")
    times = [float(python(IMPORT)) for _ in range(5 * options.rounds)]
    report.ratio("import, ms", times, "<= 20")


GET = """
import os, sys, time, numpy as np, rampool
pool = rampool.connect(sys.argv[1], memory="64M")
t = pool.remote(None, (32 << 20) // 8, "i8")
t[...] = np.arange(t.size)
places = np.random.default_rng(5).integers(0, t.size // 512, int(sys.argv[2])) * 512
times = []
for place in places.tolist():
    before = time.perf_counter_ns()
    value = t[place]
    times.append(time.perf_counter_ns() - before)
    assert value == place
print(np.median(times) / 1e3)
"""


def get(report, options, place):
    count = 2_000 if options.quick else 20_000
    for name, listen in (("same host", f"unix:{place}/get.sock"), ("loopback TCP", "127.0.0.1:0")):
        with Server(listen, "256M") as server:
            ours, theirs = [], []
            for _ in range(options.rounds):
                words = [RAMPOOL, "bench", "direct-gets", "--server", server.address, "--count", str(count)]
                theirs.append(float(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
                ours.append(float(python(GET, server.address, count)))
        report.series(f"{name}: t[n] of 8 B, p50", "us", ours)
        report.series(f"{name}: get of 8 B from Rust, p50", "us", theirs)
        report.ratio(
            f"{name}: t[n] of 8 B, us more than Rust's get",
            [a - b for a, b in zip(ours, theirs, strict=True)],
            "<= 2",
        )


STRIDED = """
import sys, time, numpy as np, rampool
pool = rampool.connect(sys.argv[1], memory="2G", **eval(sys.argv[5]))
rows, width, rounds = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
t = pool.remote(None, (rows, width), "i8")
for first in range(0, rows, 65536):
    here = np.arange(first, min(first + 65536, rows))[:, None] * 16 + np.arange(width)
    t[first : first + 65536] = here
def timed(do):
    before = time.perf_counter()
    value = do()
    return time.perf_counter() - before, value
want = np.arange(0, rows, 512) * 16 + 3
column = np.arange(rows) * 16 + 3
total = int(column[column > 8 * rows].sum())
for round in range(rounds + 1):
    some, a = timed(lambda: np.asarray(t[::512, 3]))
    every, b = timed(lambda: np.asarray(t)[::512, 3])
    assert (a == want).all() and (b == want).all()
    there, c = timed(lambda: t[:, 3].sum(where=t[:, 3] > 8 * rows))
    def fetch():
        column = np.asarray(t[:, 3])
        return column.sum(where=column > 8 * rows)
    here, d = timed(fetch)
    assert c == d == total, (c, d, total)
    if round:
        print(some, every, there, here)
"""


def strided_report(report, name, said, reaches):
    some, every, there, here = zip(*[map(float, line.split()) for line in said.splitlines()], strict=True)
    report.series(f"{name}: t[::512, 3]", "ms", [value * 1e3 for value in some])
    report.series(f"{name}: t[:][::512, 3]", "ms", [value * 1e3 for value in every])
    report.ratio(f"{name}: t[:][::512, 3] / t[::512, 3]", ratios(every, some), reaches[0])
    report.series(f"{name}: column sum with where, at the server", "ms", [value * 1e3 for value in there])
    report.series(f"{name}: column fetched and summed here", "ms", [value * 1e3 for value in here])
    report.ratio(f"{name}: fetched and summed / summed at the server", ratios(here, there), reaches[1])


def strided(report, options, _):
    rows = 65536 if options.quick else 1 << 20
    with Server("127.0.0.1:0", "3G") as server:
        said = python(STRIDED, server.address, rows, 16, options.rounds, {})
    strided_report(report, "loopback TCP", said, (">= 20", None))


def over_link(report, options, place):
    if os.geteuid() != 0:
        return "root is needed for network namespaces"
    rows = 65536 if options.quick else 1 << 19
    key = place / "key"
    subprocess.run([RAMPOOL, "key", str(key)], check=True, capture_output=True)
    with link() as (here, there), Server("10.77.0.2:0", "3G", there, str(key)) as server:
        with_key = {"key_file": str(key), "encryption": "off"}
        said = python(
            STRIDED, server.address, rows, 16, options.rounds, with_key, command=(*here, sys.executable)
        )
    strided_report(report, "1 Gbit/s", said, (">= 100", ">= 3"))
    report.note("the key authenticates connections over the link; page data is not encrypted there")
    return None


JOB = """
import os, sys, time, threading
how, server, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
before = time.perf_counter()
if how == "attach":
    import rampool
    rampool.attach("256M", server, memory="2G")
import numpy as np
peak, ended = 0, False
def watch():
    global peak
    while not ended:
        with open("/proc/self/status") as lines:
            peak = max(peak, next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")))
        time.sleep(0.02)
watcher = threading.Thread(target=watch); watcher.start()
a = np.arange(100_000_000, dtype="f8")
for _ in range(rounds):
    a += 1
    total = float(a[::512].sum())
b = a[: 20_000_000].copy(); b[::-1].sort()
summed = range(0, 100_000_000, 512)
assert b[0] == 20_000_000 - 1 + rounds and total == sum(summed) + rounds * len(summed)
ended = True; watcher.join()
print(time.perf_counter() - before, peak / 1024 - 256)
"""


def attach(report, options, place):
    """The job from the interpreter's start to its last line: `rampool run` has its start before that, attach
    has it inside."""
    times, over = {"attach": [], "run": []}, {"attach": [], "run": []}
    with Server(f"unix:{place}/attach.sock", "3G") as server:
        for number in range(options.rounds):
            for how in ("attach", "run") if number % 2 else ("run", "attach"):
                under = (
                    RAMPOOL, "run", "--local", "256M", "--server", server.address, "--memory", "2G", "--",
                    sys.executable,
                )
                began = time.perf_counter()
                said = python(
                    JOB, how, server.address, 3, command=under if how == "run" else (sys.executable,)
                )
                times[how].append(time.perf_counter() - began)
                over[how].append(float(said.split()[1]))
    report.series("763 MiB job, 256 MiB local, attached: time of the whole process", "s", times["attach"])
    report.series("763 MiB job, 256 MiB local, `rampool run`: time of the whole process", "s", times["run"])
    report.ratio("attach / rampool run, time", ratios(times["attach"], times["run"]), "<= 1.1")
    report.ratio("attach: local memory exceeded by, MiB at most", over["attach"], "<= 32")
    report.series("rampool run: local memory exceeded by, at most", "MiB", over["run"])


DASK = """
import os, sys, tempfile, time
how, server, size, disk = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
import dask, distributed, pandas as pd, numpy as np, dask.dataframe as dd
if __name__ == "__main__":
    dask.config.set({
        "distributed.worker.memory.target": 0.6, "distributed.worker.memory.spill": 0.7,
        "distributed.worker.memory.pause": 0.9, "distributed.worker.memory.terminate": False,
        "distributed.admin.log-format": "%(message)s",
    })
    limit = 400 << 20
    extra = {}
    if how == "pool":
        import rampool.dask
        extra["data"] = rampool.dask.spill(server, memory="3G", target=limit * 6 // 10)
    cluster = distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, memory_limit=limit, processes=True, dashboard_address=None,
        local_directory=disk, **extra,
    )
    with cluster, distributed.Client(cluster) as client:
        parts, rows = 4 * size, 1_000_000  # 32 MB each
        def part(n):
            random = np.random.default_rng(n)
            keys, a = random.integers(0, 1 << 40, rows), random.random(rows)
            return pd.DataFrame({"k": keys, "a": a, "b": np.full(rows, n), "c": random.random(rows)})
        frame = dd.from_map(part, range(parts)).persist()
        distributed.wait(frame)
        before = time.perf_counter()
        shuffled = frame.shuffle("k", npartitions=parts, shuffle_method="tasks").persist()
        del frame
        distributed.wait(shuffled)
        sums = shuffled["b"].sum().compute()
        after = time.perf_counter()
        assert int(sums) == rows * sum(range(parts)), sums
        print(after - before, parts * rows * 32 / limit)
"""


def disk_directory(place):
    path = place / "disk"
    path.mkdir(exist_ok=True)
    return path


def in_turns(report, options, place, name, program, words, limit_mb, memory):
    """A program with the pool and with a disk, in a cgroup of its own each; times by way. One that was killed
    has none."""
    times, killed = {"pool": [], "disk": []}, {"pool": 0, "disk": 0}
    for number in range(options.rounds):
        for how in ("pool", "disk") if number % 2 else ("disk", "pool"):
            with (
                tempfile.TemporaryDirectory(dir=disk_directory(place)) as disk,
                Server(f"unix:{place}/spill.sock", memory) as server,
            ):
                with cgroup(limit_mb) as group:
                    said = python(program, how, server.address, *words, disk, group=group)
            if said is None:
                killed[how] += 1
            else:
                times[how].append([float(word) for word in said.split()])
            print(f"  {name}, {how}: {said}", flush=True)
    for how, count in killed.items():
        if count:
            report.note(f"{name}, {how}: {count} of {options.rounds} runs were killed for memory")
    return times


def dask(report, options, place):
    if not has_cgroups():
        return "no memory cgroup of version 1 can be made"
    size = 2 if options.quick else 13
    times = in_turns(report, options, place, "Dask shuffle", DASK, (size,), 1400, "4G")
    report.series("Dask shuffle, to the pool", "s", [each[0] for each in times["pool"]])
    report.series("Dask shuffle, to disk", "s", [each[0] for each in times["disk"]])
    factor = times["pool"][0][1]
    report.ratio(
        f"Dask shuffle of {factor:.1f} x memory_limit: disk / pool, time",
        ratios([each[0] for each in times["disk"]], [each[0] for each in times["pool"]]),
        ">= 1",
    )
    report.note(
        "Dask: one worker of 400 MiB, shuffle_method=tasks, client and worker in a cgroup of 1400 MiB"
    )
    return None


DUCKDB = """
import sys, time, duckdb
how, server, rows, limit, disk = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
connection = duckdb.connect()
connection.execute(
    f"SET memory_limit = '{limit}'; SET threads = 2; SET preserve_insertion_order = false; "
    "SET enable_progress_bar = false"
)
if how == "pool":
    import rampool, rampool.fsspec
    pool = rampool.connect(server, memory="6G")
    connection.register_filesystem(rampool.fsspec.filesystem(pool))
    connection.execute("SET temp_directory = 'rampool://spill'")
else:
    connection.execute(f"SET temp_directory = '{disk}'")
numbers = f"SELECT hash(i) AS h, i, i * 3 AS j, hash(i + 1) AS g FROM range({rows}) r(i)"
before = time.perf_counter()
found = connection.execute(
    "SELECT count(*), sum(i), count(*) FILTER (before > h) "
    f"FROM (SELECT h, i, j, g, lag(h) OVER (ORDER BY h) AS before FROM ({numbers}))"
).fetchone()
sort = time.perf_counter() - before
assert found == (rows, rows * (rows - 1) // 2, 0), found
before = time.perf_counter()
found = connection.execute(
    "SELECT count(*), sum(a.i), max(a.j + b.j), max(a.g) "
    f"FROM ({numbers}) a JOIN ({numbers}) b ON a.h = b.h"
).fetchone()
join = time.perf_counter() - before
assert found[:3] == (rows, rows * (rows - 1) // 2, 6 * (rows - 1)), found
print(sort, join)
"""


def duckdb(report, options, place):
    if not has_cgroups():
        return "no memory cgroup of version 1 can be made"
    # 32 bytes a row.
    rows = 4_000_000 if options.quick else 26_000_000
    times = in_turns(report, options, place, "DuckDB", DUCKDB, (rows, "100MB"), 400, "7G")
    for at, what in enumerate(("sort", "join")):
        here, there = [each[at] for each in times["pool"]], [each[at] for each in times["disk"]]
        report.series(f"DuckDB {what}, to the pool", "s", here)
        report.series(f"DuckDB {what}, to disk", "s", there)
        report.ratio(
            f"DuckDB {what} of {rows * 32 / 100e6:.1f} x memory_limit: disk / pool, time",
            ratios(there, here),
            ">= 0.7",
        )
    report.note("DuckDB: memory_limit 100 MB, two threads, rows of 32 bytes, in a cgroup of 400 MiB")
    return None


STEP = """
import resource, sys, time, torch, rampool
from rampool.torch import offload
how, server, rounds, rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(1)
torch.set_num_threads(1)
net = torch.nn.Sequential(*[m for _ in range(12) for m in (torch.nn.Linear(64, 64), torch.nn.Sigmoid())])
batch = torch.randn(rows, 64)  # 31 MiB in full
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pool = rampool.connect(server, memory="1G")
def step():
    net.zero_grad()
    if how == "offload":
        with offload(pool):
            loss = net(batch).sum()
    elif how == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            loss = net(batch).sum()
    else:
        loss = net(batch).sum()
    loss.backward()
    return float(net[0].weight.grad.double().sum())
times = []
for _ in range(rounds):
    began = time.perf_counter()
    value = step()
    times.append(time.perf_counter() - began)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(sorted(times)[len(times) // 2], peak / 1024, repr(value))
pool.close()
"""


def torch(report, options, place):
    if (
        not TORCH.exists()
        or subprocess.run([TORCH, "-c", "import torch, rampool"], capture_output=True).returncode != 0
    ):
        return ".venv-torch has no PyTorch, or not the wheel"
    ways = ["offload", "save_on_cpu", "plain"]
    found = {way: [] for way in ways}
    rows = 8_000 if options.quick else 128_000
    with Server(f"unix:{place}/torch.sock", "2G") as server:
        for number in range(options.rounds):
            for way in ways if number % 2 else reversed(ways):
                found[way].append(python(STEP, way, server.address, 2, rows, command=(str(TORCH),)).split())
    assert len({each[2] for way in ways for each in found[way]}) == 1, "the gradients differ"
    time_of = {way: [float(each[0]) for each in found[way]] for way in ways}
    peak_of = {way: [float(each[1]) for each in found[way]] for way in ways}
    for way in ways:
        report.series(f"PyTorch step, {way}", "s", time_of[way])
        report.series(f"PyTorch step, {way}: peak", "MiB", peak_of[way])
    report.ratio(
        "PyTorch step, peak: offload / plain", ratios(peak_of["offload"], peak_of["plain"]), "<= 0.6"
    )
    report.ratio(
        "PyTorch step, time: offload / save_on_cpu",
        ratios(time_of["offload"], time_of["save_on_cpu"]),
        "<= 1.3",
    )
    report.ratio(
        "PyTorch step, peak: offload / save_on_cpu", ratios(peak_of["offload"], peak_of["save_on_cpu"])
    )
    report.note(
        f"PyTorch 1.13 of Debian on CPUs: 12 layers of 64 with sigmoids, a batch of {rows}; on CPUs "
        "save_on_cpu copies within this machine's memory"
    )
    return None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: shows that it works; the figures mean nothing"
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 5)
    functions = {
        "wheel": wheel, "get": get, "strided": strided, "link": over_link, "attach": attach, "dask": dask,
        "duckdb": duckdb, "torch": torch,
    }
    if unknown := set(options.parts) - set(functions):
        parser.error(f"there is no part {', '.join(unknown)}")
    report = Report("python", options.quick)
    with tempfile.TemporaryDirectory(prefix="rampool-bench-") as place:
        for part in options.parts or PARTS:
            before = load()
            why = functions[part](report, options, pathlib.Path(place))
            if why:
                report.note(f"{part} is left out: {why}")
            print(f"  [{part}: load average {before} before, {load()} after]", flush=True)
    report.finish(options.json)


if __name__ == "__main__":
    main()

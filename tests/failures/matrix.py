"""Numbers of servers x faults x programs: each page has two copies, and one server at a time may be lost.

A program checks all that it has, again and again, until it is told to end: so no run ends before its fault,
and each goes on for some rounds after it. Within the promise it ends with its own exit code and every byte
right. Beyond it, it may end because pages are lost, with a message that names a server, and never with a
wrong byte.
"""

import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import redis_work
from harness.proxy import Proxy
from harness.world import MIB, ROOT, TARGET, Failure, built, check, free_port, rampool_binary

LOST = 74
RANK_FAILED = 86
PYTHON = ROOT / ".venv/bin/python"
HERE = Path(__file__).resolve().parent
AGAIN = "every page has 2 copies again"
WATCHDOG_S = 180


def status(address, *options):
    """What `rampool status` says of one server."""
    words = [rampool_binary(), "status", "--json", "--server", address, *map(str, options)]
    done = subprocess.run(words, capture_output=True, timeout=30, check=False)
    lines = [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith("{")]
    answers = lines or json.loads(done.stdout or b"[]")
    check(answers, f"status says nothing of {address}: {done.stderr.decode()}")
    return answers[0].get("status", answers[0])


def wait_until(what, condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < deadline, f"after {seconds} s: not {what}")
        time.sleep(0.05)


def command(*words):
    """What a command of rampool says, and its exit code."""
    done = subprocess.run([rampool_binary(), *map(str, words)], capture_output=True, timeout=90, check=False)
    return done.returncode, (done.stdout + done.stderr).decode()


def is_whole(running):
    """Whether `rampool top` knows the run, and says nothing of missing copies."""
    code, said = command("top", "--once", "--interval", 0.05)
    lines = [line for line in said.splitlines() if str(running.process.pid) in line.split()]
    return code == 0 and lines != [] and not any("copies of each" in line for line in lines)


def restart(world, server, memory="900M"):
    """Another run of a server, at the same address, with nothing of what the first one had."""
    if server.process.poll() is None:
        server.kill()
    return world.serve(memory, "--drain-ms", 15000, listen=server.address, name="again")


def drained(running, server, by="command"):
    """Drains a server under a run, which goes on; it ends by itself, and nothing is left there."""
    if by == "signal":
        server.process.send_signal(signal.SIGTERM)
    else:
        code, said = command("drain", server.address, "--timeout", 60)
        check(code == 0, f"drain ends with {code}: {said}\n{running.said()}")
    wait_until("the server has ended", lambda: server.process.poll() is not None, 60)
    code, said = server.process.returncode, server.said()
    check(code == 0 and "with clients and their memory" not in said, f"{code}: {running.said()}\n{said}")


# ---- programs, each of which says `round` when it has checked all of its memory once more


class Program:
    """One that runs under `rampool run`, in `local` bytes, until the file `stop` is there."""

    local, lost, options = 16 * MIB, (LOST,), []
    # Whether it can be known what lacks a copy.
    tells = True

    def __init__(self, world, scale, addresses, lease="400M"):
        self.world, self.scale, self.stop = world, scale, world.dir / "stop"
        options = ["--memory", lease, *self.options]
        how = {"local": self.local, "servers": addresses, "options": options, "env": {"LC_ALL": "C"}}
        self.running = world.start(self.words(), **how)

    def words(self):
        raise NotImplementedError

    def loop(self, script, *words):
        """Runs it again and again, in new processes."""
        return ["sh", "-c", f'while [ ! -e "$0" ]; do {script}; echo round; done', self.stop, *words]

    def script(self, text, *words):
        path = self.world.dir / "script.py"
        path.write_text(text)
        return [PYTHON if PYTHON.exists() else "python3", path, self.stop, self.scale.seed, *words]

    def rounds(self):
        return self.running.out.read_text(errors="replace").count("round")

    def is_whole(self, servers):
        """Whether each page has two copies again; `servers` are there."""
        return is_whole(self.running)

    def end(self):
        """Ends in order; everything that it has is checked."""
        self.stop.touch()
        outcome = self.running.finish(WATCHDOG_S)
        check(outcome.code == 0 and outcome.faults() > 0, f"it ends with {outcome.code}: {outcome.said()}")
        check("2 copies of each page" in outcome.err, f"no line says so: {outcome.said()}")
        return outcome


class Torture(Program):
    """Threads and forks. 3 is a parent's word about a child that ended with 74."""

    local, lost = 10 * MIB, (LOST, 3)

    def words(self):
        return self.loop('"$@" || exit $?', built("torture"), self.scale.seed % (1 << 30), 6000, 4, 3000, 12)


class Sort(Program):
    local = 12 * MIB

    def words(self):
        lines, expected, out = (self.world.dir / name for name in ("lines", "expected", "sorted"))
        rng = random.Random(self.scale.seed)
        numbers = [f"{rng.randrange(1 << 60):020d}\n" for _ in range(400_000)]
        lines.write_text("".join(numbers))
        expected.write_text("".join(sorted(numbers)))
        sort = 'sort -S 1G --parallel=2 -o "$3" "$1" || exit $?; cmp "$3" "$2" || exit 3'
        return self.loop(sort, lines, expected, out)


class Sqlite(Program):
    """A database in memory, each row known."""

    local = 10 * MIB
    TEXT = """
import os, random, sqlite3, sys
stop, seed = sys.argv[1], int(sys.argv[2])
db = sqlite3.connect(":memory:")
db.execute("create table rows (k integer primary key, version integer, body blob)")
body = lambda k, version: random.Random(k * 1000003 + version).randbytes(900)
versions = [0] * 24000
db.executemany("insert into rows values (?, 0, ?)", ((k, body(k, 0)) for k in range(len(versions))))
rng = random.Random(seed)
while not os.path.exists(stop):
    for _ in range(500):
        k = rng.randrange(len(versions))
        found = db.execute("select version, body from rows where k = ?", (k,)).fetchone()
        assert found == (versions[k], body(k, versions[k])), k
        if rng.random() < 0.3:
            versions[k] += 1
            row = (versions[k], body(k, versions[k]), k)
            db.execute("update rows set version = ?, body = ? where k = ?", row)
    print("round", flush=True)
for k, version, found in db.execute("select k, version, body from rows order by k"):
    assert (version, found) == (versions[k], body(k, version)), k
assert db.execute("pragma integrity_check").fetchone() == ("ok",)
"""

    def words(self):
        return self.script(self.TEXT)


class Duckdb(Program):
    """A join and a grouping of a table that changes."""

    local = 48 * MIB
    TEXT = """
import os, sys
import duckdb
stop, seed, rows = sys.argv[1], int(sys.argv[2]), 400_000
db = duckdb.connect()
db.execute("set threads = 2; set memory_limit = '1GB'")
db.execute(f"create table t as select i, i * 7919 % 997 k, 'name-' || i s from range({rows}) r(i)")
added = 0
while not os.path.exists(stop):
    total, distinct = db.execute("select sum(k), count(distinct s) from t").fetchone()
    assert (total, distinct) == (sum(i * 7919 % 997 for i in range(rows)) + added * rows, rows), total
    pairs = db.execute("select count(*) from t a join t b on a.s = b.s and a.i = b.i").fetchone()
    assert pairs == (rows,), pairs
    db.execute("update t set k = k + 1")
    added += 1
    print("round", flush=True)
"""

    def words(self):
        return self.script(self.TEXT)


class Redis(Program):
    """Keys are read and written while children save them."""

    KEYS = 24_000
    local = KEYS * 400

    def words(self):
        self.port, home = free_port(), self.world.dir / "redis"
        home.mkdir()
        self.versions, self.done, self.trouble, self.made = [0] * self.KEYS, threading.Event(), None, 0
        threading.Thread(target=self.work, daemon=True).start()
        words = ["redis-server", "--port", self.port, "--bind", "127.0.0.1", "--dir", home, "--save", ""]
        return [*words, "--appendonly", "no", "--daemonize", "no", "--dbfilename", "dump.rdb"]

    def work(self):
        try:
            self.client = redis_work.Client(self.port)
            redis_work.fill(self.client, self.KEYS)
            while not self.done.is_set():
                if not self.saves():
                    assert self.client("BGSAVE") == b"Background saving started", "BGSAVE does not start"
                redis_work.mix(self.client, self.versions, 400, self.scale.seed + self.made)
                self.made += 1
        except Exception as error:  # noqa: BLE001
            self.trouble = error
        self.done.set()

    def saves(self):
        return b"rdb_bgsave_in_progress:1" in self.client("INFO", "persistence")

    def rounds(self):
        if isinstance(self.trouble, OSError):
            # A program that ends closes its connections before.
            wait_until(f"{self.trouble!r}: the run ends: {self.running.said()}", self.running.ended, 60)
        else:
            check(self.trouble is None, f"{self.trouble!r}: {self.running.said()}")
        return self.made

    def end(self):
        made = self.rounds()
        self.done.set()
        # The worker ends its round.
        time.sleep(0.5)
        wait_until("the last round ends", lambda: self.trouble or self.made > made, 60)
        check(self.trouble is None, f"{self.trouble!r}: {self.running.said()}")
        wait_until("BGSAVE ends", lambda: not self.saves())
        info = self.client("INFO", "persistence")
        check(b"rdb_last_bgsave_status:ok" in info, f"{info.decode()}\n{self.running.said()}")
        redis_work.verify(self.client, self.versions)
        self.client.send([[b"SHUTDOWN", b"NOSAVE"]])
        return super().end()


class Arrays(Program):
    """Ranks of a parallel program, each with a budget: pages beyond it have two copies."""

    lost, tells = (RANK_FAILED,), False

    def __init__(self, world, scale, addresses, lease="64M"):
        self.world, self.stop, self.stored = world, world.dir / "stop", 0
        program, library = world.dir / "arrays", world.dir / "librampool.so.0.1"
        library.symlink_to(TARGET.absolute() / "release/librampool.so")
        words = ["gcc", "-O1", "-I", ROOT / "crates/capi/include", "-o", program, HERE / "arrays.c"]
        subprocess.run([*words, library, f"-Wl,-rpath,{world.dir}"], check=True, timeout=60)
        words = [rampool_binary(), "launch", "-n", "2", "--local", "2M", "--memory", "64M", "--bind", "none"]
        words += [word for address in addresses for word in ("--server", address)]
        self.running = world.start([*words, program, self.stop, 8])

    def is_whole(self, servers):
        self.stored = max(self.stored, sum(status(server.address)["used_bytes"] for server in servers))
        return True

    def end(self):
        self.stop.touch()
        outcome = self.running.finish(WATCHDOG_S)
        check(outcome.code == 0 and self.stored > MIB, f"it ends with {outcome.code}: {outcome.said()}")
        return outcome


PROGRAMS = {
    "torture": Torture, "sort": Sort, "redis": Redis, "sqlite": Sqlite, "duckdb": Duckdb, "arrays": Arrays,
}


# ---- faults


class Case:
    """A program on its servers, of which one is hurt."""

    def __init__(self, world, scale, number, fault, program):
        self.world, self.what = world, f"{number} servers, {fault}, {program}"
        self.is_full = fault == "full"
        self.memory = f"{max(8, 32 // number)}M" if self.is_full else "900M"
        options = [self.memory, "--drain-ms", 15000]
        self.servers = [world.serve(*options, name=f"server{n}") for n in range(number)]
        proxied = fault in ("hole", "deaf", "mute", "slow", "corrupt")
        self.proxies = [Proxy(server.address, scale.seed) for server in self.servers] if proxied else []
        self.addresses = [of.address for of in self.proxies or self.servers]
        self.victim = scale.seed % number
        self.program = PROGRAMS[program](world, scale, self.addresses, *(["12M"] if self.is_full else []))
        self.running = self.program.running
        # How much is held is not what this is about: it is not sampled.
        self.running.done.set()

    @property
    def server(self):
        return self.servers[self.victim]

    @property
    def proxy(self):
        return self.proxies[self.victim]

    def goes_on(self, rounds=2):
        """Everything is checked once more, by processes that were there, and by new ones."""
        until = self.program.rounds() + rounds
        is_there = lambda: self.program.rounds() >= until
        wait_until(f"{self.what}: {rounds} rounds", lambda: self.running.ended() or is_there(), WATCHDOG_S)
        check(not self.running.ended(), f"{self.what}: it ended: {self.running.said()[-3000:]}")

    def whole(self, pause_s=0.5):
        """Waits until each page has two copies again, as the run says and as it stays."""
        there = [server for server in self.servers if server.process.poll() is None]
        for _ in range(2):
            time.sleep(pause_s)
            is_whole = lambda: self.running.ended() or self.program.is_whole(there)
            wait_until(f"{self.what}: two copies again: {self.running.said()}", is_whole, WATCHDOG_S)
        check(not self.running.ended(), f"{self.what}: it ended: {self.running.said()[-3000:]}")

    def passes(self, mode, seconds):
        """The victim's network is so for some time."""
        self.proxy.mode = mode
        time.sleep(seconds)
        self.proxy.mode = "pass"

    def lose_another(self):
        """Any other server may be lost, once each page has two copies."""
        if not self.program.tells:
            return
        self.whole()
        self.victim = (self.victim + 1) % len(self.servers)
        self.server.kill()


def killed(case):
    case.server.kill()
    if len(case.servers) > 2:
        # Others take its place; then another one may go.
        case.goes_on()
        case.lose_another()


def paused(case):
    case.server.process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    case.server.process.send_signal(signal.SIGCONT)
    case.lose_another()


def stopped(case):
    case.server.process.send_signal(signal.SIGSTOP)


def swallowed(mode):
    def hurt(case):
        case.proxy.mode = mode

    return hurt


def slow(case):
    case.proxy.delay_s = 0.02
    case.passes("slow", 3)
    case.lose_another()


def corrupt(case):
    case.proxy.mode = "corrupt"
    wait_until("a bit was changed", lambda: case.proxy.corrupted > 0 or case.running.ended())
    case.passes("corrupt", 1)
    case.lose_another()


def restarted(case):
    """Each in turn, so that at last none has what it had at first."""
    for at in range(len(case.servers) if case.program.tells else 1):
        case.servers[at] = restart(case.world, case.servers[at])
        case.whole()
    case.lose_another()


def replaced(case):
    """Others take its place, and give it back."""
    case.server.kill()
    case.whole()
    case.servers[case.victim] = restart(case.world, case.server)
    case.lose_another()


def full(case):
    """There is less room than the program needs, from the start."""


def drains(case):
    drained(case.running, case.server)
    if len(case.servers) > 2:
        case.lose_another()


def rolling(case):
    for at in range(len(case.servers) if case.program.tells else 1):
        drained(case.running, case.servers[at], ("signal", "command")[at % 2])
        case.goes_on(1)
        case.servers[at] = restart(case.world, case.servers[at])
        case.whole()
    case.lose_another()


def killed_while_it_drains(case):
    """Then the run is given one more."""
    case.server.process.send_signal(signal.SIGTERM)
    time.sleep(random.Random(case.victim).random() * 0.05)
    case.server.kill()
    case.servers.append(case.world.serve("900M", name="grown"))
    for run, code, word in ((case.running.process.pid, 0, ""), (1, 125, "no run 1")):
        ended, said = command("grow", run, "--server", case.servers[-1].address)
        check(ended == code and word in said, f"grow {run} ends with {ended}: {said}\n{case.running.said()}")
    case.lose_another()


def two_at_once(case):
    case.server.kill()
    case.servers[(case.victim + 1) % len(case.servers)].kill()


FAULTS = {
    "killed": killed, "paused": paused, "stopped": stopped, "hole": swallowed("hole"),
    "deaf": swallowed("deaf"), "mute": swallowed("mute"), "slow": slow, "corrupt": corrupt,
    "restarted": restarted, "replaced": replaced, "full": full, "drained": drains, "rolling": rolling,
    "killed while it drains": killed_while_it_drains,
    "two at once": two_at_once,
}
# No line of a run need name the server.
UNTOLD = ("full", "corrupt", "slow", "paused")
LEFT_OUT = {
    ("full", "arrays"): "a rank without room ends the run and says so: pages have nowhere else to be",
    ("killed while it drains", "arrays"): "a parallel program does not grow",
}
# Others are to take the place of one.
NEED_THREE = ("replaced", "killed while it drains")


def may_be_lost(case):
    """More is lost than there are copies: the program ends when it touches that, with no wrong byte."""
    rounds = case.program.rounds() + 20
    is_over = lambda: case.running.ended() or case.program.rounds() >= rounds
    wait_until(f"{case.what}: it ends, or goes on", is_over, WATCHDOG_S)
    if not case.running.ended():
        case.program.stop.touch()
        if isinstance(case.program, Redis):
            case.running.process.send_signal(signal.SIGTERM)
    outcome = case.running.finish(WATCHDOG_S)
    wrong = any(word in outcome.err for word in (" should be ", "AssertionError", "no version", "neither"))
    check(not wrong and "differ" not in outcome.text(), f"{case.what}: wrong data: {outcome.said()}")
    code, named = outcome.code, any(address in outcome.err for address in case.addresses)
    check(code in case.program.lost and named, f"{case.what}: it ends with {code}: {outcome.said()}")


def row(world, scale, number, fault, program):
    case = Case(world, scale, number, fault, program)
    case.goes_on(1)
    # A server that was slow for a moment may have missed some.
    if not case.is_full:
        case.whole(0)
    victim = case.addresses[case.victim]
    FAULTS[fault](case)
    if fault == "two at once":
        return may_be_lost(case)
    case.goes_on()
    outcome = case.program.end()
    said = outcome.err
    told = any(f"server {victim} {what}" in said for what in ("is lost", "does not answer", "is stopping"))
    told = told or fault in UNTOLD or program == "arrays"
    check(told, f"{case.what}: no line names {victim}: {outcome.said()}")
    # They would wait for the clients that were lost; `drained` sees servers end in order.
    for server in case.servers:
        if server.process.poll() is None:
            server.kill()
    check(fault != "full" or "full" in said, f"{case.what}: none says that it is full: {outcome.said()}")
    scale.note(f"{case.program.rounds()} rounds in {outcome.wall:.1f} s")


# Each number, each fault and each program once at least, in the programs that take the least time for it.
BRIEF = {
    (2, "killed", "redis"), (3, "replaced", "sqlite"), (2, "paused", "arrays"), (3, "stopped", "sort"),
    (2, "hole", "duckdb"), (3, "deaf", "sqlite"), (2, "mute", "redis"), (2, "slow", "sqlite"),
    (3, "corrupt", "duckdb"), (2, "restarted", "redis"), (2, "full", "torture"), (3, "drained", "arrays"),
    (2, "rolling", "torture"), (3, "killed while it drains", "torture"), (5, "two at once", "torture"),
}


def register(suite):
    for number in (2, 3, 5):
        for fault in FAULTS:
            for program in PROGRAMS:
                key = (number, fault, program)
                if key[1:] in LEFT_OUT or number == 2 and fault in NEED_THREE:
                    continue
                test = lambda world, scale, key=key: row(world, scale, *key)
                test.__name__ = f"{number}_servers_{fault.replace(' ', '_')}_{program}"
                suite.test(reduced=key in BRIEF)(test)

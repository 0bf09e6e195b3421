#!/usr/bin/env python3
"""What happens when something breaks: servers and clients are killed, stopped and cut off, the network is
slow or corrupts data, unauthenticated peers connect.

The program of most tests checks its own memory without end. So whatever happens, it may go on correctly, or
end with exit code 74 and a message that names the server. It may not hang, and it may not see a wrong byte
(its own exit code 3).
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "programs"))
import matrix  # noqa: E402
from harness import procs  # noqa: E402
from harness.proxy import Proxy  # noqa: E402
from harness.suite import Suite  # noqa: E402
from harness.world import MIB, ROOT, TARGET, Failure, built, check, free_port, rampool_binary  # noqa: E402
from matrix import AGAIN, restart, status, wait_until  # noqa: E402

LOST = 74
REFUSED = 125
NOT_EXECUTABLE = 126
NOT_THERE = 127
PYTHON = ROOT / ".venv/bin/python"
# Whatever breaks, a page that comes back is compared with what left.
suite = Suite("failures", always=["--verify"])
matrix.register(suite)


def free_bytes(address, *options):
    return status(address, *options)["free_bytes"]


def steady(world, servers, *, local=16 * MIB, options=(), mib=32):
    """A program that pages its memory out, and checks it for ever. Returns when it has begun."""
    running = world.start(
        [built("processes"), mib, "steady"],
        local=local,
        servers=servers,
        options=["--memory", "400M", *options],
    )
    running.wait_for("steady", 60)
    return running


def must_be_lost(outcome, name):
    check(outcome.code == LOST, f"it ends with {outcome.code} instead of {LOST}: {outcome.said()}")
    check(name in outcome.err, f"the message does not name {name}: {outcome.said()}")


def still_serves(world, server, options=()):
    # A client that was lost without leaving keeps its lease for the grace time.
    wait_until("room for another lease", lambda: free_bytes(server.address, *options) >= 300 * MIB)
    outcome = world.run(
        [built("processes"), 32, "exit-42"],
        local=16 * MIB,
        servers=[server],
        options=["--memory", "300M", *options],
        timeout=60,
    )
    check(outcome.code == 42, f"the server does not serve others any more: {outcome.said()}\n{server.said()}")


# ---- servers that die, stop, leave


@suite.test()
def server_is_killed(world, scale):
    server = world.serve("2G")
    running = steady(world, [server])
    server.kill()
    must_be_lost(running.finish(60), server.address)


@suite.test()
def server_is_killed_in_the_middle_of_the_first_pages(world, scale):
    for round_ in range(scale.pick(10, 2)):
        server = world.serve("2G")
        running = world.start(
            [built("processes"), 64, "steady"], local=16 * MIB, servers=[server], options=["--memory", "400M"]
        )
        running.managed_pids()
        time.sleep(random.Random(scale.seed + round_).random() * 0.1)
        server.kill()
        must_be_lost(running.finish(60), server.address)


@suite.test()
def server_is_killed_under_a_family(world, scale):
    """Parents, children and threads: all of them end, and none hangs."""
    server = world.serve("900M")
    running = world.start(
        [built("processes"), 64, "fork-threads"],
        local=16 * MIB,
        servers=[server],
        options=["--memory", "800M"],
    )
    running.managed_pids(2, 60)
    server.kill()
    outcome = running.finish(60)
    check(outcome.code in (LOST, 3), f"it ends with {outcome.code}: {outcome.said()}")
    # 3 is the parent's word about a child that ended with 74; a wrong byte would be told as such.
    check(" should be " not in outcome.err and "ballast" not in outcome.err, f"wrong data: {outcome.said()}")
    check(server.address in outcome.err, f"no message names the server: {outcome.said()}")
    left = [p for p in procs.descendants(os.getpid()) if "processes" in procs.command_of(p)]
    if left:
        wait_until(
            "every process of the family ended",
            lambda: not [p for p in left if os.path.exists(f"/proc/{p}")],
            40,
        )


@suite.test()
def one_of_two_servers_dies(world, scale):
    first, second = world.serve("2G", name="first"), world.serve("2G", name="second")
    running = steady(world, [first, second], options=["--copies", 1])
    second.kill()
    outcome = running.finish(60)
    must_be_lost(outcome, second.address)
    check("1 copy of each page" in outcome.err, f"no line says that a loss ends it: {outcome.said()}")


# ---- two copies of each page: any one server may be lost


def hurt(server, how):
    """Ends a server, or stops it: for a second, or until the world ends."""
    if how == "killed":
        server.kill()
        return
    server.process.send_signal(signal.SIGSTOP)
    if how == "paused":
        time.sleep(1)
        server.process.send_signal(signal.SIGCONT)


def on_a_disk(world):
    """A new directory whose files are not in memory."""
    for base in (world.dir, TARGET, Path("/var/tmp")):
        said = subprocess.run(["stat", "-f", "-c", "%T", base], capture_output=True, text=True, check=True)
        if said.stdout.strip() not in ("tmpfs", "ramfs"):
            return Path(tempfile.mkdtemp(prefix="rampool-backup-", dir=base))
    raise Failure("no directory here is on a disk")


@suite.test(waits=True)
def every_server_lost_with_a_backup(world, scale):
    """One lender and a disk are as safe as two lenders: a server dies, is used again, and dies for good."""
    room = on_a_disk(world)
    try:
        for number in scale.pick((1, 2), (1,)):
            servers = [world.serve("900M", name=f"server{n}") for n in range(number)]
            options = ["--backup", f"{room}=1G"]
            running = steady(world, servers, options=options)
            check("all servers may be lost" in running.said(), f"no line says so: {running.said()}")
            servers[0] = restart(world, servers[0])
            wait_until("two copies again", lambda: AGAIN in running.said() or running.ended(), 60)
            for server in servers:
                server.kill()
            time.sleep(2)
            check(not running.ended(), f"{number} servers: it ended with the last of them: {running.said()}")
            running.process.send_signal(signal.SIGKILL)
            outcome = running.finish(60)
            check(" should be " not in outcome.err, f"wrong data: {outcome.said()}")
            check(not list(room.iterdir()), "a file is left")
        # Threads and forks, every byte checked. Longer until the loss is within the run.
        steps = scale.pick(60000, 12000)
        for _ in range(5):
            server = world.serve("900M")
            argv = [built("torture"), scale.seed % (1 << 30), 8192, 4, steps, 20]
            running = world.start(
                argv, local=10 * MIB, servers=[server], options=["--memory", "800M", *options]
            )
            running.managed_pids(timeout=60)
            time.sleep(0.5)
            server.kill()
            early = running.ended()
            outcome = running.finish(scale.pick(900, 300))
            code = outcome.code
            check(code == 0 and outcome.faults() > 0, f"it ends with {code}: {outcome.said()}")
            scale.note(f"{steps} steps: {outcome.wall:.1f} s{', too short' if early else ''}")
            if not early:
                return
            steps *= 3
        check(False, "torture always ended before its server")
    finally:
        shutil.rmtree(room, ignore_errors=True)


@suite.test(waits=True)
def the_backup_is_lost(world, scale):
    """As any server: the program goes on with the others."""
    room = on_a_disk(world)
    try:
        server = world.serve("900M")
        running = steady(world, [server], options=["--backup", room])
        words = lambda pid: Path(f"/proc/{pid}/cmdline").read_bytes()
        [backup] = [pid for pid in procs.descendants(running.process.pid) if b"--disk" in words(pid)]
        os.kill(backup, signal.SIGKILL)
        time.sleep(2)
        check(not running.ended(), f"it ended with its backup: {running.said()}")
        check("is lost" in running.said(), f"no line says so: {running.said()}")
        running.process.send_signal(signal.SIGKILL)
        check(" should be " not in running.finish(60).err, "wrong data")
        for wrong, why in (("/dev/shm", "in memory"), ("/no/such", "no/such"), ("/var/tmp=1X", "DIR=SIZE")):
            outcome = world.run(["true"], local=16 * MIB, servers=[server], options=["--backup", wrong])
            refused = outcome.code in (2, 125) and why in outcome.err
            check(refused, f"{wrong}: it ends with {outcome.code}: {outcome.said()}")
        # Without a server the pages themselves are there.
        argv = [built("torture"), scale.seed % (1 << 30), 8192, 2, 500, 5]
        outcome = world.run(argv, local=10 * MIB, options=["--backup", f"{room}=512M"])
        right = outcome.code == 0 and outcome.faults() > 0 and "the disk of" in outcome.err
        check(right, f"it ends with {outcome.code}: {outcome.said()}")
    finally:
        shutil.rmtree(room, ignore_errors=True)


@suite.test(waits=True)
def a_job_starts_while_a_server_is_down(world, scale):
    """It is used when it is there; then the other one may go."""
    for down in range(2):
        servers = [world.serve("900M", name=f"server{n}") for n in range(2)]
        servers[down].kill()
        running = steady(world, servers)
        check(
            f"server {servers[down].address} is not there" in running.said(),
            f"it is not said: {running.said()}",
        )
        time.sleep(1)
        for command in (["top", "--once"], ["status", "--server", servers[1 - down].address]):
            said = subprocess.run(
                [rampool_binary(), *command], stdout=subprocess.PIPE, timeout=60, check=False
            ).stdout.decode()
            check(
                "of 2 copies of each page" in said and f"server {servers[down].address} is not there" in said,
                f"{command}: {said}",
            )
        servers[down] = world.serve("900M", listen=servers[down].address, name="late")
        wait_until("two copies", lambda: AGAIN in running.said() or running.ended(), 60)
        servers[1 - down].kill()
        time.sleep(2)
        check(not running.ended(), f"it ended: {running.said()}")
        running.process.send_signal(signal.SIGKILL)
        outcome = running.finish(60)
        check(" should be " not in outcome.err, f"wrong data: {outcome.said()}")
    # With one copy, or with none of them there, it does not start.
    gone = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    there = world.serve("900M")
    for servers, options in (([there, gone[0]], ["--copies", 1]), (gone, [])):
        outcome = world.run(
            ["true"], local=16 * MIB, servers=servers, options=["--memory", "100M", *options], timeout=60
        )
        check(
            outcome.code == REFUSED and any(name in outcome.err for name in gone),
            f"{outcome.code} {outcome.said()}",
        )


@suite.test(waits=True)
def both_copies_are_lost(world, scale):
    for first_how in ("killed", "stopped"):
        servers = [world.serve("2G", name=name) for name in ("first", "second")]
        running = steady(world, servers)
        hurt(servers[0], first_how)
        said = "is lost" if first_how == "killed" else "does not answer"
        wait_until("said to be gone", lambda: f"server {servers[0].address} {said}" in running.said(), 30)
        check(not running.ended(), f"it ended with the first server: {running.said()}")
        servers[1].kill()
        must_be_lost(running.finish(60), servers[1].address)


@suite.test()
def a_loss_while_the_other_server_is_behind_costs_what_is_touched(world, scale):
    """One server stops and misses pages. When it is back, the other one stops, so it cannot catch up, and is
    killed. Only who touches those pages ends."""
    for touches in (0, 1):
        behind, dies = (world.serve("900M", name=f"{name}{touches}") for name in ("behind", "dies"))
        steps = world.dir / f"steps{touches}"
        steps.mkdir()
        running = world.start(
            [built("behind"), steps, touches],
            local=16 * MIB,
            servers=[behind, dies],
            options=["--memory", "400M"],
        )
        running.wait_for("stored")
        behind.process.send_signal(signal.SIGSTOP)
        (steps / "1").touch()
        running.wait_for("behind")
        dies.process.send_signal(signal.SIGSTOP)
        behind.process.send_signal(signal.SIGCONT)
        (steps / "2").touch()
        # It reads there what was not missed.
        running.wait_for("read")
        dies.kill()
        (steps / "3").touch()
        outcome = running.finish()
        if touches:
            must_be_lost(outcome, "had not caught up")
        else:
            check(
                outcome.code == 0 and "all right" in outcome.text(),
                f"it ends with {outcome.code}: {outcome.said()}",
            )


@suite.test()
def two_copies_that_do_not_fit(world, scale):
    """By default one copy is kept then; on request it is an error."""
    servers = [world.serve("300M", name=name) for name in ("first", "second")]
    program = [built("processes"), 32, "exit-42"]
    outcome = world.run(program, local=16 * MIB, servers=servers, options=["--memory", "400M"], timeout=60)
    check(
        outcome.code == 42 and "no room for 2" in outcome.err,
        f"it ends with {outcome.code}: {outcome.said()}",
    )
    wait_until("room again", lambda: all(free_bytes(server.address) >= 290 * MIB for server in servers))
    outcome = world.run(
        program, local=16 * MIB, servers=servers, options=["--memory", "400M", "--copies", 2], timeout=60
    )
    check(outcome.code == REFUSED, f"it ends with {outcome.code}: {outcome.said()}")


@suite.test()
def server_stops_and_does_not_answer(world, scale):
    server = world.serve("2G")
    running = steady(world, [server], options=["--op-deadline-ms", 2000])
    server.process.send_signal(signal.SIGSTOP)
    must_be_lost(running.finish(60), server.address)
    server.process.send_signal(signal.SIGCONT)
    still_serves(world, server)


@suite.test()
def server_pauses_shorter_than_the_deadline(world, scale):
    server = world.serve("2G")
    running = world.start(
        [built("processes"), 64, "fork-isolation"],
        local=16 * MIB,
        servers=[server],
        options=["--memory", "450M"],
    )
    running.managed_pids()
    for _ in range(scale.pick(10, 3)):
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(0.4)
        server.process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
    outcome = running.finish(120)
    check(outcome.code == 0, f"a pause is no loss, yet it ends with {outcome.code}: {outcome.said()}")


@suite.test()
def server_is_told_to_stop(world, scale):
    server = world.serve("2G", "--drain-ms", 1500)
    running = steady(world, [server])
    server.process.terminate()
    outcome = running.finish(60)
    must_be_lost(outcome, server.address)
    server.process.wait(30)


# Says that it is up, and forks when it is told to.
FORKS_WHEN_TOLD = """
import os, random
data = [random.Random(i).randbytes(1 << 20) for i in range(32)]
right = lambda: all(data[i] == random.Random(i).randbytes(1 << 20) for i in range(32))
print("up", flush=True)
os.read(0, 1)
for _ in range(2):
    child = os.fork()
    if not child:
        mine = [bytearray(os.urandom(1 << 20)) for _ in range(16)]
        os._exit(5 if right() else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
assert right()
"""


@suite.test()
def programs_fork_while_their_server_stops(world, scale):
    """Members of a lease are served until the time to drain is over; new clients are refused, and the server
    reports it."""
    server = world.serve("900M", "--drain-ms", 60_000)
    script = world.dir / "forks.py"
    script.write_text(FORKS_WHEN_TOLD)
    read_end, write_end = os.pipe()
    running = world.start(
        ["python3", script], local=16 * MIB, servers=[server], options=["--memory", "700M"], stdin=read_end
    )
    os.close(read_end)
    running.wait_for("up", 60)
    server.process.terminate()
    answer = lambda: status(server.address)
    wait_until("the server says that it stops", lambda: answer()["draining"])
    refused = world.run(["true"], local=16 * MIB, servers=[server], options=["--memory", "100M"], timeout=60)
    check(
        refused.code == REFUSED and "the server is stopping" in refused.err,
        f"{refused.code} {refused.said()}",
    )
    os.write(write_end, b"x")
    os.close(write_end)
    outcome = running.finish(60)
    check(outcome.code == 0 and outcome.faults() > 0, f"{outcome.code} {outcome.said()}")
    check(server.process.wait(30) == 0, f"it does not end after the drain: {server.said()}")


@suite.test()
def child_without_a_connection_sees_no_zeroes(world, scale):
    """A program that runs already and cannot be served ends with a reason, whatever it reads meanwhile."""
    for _ in range(scale.pick(20, 3)):
        server = world.serve("900M", "--max-connections", 2)
        outcome = world.run(
            [built("processes"), 64, "fork-isolation"],
            local=16 * MIB,
            servers=[server],
            options=["--memory", "450M", "--op-deadline-ms", 500],
            timeout=60,
        )
        # The parent says that its child ended with 74.
        check(
            outcome.code == 3 and "a child ended with 0x4a00" in outcome.err,
            f"{outcome.code} {outcome.said()}",
        )
        check(
            "as many connections as it allows" in outcome.err and "wrong" not in outcome.err, outcome.said()
        )
        server.kill()


@suite.test()
def server_is_replaced_by_another(world, scale):
    """A new server at the same address does not have the old one's pages."""
    server = world.serve("2G")
    running = steady(world, [server])
    server.kill()
    second = world.serve("2G", listen=server.address)
    must_be_lost(running.finish(60), server.address)
    still_serves(world, second)


# ---- clients that die


@suite.test()
def client_is_killed(world, scale):
    server = world.serve("2G", "--grace-ms", 1000, "--heartbeat-ms", 500)
    total = free_bytes(server.address)
    running = steady(world, [server])
    check(free_bytes(server.address) < total, "the lease is not accounted")
    pids = running.managed_pids()
    procs.kill_all([running.process.pid, *pids])
    running.finish(30)
    wait_until("the lease is given back", lambda: free_bytes(server.address) == total)
    still_serves(world, server)


@suite.test()
def program_is_killed(world, scale):
    server = world.serve("2G", "--grace-ms", 1000, "--heartbeat-ms", 500)
    total = free_bytes(server.address)
    running = steady(world, [server])
    procs.kill_all(running.managed_pids())
    outcome = running.finish(30)
    check(
        outcome.code == -signal.SIGKILL, f"the signal does not pass through: {outcome.code} {outcome.said()}"
    )
    wait_until("the lease is given back", lambda: free_bytes(server.address) == total)


@suite.test(waits=True)
def program_takes_its_time_to_end(world, scale):
    """The signal arrives at once. Ending may take long while the program waits for its pages: then a line
    says so."""
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True)); "
        "print('ready', flush=True)\nwhile True: time.sleep(1)"
    )
    running = world.start(
        [sys.executable, "-c", script],
        local=64 * MIB,
        servers=[world.serve("64M")],
        options=["--memory", "32M"],
    )
    running.wait_for("ready", 60)
    running.process.send_signal(signal.SIGTERM)
    running.wait_for("told", 60)
    wait_until("rampool says that it has not ended", lambda: "s after SIGTERM" in running.said(), 60)
    pid = int(re.search(r"kill -9 (\d+)", running.said()).group(1))
    os.kill(pid, signal.SIGKILL)
    outcome = running.finish(60)
    check(outcome.code == -9, f"ends with {outcome.code}: {outcome.said()}")


@suite.test()
def runner_is_killed(world, scale):
    """`rampool run` is gone, its program lives: it may go on, or end with a reason."""
    server = world.serve("2G", "--grace-ms", 500, "--heartbeat-ms", 300)
    total = free_bytes(server.address)
    running = steady(world, [server])
    pids = running.managed_pids()
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait(10)
    time.sleep(2)
    running.done.set()
    said = running.said()
    check(" should be " not in said and "ballast" not in said, f"wrong data: {said[-2000:]}")
    procs.kill_all(pids)
    wait_until("the lease is given back", lambda: free_bytes(server.address) == total)


@suite.test()
def both_are_killed(world, scale):
    server = world.serve("2G")
    running = steady(world, [server])
    procs.kill_all([server.process.pid, running.process.pid, *running.managed_pids()])
    running.finish(30)
    server.process.wait(10)
    still_serves(world, world.serve("2G", listen=server.address))


@suite.test(waits=True)
def client_stops_for_longer_than_its_lease(world, scale):
    """Its pages were given back meanwhile: it must not go on with other pages."""
    server = world.serve("2G", "--grace-ms", 500, "--heartbeat-ms", 300, "--silence-ms", 2000)
    total = free_bytes(server.address)
    running = steady(world, [server])
    pids = [running.process.pid, *running.managed_pids()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_until("the lease is given back", lambda: free_bytes(server.address) == total, 60)
    still_serves(world, server)
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    must_be_lost(running.finish(60), server.address)


# ---- what a run leaves behind

# Forks and ends, as daemons do, before or after it filled its memory; the child checks its
# memory when it is told to.
DAEMON = """
import os, random, sys, time
mark, when, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
fill = lambda: [random.Random(i).randbytes(1 << 20) for i in range(mib)]
data = fill() if when == "before" else None
if os.fork():
    os._exit(7)
os.setsid()
null = os.open("/dev/null", os.O_RDWR)
for standard in range(3):
    os.dup2(null, standard)
open(mark + ".pid", "w").write(str(os.getpid()))
data = data or fill()
open(mark + ".filled", "w").close()
while not os.path.exists(mark + ".go"):
    time.sleep(0.02)
right = all(data[i] == random.Random(i).randbytes(1 << 20) for i in range(mib))
open(mark + ".right" if right else mark + ".wrong", "w").close()
"""


@suite.test()
def lease_returns_with_the_end_of_the_run(world, scale):
    """Two runs in a row that each lease all there is, also when the program was killed; the grace time is for
    lost connections."""
    server = world.serve("300M", "--grace-ms", 600_000)
    for round_ in range(scale.pick(8, 3)):
        outcome = world.run(
            [built("processes"), 32, "exit-42"],
            local=16 * MIB,
            servers=[server],
            options=["--memory", "300M"],
            timeout=60,
        )
        check(outcome.code == 42 and outcome.faults() > 0, f"round {round_}: {outcome.code} {outcome.said()}")
        running = world.start(
            [built("processes"), 32, "steady"], local=16 * MIB, servers=[server], options=["--memory", "300M"]
        )
        running.wait_for("steady", 60)
        procs.kill_all(running.managed_pids())
        outcome = running.finish(30)
        check(outcome.code == -signal.SIGKILL, f"round {round_}: {outcome.code} {outcome.said()}")


@suite.test()
def memory_of_a_process_returns_while_its_run_goes_on(world, scale):
    server = world.serve("400M", "--grace-ms", 600_000)
    script = world.dir / "workers.py"
    script.write_text(
        "import multiprocessing, random, sys\n"
        "def work(n):\n"
        "    data = [random.Random(i).randbytes(1 << 20) for i in range(n)]\n"
        "    assert all(data[i] == random.Random(i).randbytes(1 << 20) for i in range(n))\n"
        "if __name__ == '__main__':\n"
        "    for _ in range(3):\n"
        "        worker = multiprocessing.Process(target=work, args=(48,))\n"
        "        worker.start()\n"
        "        worker.join()\n"
        "        assert worker.exitcode == 0\n"
        "    print('done', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    read_end, write_end = os.pipe()
    running = world.start(
        ["python3", script], local=16 * MIB, servers=[server], options=["--memory", "300M"], stdin=read_end
    )
    os.close(read_end)
    running.wait_for("done", 120)
    used = lambda: status(server.address)["used_bytes"]
    wait_until("the workers' pages are freed", lambda: used() < 8 * MIB, 60)
    os.close(write_end)
    outcome = running.finish(30)
    check(outcome.code == 0, f"{outcome.code} {outcome.said()}")


@suite.test()
def daemon_keeps_its_memory(world, scale):
    """`rampool run` ends with the program; what the program left behind goes on, and the lease ends with
    it."""
    script = world.dir / "daemon.py"
    script.write_text(DAEMON)
    server = world.serve("400M", "--grace-ms", 600_000)
    for servers in ([server], []):
        for when in ("before", "after"):
            mark = world.dir / f"{when}.{len(servers)}"
            seen = lambda what, mark=mark: Path(f"{mark}.{what}").exists()
            argv, options = ["python3", script, mark, when, 48], ["--memory", "400M"]
            outcome = world.run(argv, local=16 * MIB, servers=servers, options=options, timeout=60)
            check(outcome.code == 7, f"{when}: {outcome.code} {outcome.said()}")
            wait_until("the daemon has its memory", lambda: seen("filled"))
            if servers:
                check(free_bytes(server.address) == 0, "the daemon has no lease any more")
                refused = world.run(["true"], local=16 * MIB, servers=servers, options=options, timeout=60)
                check(
                    refused.code == REFUSED, f"its lease is given to others: {refused.code} {refused.said()}"
                )
            Path(f"{mark}.go").touch()
            wait_until(
                "the daemon has looked",
                lambda: (
                    seen("right")
                    or seen("wrong")
                    or not os.path.exists(f"/proc/{Path(f'{mark}.pid').read_text()}")
                ),
            )
            check(
                seen("right"),
                f"{when}, {'named' if servers else 'private'} server: the daemon lost its memory",
            )
            if servers:
                wait_until("the lease is given back", lambda: free_bytes(server.address) == 400 * MIB, 60)
    left = lambda: [
        p
        for p in procs.descendants(os.getpid())
        if "rampool" in procs.command_of(p) and str(server.address) not in procs.command_of(p)
    ]
    wait_until("nothing is left of the runs", lambda: not left(), 60)


# ---- no room


@suite.test()
def pool_is_full(world, scale):
    """The program keeps what the pool cannot take, and a message says so; its answer is right."""
    server = world.serve("40M")
    argv = [built("hashmap"), scale.pick(96, 56), scale.seed]
    native = world.run(argv)
    paged = world.run(argv, local=16 * MIB, servers=[server], options=["--memory", "36M"], timeout=300)
    check(paged.code == 0 and paged.digest() == native.digest(), f"it ends with {paged.code}: {paged.said()}")
    check("full" in paged.err, f"no message says that the pool is full: {paged.said()}")


@suite.test()
def pool_is_too_small_for_the_lease(world, scale):
    server = world.serve("64M")
    outcome = world.run(["true"], local=16 * MIB, servers=[server], options=["--memory", "1G"])
    check(
        outcome.code == REFUSED and server.address in outcome.err and "64 MiB" in outcome.err,
        f"unclear: {outcome.code} {outcome.said()}",
    )
    # Without an amount, a program gets what is free, but not from servers that have almost nothing.
    outcome = world.run(["true"], local=16 * MIB, servers=[server])
    check(outcome.code == 0, f"64 MiB are not enough: {outcome.code} {outcome.said()}")
    told = [line for line in outcome.err.splitlines() if "64 MiB free" in line and "--memory" in line]
    check(len(told) == 1, f"no message says how much it was: {outcome.said()}")
    outcome = world.run(["true"], local=16 * MIB, servers=[world.serve("2M")])
    check(
        outcome.code == REFUSED and "2 MiB free" in outcome.err, f"unclear: {outcome.code} {outcome.said()}"
    )


@suite.test()
def more_local_memory_than_there_is(world, scale):
    """The system's OOM killer would be quicker than the agent. Only a warning: the user may know better."""
    for local, is_told in ((16 * MIB, False), (1 << 45, True)):
        outcome = world.run(["true"], local=local, servers=[world.serve("64M")], options=["--memory", "32M"])
        told = "more than this machine, or its container, has" in outcome.err
        check(outcome.code == 0 and told == is_told, f"{local}: {outcome.code} {outcome.said()}")


@suite.test()
def no_server_is_there(world, scale):
    address = f"127.0.0.1:{free_port()}"
    outcome = world.run(["true"], local=16 * MIB, servers=[address])
    check(outcome.code == REFUSED and address in outcome.err, f"unclear: {outcome.code} {outcome.said()}")


# ---- networks


@suite.test(waits=True)
def slow_peer(world, scale):
    server = world.serve("2G")
    for mode in ("slow", "narrow"):
        proxy = Proxy(server.address, scale.seed)
        proxy.delay_s, proxy.mode = 0.005, mode
        outcome = world.run(
            [built("processes"), 24, "exit-42"],
            local=16 * MIB,
            servers=[proxy.address],
            options=["--memory", "240M"],
            timeout=300,
        )
        check(outcome.code == 42 and proxy.passed > MIB, f"{mode}: {outcome.code} {outcome.said()}")
        proxy.close()


@suite.test(waits=True)
def link_is_cut(world, scale):
    server = world.serve("2G")
    proxy = Proxy(server.address, scale.seed)
    running = steady(world, [proxy.address])
    proxy.cut()
    must_be_lost(running.finish(60), proxy.address)


@suite.test(waits=True)
def link_is_cut_for_a_moment(world, scale):
    """Shorter than the grace time: the program notices nothing but the pause, forks included."""
    server = world.serve("2G")
    proxy = Proxy(server.address, scale.seed)
    random_ = random.Random(scale.seed)
    running = world.start(
        [built("processes"), 64, "fork-isolation"],
        local=16 * MIB,
        servers=[proxy.address],
        options=["--memory", "450M"],
    )
    running.managed_pids()
    cuts = 0
    while not running.ended() and cuts < scale.pick(60, 12):
        time.sleep(random_.random() * 0.4)
        proxy.interrupt(2.5 if cuts == 2 else random_.random() * 0.2)
        cuts += 1
    outcome = running.finish(120)
    check(outcome.code == 0, f"after {cuts} short cuts it ends with {outcome.code}: {outcome.said()}")
    check(
        "member reconnected" in server.said(100_000),
        f"no member reconnected after {cuts} cuts: {server.said()}",
    )
    # One that lasts longer than the server is waited for ends the program.
    running = steady(world, [proxy.address], options=["--op-deadline-ms", 1500])
    threading.Thread(target=proxy.interrupt, args=(20,), daemon=True).start()
    must_be_lost(running.finish(60), proxy.address)
    proxy.close()


@suite.test(waits=True)
def link_swallows_everything(world, scale):
    server = world.serve("2G")
    proxy = Proxy(server.address, scale.seed)
    running = steady(world, [proxy.address], options=["--op-deadline-ms", 2000])
    proxy.mode = "hole"
    must_be_lost(running.finish(60), proxy.address)
    proxy.mode = "pass"
    proxy.close()


@contextlib.contextmanager
def namespace(scale, net):
    """A network namespace behind a pair of interfaces: its name, this side's address and that side's. Nothing
    without root and ip(8)."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
    if os.geteuid() != 0 or subprocess.run(["ip", "netns", "list"], **quiet).returncode != 0:
        scale.note("skipped: needs root and ip(8)")
        yield None
        return
    name, ip = f"r{net}{os.getpid()}", lambda *a: subprocess.run(["ip", *a], check=True, timeout=20)
    here, there = (f"10.{net}.{1 + os.getpid() % 250}.{side}" for side in (1, 2))
    ip("netns", "add", name)
    try:
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("addr", "add", f"{here}/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("-n", name, "addr", "add", f"{there}/30", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        yield name, here, there
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, timeout=20)


@suite.test(waits=True)
def link_is_cut_in_a_network_namespace(world, scale):
    """A real interface goes down: the client's own kernel still reports no error."""
    with namespace(scale, 213) as network:
        if network is None:
            return
        name, here, _ = network
        ip = lambda *a: subprocess.run(["ip", *a], check=True, timeout=20)
        key = world.dir / "key"
        subprocess.run([rampool_binary(), "key", key], check=True, stdout=subprocess.DEVNULL, timeout=20)
        server = world.serve("2G", "--key-file", key, listen=f"{here}:{free_port()}")
        running = world.start(
            [
                "ip", "netns", "exec", name, rampool_binary(), "run", "--local", "16M", "--server",
                server.address, "--key-file", key, "--memory", "400M", "--", built("processes"), 32, "steady",
            ],
        )
        running.wait_for("steady", 60)
        # For three seconds, then a reset by the kernel if it can do that: the program goes on.
        seen = lambda: status(server.address, "--key-file", key)["operations"]["got_pages"]
        ip("-n", name, "link", "set", f"{name}b", "down")
        time.sleep(3)
        ip("-n", name, "link", "set", f"{name}b", "up")
        before = seen()
        wait_until(
            "the program goes on after three seconds without a link",
            lambda: seen() > before or running.ended(),
            30,
        )
        cut = ["ip", "netns", "exec", name, "ss", "-K", "dst", here]
        subprocess.run(cut, check=False, timeout=20, capture_output=True)
        before = seen()
        wait_until(
            "the program goes on after its connections were killed",
            lambda: seen() > before or running.ended(),
            30,
        )
        check(not running.ended(), f"it did not survive a short cut: {running.said()[-1500:]}")
        if "member reconnected" not in server.said(100_000):
            scale.note("this machine has no `ss -K`")
        ip("-n", name, "link", "set", f"{name}b", "down")
        must_be_lost(running.finish(60), server.address)


@suite.test()
def link_changes_bits(world, scale):
    """No wrong byte reaches the program: it goes on, or ends with a reason."""
    server = world.serve("2G")
    for round_ in range(scale.pick(6, 2)):
        proxy = Proxy(server.address, scale.seed + round_)
        running = steady(world, [proxy.address])
        proxy.mode = "corrupt"
        wait_until("a bit was changed", lambda: proxy.corrupted > 0 or running.ended(), 60)
        time.sleep(1)
        ended = running.ended()
        if not ended:
            procs.kill_all(running.managed_pids())
        outcome = running.finish(60)
        check(
            " should be " not in outcome.err and "ballast" not in outcome.err and outcome.code != 3,
            f"wrong data: {outcome.said()}",
        )
        if ended:
            must_be_lost(outcome, proxy.address)
        scale.note(
            f"seed {scale.seed + round_}: {proxy.corrupted} bits, the program "
            f"{'ended with an error' if ended else 'went on'}"
        )
        proxy.close()


# ---- unauthenticated peers


@suite.test()
def wrong_key(world, scale):
    keys = [world.dir / "right.key", world.dir / "wrong.key"]
    for key in keys:
        subprocess.run([rampool_binary(), "key", key], check=True, stdout=subprocess.DEVNULL, timeout=20)
    server = world.serve("2G", "--key-file", keys[0])
    for options in (["--key-file", keys[1]], []):
        outcome = world.run(
            ["true"], local=16 * MIB, servers=[server], options=["--memory", "100M", *options], timeout=60
        )
        check(
            outcome.code == REFUSED and server.address in outcome.err and "key" in outcome.err.lower(),
            f"unclear: {outcome.code} {outcome.said()}",
        )
    check("key" in server.said(4000).lower(), f"the log does not say why: {server.said()}")
    still_serves(world, server, ["--key-file", keys[0]])
    # The other way round: a key, where the server wants none.
    open_server = world.serve("2G")
    outcome = world.run(
        ["true"],
        local=16 * MIB,
        servers=[open_server],
        options=["--memory", "100M", "--key-file", keys[0]],
        timeout=60,
    )
    check(outcome.code in (0, REFUSED), f"unclear: {outcome.code} {outcome.said()}")
    still_serves(world, open_server)


def unauthenticated_messages(seed):
    """What may arrive at an open port."""
    rng = random.Random(seed)
    yield b""
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200)
    yield b"\0" * 4096
    yield b"\xff" * 65536
    for length in (1, 7, 8, 15, 16, 31, 32, 63, 64, 65, 1000, 100_000):
        yield rng.randbytes(length)


@suite.test()
def garbage_at_the_server(world, scale):
    server = world.serve("2G")
    running = steady(world, [server])
    host, port = server.address.split(":")
    # The first bytes of a real client, to be corrupted.
    recorder, said = socket.create_server(("127.0.0.1", 0)), []
    recorder.settimeout(30)

    def record():
        with recorder.accept()[0] as client:
            client.settimeout(2)
            try:
                said.append(client.recv(4096))
            except OSError:
                pass

    thread = threading.Thread(target=record)
    thread.start()
    outcome = world.run(
        ["true"], local=16 * MIB, servers=[f"127.0.0.1:{recorder.getsockname()[1]}"], timeout=60
    )
    check(outcome.code == REFUSED, f"a server that hangs up at once: {outcome.code} {outcome.said()}")
    thread.join(30)
    recorder.close()
    check(said and said[0], "a client says nothing")
    rng, damaged = random.Random(scale.seed), []
    for at in range(min(len(said[0]), 64)):
        one = bytearray(said[0])
        one[at] ^= 1 << rng.randrange(8)
        damaged.append(bytes(one))
    for message in [
        *unauthenticated_messages(scale.seed), *damaged, said[0][:-1], said[0] + rng.randbytes(5000)
    ]:
        with socket.create_connection((host, int(port)), 10) as s:
            s.settimeout(0.05)
            try:
                s.sendall(message)
                s.recv(4096)
            except OSError:
                pass
    check(not running.ended(), f"an unauthenticated peer ended a program: {running.said()[-1500:]}")
    still_serves(world, server)
    procs.kill_all(running.managed_pids())
    running.finish(30)
    check("panicked" not in server.said(100_000), server.said(3000))


@suite.test()
def garbage_from_the_server(world, scale):
    for message in unauthenticated_messages(scale.seed):
        fake = socket.create_server(("127.0.0.1", 0))
        fake.settimeout(30)

        def answer(fake=fake, message=message):
            try:
                while True:
                    client, _ = fake.accept()
                    client.settimeout(1)
                    client.sendall(message)
                    client.recv(4096)
                    client.close()
            except OSError:
                pass

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = f"127.0.0.1:{fake.getsockname()[1]}"
        outcome = world.run(["true"], local=16 * MIB, servers=[address], timeout=60)
        check(outcome.code == REFUSED and address in outcome.err, f"unclear: {outcome.code} {outcome.said()}")
        fake.close()


@suite.test(waits=True)
def server_that_never_answers(world, scale):
    silent = socket.create_server(("127.0.0.1", 0), backlog=8)
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    outcome = world.run(
        ["true"], local=16 * MIB, servers=[address], options=["--op-deadline-ms", 2000], timeout=60
    )
    check(outcome.code == REFUSED and address in outcome.err, f"unclear: {outcome.code} {outcome.said()}")
    silent.close()


# ---- programs that cannot work, and the embedded server


@suite.test()
def programs_that_cannot_work_are_refused(world, scale):
    source, binary = world.dir / "static.c", world.dir / "static"
    source.write_text("int main(void) { return 0; }\n")
    subprocess.run(["gcc", "-static", "-o", binary, source], check=True, timeout=60)
    server = world.serve("64M")
    cases = (
        ([binary], REFUSED, "static"), (["/no/such/program"], NOT_THERE, "no such"),
        (["no-such-program"], NOT_THERE, "PATH"), ([source], NOT_EXECUTABLE, "cannot run"),
    )
    for argv, code, why in cases:
        outcome = world.run(argv, local=16 * MIB, servers=[server], options=["--memory", "32M"])
        check(outcome.code == code and why in outcome.err, f"{argv}: {outcome.code} {outcome.said()}")
        if code != REFUSED:
            natively = subprocess.run(
                ["env", *map(str, argv)], stderr=subprocess.DEVNULL, timeout=60, check=False
            ).returncode
            check(natively == code, f"{argv}: after `env` it is {natively}")
    outcome = subprocess.run(
        [rampool_binary(), "launch", "-n", "2", "/no/such/program"],
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    check(
        outcome.returncode == NOT_THERE and b"cannot start /no/such/program" in outcome.stderr,
        f"launch: {outcome}",
    )
    # A sanitizer's run-time library may be missing here; its name in the program is enough for a refusal.
    library, needs = world.dir / "liblsan.so.0", world.dir / "needs"
    subprocess.run(
        ["gcc", "-shared", "-Wl,-soname,liblsan.so.0", "-o", library, "-xc", "/dev/null"],
        check=True,
        timeout=60,
    )
    subprocess.run(["gcc", "-Wl,--no-as-needed", "-o", needs, source, library], check=True, timeout=60)
    outcome = world.run([needs], local=16 * MIB, servers=[server], options=["--memory", "32M"])
    check(
        outcome.code == REFUSED and "sanitizer (liblsan.so.0)" in outcome.err,
        f"{outcome.code} {outcome.said()}",
    )
    # What Go's compiler leaves in a program.
    go, note = (
        world.dir / "go",
        r'__asm__(".section .note.go.buildid,\"a\",@note\n.long 4, 4, 4\n.ascii \"Go\\0\\0\"\n.long '
        r'0\n.text\n");',
    )
    source.write_text(note + "\nint main(void) { return 0; }\n")
    subprocess.run(["gcc", "-o", go, source], check=True, timeout=60)
    outcome = world.run(
        [go], local=16 * MIB, servers=[server], options=["--memory", "32M", "--fault-mode", "segv"]
    )
    check(outcome.code == REFUSED and "is a Go program" in outcome.err, f"{outcome.code} {outcome.said()}")


@suite.test()
def an_unknown_option_is_not_the_program(world, scale):
    for command in (
        ["run", "--local", "16M", "--locol", "64M", "--", "true"],
        ["launch", "-n", "2", "--rank", "4", "true"],
    ):
        outcome = subprocess.run(
            [rampool_binary(), *command], stderr=subprocess.PIPE, timeout=60, check=False
        )
        said = outcome.stderr.decode()
        option = command[3]
        check(
            outcome.returncode == REFUSED and f"unexpected argument '{option}'" in said and "tip" in said,
            f"{command}: {outcome}",
        )


@suite.test()
def a_script_without_an_interpreter_is_the_shells(world, scale):
    script = world.dir / "script"
    script.write_text('echo "$0" "$@"; grep -c librampool_agent.so /proc/$$/maps; exit 5\n')
    script.chmod(0o755)
    outcome = world.run(
        [script, "one", "two words"],
        local=16 * MIB,
        servers=[world.serve("64M")],
        options=["--memory", "32M"],
    )
    lines = outcome.text().splitlines()
    check(
        outcome.code == 5 and lines[0] == f"{script} one two words" and int(lines[1]) > 0,
        f"{outcome.code} {lines} {outcome.said()}",
    )


@suite.test()
def without_proc_a_program_goes_on_without_rampool(world, scale):
    """Forked in another root directory, with nothing of its memory away."""
    if os.geteuid() != 0:
        scale.note("not root: no other root directory")
        return
    root = world.dir / "root"
    root.mkdir()
    program = (
        f"import os; os.chroot({str(root)!r}); os.chdir('/'); c = os.fork(); c or os._exit(7); "
        "os._exit(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]))"
    )
    outcome = world.run(
        ["python3", "-c", program], local=64 * MIB, servers=[world.serve("64M")], options=["--memory", "32M"]
    )
    check(
        outcome.code == 7 and outcome.err.count("runs without rampool") == 1,
        f"{outcome.code} {outcome.said()}",
    )


@suite.test()
def what_does_not_start_leaves_no_lease(world, scale):
    server = world.serve("64M", "--grace-ms", "600000")
    before = free_bytes(server.address)
    program = world.dir / "not-executable"
    shutil.copy("/bin/sh", program)
    program.chmod(0o600)
    cases = (
        (["true"], ["--page-size", "3K"], REFUSED, "page size"),
        ([program], [], NOT_EXECUTABLE, "cannot start"),
        ([world.dir], [], NOT_EXECUTABLE, "is a directory"),
    )
    for argv, options, code, why in cases:
        outcome = world.run(argv, local=16 * MIB, servers=[server], options=["--memory", "32M", *options])
        check(
            outcome.code == code and why in outcome.err, f"{argv} {options}: {outcome.code} {outcome.said()}"
        )
        wait_until(
            f"the lease is back after {argv} {options}", lambda: free_bytes(server.address) == before, 30
        )


@suite.test(waits=True)
def nobody_takes_what_rampool_says(world, scale):
    """Standard error without a reader, or on a full disk: the program's end counts, and nothing stays
    leased."""
    server = world.serve("64M", "--grace-ms", "600000")
    before = free_bytes(server.address)
    for options in (["--memory", "32M", "--server", server.address], []):
        for reader in ("gone", "full"):
            if reader == "full":
                stderr = os.open("/dev/full", os.O_WRONLY)
            else:
                read, stderr = os.pipe()
                os.close(read)
            # Long enough for a live line.
            command = [
                rampool_binary(), "run", "--local", "16M", "--stats", "--progress", *options, "--", "sh",
                "-c", "sleep 1; echo done; exit 3",
            ]
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                timeout=60,
                check=False,
            )
            os.close(stderr)
            check((done.returncode, done.stdout) == (3, b"done\n"), f"{reader} {options}: {done}")
        wait_until("the lease is back", lambda: free_bytes(server.address) == before, 30)


@suite.test()
def programs_without_the_agent_are_named(world, scale):
    """A program that the program starts cannot be refused; it is named once, on standard error and in the
    summary."""
    source, binary = world.dir / "waits.c", world.dir / "waits"
    source.write_text(
        "#include <unistd.h>\nint main(void) { char c; while (read(0, &c, 1) > 0) {} return 0; }\n"
    )
    subprocess.run(["gcc", "-static", "-o", binary, source], check=True, timeout=60)
    pipe = world.dir / "pipe"
    os.mkfifo(pipe)
    server = world.serve("64M")
    running = world.start(
        ["sh", "-c", f"{binary} < {pipe}; {binary} < /dev/null; exit 5"],
        local=16 * MIB,
        servers=[server],
        options=["--memory", "32M"],
    )
    with open(pipe, "w"):
        wait_until(
            "the static program is named",
            lambda: f"{binary} is statically linked" in running.err.read_text(errors="replace"),
            60,
        )
    outcome = running.finish(60)
    check(
        outcome.code == 5 and outcome.err.count("runs without rampool") == 1,
        f"{outcome.code} {outcome.said()}",
    )
    check(f"not managed    {binary}" in outcome.err, f"not in the summary: {outcome.said()}")


@suite.test()
def alone_with_a_private_server(world, scale):
    """No server is named: a private one serves, is killed, and the program ends with a reason."""
    outcome = world.run([built("processes"), 64, "fork-isolation"], local=16 * MIB, timeout=120)
    check(
        outcome.code == 0 and "private" in outcome.err and outcome.faults() > 0,
        f"{outcome.code} {outcome.said()}",
    )
    running = world.start([built("processes"), 32, "steady"], local=16 * MIB)
    running.wait_for("steady", 60)
    mine = [p for p in procs.descendants(running.process.pid) if " serve " in procs.command_of(p)]
    check(len(mine) == 1, f"servers of its own: {mine}")
    os.kill(mine[0], signal.SIGKILL)
    outcome = running.finish(60)
    check(outcome.code == LOST, f"{outcome.code} {outcome.said()}")


@suite.test()
def servers_start_on_named_hosts_and_end_with_the_run(world, scale):
    """Through a shell that starts them here: the run ends, is killed, loses one, or a machine refuses."""
    shell, started = world.dir / "shell", world.dir / "started"
    shell.write_text(
        f'echo $$ >> {started}\ncase $1 in refuses) echo "Permission denied (publickey)." >&2; exit 255;;\n'
        'other) echo hello; exit 0;; esac\nexport PATH=/usr/bin:/bin\ncd / && exec sh -c "$2"\n'
    )
    servers = lambda: [int(pid) for pid in started.read_text().split()]
    living = lambda: [pid for pid in servers() if " serve " in procs.command_of(pid)]
    hosts = ["--ssh", f"sh {shell}", "--hosts", "me@127.0.0.1=256M,127.0.0.2=256M"]
    forks, steady = [built("processes"), 64, "fork-isolation"], [built("processes"), 32, "steady"]
    outcome = world.run(forks, local=16 * MIB, options=hosts, timeout=120)
    check(outcome.code == 0 and outcome.faults() > 0, f"{outcome.code} {outcome.said()}")
    check("me@127.0.0.1 (256 MiB), 127.0.0.2 (256 MiB)" in outcome.err, outcome.said())
    check(len(servers()) == 2 and not living(), f"servers {servers()}, of which {living()} live")
    running = world.start(steady, local=16 * MIB, options=[*hosts, "--copies", "1"])
    running.wait_for("steady", 60)
    check(len(living()) == 2, f"servers {servers()}, of which {living()} live")
    os.kill(running.process.pid, signal.SIGKILL)
    running.finish(60)
    wait_until("the servers of a run that was killed have ended", lambda: not living(), 30)
    running = world.start(steady, local=16 * MIB, options=[*hosts, "--copies", "1"])
    running.wait_for("steady", 60)
    os.kill(living()[1], signal.SIGKILL)
    must_be_lost(running.finish(60), "127.0.0.2:")
    for host, words in (
        ("refuses=256M", ["on refuses", "Permission denied (publickey)", "255"]),
        ("127.0.0.1=8K", ["on 127.0.0.1"]),
        ("other=256M", ["on other", "ended at once"]),
        ("127.0.0.1", ["HOST=4G"]),
    ):
        options = ["--ssh", f"sh {shell}", "--hosts", f"127.0.0.3=16M,{host}"]
        outcome = world.run(["true"], local=16 * MIB, options=options)
        check(outcome.code != 0 and all(word in outcome.err for word in words), f"{host}: {outcome.said()}")
        wait_until("no server is left", lambda: not living(), 30)


@suite.test()
def servers_start_in_another_network_namespace(world, scale):
    with namespace(scale, 214) as network:
        if network is None:
            return
        name, _, there = network
        shell = world.dir / "shell"
        shell.write_text('exec ip netns exec "${1%@*}" sh -c "$2"\n')
        options = ["--ssh", f"sh {shell}", "--hosts", f"{name}@{there}=512M"]
        forks = [built("processes"), 64, "fork-isolation"]
        outcome = world.run(forks, local=16 * MIB, options=options, timeout=120)
        check(outcome.code == 0 and outcome.faults() > 0, f"{outcome.code} {outcome.said()}")
        left = subprocess.check_output(["ip", "netns", "pids", name], text=True, timeout=20)
        check(not left.strip(), f"left in the namespace: {left}")



if __name__ == "__main__":
    procs.end_with_parent()
    suite.main()

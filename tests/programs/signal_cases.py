"""Signals under `rampool run` and `rampool launch`: each reaches the program once, whoever it is sent to."""

import fcntl
import os
import pty
import random
import select
import signal
import struct
import termios
import time

import redis_work
from harness import procs
from harness.world import MIB, built, check, free_port, rampool_binary

SENTINEL = signal.SIGWINCH
"""Passed on after every other signal that the tests send: when it has come, what was sent before has come as
often as it ever will."""
DEADLINE_S = 60


def status_of(pid):
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            return dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    except OSError:
        return {}


def none_pending(rampool):
    """In this rampool and those that it started; not in what is there to show what is pending."""
    all_of_it = map(status_of, [rampool, *procs.descendants(rampool)])
    return all(
        int(one["ShdPnd"], 16) & ~(1 << (signal.SIGCHLD - 1)) == 0
        for one in all_of_it
        if one.get("Name") == "rampool"
    )


class Signalled:
    """A process that rampool started by `argv`, and the programs in it that say which signals they get."""

    def __init__(self, world, argv, programs=1, **how):
        self.running, self.programs, self.sent = world.start(argv, **how), programs, {}
        self.rampool = self.running.process.pid
        self.await_((lambda: self.text().count("ready\n") == programs), "not every program is ready")

    def text(self):
        return self.running.out.read_text(errors="replace")

    def count(self, number):
        """How often all programs together have got it."""
        return sum(line.endswith(f" {int(number)}") for line in self.text().splitlines())

    def await_(self, condition, what):
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            check(
                not self.running.ended(),
                f"{what}: it has ended\n{self.text()[-500:]}{self.running.said()[-1500:]}",
            )
            if time.monotonic() > deadline:
                self.running.hang(what)
            time.sleep(0.0005)

    def send(self, number, to_group):
        """Waits until each program has got it."""
        os.kill(-self.rampool if to_group else self.rampool, number)
        self.sent[number] = self.sent.get(number, 0) + self.programs
        self.await_(
            (lambda: self.count(number) >= self.sent[number]),
            f"signal {number} to {'the group' if to_group else 'rampool'} did not come",
        )

    def await_taken(self):
        """Waits until each rampool has taken every signal that it got: a second one like it would be lost in
        it, as in any process."""
        self.await_((lambda: none_pending(self.rampool)), "rampool does not take its signals")

    def check_once(self, what):
        self.await_taken()
        self.send(SENTINEL, to_group=False)
        self.await_taken()
        for number, sent in self.sent.items():
            check(
                self.count(number) == sent,
                f"{what}: signal {number} was sent {sent} times and came {self.count(number)} times",
            )

    def end(self, code=42):
        os.kill(self.rampool, signal.SIGHUP)
        outcome = self.running.finish(DEADLINE_S)
        check(outcome.code == code, f"ends with {outcome.code}: {outcome.said()}")


def to_all(signalled, rounds, seed, what):
    chance = random.Random(seed)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        for _ in range(rounds):
            signalled.send(number, to_group=True)
        signalled.check_once(f"{what}, to the group")
        for _ in range(rounds):
            signalled.send(number, to_group=False)
            signalled.await_taken()
        signalled.check_once(f"{what}, to rampool alone")
    numbers = (
        signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGALRM,
        signal.SIGCONT,
    )
    for _ in range(rounds * 4):
        signalled.send(chance.choice(numbers), to_group=chance.random() < 0.5)
        signalled.await_taken()
    signalled.check_once(f"{what}, to either")
    for to_group in (True, False, True):
        os.kill(-signalled.rampool, signal.SIGSTOP)
        signalled.await_((lambda: status_of(signalled.rampool)["State"].startswith("T")), "it does not stop")
        signalled.send(signal.SIGCONT, to_group)
        signalled.check_once(f"{what}, stopped and continued by {'group' if to_group else 'number'}")


class Terminal:
    """A process on a terminal of its own, which leads the terminal's session."""

    def __init__(self, argv):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            os.execvp(str(argv[0]), [str(a) for a in argv])
        self.text = ""

    def read_until(self, condition, what):
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            check(time.monotonic() < deadline, f"{what}:\n{self.text[-1500:]}")
            if select.select([self.terminal], [], [], 0.01)[0]:
                try:
                    self.text += os.read(self.terminal, 65536).decode(errors="replace").replace("\r", "")
                except OSError:
                    check(condition(), f"{what}, and the terminal is closed:\n{self.text[-1500:]}")

    def type(self, keys):
        os.write(self.terminal, keys.encode())

    def count(self, number):
        """Not in lines, because the terminal shows `^C` in front."""
        return sum(line.endswith(f" {int(number)}") for line in self.text.splitlines())

    def expect(self, number, times):
        self.read_until((lambda: self.count(number) >= times), f"signal {number} did not come {times} times")

    def end(self):
        """Hangs up; returns how the process ended."""
        os.close(self.terminal)
        deadline = time.monotonic() + DEADLINE_S
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                check(False, "it did not end when its terminal was closed")
            time.sleep(0.005)
        return os.waitstatus_to_exitcode(ended[1])


def run_words():
    return [rampool_binary(), "run", "--local", str(64 * MIB), "--"]


def register(suite):
    @suite.test()
    def signals_reach_the_program_once(world, scale):
        signalled = Signalled(world, [built("signals")], local=64 * MIB)
        to_all(signalled, scale.pick(200, 30), scale.seed, "run")
        signalled.end()

    @suite.test()
    def signals_reach_the_program_of_a_run_in_a_run_once(world, scale):
        signalled = Signalled(world, [*run_words(), built("signals")], local=64 * MIB)
        to_all(signalled, scale.pick(100, 15), scale.seed, "a run in a run")
        signalled.end()

    @suite.test()
    def signals_reach_a_program_in_a_group_of_its_own_once(world, scale):
        """It has left the group, as shells do: then rampool passes on what is sent to the group that it was
        started in."""
        leaves = "import os, sys; os.setpgid(0, 0); os.execv(sys.argv[1], sys.argv[1:])"
        signalled = Signalled(world, ["python3", "-c", leaves, built("signals")], local=64 * MIB)
        for number in (signal.SIGINT, signal.SIGTERM):
            for to_group in (True, False) * scale.pick(50, 10):
                signalled.send(number, to_group)
                signalled.await_taken()
        signalled.check_once("to a program in a group of its own")
        signalled.end()

    @suite.test()
    def signals_reach_each_rank_once(world, scale):
        signalled = Signalled(
            world, [rampool_binary(), "launch", "-n", "2", "--", built("signals")], programs=2
        )
        for number in (signal.SIGINT, signal.SIGUSR1):
            for to_group in (True, False) * scale.pick(50, 10):
                signalled.send(number, to_group)
                signalled.await_taken()
        signalled.check_once("launch")
        signalled.end()

    @suite.test()
    def signals_of_a_terminal_reach_the_program_once(world, scale):
        terminal, rounds = Terminal([*run_words(), built("signals")]), scale.pick(50, 10)
        terminal.read_until((lambda: "ready\n" in terminal.text), "it is not ready")
        for times in range(1, rounds + 1):
            for key, number in (("\x03", signal.SIGINT), ("\x1c", signal.SIGQUIT)):
                terminal.type(key)
                terminal.expect(number, times)
            fcntl.ioctl(terminal.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80 + times, 0, 0))
            terminal.expect(signal.SIGWINCH, times)
        terminal.read_until((lambda: none_pending(terminal.pid)), "rampool does not take its signals")
        os.kill(terminal.pid, signal.SIGWINCH)
        terminal.expect(signal.SIGWINCH, rounds + 1)
        for number, times in (
            (signal.SIGINT, rounds),
            (signal.SIGQUIT, rounds),
            (signal.SIGWINCH, rounds + 1),
        ):
            check(
                terminal.count(number) == times,
                f"signal {number} came {terminal.count(number)} times instead of {times}:\n"
                f"{terminal.text[-500:]}",
            )
        # The kernel tells only the session's leader of the terminal's end, which is rampool here.
        check((code := terminal.end()) == 42, f"ends with {code} when its terminal is closed")

    @suite.test()
    def a_shell_stops_and_continues_a_run(world, scale):
        shell = Terminal(["bash", "--norc", "--noprofile", "-i"])
        shell.type("PS1=; stty -echo; echo be''gun\n")
        shell.read_until((lambda: "begun\n" in shell.text), "no shell")
        shell.type(" ".join(map(str, [*run_words(), built("signals")])) + "\n")
        shell.read_until((lambda: "ready\n" in shell.text), "it is not ready")
        for times in range(1, scale.pick(20, 4) + 1):
            shell.type("\x1a")
            shell.read_until(
                (lambda: shell.text.count("Stopped") == 2 * times - 1), "Ctrl-Z does not stop it"
            )
            shell.type("fg\n")
            shell.expect(signal.SIGCONT, 2 * times - 1)
            shell.type("\x03")
            shell.expect(signal.SIGINT, times)
            shell.type("\x1a")
            shell.read_until(
                (lambda: shell.text.count("Stopped") == 2 * times), "Ctrl-Z does not stop it again"
            )
            shell.type("bg\nkill -USR1 %1\n")
            shell.expect(signal.SIGCONT, 2 * times)
            shell.expect(signal.SIGUSR1, times)
            shell.type("fg\n")
            shell.read_until(
                (lambda: os.tcgetpgrp(shell.terminal) != shell.pid), "it is not in the foreground"
            )
            shell.type("\x1c")
            shell.expect(signal.SIGQUIT, times)
        counts = {
            number: shell.count(number)
            for number in (signal.SIGCONT, signal.SIGINT, signal.SIGUSR1, signal.SIGQUIT)
        }
        # A shell continues a job that runs as well.
        wanted = {signal.SIGINT: times, signal.SIGUSR1: times, signal.SIGQUIT: times}
        check(
            all(counts[number] == wanted[number] for number in wanted),
            f"{counts} instead of {wanted}:\n{shell.text[-1500:]}",
        )
        shell.type("\x1a")
        shell.read_until(
            (lambda: shell.text.count("Stopped") == 2 * times + 1), "Ctrl-Z does not stop it at last"
        )
        shell.type("kill -HUP %1; fg; echo code=$?\n")
        shell.read_until((lambda: "code=" in shell.text), "it does not end")
        check("code=42\n" in shell.text, f"its exit code is lost:\n{shell.text[-500:]}")
        shell.type("exit\n")
        shell.end()

    @suite.test()
    def a_run_that_is_interrupted_while_it_starts_ends(world, scale):
        """Whether its program is there yet, half there, or there."""
        chance = random.Random(scale.seed)
        for round_ in range(scale.pick(300, 40)):
            running = world.start(["sleep", "1000"], local=64 * MIB)
            time.sleep(chance.uniform(0, 0.03))
            os.kill(-running.process.pid, signal.SIGINT)
            outcome = running.finish(DEADLINE_S)
            check(
                outcome.code == -signal.SIGINT, f"round {round_}: ends with {outcome.code}: {outcome.said()}"
            )

    @suite.test()
    def redis_saves_when_its_group_is_interrupted(world, scale):
        for round_ in range(scale.pick(12, 4)):
            port, home = free_port(), world.dir / f"redis-{round_}"
            home.mkdir()
            argv = [
                "redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", home, "--save", "3600 1",
                "--appendonly", "no", "--dbfilename", "dump.rdb",
            ]
            running = world.start(argv, local=64 * MIB)
            client = redis_work.Client(port, timeout=60)
            redis_work.fill(client, 1000)
            os.kill(-running.process.pid, signal.SIGINT)
            outcome = running.finish(60)
            check(
                outcome.code == 0,
                f"round {round_}: ends with {outcome.code}: {outcome.text()[-1500:]}{outcome.said()}",
            )
            check(
                (home / "dump.rdb").exists(),
                f"round {round_}: there is no snapshot: {outcome.text()[-1500:]}",
            )

"""What the tests need: memory servers on Unix sockets, which end with them."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

WATCHDOG_S = 120


class Server:
    """A memory server of this test's own."""

    def __init__(self, directory, memory="256M"):
        self.address = f"unix:{directory}/server.sock"
        self.memory = memory
        self.start()

    def start(self):
        from rampool._command import command

        words = [command(), "serve", "--listen", self.address, "--memory", self.memory, "--shards", "1"]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RAMPOOL_SERVE_")
        }
        self.process = subprocess.Popen(
            [*words, "--until-stdin-closes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self.process.stdout.readline(), "the server did not start"
        # What it says later must not fill the pipe.
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def stop(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"), "1G")
    yield server.address
    server.stop()


@pytest.fixture
def own_server(tmp_path):
    """One that a test may kill."""
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def two_servers(tmp_path_factory):
    servers = [Server(tmp_path_factory.mktemp("server")) for _ in range(2)]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def pool(server):
    import rampool

    with rampool.connect(server, memory="64M", local="2M") as pool:
        yield pool


@pytest.fixture
def python(server):
    """Runs a program in a Python of its own, and gives its output."""

    def run(program, *, check=True, timeout=WATCHDOG_S, command=(sys.executable,), **environment):
        ended = subprocess.run(
            [*command, "-c", program],
            env={**os.environ, "SERVER": server, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check:
            assert ended.returncode == 0, ended.stderr + ended.stdout
            return ended.stdout
        return ended

    return run


def until(condition, what):
    """Waits for something that must happen."""
    end = time.monotonic() + WATCHDOG_S
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen in {WATCHDOG_S} s"
        time.sleep(0.01)


def stop(pid):
    """Stops a process, and returns when none of its threads runs."""
    os.kill(pid, signal.SIGSTOP)
    states = lambda: [
        path.read_text().rsplit(")", 1)[1].split()[0]
        for path in pathlib.Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    until(lambda: set(states()) == {"T"}, f"the stop of process {pid}")


__all__ = ["Server", "stop", "until"]

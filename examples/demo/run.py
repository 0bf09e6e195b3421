#!/usr/bin/env python3
"""The main job, small: a database in memory with everything local, then with a quarter of its memory local
and the rest on two memory servers, one of which is killed.

The database is SQLite in an unmodified Python (orders.py); the servers are processes of their own, reached
over TCP. Both runs must give the same answer. Python's standard library only.
"""

import argparse
import hashlib
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MIB = 1 << 20
# No wait is endless, and no machine is this slow.
LIMIT_S = 900


class Failure(Exception):
    pass


def binary():
    path = pathlib.Path(
        os.environ.get("RAMPOOL_BIN")
        or pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release/rampool"
    )
    if not path.exists():
        raise Failure(f"{path} is not built: run `make build`")
    return str(path)


def run(command, meanwhile=None):
    """Seconds, peak resident bytes of the process, its output, what it said on standard error. `meanwhile`:
    seconds, and what is done after them."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    watchdog = threading.Timer(LIMIT_S, process.kill)
    watchdog.start()
    if meanwhile:
        threading.Timer(*meanwhile).start()
    said = []
    reader = threading.Thread(target=lambda: said.append(process.stderr.read()))
    reader.start()
    output = process.stdout.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    watchdog.cancel()
    reader.join()
    text = said[0].decode(errors="replace")
    if process.returncode != 0:
        raise Failure(f"{' '.join(command)} ended with {process.returncode}:\n{text}")
    return seconds, usage.ru_maxrss * 1024, output, text


def start_server(rampool, memory):
    """A memory server on a port of the system's choice, and its address."""
    server = subprocess.Popen(
        [rampool, "serve", "--memory", f"{memory}M", "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if not select.select([server.stdout], [], [], 30)[0]:
        server.kill()
        raise Failure("the memory server did not become ready in 30 s")
    line = server.stdout.readline()
    if not line.startswith("listening on "):
        server.kill()
        raise Failure(f"the memory server did not start; see `{rampool} serve --memory {memory}M`")
    return server, line.removeprefix("listening on ").strip()


def stop(server):
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def shown(command):
    return " ".join(part.replace(str(ROOT) + "/", "").replace(sys.executable, "python3") for part in command)


def indented(text):
    return "\n".join(f"   {line}" for line in text.rstrip().splitlines())


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def demo(rows, share):
    rampool = binary()
    program = [sys.executable, str(HERE / "orders.py"), str(rows), str(rows // 25)]
    print(f"1. everything local\n   $ {shown(program)}", flush=True)
    native_s, native_peak, native_output, _ = run(program)
    print(indented(native_output))
    print(f"   {native_s:.2f} s, {native_peak // MIB} MiB of memory\n", flush=True)

    local, lent = int(native_peak * share) // MIB, max(4 * native_peak // MIB, 1024)
    servers, addresses = [], []
    try:
        for _ in range(2):
            server, address = start_server(rampool, lent)
            servers.append(server)
            addresses.append(address)
        lines = "".join(
            f"   $ {shown([rampool])} serve --memory {lent}M --listen {address}\n" for address in addresses
        )
        print(f"2. two memory servers\n{lines}", flush=True)
        named = [word for address in addresses for word in ("--server", address)]
        paged = [
            rampool, "run", "--local", f"{local}M", "--memory", f"{lent // 2}M", *named, "--stats", "--",
            *program,
        ]
        middle = native_s * 0.75
        print(
            f"3. {share:.0%} of its memory local, the rest on the servers; one of them is killed after "
            f"{middle:.1f} s\n   $ {shown(paged)}",
            flush=True,
        )
        paged_s, _, paged_output, summary = run(paged, (middle, servers[1].kill))
    finally:
        for server in servers:
            stop(server)
    print(indented(paged_output + summary), flush=True)

    def number(pattern):
        found = re.search(pattern, summary)
        return found.group(1) if found else "?"

    faults = number(r"faults +(\d+)")
    rows = [
        ("", "everything local", f"{share:.0%} local"),
        ("time", f"{native_s:.2f} s", f"{paged_s:.2f} s ({paged_s / native_s:.1f}x)"),
        ("local memory, at most", f"{native_peak // MIB} MiB", number(r"highest seen ([^(]*) \(")),
        ("page faults caught", "0", faults),
        ("  without waiting for a server", "", number(r"([\d.]+ %) served")),
        ("read from the pool", "0", number(r"read +(.*?) from the pool")),
        ("written to the pool", "0", number(r"left +[^:]*: (.*?) written")),
        ("answer, SHA-256", digest(native_output), digest(paged_output)),
    ]
    print()
    for row in rows:
        print(f"   {row[0]:<32}{row[1]:>18}{row[2]:>22}")
    print()
    if paged_output != native_output:
        raise Failure("the answers differ")
    if not faults.isdigit() or int(faults) == 0:
        raise Failure("no page left the machine's memory: the demo shows nothing")
    if f"server {addresses[1]} is lost" not in summary:
        raise Failure("the program did not notice that a server was killed: the demo shows nothing")
    print("   A server was killed in the middle, and the answers are the same, byte for byte.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=300_000, help="rows of the table, 400 bytes each")
    parser.add_argument(
        "--local", type=float, default=0.25, help="share of the program's memory that stays local"
    )
    arguments = parser.parse_args()
    try:
        demo(arguments.rows, arguments.local)
    except Failure as failure:
        sys.exit(f"demo: {failure}")


if __name__ == "__main__":
    main()

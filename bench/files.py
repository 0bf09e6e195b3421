#!/usr/bin/env python3
"""Files in the pool against the direct view: a file is read in order, in pieces of 1 MiB that the kernel does
not have, and as many bytes by gets of 1 MiB; and written in order, until `fsync` returns. All in the same
run, taking turns; medians and their ratio.

`python3 bench/files.py [--json FILE] [--rounds N] [--quick]`, as root on an otherwise idle machine, with the
Python package (`make wheel`). RAMPOOL_BIN names the binary.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
import rampool

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness import procs  # noqa: E402
from harness.world import MIB, rampool_binary  # noqa: E402
from report import Report, ratios  # noqa: E402


def through_file(path, mib):
    """Bytes a second."""
    Path("/proc/sys/vm/drop_caches").write_text("3")
    into = bytearray(MIB)
    with open(path, "rb", buffering=0) as file:
        began = time.monotonic()
        for _ in range(mib):
            if file.readinto(into) != MIB:
                raise SystemExit("the file is cut short")
        return mib * MIB / (time.monotonic() - began)


def written(path, mib):
    """Bytes a second."""
    piece = os.urandom(MIB)
    with open(path, "r+b", buffering=0) as file:
        began = time.monotonic()
        for _ in range(mib):
            file.write(piece)
        os.fsync(file.fileno())
        return mib * MIB / (time.monotonic() - began)


def by_gets(table, mib):
    """Bytes a second."""
    began = time.monotonic()
    for number in range(mib):
        table.start_get(slice(number * MIB, (number + 1) * MIB)).result()
    return mib * MIB / (time.monotonic() - began)


def started(*words):
    words = [str(word) for word in words]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, **quiet, preexec_fn=procs.end_with_parent)
    process.stdout.readline()
    return process


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works")
    options = parser.parse_args()
    rounds, mib = options.rounds or (1 if options.quick else 9), 64 if options.quick else 512
    report = Report("files", options.quick)
    report.note(f"{mib} MiB in order, in pieces of 1 MiB, of a server on the same machine")
    with tempfile.TemporaryDirectory() as at:
        for name, listen in (("loopback TCP", "127.0.0.1:7197"), ("Unix socket", f"unix:{at}/sock")):
            one_server(report, name, listen, Path(at, name.partition(" ")[0]), rounds, mib)
    report.finish(options.json)


def one_server(report, name, listen, at, rounds, mib):
    at.mkdir()
    server = started(rampool_binary(), "serve", "--memory", "1300M", "--no-lock", "--listen", listen)
    mount = started(rampool_binary(), "mount", at, "--size", f"{mib + 8}M", "--server", listen)
    try:
        with open(at / "file", "wb") as file:
            for _ in range(mib):
                file.write(os.urandom(MIB))
        with rampool.connect(f"{listen}={mib + 8}M", local="64M") as pool:
            table = pool.remote("table", (mib * MIB,), "u1")
            for number in range(mib):
                table[number * MIB : (number + 1) * MIB] = numpy.frombuffer(os.urandom(MIB), "u1")
            seen = {through_file: [], by_gets: [], written: []}
            for turn in range(rounds):
                for way in list(seen)[:: 1 if turn % 2 == 0 else -1]:
                    seen[way].append(way(table if way is by_gets else at / "file", mib))
        files, gets, writes = ([bytes_ / MIB for bytes_ in each] for each in seen.values())
        report.series(f"{name}: a file in order", "MiB/s", files)
        report.series(f"{name}: gets of 1 MiB", "MiB/s", gets)
        report.series(f"{name}: a file written in order, fsync", "MiB/s", writes)
        report.ratio(f"{name}: file / gets", ratios(files, gets), ">= 0.6")
    finally:
        mount.terminate()
        mount.wait()
        server.kill()


if __name__ == "__main__":
    main()

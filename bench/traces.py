#!/usr/bin/env python3
"""Records which pages ten of the world's programs touch, and compares the policy with the optimum on that.

`python3 bench/traces.py [--only NAME] [FOLDER]`: needs strace, and puts traces into FOLDER (target/traces).
A program runs under `rampool run --local 8M --prefetch 0`, and every fault that the kernel reports is an
access: what it touches in 8 MiB that it has touched lately is not seen, which matters little for a budget
many times as large. `bench/traces.json` says what was recorded last, by digest. RAMPOOL_BIN names the binary.
"""

import argparse
import array
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/programs/world")]
import catalog  # noqa: E402
from harness import procs  # noqa: E402
from harness.world import TARGET, rampool_binary  # noqa: E402

PROGRAMS = (
    "DuckDB", "pandas", "OpenJDK, Serial", "OpenJDK, G1", "Node", "SQLite in memory", "LuaJIT", "Perl",
    "hash map in C++, glibc", "graph search, OpenMP",
)  # fmt: skip
# As many faults are kept of each program.
MOST = 600_000
LIMIT_S = 60
# A fault's message: its kind, flags (1: a store) and address.
FAULT = re.compile(r"\\x12(?:\\x00){7}((?:\\x..){8})((?:\\x..){8})(?:\\x..){8}")


def number(text):
    return int.from_bytes(bytes.fromhex(text.replace("\\x", "")), "little")


def faults(argv, env, trace):
    """The addresses of the pages on which the program faults, and which are stores, in order."""
    run = [rampool_binary(), "run", "--local", "8M", "--prefetch", "0", "--", *argv]
    strace = ["strace", "-f", "--seccomp-bpf", "-xx", "-s", "512", "-e", "trace=read", "-o", trace]
    env = {**os.environ, **env}
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*map(str, strace), *map(str, run)], env=env, **quiet)
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"  ended after {LIMIT_S} s", flush=True)
        procs.kill_all(procs.descendants(os.getpid()))
        process.wait()
        procs.reap()
    with open(trace) as lines:
        for line in lines:
            for flags, address in FAULT.findall(line):
                yield number(address) >> 12, number(flags) & 1


def recorded(program, file):
    with tempfile.TemporaryDirectory(prefix="rampool-traces-") as home:
        place = catalog.Place(Path(home))
        seen = []
        for page, store in faults(program.argv(place), program.env, Path(home) / "strace"):
            seen.append((page, store))
            if len(seen) == MOST:
                break
    # Pages get numbers without the gaps between mappings.
    numbers = {page: at for at, page in enumerate(sorted({page for page, _ in seen}))}
    words = array.array("I", (numbers[page] << 1 | store for page, store in seen))
    file.write_bytes(words.tobytes())
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"pages": len(numbers), "accesses": len(seen), "sha256": digest}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=TARGET / "traces")
    parser.add_argument("--only", action="append", default=[])
    options = parser.parse_args()
    procs.adopt_orphans()
    options.folder.mkdir(parents=True, exist_ok=True)
    digests = ROOT / "bench/traces.json"
    known = json.loads(digests.read_text()) if digests.exists() else {}
    files = []
    for program in catalog.PROGRAMS:
        if program.name in PROGRAMS and any(part in program.name for part in options.only or [""]):
            file = options.folder / (re.sub(r"\W+", "-", program.name) + ".trace")
            known[program.name] = recorded(program, file)
            print(f"{program.name}: {known[program.name]}", flush=True)
            files.append(file)
            digests.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    example = [
        "cargo",
        "run",
        "--release",
        "-q",
        "-p",
        "rampool-sim",
        "--example",
        "policy",
        "--",
        "--recorded",
    ]
    subprocess.run([*example, *files], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()

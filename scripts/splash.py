#!/usr/bin/env python3
"""Builds the programs of SPLASH-3 or SPLASH-4 from their untouched sources and runs each as processes that
share memory, under each protocol: `scripts/splash.py DIR [--only PROGRAM] [--protocol NAME] [--processes N]`.

DIR has their Makefile.config, or a folder of it does. Everything is built in a copy. A program is right if it
prints, and writes into files, what it does with as many threads: words alike, numbers to 1e-5, and lines as
often, as far as two runs by threads agree with each other (times do not). Otherwise the row has what it said
instead, or the variables that rampool named because processes do not share them. Ends with 1 if an answer is
wrong.

With `--against-one-thread ROUNDS` it compares times instead, as the programs take them: processes under the
default protocol, and one thread of the program without rampool, by turns.
"""

import argparse
import collections
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / "target/release"
LAUNCH = (RELEASE / "rampool", "launch", "-n")
PROTOCOLS = ("hlrc", "lrc", "sc", "aurc", "auto")
# Folders in SPLASH-3 and SPLASH-4, arguments, standard input. `{n}` is how many processes. Small: a run takes
# seconds.
PROGRAMS = {
    "fft": ("kernels/fft fft", "-p{n} -m14 -t", None),
    "lu": ("kernels/lu/contiguous_blocks lu-contiguous_blocks", "-p{n} -n256 -t", None),
    "lu-non-contiguous": (
        "kernels/lu/non_contiguous_blocks lu-non_contiguous_blocks",
        "-p{n} -n256 -t",
        None,
    ),
    "radix": ("kernels/radix radix", "-p{n} -n65536 -t", None),
    "cholesky": ("kernels/cholesky cholesky", "-p{n} -t", "inputs/tk14.O"),
    "ocean": ("apps/ocean/contiguous_partitions ocean-contiguous_partitions", "-p{n} -n66 -o", None),
    "ocean-non-contiguous": (
        "apps/ocean/non_contiguous_partitions ocean-non_contiguous_partitions",
        "-p{n} -n66 -o",
        None,
    ),
    "water-nsquared": ("apps/water-nsquared water-nsquared", "", "inputs/n512-p{n}"),
    "water-spatial": ("apps/water-spatial water-spatial", "", "inputs/n512-p{n}"),
    "barnes": ("apps/barnes barnes", "", "inputs/n16384-p{n}"),
    "fmm": ("apps/fmm fmm", "", "inputs/input.{n}.16384"),
    "raytrace": ("apps/raytrace raytrace", "-p{n} -m16 inputs/teapot.env", None),
    "radiosity": ("apps/radiosity radiosity", "-p {n} -batch -room -ae 50000 -en 0.5 -bf 0.5", None),
    "volrend": ("apps/volrend volrend", "{n} inputs/head-scaleddown4 4", None),
    "volrend-no-print-lock": ("volrend-no_print_lock", "{n} inputs/head-scaleddown4 4", None),
}
SMALLER = {"16384": "2048"}
# What is compared with one thread: other arguments, or another number in the standard input.
TIMED = {
    "fft": "-p{n} -m18",
    "lu": "-p{n} -n1024",
    "radix": "-p{n} -n1048576",
    "ocean": "-p{n} -n258",
    "water-nsquared": {},
    "barnes": {"16384": "4096"},
    "raytrace": "-p{n} -m16 inputs/teapot.env",
}
TIME = re.compile(r"(?:Total time without initialization|COMPUTETIME[^=\n]*?)\s*[:=]?\s+(\d+)")
# Lines about time; and rows of whole numbers and a share, 0 or nothing by threads and microseconds here.
TIMES = r"time|clock|second|transpose f|^Step|COMPUTE(START|END)|^\s*\d+(\s+\d+)*(\s+-?(nan|[\d.]+))?\s*$"


def output_of(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


class Suite:
    """A copy of the sources, with what each program is when built in one way."""

    def __init__(self, source, work, make):
        self.make, self.built, self.told = make, {}, []
        shutil.copytree(source, work, ignore=shutil.ignore_patterns(".git"))
        # Programs of SPLASH-4 lie one folder deeper than what they all need.
        self.base = work / "Splash-4" if (work / "Splash-4").exists() else work

    def program(self, name):
        """The binary; or why there is none."""
        if name not in self.built:
            self.built[name] = self.build(name)
        return self.built[name]

    def build(self, name):
        folders = (self.base / folder for folder in PROGRAMS[name][0].split())
        folder = next(filter(Path.exists, folders), None)
        if not folder:
            return "not in this suite"
        make = ["make", "-C", folder, *self.make]
        done = subprocess.run(make, capture_output=True, text=True, check=False)
        binary = folder / re.search(r"^TARGET\s*=\s*(\S+)", (folder / "Makefile").read_text(), re.M)[1]
        errors = [line for line in done.stderr.splitlines() if "rror" in line]
        is_there = done.returncode == 0 and binary.exists()
        return binary if is_there else f"not built: {errors[:1]}"

    def run(self, name, processes, seconds, launcher=(), change=None):
        """What it prints and writes, or why it did not end well. `change` as in TIMED."""
        binary = self.program(name)
        if isinstance(binary, str):
            return binary
        folder = binary.parent
        _, arguments, stdin = PROGRAMS[name]
        if isinstance(change, str):
            arguments = change
        text = None
        if stdin:
            path = folder / stdin.format(n=processes)
            if not path.exists():
                return f"no {stdin.format(n=processes)}"
            text = path.read_text()
            for large, small in (SMALLER if change is None else change).items():
                text = text.replace(large, small)
        before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        words = [*launcher, binary, *arguments.format(n=processes).split()]
        try:
            how = {"cwd": folder, "input": text, "capture_output": True, "text": True, "errors": "replace"}
            done = subprocess.run(words, timeout=seconds, check=False, **how)
        except subprocess.TimeoutExpired:
            return f"not done in {seconds} s"
        self.told = [line for line in done.stderr.splitlines() if line.startswith("rampool")]
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
            return f"ended with {done.returncode}: {(self.told or said)[0]}"
        is_new = lambda path: path.is_file() and before.get(path) != path.stat().st_mtime_ns
        written = filter(is_new, sorted(folder.iterdir()))
        return [*done.stdout.splitlines(), *(f"{path.name} {path.read_bytes().hex()}" for path in written)]


def differs(found, first, second, processes):
    """What is not as both runs by threads have it: a line."""
    # Lines come in any order. What a variable lets threads say once, each process may say once.
    found, first, second = map(counted, (found, first, second))
    if not first:
        return "nothing is left that could be compared"
    if len(found) != len(first):
        return f"{len(found)} lines instead of {len(first)}"
    for (line, times), (one, usual), (other, also) in zip(found.items(), first.items(), second.items()):
        if alike(one, other) and not alike(line, one):
            return f"{line.strip()[:60]!r} instead of {one.strip()[:60]!r}"
        if usual == also and times not in (usual, usual * processes):
            return f"{line.strip()[:60]!r} comes {times} times instead of {usual}"
    return None


def counted(lines):
    """The lines that are compared, ascending, each with how often it comes."""
    is_compared = lambda line: line.strip() and not re.search(TIMES, line, re.IGNORECASE)
    return collections.Counter(sorted(filter(is_compared, lines)))


def alike(line, other):
    words, others = line.split(), other.split()
    return len(words) == len(others) and all(map(same_word, words, others))


def same_word(word, other):
    try:
        return word == other or math.isclose(float(word), float(other), rel_tol=1e-5, abs_tol=1e-9)
    except ValueError:
        return False


def verdict(by_threads, shared, processes, run):
    """What a run of `shared` is, in words."""
    failed = [outcome for outcome in by_threads if isinstance(outcome, str)]
    if failed:
        return f"by threads: {failed[0]}"
    found = run()
    if isinstance(found, str):
        return found
    difference = differs(found, *by_threads, processes)
    if difference and shared.told:
        return f"not alike, and told so: {shared.told[0]}"
    return f"WRONG: {difference}" if difference else "right"


def compare_with_protocols(threads, shared, options):
    """Prints a row for each run; returns how many are wrong."""
    wrong = 0
    for name in options.only or PROGRAMS:
        for processes in options.processes or (1, 2, 4):
            by_threads = [threads.run(name, processes, options.seconds) for _ in range(2)]
            for protocol in options.protocol or PROTOCOLS:
                launch = (*LAUNCH, str(processes), "--protocol", protocol, "--")
                run = lambda: shared.run(name, processes, options.seconds, launch)
                said = verdict(by_threads, shared, processes, run)
                wrong += said.startswith("WRONG")
                print(f"{name:22} {processes:2} {protocol:5} {said}", flush=True)
    return wrong


def compare_with_one_thread(threads, shared, options):
    """Prints a row for each program: medians of the rounds, and quartiles. Returns how many have none."""
    failed = 0
    print(f"{'program':16} processes  ms: one thread, processes, ratio, load", flush=True)
    for processes in options.processes or (2,):
        for name in options.only or TIMED:
            launch = (*LAUNCH, str(processes), "--")
            sides = ((threads, 1, ()), (shared, processes, launch))
            times = by_turns(name, sides, options)
            failed += isinstance(times, str)
            if not isinstance(times, str):
                ratio = times[1][1] / times[0][1]
                sides = (f"{middle:.1f} ({low:.1f}-{high:.1f})" for low, middle, high in times)
                times = f"{', '.join(sides)}, {ratio:.2f}, {os.getloadavg()[0]:.2f}"
            print(f"{name:16} {processes:9}  {times}", flush=True)
    return failed


def by_turns(name, sides, options):
    """The quartiles in ms of each side's runs; or why there are none."""
    times = [[] for _ in sides]
    for _ in range(options.against_one_thread):
        for (suite, processes, launch), into in zip(sides, times):
            outcome = suite.run(name, processes, options.seconds, launch, TIMED[name])
            if isinstance(outcome, str):
                return outcome
            into.append(int(TIME.search("\n".join(outcome))[1]) / 1000)
    return [statistics.quantiles(side * 2, n=4, method="inclusive") for side in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--only", action="append", choices=PROGRAMS)
    parser.add_argument("--protocol", action="append", choices=PROTOCOLS)
    parser.add_argument("--processes", action="append", type=int)
    parser.add_argument("--seconds", type=int, default=60, help="for one run")
    parser.add_argument("--against-one-thread", type=int, metavar="ROUNDS", help="compare times instead")
    options = parser.parse_args()
    found = [options.source, *options.source.glob("*")]
    source = next((path for path in found if (path / "Makefile.config").exists()), None)
    if not source:
        parser.error(f"{options.source} has no Makefile.config: name the folder that SPLASH lies in")
    with tempfile.TemporaryDirectory(prefix="rampool-splash-") as work:
        work = Path(work)
        install = [ROOT / "crates/capi/pkg/install.sh", RELEASE, work / "installed"]
        subprocess.run(install, check=True, capture_output=True)
        os.environ["PKG_CONFIG_PATH"] = str(work / "installed/lib/pkgconfig")
        os.environ["LD_LIBRARY_PATH"] = str(work / "installed/lib")
        cflags = output_of("pkg-config", "--cflags", "rampool")
        libs = output_of("pkg-config", "--libs", "rampool")
        macros = output_of("pkg-config", "--variable=parmacs", "rampool")
        ours = [f"MACROS={macros}", f"CC=gcc {cflags}", f"LDFLAGS=-lm {libs}"]
        threads = Suite(source.resolve(), work / "threads", [])
        shared = Suite(source.resolve(), work / "shared", ours)
        compare = compare_with_one_thread if options.against_one_thread else compare_with_protocols
        return 1 if compare(threads, shared, options) else 0


if __name__ == "__main__":
    sys.exit(main())

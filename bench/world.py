#!/usr/bin/env python3
"""The world's programs at half and at a quarter of their own peak, natively, under `rampool run`, and with
kernel swap on zram in as much memory, by turns: answers, time, processor time, memory held.

`python3 bench/world.py [--json FILE] [--only NAME] [--rounds N] [--list]`. What a program needs is
installed where this user may; what cannot be had is left out, and said. Without --json it ends with 1 where
an answer differs, a program fails or takes longer than its bound. RAMPOOL_BIN names the binary.
"""

import argparse
import contextlib
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
from harness.world import MIB, Failure, World  # noqa: E402
from harness.zram import KernelSwap  # noqa: E402
from report import Report, ratios  # noqa: E402

SHARES = (0.5, 0.25)
NATIVE_S = 120
# What starting takes, whatever the bound.
START_S = 10
# For the kernel's own memory of the processes, which the limit of a cgroup includes.
KERNEL = 2 * MIB
# Where all pages of a small cgroup are in use, the kernel at times ends a process though there is swap.
SWAP_TRIES = 3


def installed(program):
    """Installs what is missing. Returns why it cannot be had, or None."""
    debian, python = catalog.missing(program)
    commands = []
    if debian and os.geteuid() == 0 and catalog.found("apt-get"):
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
        commands += [[*apt, "update"], [*apt, "install", "-y", "--no-install-recommends", *debian]]
    if python:
        commands += [] if catalog.PYTHON.exists() else [[sys.executable, "-m", "venv", ROOT / ".venv"]]
        commands += [
            [catalog.PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *python]
        ]
    for command in commands:
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=600,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )
        except (OSError, subprocess.TimeoutExpired):
            pass
    debian, python = catalog.missing(program)
    return f"cannot be installed here: {' '.join(debian + python)}" if debian or python else None


class Run:
    """One program natively and at each share, round after round. `swap`: a KernelSwap, or None."""

    def __init__(self, program, argv, swap):
        self.program, self.argv, self.swap = program, argv, swap
        self.wrong = None
        self.natives, self.paged = [], {share: [] for share in SHARES}
        self.swapped, self.not_swapped = {share: [] for share in SHARES}, {}

    def once(self, timeout, local=None, prepare=lambda: None, watch=True):
        # A program of another user must reach its directory.
        with World("world") as world:
            world.dir.chmod(0o777)
            how = {"before": self.program.before, "watch": watch, "prepare": prepare}
            env = {"PYTHONHASHSEED": "0", **self.program.env}
            return Seen(world.run(self.argv, timeout=timeout, local=local, env=env, **how))

    def natively(self, watch=True):
        seen = self.once(NATIVE_S, watch=watch)
        if seen.code != 0:
            raise Failure(f"natively it ends with {seen.code}: {seen.err[-300:]}")
        return seen

    def rounds(self, count):
        """Stops at the first thing that is wrong, and keeps what was seen before."""
        first = self.natively(watch="shares")
        self.peak, self.answer, self.moments = first.peak, first.answer, first.moments
        for _ in range(count):
            native = self.natively()
            if native.answer != self.answer:
                raise Failure(f"natively it answers {self.answer}, and {native.answer} the next time")
            self.natives.append(native)
            for share, bound in zip(SHARES, self.program.bound):
                limit = bound * native.wall + START_S
                if self.wrong is None or not self.paged[share]:
                    self.at(share, limit)
                if self.swap and share not in self.not_swapped:
                    self.swapped_at(share, limit)

    def at(self, share, limit):
        what = f"at {share:.0%}"
        try:
            seen = self.once(limit, local=self.local(share))
        except Failure as failure:
            self.wrong = f"{what} no end in {limit:.0f} s" if "HANG" in str(failure) else f"{what} {failure}"
            print(str(failure)[:3000], file=sys.stderr)
            return
        if seen.code != 0:
            said = seen.err.strip().splitlines() or [""]
            self.wrong = f"{what} it ends with {seen.code}: {said[-1]}"
        elif seen.answer != self.answer:
            self.wrong = f"{what} it answers {seen.answer} instead of {self.answer}"
        elif seen.faults == 0 and not self.program.stays:
            self.wrong = f"{what} no page left: that shows nothing"
        if self.wrong:
            print(seen.err[-3000:], file=sys.stderr)
        else:
            self.paged[share].append(seen)

    def swapped_at(self, share, limit):
        """The same with kernel swap: how it ends there is the kernel's affair, and only said."""
        local = self.local(share)
        # As `--local` does, this lets each process have so much.
        together = max(sum(min(held, local) for held in moment) for moment in self.moments)
        try:
            for _ in range(SWAP_TRIES):
                with self.swap.limit(max(together, local) + KERNEL) as group:
                    seen, killed = self.once(limit, prepare=group.join), group.killed()
                if not killed:
                    break
        except Failure:
            self.not_swapped[share] = "no end"
            return
        if killed:
            self.not_swapped[share] = "out of memory"
        elif seen.code != 0 or seen.answer != self.answer:
            self.not_swapped[share] = f"ends with {seen.code}"
        else:
            self.swapped[share].append(seen)

    def local(self, share):
        return max(int(self.peak * share), 4 * MIB)

    def record(self, report):
        program, name = self.program, self.program.name
        common = {
            "experiment": "world",
            "program": name,
            "peak_mib": self.peak / MIB,
            "bound": program.bound,
            "wrong": self.wrong,
            "stays": program.stays,
            "not_swapped": {f"{share:.0%}": why for share, why in self.not_swapped.items()},
        }
        report.series(
            f"{name}: native",
            "s",
            [seen.wall for seen in self.natives],
            what="native",
            cpu_s=[seen.cpu for seen in self.natives],
            **common,
        )
        for share, reach in zip(SHARES, program.reach):
            paged, swapped = self.paged[share], self.swapped[share]
            what = f"{share:.0%}"
            if swapped:
                report.series(
                    f"{name}: at {what}, kernel swap",
                    "s",
                    [seen.wall for seen in swapped],
                    what=f"{what} swap",
                    cpu_s=[seen.cpu for seen in swapped],
                    **common,
                )
            if not paged:
                continue
            report.series(
                f"{name}: at {what}",
                "s",
                [seen.wall for seen in paged],
                what=what,
                cpu_s=[seen.cpu for seen in paged],
                local_mib=self.local(share) / MIB,
                lasting_mib=max(seen.lasting for seen in paged) / MIB,
                most_mib=max(seen.peak for seen in paged) / MIB,
                faults=[seen.faults for seen in paged],
                **common,
            )
            if reach:
                natives = [seen.wall for seen in self.natives[: len(paged)]]
                report.ratio(
                    f"{name}, {what} local: rampool / native",
                    ratios([seen.wall for seen in paged], natives),
                    f"<= {reach}",
                )


class Seen:
    """What is kept of an outcome, whose directory is gone."""

    def __init__(self, outcome):
        self.code, self.err, self.wall, self.cpu = outcome.code, outcome.said(), outcome.wall, outcome.cpu
        self.peak, self.lasting, self.faults = (
            outcome.peak_anonymous,
            outcome.lasting_anonymous,
            outcome.faults(),
        )
        self.answer, self.moments = catalog.digest_of(outcome.text()), outcome.moments


def measured(program, report, directory, rounds, swap):
    """Measures one program. Returns what is wrong with it, or None."""
    if why := installed(program):
        report.all["left_out"][program.name] = why
        return None
    try:
        argv = program.argv(catalog.Place(directory))
        run = Run(program, argv, swap)
        run.rounds(rounds)
    except (Failure, OSError, subprocess.SubprocessError) as error:
        report.all["left_out"][program.name] = re.sub(r"\s+", " ", f"not measured: {error}")[:300]
        return str(error)
    run.record(report)
    for share, why in run.not_swapped.items():
        print(f"  {program.name}: at {share:.0%}, kernel swap: {why}", flush=True)
    return run.wrong


def swap_or_not(held, report):
    """Kernel swap until `held` ends, or None where this machine has none for us."""
    try:
        return held.enter_context(KernelSwap())
    except (OSError, subprocess.SubprocessError) as error:
        report.note(f"not compared with kernel swap: {error}")
        return None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only", action="append", default=[], help="programs whose name contains this; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--quick", action="store_true", help="three programs: shows that it works; the figures mean nothing"
    )
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    programs = catalog.named(options.only or (["sqlite", "node", "xz"] if options.quick else []))
    if options.list:
        return print("\n".join(program.name for program in programs))
    report = Report("world", options.quick)
    report.all["left_out"] = {}
    report.note(
        "private store; local memory: 50 % and 25 % of the most anonymous memory that one process of the "
        "program held natively in the same run; not pinned; held for 50 ms; swap: kernel swap on zram, all "
        "processes in a memory cgroup with what they together may hold under rampool, and "
        f"{KERNEL // MIB} MiB; one of them may hold there what others leave; `out of memory`: the kernel "
        f"ended it {SWAP_TRIES} times"
    )
    wrong = {}
    with contextlib.ExitStack() as held:
        swap = swap_or_not(held, report)
        for program in programs:
            with tempfile.TemporaryDirectory(prefix="rampool-world-") as directory:
                os.chmod(directory, 0o777)
                if said := measured(program, report, Path(directory), options.rounds, swap):
                    wrong[program.name] = said
                    print(f"  {program.name}: {said}", flush=True)
    for name, why in report.all["left_out"].items():
        print(f"  {name}: {why}", flush=True)
    report.finish(options.json)
    left_out = len(report.all["left_out"])
    right = len(programs) - len(wrong) - left_out
    print(f"{len(programs)} programs: {right} as natively, {len(wrong)} not, {left_out} left out", flush=True)
    if wrong and not options.json:
        sys.exit(1)


if __name__ == "__main__":
    procs.adopt_orphans()
    procs.end_with_parent()
    main()

"""A list of tests, run one after the other. What failed, and how, comes once more at the very end: a long log
is often cut to its last lines."""

import argparse
import os
import random
import sys
import time
import traceback

from . import procs
from .world import Failure, World


MOST_REPEATED = 15
"""Lines of all failures together that the end of the output repeats."""


class Suite:
    def __init__(self, name, always=()):
        self.always = always
        self.name, self.tests = name, []

    def test(self, *, reduced=True, waits=False):
        """Registers a function of (world, scale). With reduced=False it only runs at full size.

        A test with waits=True mostly waits, and may run beside other work: `--lane waiting`.
        """

        def register(function):
            lane = "waiting" if waits else "computing"
            self.tests.append((function.__name__.replace("_", "-"), function, reduced, lane))
            return function

        return register

    def main(self):
        parser = argparse.ArgumentParser(description=self.name)
        parser.add_argument("--reduced", action="store_true", help="small sizes, for `make test`")
        lanes = "only those that wait more than they compute, or only the others"
        parser.add_argument("--lane", choices=["waiting", "computing"], help=lanes)
        parser.add_argument(
            "--only", action="append", default=[], help="tests whose name contains this; repeatable"
        )
        parser.add_argument(
            "--seed", type=int, default=None, help="seed of everything random (printed by every run)"
        )
        parser.add_argument("--repeat", type=int, default=1)
        shuffles = "begin no test after this time, in an order that the seed gives, so that each has its turn"
        parser.add_argument("--seconds", type=float, help=shuffles)
        parser.add_argument("--keep", action="store_true", help="keep the tests' directories")
        parser.add_argument("--list", action="store_true")
        args = parser.parse_args()
        if args.list:
            print("\n".join(name for name, *_ in self.tests))
            return 0
        seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(4), "little")
        print(f"{self.name}: seed {seed} (repeat with --seed {seed})", flush=True)
        procs.adopt_orphans()
        chosen = [
            (name, function) for name, function, reduced, lane in self.tests
            if (not args.only or any(part in name for part in args.only))
            and (reduced or not args.reduced) and args.lane in (None, lane)
        ]
        if args.seconds is not None:
            random.Random(seed).shuffle(chosen)
        ran, failed, started, left = 0, {}, time.monotonic(), 0
        for round_ in range(args.repeat):
            for name, function in chosen:
                if args.seconds is not None and time.monotonic() - started > args.seconds:
                    left += 1
                    continue
                ran += 1
                began = time.monotonic()
                scale = Scale(args.reduced, seed + round_)
                try:
                    with World(name, args.keep, self.always) as world:
                        function(world, scale)
                    verdict = "ok"
                except Failure as failure:
                    verdict = f"FAILED\n{failure}"
                except Exception:  # noqa: BLE001 - a broken test is a failed test
                    verdict = f"FAILED\n{traceback.format_exc()}"
                if verdict != "ok":
                    failed[name] = verdict
                print(f"{name:<34} {time.monotonic() - began:7.1f} s  {verdict}", flush=True)
                for line in scale.notes:
                    print(f"    {line}", flush=True)
        if left:
            print(f"{self.name}: {left} tests were not begun in {args.seconds:.0f} s", flush=True)
        took = f"in {time.monotonic() - started:.0f} s, seed {seed}"
        if ran == 0:
            sys.exit(f"{self.name}: no test of that name; --list tells the names")
        if not failed:
            print(f"{self.name}: {ran} passed, 0 failed, {took}", flush=True)
            sys.exit(0)
        # The first lines of a failure say what was expected; the last ones what was seen at the end.
        room = max(MOST_REPEATED // len(failed), 4)
        for name, verdict in failed.items():
            lines = [line.rstrip()[:200] for line in verdict.splitlines()[1:] if line.strip()]
            if len(lines) > room:
                lines = [*lines[: room // 2], "...", *lines[len(lines) - (room - room // 2 - 1) :]]
            print("\n".join([f"FAILED {name}", *(f"    {line}" for line in lines)]), flush=True)
        print(f"{self.name}: FAILED: {', '.join(failed)} {took}", flush=True)
        sys.exit(1)


class Scale:
    """How large, and from which seed; collects what the test wants to tell."""

    def __init__(self, reduced, seed):
        self.reduced, self.seed, self.notes = reduced, seed, []

    def pick(self, full, reduced):
        return reduced if self.reduced else full

    def note(self, text):
        self.notes.append(text)

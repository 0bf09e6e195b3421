"""A list of tests, run one after the other, with a table at the end."""

import argparse
import os
import sys
import time
import traceback

from . import procs
from .world import Failure, World


class Suite:
    def __init__(self, name):
        self.name, self.tests = name, []

    def test(self, *, reduced=True):
        """Registers a function of (world, scale). With reduced=False it only runs at full size."""

        def register(function):
            self.tests.append((function.__name__.replace("_", "-"), function, reduced))
            return function

        return register

    def main(self):
        parser = argparse.ArgumentParser(description=self.name)
        parser.add_argument("--reduced", action="store_true", help="small sizes, for `make test`")
        parser.add_argument("--only", action="append", default=[], help="tests whose name contains this; repeatable")
        parser.add_argument("--seed", type=int, default=None, help="seed of everything random (printed by every run)")
        parser.add_argument("--repeat", type=int, default=1)
        parser.add_argument("--keep", action="store_true", help="keep the tests' directories")
        parser.add_argument("--list", action="store_true")
        args = parser.parse_args()
        if args.list:
            print("\n".join(name for name, _, _ in self.tests))
            return 0
        seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(4), "little")
        print(f"{self.name}: seed {seed} (repeat with --seed {seed})", flush=True)
        procs.adopt_orphans()
        failed, started = [], time.monotonic()
        for round_ in range(args.repeat):
            for name, function, reduced in self.tests:
                if args.only and not any(part in name for part in args.only):
                    continue
                if args.reduced and not reduced:
                    continue
                began = time.monotonic()
                scale = Scale(args.reduced, seed + round_)
                try:
                    with World(name, args.keep) as world:
                        function(world, scale)
                    verdict = "ok"
                except Failure as failure:
                    verdict = f"FAILED\n{failure}"
                except Exception:  # noqa: BLE001 - a broken test is a failed test
                    verdict = f"FAILED\n{traceback.format_exc()}"
                if verdict != "ok":
                    failed.append(name)
                print(f"{name:<34} {time.monotonic() - began:7.1f} s  {verdict}", flush=True)
                for line in scale.notes:
                    print(f"    {line}", flush=True)
        print(f"{self.name}: {'all passed' if not failed else 'FAILED: ' + ', '.join(failed)} in {time.monotonic() - started:.0f} s", flush=True)
        sys.exit(1 if failed else 0)


class Scale:
    """How large, and from which seed; collects what the test wants to tell."""

    def __init__(self, reduced, seed):
        self.reduced, self.seed, self.notes = reduced, seed, []

    def pick(self, full, reduced):
        return reduced if self.reduced else full

    def note(self, text):
        self.notes.append(text)

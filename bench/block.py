#!/usr/bin/env python3
"""A block device from the pool against `nbdkit memory`: fio over Unix sockets, both in the same run, taking
turns; medians and their ratio.

`python3 bench/block.py [--json FILE] [--rounds N] [--quick]`, on an otherwise idle machine with fio and
nbdkit. RAMPOOL_BIN names the binary.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness import procs  # noqa: E402
from harness.world import rampool_binary  # noqa: E402
from report import Report, ratios  # noqa: E402

CASES = [
    ("randread", "4k", 32), ("randwrite", "4k", 32), ("read", "256k", 1), ("write", "256k", 1),
    ("read", "256k", 8), ("write", "256k", 8),
]
SIZE = "512M"


def fio(uri, kind, block, depth, seconds):
    """Operations a second; without seconds: writes everything once."""
    limits = ["--time_based", f"--runtime={seconds}"] if seconds else []
    command = [
        "fio", "--name=x", "--ioengine=nbd", f"--uri={uri}", f"--rw={kind}", f"--bs={block}",
        f"--iodepth={depth}", f"--size={SIZE}", "--output-format=json", *limits,
    ]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    job = json.loads(out[out.index("{") :])["jobs"][0]
    return job["read" if "read" in kind else "write"]["iops"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--quick", action="store_true", help="one short round: shows that it works; the figures mean nothing"
    )
    options = parser.parse_args()
    rounds, seconds = options.rounds or (1 if options.quick else 5), 1 if options.quick else 3
    report = Report("block", options.quick)
    report.note(
        f"both over Unix sockets, {SIZE}, {seconds} s for each figure and round, not pinned; nbdkit memory: "
        "a server that does only this"
    )
    with tempfile.TemporaryDirectory() as at:
        commands = [
            [
                rampool_binary(), "serve", "--memory", "600M", "--listen", f"unix:{at}/rampool", "--nbd",
                f"unix:{at}/a", "--export", f"disk={SIZE}",
            ],
            ["nbdkit", "--foreground", "--unix", f"{at}/b", "memory", SIZE],
        ]
        servers = [
            subprocess.Popen(
                c, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=procs.end_with_parent
            )
            for c in commands
        ]
        try:
            uris = [f"nbd+unix:///disk?socket={at}/a", f"nbd+unix:///?socket={at}/b"]
            while not (Path(at, "a").exists() and Path(at, "b").exists()):
                time.sleep(0.02)
            for uri in uris:
                fio(uri, "write", "1M", 4, None)
            for kind, block, depth in CASES:
                seen = [[], []]
                for turn in range(rounds):
                    for which in (0, 1) if turn % 2 == 0 else (1, 0):
                        seen[which].append(fio(uris[which], kind, block, depth, seconds))
                name = f"{kind} of {block}, depth {depth}"
                for server, each in zip(("rampool", "nbdkit"), seen):
                    report.series(f"{name}: {server}", "operations a second", each)
                report.ratio(f"{name}: rampool / nbdkit", ratios(*seen))
            report.finish(options.json)
        finally:
            procs.kill_all(server.pid for server in servers)


if __name__ == "__main__":
    main()

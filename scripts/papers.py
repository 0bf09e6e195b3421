#!/usr/bin/env python3
"""Measures what the papers measured, and makes docs/papers.md: their numbers next to ours.

    scripts/papers.py measure [--quick] [PART...]  measures (all parts), then makes the page and its plots
    scripts/papers.py write                        makes the page and its plots of what is measured
    scripts/papers.py list                         every part and about how many seconds it takes

A part is one run of `rampool bench`; its samples are kept in bench/data/papers.json with the machine, the
date, the sizes and the load. --quick takes small sizes, which show the shape of a result but no more, and
never replaces what was measured at full size. Some parts need root (links). RAMPOOL_BIN names the rampool to
measure, next to which lies rampool-bench. What the page says besides is in bench/papers.toml.
`scripts/plot.py --check` fails where the page is not what the data gives.

Python's standard library only, but for plots, which need matplotlib; without it a line says so.
"""

import datetime
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib

import papers_page
from check_links import anchor_of, heading, without_code

ROOT = pathlib.Path(__file__).resolve().parent.parent
SAID, DATA, PAGE = ROOT / "bench/papers.toml", ROOT / "bench/data/papers.json", ROOT / "docs/papers.md"
PICTURES = ROOT / "docs/pictures"

# Each part: the benchmark, its options at full and at small size, and about how many seconds full size takes.
LINK = "stream --link 1g --experiment"
FEW_PAGES = "--elements 3000000 --rounds 1 --page-size 4K,32K,128K,512K"
PARTS = {
    "pages": (f"{LINK} pages", f"{LINK} pages {FEW_PAGES}", 160),
    "clients": (f"{LINK} clients", f"{LINK} clients --elements 3000000", 60),
    "servers": (f"{LINK} servers", f"{LINK} servers --quick", 70),
    "allocation": ("allocation", "allocation --quick", 20),
    "sends": ("fifo --only sends", "fifo --only sends --quick", 30),
    "payload": ("register", "register --rounds 2", 40),
    "payload-link": ("register --link 1g", "register --link 1g --rounds 1", 60),
    "speedups": ("predict --papers", "predict --papers --rounds 1", 60),
    "time": ("shared --only time", "shared --only time --rounds 1", 40),
    "locks": ("shared --only s5 --rounds 3", "shared --only s5 --rounds 1 --quick", 240),
    "locks-ranks": ("shared --only s5-locks --rounds 2", "shared --only s5-locks --rounds 1 --quick", 180),
    "programs-ranks": ("shared --only s5-programs --rounds 1", "shared --only s5-programs --quick", 180),
}
LONGEST_S = 600
# What is kept of a part that measures more than the paper has: the values that a parameter may have.
KEPT = {"time": {"program": {"fft", "lu", "ocean", "water"}, "protocol": {"sc", "lrc", "hlrc", "aurc"}}}


def load():
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def measure(names, quick):
    """Measures parts, keeps each as soon as it is done, and returns those that failed."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    rampool = pathlib.Path(os.environ.get("RAMPOOL_BIN", target / "release/rampool")).resolve()
    bench = rampool.with_name("rampool-bench")
    if not bench.is_file():
        sys.exit(f"papers: there is no {bench}; build it with `cargo build --release --workspace`")
    failed = []
    for name in names:
        options = PARTS[name][quick]
        found, seconds = one_part(bench, options, {**os.environ, "RAMPOOL_BIN": str(rampool)})
        if found is None:
            failed.append(name)
            continue
        if quick and not load().get(name, {"quick": True})["quick"]:
            print(f"papers: {name} was measured at full size, which stays", flush=True)
            continue
        kept = {key: found[key] for key in ("machine", "load_before", "load_after", "notes")}
        kept |= {"quick": quick, "options": options, "seconds": seconds}
        kept["date"] = datetime.date.today().isoformat()
        wanted = KEPT.get(name, {}).items()
        series = [s for s in found["series"] if all(s["parameters"].get(key) in of for key, of in wanted)]
        kept["series"] = [rounded(one) for one in series]
        # As it is now: another part may have been kept meanwhile.
        save({**load(), name: kept})
    return failed


def one_part(bench, options, environment):
    """What a benchmark found, and the seconds it took; None if it failed."""
    print(f"papers: bench {options}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "found.json"
        command = [bench, "bench", *shlex.split(options), "--json", file]
        started = time.monotonic()
        try:
            done = subprocess.run(command, env=environment, timeout=LONGEST_S, check=False, cwd=ROOT)
        except subprocess.TimeoutExpired:
            print(f"papers: it did not end within {LONGEST_S} s", file=sys.stderr)
            return None, 0
        if done.returncode != 0 or not file.exists():
            print(f"papers: it ended with {done.returncode}", file=sys.stderr)
            return None, 0
        return json.loads(file.read_text()), round(time.monotonic() - started)


def rounded(series):
    """A series whose numbers have as many digits as mean something."""
    short = lambda value: float(f"{value:.5g}")
    numbers = {key: short(series[key]) for key in ("median", "low", "high")}
    return {**series, **numbers, "samples": [short(sample) for sample in series["samples"]]}


def save(data):
    """One series a line, so that a difference shows what changed."""
    parts = []
    for name in sorted(data):
        part = dict(data[name])
        series = ",\n   ".join(json.dumps(one, sort_keys=True) for one in part.pop("series"))
        rest = json.dumps(part, indent=2, sort_keys=True)[2:-2]
        parts.append(f' "{name}": {{\n{rest},\n  "series": [\n   {series}\n  ]\n }}')
    new = DATA.with_suffix(".new")
    new.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    new.replace(DATA)


def gone(said):
    """What the rows name and the project does not have, a line each."""
    wrong = []
    for paper in said["paper"]:
        for row in paper["row"]:
            if row["state"] not in papers_page.STATES:
                wrong.append(f"bench/papers.toml, {row['item']}: no state is called {row['state']!r}")
            if row["state"] == "full" and not row.get("see"):
                wrong.append(f"bench/papers.toml, {row['item']}: full, but it names no place")
            for see in row.get("see", []):
                file, _, name = see.partition("::")
                if not (ROOT / file).is_file():
                    wrong.append(f"bench/papers.toml, {row['item']}: there is no {file}")
                elif name and not has(ROOT / file, name):
                    wrong.append(f"bench/papers.toml, {row['item']}: {file} has no {name!r}")
        for experiment in paper.get("experiment", []):
            if experiment["part"] not in PARTS:
                wrong.append(
                    f"bench/papers.toml, {experiment['title']}: no part is called {experiment['part']}"
                )
    return wrong


def has(file, name):
    """Whether a document has such a heading, or a source such a word."""
    text = file.read_text()
    if file.suffix == ".md":
        return name in [heading(line) for line in without_code(text)]
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def link(see):
    """A row's place as a link from the page."""
    file, _, name = see.partition("::")
    path = os.path.relpath(ROOT / file, PAGE.parent)
    if file.endswith(".md"):
        return f"[{name or file}]({path}{'#' + anchor_of(name) if name else ''})"
    return f"[{name or file.removeprefix('crates/')}]({path})"


def differences():
    """Where the page is not what the data gives, a line each."""
    said, data = tomllib.loads(SAID.read_text()), load()
    wrong = gone(said)
    wrong += [f"bench/data/papers.json has no part {name}: measure it" for name in PARTS if name not in data]
    if not wrong and (not PAGE.exists() or PAGE.read_text() != papers_page.page(said, data, link)):
        wrong.append("docs/papers.md: not what bench/data/papers.json gives; run scripts/papers.py write")
    return wrong


def main():
    arguments = sys.argv[1:]
    if arguments == ["list"]:
        print("\n".join(f"{name} {seconds}" for name, (_, _, seconds) in PARTS.items()))
        return 0
    failed = []
    if arguments[:1] == ["measure"]:
        names = [one for one in arguments[1:] if one != "--quick"] or list(PARTS)
        if unknown := [name for name in names if name not in PARTS]:
            sys.exit(f"papers: there is no part {unknown[0]}; `scripts/papers.py list` names all")
        failed = measure(names, "--quick" in arguments)
    elif arguments != ["write"]:
        sys.exit(__doc__)
    said, data = tomllib.loads(SAID.read_text()), load()
    papers_page.plots(data, said, PICTURES)
    PAGE.write_text(papers_page.page(said, data, link))
    print(f"papers: docs/papers.md is made of {len(data)} parts")
    if failed:
        print(f"papers: these failed: {' '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

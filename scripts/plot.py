#!/usr/bin/env python3
"""Makes the plots, and the tables of bench/figures.md and README.md.

Each table stands between `<!-- figures: NAME -->` and `<!-- end -->`, the summary of figures with a reach
between `<!-- summary -->` and `<!-- end -->`, and the README's table between `<!-- selected -->` and
`<!-- end -->`. The rest of the pages is written by hand and left alone. Plots need matplotlib; without it
only the tables are made, and a line says so.

`scripts/plot.py --check` writes nothing, and fails where the pages, or docs/papers.md (scripts/papers.py),
differ from the measurements in bench/data, or figures are older than the defaults that they measure
(scripts/defaults.py).
"""

import json
import os
import pathlib
import re
import sys
import textwrap

import defaults
from check_links import anchor_of, heading, without_code

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA, PAGE = ROOT / "bench/data", ROOT / "bench/figures.md"
README = ROOT / "README.md"
# The plots that the guide shows lie with its pictures, all others with the figures.
IN_GUIDE = {"fault", "programs", "stream-pages"}

# The README's table: programs that fit and their time under rampool, programs of `programs` and
# `redundancy` at a quarter of their memory, and what a miss takes, with what the CPUs do besides; and its
# columns: file and name of each way.
FIT_ROWS = [("GNU sort", "GNU sort, 200 MB"), ("SQLite", "SQLite, 100 k rows")]
PROGRAM_ROWS = [
    ("NumPy scan of columns", "NumPy column scan, 1 GiB"),
    ("SQLite", "SQLite, 1 M rows"),
    ("GNU sort of 1 kB lines", "GNU sort, 1 GB, lines of 1 kB"),
    ("GNU sort of 100 B lines", "GNU sort, 1 GB, lines of 100 B"),
    ("`HashMap` in Rust", "HashMap in Rust, 160 MiB"),
]
PROGRAM_WAYS = [
    ("programs", "private store"), ("programs", "rampool"), ("redundancy", "two copies"),
    ("programs", "kernel swap on zram"),
]
MISS_WAYS = ["private store", "TCP", None, "kernel swap"]

# Saito, Midorikawa, Kai: the best bandwidth of STREAM over 1 Gbit/s Ethernet, in GB/s; a line in its plot.
PAPER_GB = 0.035
PAPER_LABEL = "DLM-M's best, 1 Gbit/s"

# How far a quartile is from the median, as a share of it, where it is shown.
WIDE = 0.25
# What the tables show of a sweep whose plot has all of it.
PAGE_SIZES_KIB = (4, 64, 2048)
SWEPT = ("share", "pages", "clients", "time", "predict", "payload", "world")

# Notes of bench/data that the page leaves out, or says in its own words.
LEFT_OUT = re.compile(
    r"\d+ faults counted|(scan|store|halo|ledger.*|service): \d|in-thread|floor: |of as much memory: |busy: |"
    r"plain TCP stream: |(GNU sort: )?least: |.*: (hits|misses) are faster|a queue is at|rampool: one|"
    r"every (byte|process)|.*: raw round trips of \[|a link is its rate|two ranks; recorded|where one thread|"
    r"content is random|every example checks|nothing is pinned;|one thread has the sender's|a timed pass|"
    r"the best of these|TCP, one connection|each program natively|private store; local|floor of a remote|"
    r"two servers over loopback TCP on this|stalls, reads and refills|local memory: 25|times are the median|"
    r"\d+ bytes travelled|.*: .*peak \d+ MiB, local|the paper's, at 4096|10000000 doubles|copies: the source"
)
# What stands in some of them and is said once for all.
PINNED = "; the program and its pager run on one CPU, the server process on CPU 1"

# Figures that follow from others on the page: what a ratio is to, mostly.
FOLLOWS = {
    "fault": r".*raw .*p99|(?!.* / ).*(raw|floor).*",
    "fifo": r"(64 B through|half a raw round trip of) .*|head (with|while) .*|messages .*, 8 .*: redis .*",
    "fit": r".*: under rampool",
    "programs": r".*: (rampool|kernel swap on zram|least)",
    "sequential": r".*: share that .*|(?!.* / )(.*least.*|(plain|unpaced) TCP stream)",
    "miss": r".*(private store|Unix socket|TCP): a miss.*",
    "redundancy": r"a reader.*, one of three servers is [a-z]+|a read, p50, one .*|.*plain stores to it"
    r"|.*a read, p99, while it .*|a read, (p99|mean), one of .*"
    r"|a miss, (one|two) (copy|copies|server)( and a disk)?, .*|a read, [^/]*(all prompt|none of .* lost)"
    r"|.*a read, p99, before"
    r"|(?!.* / ).*: (one copy|two copies|rampool( with a backup)?)",
    "python": r".*from Rust.*|.*: t\[:\]\[::512, 3\]|.*fetched and summed here|763 MiB.*"
    r"|rampool run: local .*|.*, to (disk|the pool)|PyTorch step, (save_on_cpu.*|offload.*|plain.*)",
    "server": r".*: load generator.*|(same host, )?reads a second: .* / (redis, over .*|the same .*)"
    r"|reads a second: least .*|server's CPU time an operation: .* / .*",
    "direct": r"(?!.* / )(same host: )?(raw |memcpy|(plain|unpaced) TCP|the same |one get "
    r"|gather of|strided ).*|8 faces of[^/]*|column .*|get and put.*|random gather.*"
    r"|same host: .*socket / shared memory",
    "tenants": r"p99 .*, now against before|(before: )?victim's .*, next to .*|scans .* 64 connections"
    r"|4 KiB reads, before|the slowest of a round",
    "examples": r"(rows read|plain gets|cells of|a put and) .*",
    "openmpi": r".*, OpenMPI",
    "world": r".* local: rampool / native",
    "shared": r"(raw|floor|plain messages|plain TCP|256 MiB|barrier after) .*|.*: by two ranks|diff of [^.]*",
}

# The plots of the page, each under the figures of the last file it needs.
PLOTS_UNDER = {
    "fault": [("fault", "A 4 KiB fault and a raw request and reply")],
    "stream-1g": [
        ("stream-pages", "STREAM triad against page size"),
        ("stream-clients", "One to seven clients on one server"),
    ],
    "programs": [("programs", "Programs at a quarter of their memory")],
    "register": [("register", "Copies, hits and misses against payload")],
    "shared-time": [("shared-time", "Where the time of parallel programs goes")],
}


def load():
    """Every measured file by its name, without those of smoke runs."""
    found = {}
    # What the papers measured has a page of its own (scripts/papers.py).
    for path in sorted(set(DATA.glob("*.json")) - {DATA / "papers.json"}):
        data = json.loads(path.read_text())
        if data["quick"]:
            print(f"{path.name} is of a --quick run: left out")
            continue
        found[path.stem] = data
    return found


def short(value):
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def short_for_reach(value, reach):
    """The value in as many digits as tell on which side of its reach (`<= 1.15`) it lies."""
    bound = float(reach.split()[1]) if reach else None
    side = lambda number: (number > bound) - (number < bound)
    if bound is None or side(float(short(value))) == side(value):
        return short(value)
    return next(
        (
            text
            for text in (f"{value:.{digits}g}" for digits in range(4, 9))
            if side(float(text)) == side(value)
        ),
        short(value),
    )


def spread(one, reach=None):
    """The quartiles, where they lie far from the median, or on either side of a reach."""
    middle = one["median"] if "median" in one else one["value"]
    bound = float(reach.split()[1]) if reach else None
    wide = max(middle - one["low"], one["high"] - middle) > abs(middle) * WIDE
    if not wide and not (bound is not None and one["low"] < bound < one["high"]):
        return ""
    return f" ({short(one['low'])}–{short(one['high'])})"


def ratio_cell(ratio):
    """What was measured, and its reach in brackets; bold where it misses that."""
    value, reach = short_for_reach(ratio["value"], ratio["reach"]), (ratio["reach"] or "").replace(" ", "")
    shown = f"**{value}**" if ratio["met"] is False else value
    return shown + spread(ratio, ratio["reach"]) + (f" [{reach}]" if reach else "")


def series_cell(one):
    value = short(one["median"])
    unit = f" {one['unit']}" if one["unit"] else ""
    return (f"{int(value):,}" if len(value) > 4 and value.isdigit() else value) + unit + spread(one)


# Names that say two things at once, by file, then by table: `column` becomes one, next to others of the row.
GRIDS = {
    "fault": [[r"(?P<column>.*): (?P<row>.*)"]],
    "sequential": [[r"(?P<column>.* pages): (?P<row>.*)"]],
    "direct": [
        [r"(?P<row>get of \d+ (B|KiB)) (?P<column>/ .*)"],
        [r"(?P<row>... of 1 MiB) (?P<column>/ .*)", r"(?P<row>... of 1 MiB), (?P<column>four under way)"],
        [
            r"(?P<row>same host: (get|put) of .*) (?P<column>/ .*)",
            r"(?P<row>same host: (get|put) of .*), (?P<column>shared memory|Unix socket)(, p50)?",
        ],
    ],
    "fit": [[r"(?P<row>.*): (?P<column>.*)"]],
    "programs": [[r"(?P<row>.*): (?P<column>.*)"]],
    "miss": [
        [
            r"(?P<row>.*), (?P<column>.*) / kernel swap(?P<more>, (wall|CPU))",
            r"(?P<row>.*), (?P<column>[^,]*): a miss(?P<more>, (wall|CPU))",
            r"(?P<row>\w+), (?P<column>.*)(?P<more>: busy / quiet, wall)",
        ]
    ],
    "redundancy": [
        [r"(?P<row>a reader's longest stall), one of three servers is (?P<column>\w+)(?P<more>, ms)"],
        [r"(?P<column>loopback|1 Gbit/s): (?P<row>.*)"],
        [r"(?P<row>a miss), (?P<column>wall|CPU): (?P<more> two copies / one copy)"],
        [r"(?P<row>.*(MiB|GiB|kB)): (?P<column>.*)"],
    ],
    "python": [[r"(?P<column>same host|loopback TCP|1 Gbit/s): (?P<row>.*?)(, p50)?"]],
    "server": [[r"(?P<row>[^:]*): (?P<column>reads|reads, p50|.* CPU time an operation)"]],
    "openmpi": [[r"(?P<column>TCP|same host): (?P<row>.*?)(: OpenMPI / rampool)?"]],
    "register": [
        [r"4096 KiB, (?P<row>.*), (?P<column>.*)"],
        [r"(?P<column>look-up|look-up and release) (?P<row>among \d+)"],
    ],
    "tenants": [[r"(?P<column>before: )?p99 next to (?P<row>.*), against alone"]],
    "fifo": [[r"messages a second, (?P<column>one by one|in groups): (?P<row>.*)"]],
    "shared": [
        [r"(?P<row>ArgoDSM's .* / barrier after .* dirty pages) by (?P<column>.*)"],
        [
            r"(?P<row>barrier) of (?P<column>\d)(?P<more>(, shared memory)? / ArgoDSM's) .*",
            r"(?P<row>barrier) of (?P<column>\d)(?P<more>(, shared memory)? / .*)",
            r"(?P<row>barrier / raw over memory), next to (?P<column>\d)(?P<more>, shared memory)",
        ],
        [r"(?P<row>.*?)(?P<column>, shared memory)(?P<more> / .*)?(: p50)?", r"(?P<row>.*?)(: p50)?"],
    ],
    "predict": [[r"(?P<column>.*bit/s): (?P<row>.*)"]],
}
# What stands in the corner of the tables, where it is more than that they are figures.
CORNERS = {
    "miss": "/ kernel swap, and what that takes",
    "openmpi": "OpenMPI / rampool; rampool",
    "tenants": "p99 next to these / alone",
}
# What the column without a name says.
UNNAMED = {"shared": "over TCP", "tenants": "now"}


def placed(name, grids):
    """The table, the row and the column of a figure, or None for one with a row of its own."""
    for number, patterns in enumerate(grids):
        for pattern in patterns:
            if match := re.fullmatch(pattern, name):
                parts = match.groupdict(default="")
                column = parts.get("column", "").removeprefix(", ").removesuffix(": ")
                return number, parts["row"] + parts.get("more", ""), column
    return None


def lonely(place, places):
    """Whether a figure has its table, or a row whose column has no name, for itself."""
    table, row, column = place
    others = [other for other in places if other and other[0] == table]
    named = any(other[1] == row and other[2] for other in others)
    return all(other[2] == column for other in others) or not column and not named


def with_unit(row, cells):
    """A row and its cells; a unit, or a reach, that all of them have stands behind the row's name."""
    parts = [re.fullmatch(r"([\d.,]+) (\S+)", cell) for cell in cells if cell]
    units = {part and part.group(2) for part in parts}
    if len(parts) < 2 or len(units) > 1 or None in units:
        return row, cells
    unit = units.pop()
    return row + ("" if unit[0] == "[" else ",") + f" {unit}", [cell.partition(" ")[0] for cell in cells]


def grid(rows, columns, cells, head, unnamed=""):
    """A table of those cells, by (row, column)."""
    line = lambda first, rest: f"| {first} | " + " | ".join(rest) + " |"
    made = [line(head, (column or unnamed for column in columns)), "|---|" + "---|" * len(columns)]
    found = [with_unit(row, [cells.get((row, column), "") for column in columns]) for row in rows]
    return made + [line(row, several) for row, several in found]


def stem(name):
    """What a figure is of: `get of 8 B` of `get of 8 B / raw round trip`, and of `get of 8 B, p50`."""
    return re.sub(r" / [^,:(]*(\([^)]*\))?|(, |: )p50$", "", name)


def joined(ratios, series):
    """(name, cell) of each figure. What was measured stands behind the first ratio of it."""
    cells, first = [], {}
    for one in ratios:
        if " / " in one["name"]:
            for of in (stem(one["name"]), one["name"].split(" / ")[0]):
                first.setdefault(of, len(cells))
        cells.append((one["name"], [ratio_cell(one)]))
    for one in series:
        at = first.get(stem(one["name"]))
        if at is None:
            cells.append((one["name"], [series_cell(one)]))
        else:
            cells[at][1].append(series_cell(one))
    return [(name, "; ".join(several)) for name, several in cells]


def figure_tables(items, grids, head, unnamed):
    """Tables of (name, cell): one of those that stand alone, and those whose figures share rows."""
    alone, tables = {}, {}
    places = [placed(name, grids) for name, _ in items]
    for (name, cell), place in zip(items, places):
        if place is None or lonely(place, places):
            alone.setdefault(name, []).append(cell)
        else:
            tables.setdefault(place[0], {}).setdefault(place[1:], []).append(cell)
    made = []
    if alone:
        rows = [f"| {name} | {', '.join(several)} |" for name, several in alone.items()]
        made.append(["| figure | |", "|---|---|", *rows])
    for found in tables.values():
        cells = {place: "; ".join(several) for place, several in found.items()}
        rows, columns = (dict.fromkeys(place[at] for place in cells) for at in (0, 1))
        made.append(grid(rows, columns, cells, head, unnamed))
    return made


def link_of(data):
    """The link that a file of STREAM was measured over."""
    return next(one["parameters"]["link"] for one in data["series"] if "link" in one["parameters"])


def of_experiment(data, experiment):
    return [one for one in data["series"] if one["parameters"].get("experiment") == experiment]


def half_local_table(files):
    """STREAM with half of its arrays local, and what the links are good for."""
    cells, kernels = {}, ["copy", "scale", "add", "triad"]
    for data in files:
        link, ratios = link_of(data), {ratio["name"]: ratio for ratio in data["ratios"]}
        plain = next(one for one in data["series"] if one["parameters"]["what"] == "raw")
        cells[link, "plain TCP stream"] = series_cell(plain)
        for name, ratio in ratios.items():
            kernel = name.split(":")[0]
            cells[link, kernel if kernel in kernels else "best triad / line rate"] = ratio_cell(ratio)
    columns = [*kernels, "best triad / line rate", "plain TCP stream"]
    return grid(dict.fromkeys(row for row, _ in cells), columns, cells, "half local / all local")


def pages_table(files):
    """STREAM's triad against the page size, all remote. The plot has every size."""
    cells = {}
    for data in files:
        for one in of_experiment(data, "pages"):
            by = one["parameters"]
            kib, remote = by["page_bytes"] >> 10, by["remote_share"] * 100
            if kib not in PAGE_SIZES_KIB:
                continue
            ahead = f"prefetch {by['prefetch_bytes'] >> 20} MiB" if by["prefetch_bytes"] else "no prefetch"
            share = f" ({remote:.0f} % remote)" if remote < 99 else ""
            cells[f"{by['link']}, {ahead}", f"{kib} KiB"] = short(one["median"]) + share
    rows, columns = (dict.fromkeys(place[at] for place in cells) for at in (0, 1))
    return grid(rows, columns, cells, "triad, GB/s") if cells else []


CATEGORIES = "computing,requests,read fault,write fault,lock,unlock,barrier,word,other".split(",")
PROTOCOLS = ["sc", "lrc", "hlrc", "aurc", "ibec", "auto"]


def time_runs(data):
    """Runs of `rampool bench shared --only time`: for (program, protocol) the series of each category."""
    runs = {}
    for one in data["series"]:
        by = one["parameters"]
        if by.get("experiment") == "time":
            runs.setdefault((by["program"], by["protocol"]), {})[by["category"]] = one
    return runs


def time_table(data):
    """What each program takes, and its messages. The plot has what it does meanwhile."""
    runs = time_runs(data)
    if not runs:
        return []
    cells = {}
    for (program, protocol), by in runs.items():
        total, sent = sum(one["median"] for one in by.values()), by["computing"]["parameters"]
        cells[program, protocol] = f"{short(total * 1e3)}, {sent['messages']}"
    return grid(dict.fromkeys(program for program, _ in runs), PROTOCOLS, cells, "ms, messages")


def world_table(data):
    """The world's programs at a half and a quarter of their peak, and those that were left out."""
    runs = {}
    for one in data["series"]:
        if one["parameters"].get("experiment") == "world":
            runs.setdefault(one["parameters"]["program"], {})[one["parameters"]["what"]] = one
    reaches = {ratio["name"]: ratio for ratio in data["ratios"]}
    cells, remarked = {}, {}
    for program, by in runs.items():
        native = by["native"]
        said = native["parameters"]
        cells[program, "native: s, MiB"] = f"{short(native['median'])}, {short(said['peak_mib'])}"
        remarks = [f"**{said['wrong']}**"] if said["wrong"] else []
        remarks += [said["stays"]] if said["stays"] else []
        not_swapped = said.get("not_swapped", {})
        short_of = {"out of memory": "OOM"}
        cells |= {(program, f"{what}, swap"): short_of.get(why, why) for what, why in not_swapped.items()}
        for what in ("50%", "25%"):
            if f"{what} swap" in by:
                cells[program, f"{what}, swap"] = world_cell(native, by[f"{what} swap"], None)
            if what in by:
                reach = reaches.get(f"{program}, {what} local: rampool / native")
                cells[program, what] = world_cell(native, by[what], reach)
                remarks += held_too_much(by[what]["parameters"], what)
        remarked |= {program: "; ".join(remarks)} if remarks else {}
    remarked |= data.get("left_out", {})
    named = ["native: s, MiB", "50%", "50%, swap", "25%", "25%, swap"]
    columns = [column for column in named if any(of == column for _, of in cells)]
    if not cells:
        return []
    made = grid(dict.fromkeys(row for row, _ in cells), columns, cells, "program: time, CPU")
    return made + ["", *(f"* {program}: {remark}" for program, remark in remarked.items())]


def held_too_much(said, what):
    """A remark on a program that held more than a tenth above its budget."""
    held, local = said["lasting_mib"], said["local_mib"]
    return [f"held {short(held)} of {short(local)} MiB at {what}"] if held > local * 1.1 else []


def world_cell(native, paged, reach):
    """How many times its native time and processor time a program took."""
    cpu = sum(native["parameters"]["cpu_s"])
    times = ratio_cell(reach) if reach else short(paged["median"] / native["median"])
    return times + f", {short(sum(paged['parameters']['cpu_s']) / cpu)}" if cpu > 0.1 else times


def register_runs(data):
    """Throughput by registrar, way and payload, in the order in which they were measured."""
    runs = {}
    for s in data["series"]:
        p = s["parameters"]
        if p.get("experiment") == "payload":
            runs.setdefault(p["registrar"], {}).setdefault(p["what"], {})[p["payload"]] = s["median"]
    return runs


def conditions(data):
    """The machine, its load, how many samples a median is of, and whether the defaults are recorded."""
    load = "–".join(dict.fromkeys(data[when].split()[0] for when in ("load_before", "load_after")))
    swept = set(SWEPT) - {"share"}
    plain = [one for one in data["series"] if one["parameters"].get("experiment") not in swept]
    counts = sorted({len(one["samples"]) for one in plain})
    samples = f"; medians of {' or '.join(map(str, counts))}" if counts and counts != [1] else ""
    old = "" if "defaults" in data else "; old defaults"
    return f"{processor(data)}, load {load}{samples}{old}."


def figures(files, said):
    """The figures of the files that share a place on the page, by name. `said`: notes that stand above."""
    name, data = next(iter(files.items()))
    grids, follows = GRIDS.get(name, []), re.compile(FOLLOWS.get(name, r"(?!)"))
    made, streams = [], list(files.values()) if name.startswith("stream") else []
    if not streams:
        plain = [s for s in data["series"] if s["parameters"].get("experiment") not in SWEPT]
        own = lambda kind: [one for one in kind if not follows.fullmatch(one["name"])]
        head, unnamed = CORNERS.get(name, "figure"), UNNAMED.get(name, "")
        made = figure_tables(joined(own(data["ratios"]), own(plain)), grids, head, unnamed)
        made += [make(data) for make in (time_table, world_table)]
    else:
        made = [make(streams) for make in (half_local_table, pages_table)]
    # The links of STREAM were measured one after another.
    made_so = [f"{link_of(one)}: {conditions(one)}" for one in streams] or [conditions(data)]
    lines = [*textwrap.wrap(" ".join(made_so), 110), ""]
    for table in made:
        lines += [*table, ""] if table else []
    for note in (note for one in files.values() for note in one["notes"]):
        if note not in said and not LEFT_OUT.match(note):
            said.add(note)
            keep = {"break_long_words": False, "break_on_hyphens": False}
            note = note.replace(PINNED, "")
            lines += textwrap.wrap(note, 110, initial_indent="* ", subsequent_indent="  ", **keep)
    return "\n".join(lines).strip()


TABLES = re.compile(r"<!-- figures: ([\w -]+?) -->.*?<!-- end -->", re.S)
SUMMARY = re.compile(r"<!-- summary -->.*?<!-- end -->", re.S)
SELECTION = re.compile(r"<!-- selected -->.*?<!-- end -->", re.S)


def headings_above_tables(page):
    """For each table's name the nearest heading above it, in the order of the page."""
    above, nearest = {}, ""
    for line in without_code(page):
        nearest = heading(line) or nearest
        if marker := re.match(r"<!-- figures: ([\w -]+?) -->", line):
            above[marker.group(1)] = nearest
    return above


def processor(data):
    """`AMD EPYC` of `2 CPUs, AMD EPYC (virtual), Linux 6.18.44`."""
    name = data["machine"].split(", ")[1] if ", " in data["machine"] else data["machine"]
    return re.sub(r"\(.*?\)|\bProcessor\b", "", name).strip()


def summary(page, found):
    """How many of the figures that have a reach are within it, section by section."""
    sections, all_met, all_missed = [], 0, 0
    for name, title in headings_above_tables(page).items():
        ratios = [one for part in name.split() for one in found.get(part, {"ratios": []})["ratios"]]
        met = [ratio["met"] for ratio in ratios if ratio["reach"]]
        missed = met.count(False)
        all_met, all_missed = all_met + len(met) - missed, all_missed + missed
        if missed:
            sections.append(f"[{title}](#{anchor_of(title)}) {missed} of {len(met)}")
    said = f"**{all_met} of {all_met + all_missed} reached, {all_missed} missed**: {', '.join(sections)}."
    return textwrap.fill(said, 110, break_long_words=False, break_on_hyphens=False)


def picture(name):
    """Where a plot lies."""
    return (ROOT / "docs/pictures" if name in IN_GUIDE else ROOT / "bench/plots") / f"{name}.svg"


def times_native(found, file, program, way):
    """How many times its native time a program took, or why there is no such figure."""
    data = found.get(file, {"series": [], "notes": []})
    took = {
        one["parameters"].get("what"): one["median"]
        for one in data["series"]
        if one["parameters"].get("program") == program
    }
    if way in took and "native" in took:
        return short(took[way] / took["native"])
    prefix = {"kernel swap on zram": f"{program}: with kernel swap it was ended by"}.get(
        way, f"{program}, {way}: there was no end"
    )
    if any(note.startswith(prefix) for note in data["notes"]):
        return "ended by the kernel" if way == "kernel swap on zram" else "no end"
    return ""


def a_miss(found, cpus, way):
    """What a miss takes, in microseconds, with content that packs."""
    wanted = {"content": "packs", "what": "wall", "cpus": cpus, "way": way}
    series = found.get("miss", {"series": []})["series"]
    return next(
        (f"{short(one['median'])} us" for one in series if wanted.items() <= one["parameters"].items()), ""
    )


def readme_table(found):
    """What users may expect: what is on by default, next to what they would use instead."""
    rows = [
        "| | native | private store | server over TCP | two servers, two copies | swap on zram |",
        "|---|---|---|---|---|---|",
    ]
    for label, program in FIT_ROWS:
        rows.append(
            f"| fits its local memory: {label} | 1 | | {times_native(found, 'fit', program, 'rampool')} | | |"
        )
    for label, program in PROGRAM_ROWS:
        cells = [times_native(found, file, program, way) for file, way in PROGRAM_WAYS]
        if any(cells):
            rows.append(f"| a quarter local: {label} | 1 | " + " | ".join(cells) + " |")
    for cpus in ("quiet", "busy"):
        cells = [a_miss(found, cpus, way) for way in MISS_WAYS]
        if any(cells):
            rows.append(f"| a random page that is away, other CPUs {cpus} | | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def readme_filled(page, found):
    """The README with its table as the measurements have it."""
    return SELECTION.sub(lambda _: f"<!-- selected -->\n\n{readme_table(found)}\n\n<!-- end -->", page)


def filled(page, found):
    """The page with its tables and its summary as the measurements have them."""
    said = set()

    def fill(match):
        names = match.group(1)
        files = {name: found[name] for name in names.split() if name in found}
        if not files:
            return match.group(0)
        plots = [plot for name in files for plot in PLOTS_UNDER.get(name, []) if picture(plot[0]).exists()]
        pictures = "".join(
            f"![{title}]({os.path.relpath(picture(plot), PAGE.parent)})\n\n" for plot, title in plots
        )
        return f"<!-- figures: {names} -->\n\n{figures(files, said)}\n\n{pictures}<!-- end -->"

    page = TABLES.sub(fill, page)
    return SUMMARY.sub(lambda _: f"<!-- summary -->\n\n{summary(page, found)}\n\n<!-- end -->", page)


def differences(found):
    """Where the pages differ from the measurements, a line for each."""
    page = PAGE.read_text()
    on_page = [name for match in TABLES.finditer(page) for name in match.group(1).split()]
    lines = [
        f"{name}: measured, but bench/figures.md has no table of it" for name in found if name not in on_page
    ]
    lines += [
        f"{name}: bench/figures.md has a table of it, but it is not measured"
        for name in on_page
        if name not in found and name not in defaults.UNRECORDED
    ]
    if not SUMMARY.search(page):
        lines.append("bench/figures.md has no place for the summary: <!-- summary --> and <!-- end -->")
    made = filled(page, found)
    for blocks in (SUMMARY, TABLES):
        for stands, should in zip(blocks.finditer(page), blocks.finditer(made)):
            if stands.group() != should.group():
                lines.append(
                    f"bench/figures.md, {stands.group().splitlines()[0]}: not what bench/data gives; run "
                    "scripts/plot.py"
                )
    text = README.read_text()
    if not SELECTION.search(text):
        lines.append("README.md has no place for its figures: <!-- selected --> and <!-- end -->")
    if readme_filled(text, found) != text:
        lines.append("README.md: not what bench/data gives; run scripts/plot.py")
    lines += defaults.complaints(found)
    return lines


def plot(found):
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not here: tables only")
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rampool"
    from matplotlib import pyplot

    def save(figure, name):
        figure.tight_layout()
        figure.savefig(picture(name), metadata={"Date": None})
        pyplot.close(figure)

    links = {"stream-loopback": "loopback", "stream-10g": "10 Gbit/s", "stream-1g": "1 Gbit/s"}
    streams = {name: found[name] for name in links if name in found}
    if streams:
        figure, axes = pyplot.subplots(figsize=(8, 4.5))
        for color, (name, data) in zip("C0 C1 C2".split(), streams.items()):
            for ahead, style in ((0, "--"), (1, "-")):
                points = sorted(
                    (s["parameters"]["page_bytes"] / 1024, s["median"])
                    for s in data["series"]
                    if s["parameters"].get("experiment") == "pages"
                    and bool(s["parameters"]["prefetch_bytes"]) == bool(ahead)
                )
                if points:
                    axes.plot(
                        *zip(*points),
                        style,
                        color=color,
                        marker="o",
                        markersize=3,
                        label=f"{links[name]}, {'prefetch' if ahead else 'no prefetch'}",
                    )
        axes.axhline(PAPER_GB, color="gray", linestyle=":", label=PAPER_LABEL)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="page size, KiB",
            ylabel="triad, GB/s",
            title="STREAM triad against page size, every access remote",
        )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda kib, _: f"{kib:g}")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
        save(figure, "stream-pages")

        figure, axes = pyplot.subplots(figsize=(8, 4.5))
        for color, (name, data) in zip("C0 C1 C2".split(), streams.items()):
            for what, style in (("each", "--"), ("together", "-")):
                points = sorted(
                    (s["parameters"]["clients"], s["median"])
                    for s in data["series"]
                    if s["parameters"].get("experiment") == "clients" and s["parameters"]["what"] == what
                )
                if points:
                    axes.plot(
                        *zip(*points),
                        style,
                        color=color,
                        marker="o",
                        markersize=3,
                        label=f"{links[name]}, {what}",
                    )
        axes.set(
            yscale="log",
            xlabel="clients on one server",
            ylabel="triad, GB/s",
            title="One to seven clients on one server",
        )
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
        save(figure, "stream-clients")

    if "register" in found:
        figure, axes = pyplot.subplots(figsize=(6, 3.5))
        for registrar, ways in register_runs(found["register"]).items():
            for what, points in ways.items():
                usual = registrar == "none"
                kib = [payload / 1024 for payload in sorted(points)]
                axes.plot(
                    kib,
                    [points[payload] for payload in sorted(points)],
                    "--" if usual else "-",
                    color="gray" if usual else None,
                    marker="o",
                    markersize=3,
                    label=what,
                )
        axes.set(xlabel="payload, KiB", ylabel="GB/s", title="Sending from pinned memory")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda kib, _: f"{kib:g}")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
        save(figure, "register")

    if "programs" in found:
        programs, ways = [], ["native", "private store", "rampool", "kernel swap on zram"]
        for one in found["programs"]["series"]:
            if one["parameters"]["program"] not in programs:
                programs.append(one["parameters"]["program"])
        value = {
            (s["parameters"]["program"], s["parameters"]["what"]): s["median"]
            for s in found["programs"]["series"]
        }
        figure, axes = pyplot.subplots(figsize=(9, 4))
        for at, way in enumerate(ways):
            heights = [value.get((p, way), 0) / value[(p, "native")] for p in programs]
            bars = axes.bar(
                [n + (at - 1.5) * 0.21 for n in range(len(programs))],
                heights,
                0.2,
                label="rampool, server over TCP" if way == "rampool" else way,
            )
            axes.bar_label(bars, [f"{h:.1f}" if h else "none" for h in heights], fontsize=8)
        axes.set_xticks(range(len(programs)), programs, fontsize=8)
        axes.set(ylabel="times native", title="Programs at a quarter of their memory")
        axes.legend(fontsize=8)
        save(figure, "programs")

    if "shared-time" in found:
        runs = time_runs(found["shared-time"])
        programs = list(dict.fromkeys(program for program, _ in runs))
        figure, grid = pyplot.subplots(3, 3, figsize=(10, 9))
        for axes, program in zip(grid.flat, programs):
            protocols = [protocol for name, protocol in runs if name == program]
            bottom = [0.0] * len(protocols)
            for color, category in enumerate(CATEGORIES):
                # Recorded before `word` was apart from `other`, a run has none.
                parts = [runs[program, protocol].get(category) for protocol in protocols]
                heights = [part["median"] * 1e3 if part else 0 for part in parts]
                axes.bar(protocols, heights, 0.7, bottom, label=category, color=f"C{color}")
                bottom = [below + height for below, height in zip(bottom, heights)]
            axes.set(title=program, ylabel="ms")
        figure.legend(
            *grid.flat[0].get_legend_handles_labels(), loc="lower center", ncols=len(CATEGORIES), fontsize=8
        )
        figure.suptitle("Where the time of two ranks goes")
        figure.tight_layout(rect=(0, 0.03, 1, 1))
        figure.savefig(picture("shared-time"), metadata={"Date": None})
        pyplot.close(figure)

    if "fault" in found:
        figure, axes = pyplot.subplots(figsize=(6, 3.5))
        names = [s for s in found["fault"]["series"] if "p99" not in s["parameters"]["what"]]
        axes.barh(
            [s["name"] for s in names],
            [s["median"] for s in names],
            color=["C0" if s["parameters"]["what"] == "fault" else "C7" for s in names],
        )
        axes.set(xlabel="us, p50")
        figure.suptitle("A 4 KiB fault and a raw request and reply", fontsize=11)
        axes.invert_yaxis()
        save(figure, "fault")


def main():
    found = load()
    if not found:
        sys.exit("nothing is measured: run scripts/bench-all.sh")
    if sys.argv[1:] == ["--check"]:
        # It takes what it shows a number with from here.
        import papers

        wrong = differences(found) + papers.differences()
        print(
            "\n".join(wrong)
            if wrong
            else f"figures: bench/figures.md, docs/papers.md and README.md agree with {len(found)} files"
        )
        return 1 if wrong else 0
    plot(found)
    page = PAGE.read_text()
    PAGE.write_text(filled(page, found))
    README.write_text(readme_filled(README.read_text(), found))
    names = [name for match in TABLES.finditer(page) for name in match.group(1).split()]
    if missing := [name for name in names if name not in found]:
        print("not measured, left as they were: " + ", ".join(missing))
    print(f"bench/figures.md, README.md and the plots are made from {len(found)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())

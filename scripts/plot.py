#!/usr/bin/env python3
"""Makes the plots, and the tables of bench/figures.md, docs/guide/performance.md and README.md.

Each table stands between `<!-- figures: NAME -->` and `<!-- end -->`, the summary of figures with a reach
between `<!-- summary -->` and `<!-- end -->`, and the selections for the guide and the README between
`<!-- selected -->` and `<!-- end -->`. The rest of the pages is written by hand and left alone. Plots need
matplotlib; without it only the tables are made, and a line says so.

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
GUIDE, README = ROOT / "docs/guide/performance.md", ROOT / "README.md"
# The plots that the guide shows lie with its pictures, all others with the figures.
IN_GUIDE = {"fault", "programs", "stream-pages"}

# The figures that the guide shows: what each is called there, its file, its name and how to read it.
SELECTED = [
    ("A page that is away, pager and server spinning", "fault", "spinning: 4 KiB fault, p50"),
    ("A raw request and reply of 4 KiB there", "fault", "spinning: raw request and reply, p50"),
    ("A page that is away, both sleeping", "fault", "blocking: 4 KiB fault, p50"),
    ("A raw request and reply of 4 KiB there, both sleeping", "fault", "blocking: raw request and reply, p50"),
    ("Reading in order over loopback", "sequential", "4 KiB pages, copied: read from the server"),
    ("Reading in order over loopback / unpaced TCP stream", "sequential", "4 KiB pages, copied: read / unpaced stream"),
    ("STREAM over 1 Gbit/s, all remote: bytes on the wire / line rate", "stream-1g", "best triad, by what came over the wire / line rate of 1 Gbit/s"),
    ("STREAM over 10 Gbit/s, all remote: bytes on the wire / line rate", "stream-10g", "best triad, by what came over the wire / line rate of 10 Gbit/s"),
    ("A program that fits, GNU sort: under rampool / native", "fit", "GNU sort, 200 MB: time"),
    ("A program that fits, SQLite: under rampool / native", "fit", "SQLite, 100 k rows: time"),
    ("A quarter local, NumPy column scan: rampool / native", "programs", "NumPy column scan, 1 GiB: rampool / native"),
    ("A quarter local, NumPy column scan: rampool / kernel swap", "programs", "NumPy column scan, 1 GiB: rampool / swap"),
    ("A quarter local, SQLite: rampool / native", "programs", "SQLite, 1 M rows: rampool / native"),
    ("A quarter local, GNU sort of 1 kB lines: rampool / native", "programs", "GNU sort, 1 GB, lines of 1 kB: rampool / native"),
    ("A quarter local, GNU sort of 1 kB lines: rampool / kernel swap", "programs", "GNU sort, 1 GB, lines of 1 kB: rampool / swap"),
    ("One column of a table: paged scan / scan at the server", "direct", "paged scan / scan at the server"),
    ("Two ranks on two CPUs, SOR under hlrc: one thread / two ranks", "shared", "SOR 1024 1536 200, hlrc: sequentially / by two ranks (ArgoDSM: 1.19)"),
]

# The README's table: programs that fit and their time under rampool, programs of `programs` and `redundancy` at a quarter of their memory,
# and what a miss takes, with what the CPUs do besides; and its columns: file and name of each way.
FIT_ROWS = [("GNU sort", "GNU sort, 200 MB"), ("SQLite", "SQLite, 100 k rows")]
PROGRAM_ROWS = [
    ("NumPy scan of columns", "NumPy column scan, 1 GiB"),
    ("SQLite", "SQLite, 1 M rows"),
    ("GNU sort of 1 kB lines", "GNU sort, 1 GB, lines of 1 kB"),
    ("GNU sort of 100 B lines", "GNU sort, 1 GB, lines of 100 B"),
    ("`HashMap` in Rust", "HashMap in Rust, 160 MiB"),
]
PROGRAM_WAYS = [("programs", "private store"), ("programs", "rampool"), ("redundancy", "two copies"), ("programs", "kernel swap on zram")]
MISS_WAYS = ["private store", "TCP", None, "kernel swap"]

# Saito, Midorikawa, Kai: the best bandwidth of STREAM over 1 Gbit/s Ethernet, in GB/s.
PAPER_GB = 0.035
PAPER_LABEL = "DLM-M's best, 1 Gbit/s"
PAPER_LINE_RATE_GB = 0.125

# What the tables show of a sweep whose plot has all of it.
PAGE_SIZES_KIB, CLIENTS, PAYLOADS_KIB = (4, 64, 2048), (1, 2, 4, 7), (1, 64, 1024, 4096)
SWEPT = ("pages", "clients", "time", "predict", "payload", "world")

# Notes of bench/data that the page leaves out, or says in its own words.
LEFT_OUT = re.compile(
    r"\d+ faults counted|(scan|store|halo|ledger.*|service): \d|in-thread|floor: |of as much memory: |busy: |"
    r"plain TCP stream: |(GNU sort: )?least: |.*: (hits|misses) are faster|a queue is at|rampool: one|"
    r"every byte|.*: raw round trips of \[|a link is its rate|two ranks; recorded|content is random|"
    r"every example checks|nothing is pinned;|one thread has the sender's|a timed pass reads"
)

# Figures that follow from others on the page: what a ratio is to, mostly.
FOLLOWS = {
    "fault": r".*raw .*p99",
    "fifo": r"(64 B through|half a raw round trip of) .*",
    "sequential": r".*: share that .*",
    "stream": r".*, local arrays",
    "server": r".*: load generator.*",
    "direct": r"(?!.* / )(same host: )?(raw |memcpy|(plain|unpaced) TCP|the same |one get |gather of|strided ).*"
    r"|8 faces of[^/]*|column .*|get and put.*|random gather.*",
    "tenants": r"p99 .*, now against before",
    "examples": r"(rows read|plain gets|cells of|a put and) .*",
    "openmpi": r".*, OpenMPI",
    "world": r".* local: rampool / native",
    "shared": r"(raw|floor|plain messages|plain TCP) .*",
}

# The plots of the page, each under the figures of the last file it needs.
PLOTS_UNDER = {
    "fault": [("fault", "A 4 KiB fault and a raw request and reply")],
    "stream-1g": [("stream-pages", "STREAM triad against page size"), ("stream-clients", "One to seven clients on one server")],
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
    return next((text for text in (f"{value:.{digits}g}" for digits in range(4, 9)) if side(float(text)) == side(value)), short(value))


def spread(one, reach=None):
    """The quartiles, where they lie more than a tenth from the median, or on either side of a reach."""
    middle = one["median"] if "median" in one else one["value"]
    bound = float(reach.split()[1]) if reach else None
    wide = max(middle - one["low"], one["high"] - middle) > abs(middle) / 10
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
    "sequential": [[r"(?P<column>.*(copied|moved in)): (?P<row>.*)"]],
    "stream": [[r"(?P<column>copy|scale|add|triad)(: |, )(?P<row>.*)"]],
    "direct": [[r"same host: (?P<row>(get|put) of .*), (?P<column>shared memory|Unix socket)(, p50)?"]],
    "fit": [[r"(?P<row>.*): (?P<column>.*)"]],
    "programs": [[r"(?P<row>.*): (?P<column>.*)"]],
    "miss": [
        [
            r"(?P<row>.*), (?P<column>.*) / kernel swap(?P<more>, (wall|CPU))",
            r"(?P<row>.*), (?P<column>[^,]*): a miss(?P<more>, (wall|CPU))",
            r"(?P<row>\w+), (?P<column>.*)(?P<more>: busy / quiet, wall)",
        ]
    ],
    "server": [[r"(?P<row>[^:]*): (?P<column>reads|reads, p50|.* CPU time an operation)"]],
    "openmpi": [[r"(?P<column>TCP|same host): (?P<row>.*)"]],
    "register": [
        [r"4096 KiB, (?P<row>.*), (?P<column>.*)"],
        [r"(?P<column>look-up|look-up and release) (?P<row>among \d+)"],
    ],
    "tenants": [
        [
            r"(?P<column>before: )?(?P<row>p99 .*, against alone)",
        ],
        [r"(?P<column>before: )?victim's 4 KiB get, (?P<row>p99, .*)"],
    ],
    "fifo": [[r"messages a second, 8 senders, (?P<column>one by one|in groups): (?P<row>.*)"]],
    "shared": [
        [r"(?P<row>(ArgoDSM's .* / )?barrier after .* dirty pages) by (?P<column>.*)"],
        [r"(?P<row>SOR.*): (?P<column>sequentially|by two ranks)"],
        [r"(?P<row>.*?)(?P<column>, shared memory)(?P<more> / .*)?(: p50)?", r"(?P<row>.*?)(: p50)?"],
    ],
    "predict": [[r"(?P<column>.*bit/s): (?P<row>.*)"]],
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


def grid(rows, columns, cells, head, unnamed=""):
    """A table of those cells, by (row, column)."""
    line = lambda first, rest: f"| {first} | " + " | ".join(rest) + " |"
    made = [line(head, (column or unnamed for column in columns)), "|---|" + "---|" * len(columns)]
    return made + [line(row, (cells.get((row, column), "") for column in columns)) for row in rows]


def figure_tables(items, grids, cell, head, unnamed):
    """Tables of figures: one of those that stand alone, and those whose figures share rows."""
    alone, tables = {}, {}
    places = [placed(one["name"], grids) for one in items]
    for one, place in zip(items, places):
        if place is None or lonely(place, places):
            alone.setdefault(one["name"], []).append(cell(one))
        else:
            tables.setdefault(place[0], {})[place[1:]] = cell(one)
    made = []
    if alone:
        rows = [f"| {name} | {', '.join(several)} |" for name, several in alone.items()]
        made.append([f"| {head} | {'ratio' if head == 'figure' else 'median'} |", "|---|---|", *rows])
    for cells in tables.values():
        rows, columns = (dict.fromkeys(place[at] for place in cells) for at in (0, 1))
        made.append(grid(rows, columns, cells, head, unnamed))
    return made


def pages_table(data):
    sweep = [s for s in data["series"] if s["parameters"].get("experiment") == "pages"]
    ahead = sorted({s["parameters"]["prefetch_bytes"] for s in sweep})
    if not sweep:
        return []
    heads = ["no prefetch" if a == 0 else f"prefetch {a >> 20} MiB" for a in ahead]
    cells = {}
    for one in sweep:
        kib, remote = one["parameters"]["page_bytes"] >> 10, one["parameters"]["remote_share"] * 100
        if kib in PAGE_SIZES_KIB:
            share = f" ({remote:.0f} % remote)" if remote < 99 else ""
            column = heads[ahead.index(one["parameters"]["prefetch_bytes"])]
            cells[f"{kib} KiB", column] = short(one["median"]) + share
    return grid([f"{kib} KiB" for kib in PAGE_SIZES_KIB], heads, cells, "page size; triad, GB/s")


def paper_line(data):
    """What the paper reports for the same experiment, next to the best of ours over the same link."""
    sweep = [s for s in data["series"] if s["parameters"].get("experiment") == "pages"]
    if not sweep or sweep[0]["parameters"].get("link") != "1 Gbit/s":
        return []
    best = max(s["median"] * min(s["parameters"]["remote_share"], 1) for s in sweep)
    paper = f"{PAPER_GB} GB/s ({PAPER_GB / PAPER_LINE_RATE_GB * 100:.0f} % of its 1 Gbit/s)"
    share = best / PAPER_LINE_RATE_GB * 100
    ours = f"{short(best)} GB/s ({share:.0f} %, {best / PAPER_GB:.1f} times as much)"
    text = f"The paper's best is {paper}; the best here, by what came over the wire, is {ours}."
    return textwrap.wrap(text, 110)


def clients_table(data):
    runs = [s for s in data["series"] if s["parameters"].get("experiment") == "clients"]
    if not runs:
        return []
    by = {(s["parameters"]["what"], s["parameters"]["clients"]): s["median"] for s in runs}
    counts = sorted({count for _, count in by if count in CLIENTS})
    cells = {}
    for count in counts:
        cells["each, GB/s", str(count)] = short(by["each", count])
        cells["together, GB/s", str(count)] = short(by["together", count])
        share = by["each", count] / by["each", 1]
        cells["each / one alone (the paper's: 1 / clients)", str(count)] = short(share)
    return grid(dict.fromkeys(row for row, _ in cells), [str(count) for count in counts], cells, "clients")


CATEGORIES = ["computing", "requests", "read fault", "write fault", "lock", "unlock", "barrier", "other"]
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
    """What each program takes, how much of it is computing, and its messages. The plot has all categories."""
    runs = time_runs(data)
    if not runs:
        return []
    cells = {}
    for (program, protocol), by in runs.items():
        total, sent = sum(one["median"] for one in by.values()), by["computing"]["parameters"]
        computing = by["computing"]["median"] / total * 100
        cells[program, protocol] = f"{short(total * 1e3)}, {computing:.0f}%, {sent['messages']}"
    return grid(dict.fromkeys(program for program, _ in runs), PROTOCOLS, cells, "ms, computing, messages")


def predict_table(data):
    """Rows of `rampool bench predict`: what was measured on a link, and how far off predictions were."""
    found = {}
    for one in data["series"]:
        by = one["parameters"]
        if by.get("experiment") == "predict":
            key = (f"{by['link']}, {by['program']}", by["protocol"])
            found.setdefault(key, {})[by["what"]] = one["median"]
    if not found:
        return []
    error = lambda by, what: f"{(by[what] / by['measured'] - 1) * 100:+.0f}%"
    cell = lambda by: f"{short(by['measured'])}: {error(by, 'replayed')} ({error(by, 'additive')})"
    cells, head = {key: cell(by) for key, by in found.items()}, "measured ms: error of the replay (additive)"
    return grid(dict.fromkeys(row for row, _ in found), PROTOCOLS, cells, head)


def world_table(data):
    """The world's programs at a half and a quarter of their peak, and those that were left out."""
    runs = {}
    for one in data["series"]:
        if one["parameters"].get("experiment") == "world":
            runs.setdefault(one["parameters"]["program"], {})[one["parameters"]["what"]] = one
    reaches = {ratio["name"]: ratio for ratio in data["ratios"]}
    cells = {}
    for program, by in runs.items():
        native = by["native"]
        said = native["parameters"]
        cells[program, "native"] = f"{short(native['median'])} s, {short(said['peak_mib'])} MiB"
        for what in ("50%", "25%"):
            if what in by:
                reach = reaches.get(f"{program}, {what} local: rampool / native")
                cells[program, what], cells[program, f"held, {what}"] = world_cells(native, by[what], reach)
        cells[program, "bounds"] = ", ".join(map(str, said["bound"]))
        same = f"same; {said['stays']}" if said["stays"] else "same"
        cells[program, "answers"] = f"**{said['wrong']}**" if said["wrong"] else same
    cells |= {(program, "answers"): why for program, why in data.get("left_out", {}).items()}
    columns = ["native", "50%", "held, 50%", "25%", "held, 25%", "bounds", "answers"]
    return grid(dict.fromkeys(row for row, _ in cells), columns, cells, "program: time, CPU") if cells else []


def world_cells(native, paged, reach):
    """How many times its native time and processor time a program took, and what it held of its budget."""
    said, cpu = paged["parameters"], sum(native["parameters"]["cpu_s"])
    times = ratio_cell(reach) if reach else short(paged["median"] / native["median"])
    if cpu > 0.1:
        times += f", {short(sum(said['cpu_s']) / cpu)}"
    return times, f"{short(said['lasting_mib'])} of {short(said['local_mib'])}"


def register_runs(data):
    """Throughput by registrar, way and payload, in the order in which they were measured."""
    runs = {}
    for s in data["series"]:
        p = s["parameters"]
        if p.get("experiment") == "payload":
            runs.setdefault(p["registrar"], {}).setdefault(p["what"], {})[p["payload"]] = s["median"]
    return runs


def payload_table(data):
    """Throughput by payload. The plot has every payload."""
    cells = {}
    for registrar, ways in register_runs(data).items():
        for what, points in ways.items():
            row = what if registrar == "none" else f"{registrar}, {what}"
            for kib in PAYLOADS_KIB:
                if kib << 10 in points:
                    cells[row, f"{kib} KiB"] = short(points[kib << 10])
    columns = [f"{kib} KiB" for kib in PAYLOADS_KIB]
    return grid(dict.fromkeys(row for row, _ in cells), columns, cells, "GB/s") if cells else []


def conditions(data):
    """The machine, its load, how many samples a median is of, and whether the defaults are recorded."""
    load = " to ".join(data[when].split()[0] for when in ("load_before", "load_after"))
    plain = [one for one in data["series"] if one["parameters"].get("experiment") not in SWEPT]
    counts = sorted({len(one["samples"]) for one in plain})
    samples = f"; medians of {' or '.join(map(str, counts))}" if counts and counts != [1] else ""
    old = "" if "defaults" in data else "; old defaults"
    return f"{processor(data)}, load {load}{samples}{old}."


def figures(data, said, name):
    """The figures of one file. `said`: notes that stand above, which this one adds its own to."""
    kind = name.partition("-")[0]
    grids = GRIDS.get(name, GRIDS.get(kind, []))
    follows = re.compile(FOLLOWS.get(name, FOLLOWS.get(kind, r"(?!)")))
    lines = [conditions(data), ""]
    plain = [s for s in data["series"] if s["parameters"].get("experiment") not in SWEPT]
    unnamed = UNNAMED.get(name, "")
    plain = [one for one in plain if not follows.fullmatch(one["name"])]
    ratios = [one for one in data["ratios"] if not follows.fullmatch(one["name"])]
    tables = figure_tables(ratios, grids, ratio_cell, "figure", unnamed)
    tables += figure_tables(plain, grids, series_cell, "measured", unnamed)
    swept = (pages_table, paper_line, clients_table, time_table, predict_table, payload_table)
    swept += (world_table,)
    for table in (*tables, *(make(data) for make in swept)):
        lines += [*table, ""] if table else []
    for note in data["notes"]:
        if note not in said and not LEFT_OUT.match(note):
            said.add(note)
            keep = {"break_long_words": False, "break_on_hyphens": False}
            lines += textwrap.wrap(note, 110, initial_indent="* ", subsequent_indent="  ", **keep)
    return "\n".join(lines).strip()


TABLES = re.compile(r"<!-- figures: ([\w-]+) -->.*?<!-- end -->", re.S)
SUMMARY = re.compile(r"<!-- summary -->.*?<!-- end -->", re.S)
SELECTION = re.compile(r"<!-- selected -->.*?<!-- end -->", re.S)


def headings_above_tables(page):
    """For each table's name the nearest heading above it, in the order of the page."""
    above, nearest = {}, ""
    for line in without_code(page):
        nearest = heading(line) or nearest
        if marker := re.match(r"<!-- figures: ([\w-]+) -->", line):
            above[marker.group(1)] = nearest
    return above


def processor(data):
    """`AMD EPYC` of `2 CPUs, AMD EPYC (virtual), Linux 6.18.44`."""
    name = data["machine"].split(", ")[1] if ", " in data["machine"] else data["machine"]
    return re.sub(r"\(.*?\)|\bProcessor\b", "", name).strip()


def summary(page, found):
    """How many of the figures that have a reach are within it, section by section."""
    rows, all_met, all_missed = [], 0, 0
    for name, title in headings_above_tables(page).items():
        met = [ratio["met"] for ratio in found.get(name, {"ratios": []})["ratios"] if ratio["reach"]]
        if not met:
            continue
        missed = met.count(False)
        all_met, all_missed = all_met + len(met) - missed, all_missed + missed
        no = f"**{missed}**" if missed else ""
        section = f"[{title}](#{anchor_of(title)})"
        rows.append(f"| {section} | {len(met) - missed} | {no} |")
    said = f"**{all_met} of {all_met + all_missed} reached, {all_missed} missed.**"
    return "\n".join([said, "", "| section | reached | missed |", "|---|---|---|", *rows])


def picture(name):
    """Where a plot lies."""
    return (ROOT / "docs/pictures" if name in IN_GUIDE else ROOT / "bench/plots") / f"{name}.svg"


def selection(found):
    """The table of the guide."""
    rows = ["| figure | measured |", "|---|---|"]
    for label, file, name in SELECTED:
        measured = [*found.get(file, {"ratios": []})["ratios"], *found.get(file, {"series": []})["series"]]
        one = next((one for one in measured if one["name"] == name), None)
        if one is None:
            sys.exit(f"{file} has no figure {name!r}, which the guide shows")
        value = series_cell(one) if "median" in one else short(one["value"]) + spread(one)
        rows.append(f"| {label} | {value} |")
    return "\n".join(rows)


def times_native(found, file, program, way):
    """How many times its native time a program took, or why there is no such figure."""
    data = found.get(file, {"series": [], "notes": []})
    took = {one["parameters"].get("what"): one["median"] for one in data["series"] if one["parameters"].get("program") == program}
    if way in took and "native" in took:
        return short(took[way] / took["native"])
    prefix = {"kernel swap on zram": f"{program}: with kernel swap it was ended by"}.get(way, f"{program}, {way}: there was no end")
    if any(note.startswith(prefix) for note in data["notes"]):
        return "ended by the kernel" if way == "kernel swap on zram" else "no end"
    return ""


def a_miss(found, cpus, way):
    """What a miss takes, in microseconds, with content that packs."""
    wanted = {"content": "packs", "what": "wall", "cpus": cpus, "way": way}
    series = found.get("miss", {"series": []})["series"]
    return next((f"{short(one['median'])} us" for one in series if wanted.items() <= one["parameters"].items()), "")


def readme_table(found):
    """What users may expect: what is on by default, next to what they would use instead."""
    rows = ["| | native | private store | server over TCP | two servers, two copies | swap on zram |", "|---|---|---|---|---|---|"]
    for label, program in FIT_ROWS:
        rows.append(f"| fits its local memory: {label} | 1 | | {times_native(found, 'fit', program, 'rampool')} | | |")
    for label, program in PROGRAM_ROWS:
        cells = [times_native(found, file, program, way) for file, way in PROGRAM_WAYS]
        if any(cells):
            rows.append(f"| a quarter local: {label} | 1 | " + " | ".join(cells) + " |")
    for cpus in ("quiet", "busy"):
        cells = [a_miss(found, cpus, way) for way in MISS_WAYS]
        if any(cells):
            rows.append(f"| a random page that is away, other CPUs {cpus} | | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def selected_filled(page, table):
    """A page with its selection of figures as the measurements have them."""
    return SELECTION.sub(lambda _: f"<!-- selected -->\n\n{table}\n\n<!-- end -->", page)


# The pages with a selection, and what makes it.
SELECTIONS = {GUIDE: selection, README: readme_table}


def filled(page, found):
    """The page with its tables and its summary as the measurements have them."""
    said = set()

    def fill(match):
        name = match.group(1)
        if name not in found:
            return match.group(0)
        plots = [(os.path.relpath(picture(plot), PAGE.parent), title) for plot, title in PLOTS_UNDER.get(name, []) if picture(plot).exists()]
        pictures = "".join(f"![{title}]({path})\n\n" for path, title in plots)
        return f"<!-- figures: {name} -->\n\n{figures(found[name], said, name)}\n\n{pictures}<!-- end -->"

    page = TABLES.sub(fill, page)
    return SUMMARY.sub(lambda _: f"<!-- summary -->\n\n{summary(page, found)}\n\n<!-- end -->", page)


def differences(found):
    """Where the pages differ from the measurements, a line for each."""
    page = PAGE.read_text()
    on_page = [match.group(1) for match in TABLES.finditer(page)]
    lines = [f"{name}: measured, but bench/figures.md has no table of it" for name in found if name not in on_page]
    lines += [f"{name}: bench/figures.md has a table of it, but it is not measured" for name in on_page if name not in found and name not in defaults.UNRECORDED]
    if not SUMMARY.search(page):
        lines.append("bench/figures.md has no place for the summary: <!-- summary --> and <!-- end -->")
    made = filled(page, found)
    for blocks in (SUMMARY, TABLES):
        for stands, should in zip(blocks.finditer(page), blocks.finditer(made)):
            if stands.group() != should.group():
                lines.append(f"bench/figures.md, {stands.group().splitlines()[0]}: not what bench/data gives; run scripts/plot.py")
    for path, table in SELECTIONS.items():
        text, name = path.read_text(), path.relative_to(ROOT)
        if not SELECTION.search(text):
            lines.append(f"{name} has no place for its figures: <!-- selected --> and <!-- end -->")
        if selected_filled(text, table(found)) != text:
            lines.append(f"{name}: not what bench/data gives; run scripts/plot.py")
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
                    if s["parameters"].get("experiment") == "pages" and bool(s["parameters"]["prefetch_bytes"]) == bool(ahead)
                )
                if points:
                    axes.plot(*zip(*points), style, color=color, marker="o", markersize=3, label=f"{links[name]}, {'prefetch' if ahead else 'no prefetch'}")
        axes.axhline(PAPER_GB, color="gray", linestyle=":", label=PAPER_LABEL)
        axes.set(xscale="log", yscale="log", xlabel="page size, KiB", ylabel="triad, GB/s", title="STREAM triad against page size, every access remote")
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
                    axes.plot(*zip(*points), style, color=color, marker="o", markersize=3, label=f"{links[name]}, {what}")
        axes.set(yscale="log", xlabel="clients on one server", ylabel="triad, GB/s", title="One to seven clients on one server")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
        save(figure, "stream-clients")

    if "register" in found:
        figure, axes = pyplot.subplots(figsize=(6, 3.5))
        for registrar, ways in register_runs(found["register"]).items():
            for what, points in ways.items():
                usual = registrar == "none"
                kib = [payload / 1024 for payload in sorted(points)]
                axes.plot(kib, [points[payload] for payload in sorted(points)], "--" if usual else "-", color="gray" if usual else None, marker="o", markersize=3, label=what)
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
        value = {(s["parameters"]["program"], s["parameters"]["what"]): s["median"] for s in found["programs"]["series"]}
        figure, axes = pyplot.subplots(figsize=(9, 4))
        for at, way in enumerate(ways):
            heights = [value.get((p, way), 0) / value[(p, "native")] for p in programs]
            bars = axes.bar([n + (at - 1.5) * 0.21 for n in range(len(programs))], heights, 0.2, label="rampool, server over TCP" if way == "rampool" else way)
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
                heights = [runs[program, protocol][category]["median"] * 1e3 for protocol in protocols]
                axes.bar(protocols, heights, 0.7, bottom, label=category, color=f"C{color}")
                bottom = [below + height for below, height in zip(bottom, heights)]
            axes.set(title=program, ylabel="ms")
        figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="lower center", ncols=len(CATEGORIES), fontsize=8)
        figure.suptitle("Where the time of two ranks goes")
        figure.tight_layout(rect=(0, 0.03, 1, 1))
        figure.savefig(picture("shared-time"), metadata={"Date": None})
        pyplot.close(figure)

    if "fault" in found:
        figure, axes = pyplot.subplots(figsize=(6, 3.5))
        names = [s for s in found["fault"]["series"] if "p99" not in s["parameters"]["what"]]
        axes.barh([s["name"] for s in names], [s["median"] for s in names], color=["C0" if s["parameters"]["what"] == "fault" else "C7" for s in names])
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
        print("\n".join(wrong) if wrong else f"figures: bench/figures.md, docs/guide/performance.md, docs/papers.md and README.md agree with {len(found)} files")
        return 1 if wrong else 0
    plot(found)
    page = PAGE.read_text()
    PAGE.write_text(filled(page, found))
    for path, table in SELECTIONS.items():
        path.write_text(selected_filled(path.read_text(), table(found)))
    if missing := [match.group(1) for match in TABLES.finditer(page) if match.group(1) not in found]:
        print("not measured, left as they were: " + ", ".join(missing))
    print(f"bench/figures.md, docs/guide/performance.md, README.md and the plots are made from {len(found)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())

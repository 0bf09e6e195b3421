#!/usr/bin/env python3
"""Makes the plots and tables of bench/figures.md, docs/guide/performance.md and README.md from what scripts/bench-all.sh wrote into bench/data.

Each table stands between `<!-- figures: NAME -->` and `<!-- end -->`, the summary of every figure with a reach between
`<!-- summary -->` and `<!-- end -->`, and the selections for the guide and the README between `<!-- selected -->` and `<!-- end -->`.
The rest of the pages is written by hand and left alone. Plots need matplotlib; without it only the tables are made, and a line says so.

`scripts/plot.py --check` writes nothing, and fails where the pages differ from the measurements, or figures are older than the
defaults that they measure (scripts/defaults.py).
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
DATA, PAGE, GUIDE, README = ROOT / "bench/data", ROOT / "bench/figures.md", ROOT / "docs/guide/performance.md", ROOT / "README.md"
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
    for path in sorted(DATA.glob("*.json")):
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


def ratio_cells(ratio):
    verdict = {None: "", True: "ok", False: "**missed**"}[ratio["met"]]
    return f"{ratio['name']} | {ratio['reach'] or ''} | {short_for_reach(ratio['value'], ratio['reach'])} | {short(ratio['low'])} to {short(ratio['high'])} | {verdict}"


def ratio_table(data):
    return ["| figure | reach | measured | quartiles | |", "|---|---|---|---|---|", *(f"| {ratio_cells(ratio)} |" for ratio in data["ratios"])]


def series_table(series):
    rows = ["| measured | median | quartiles | samples |", "|---|---|---|---|"]
    for one in series:
        rows.append(f"| {one['name']} | {short(one['median'])} {one['unit']} | {short(one['low'])} to {short(one['high'])} | {len(one['samples'])} |")
    return rows


def pages_table(data):
    sweep = [s for s in data["series"] if s["parameters"].get("experiment") == "pages"]
    ahead = sorted({s["parameters"]["prefetch_bytes"] for s in sweep})
    if not sweep:
        return []
    rows = ["| page size | " + " | ".join("no prefetch" if a == 0 else f"prefetch {a >> 20} MiB" for a in ahead) + " |", "|---|" + "---|" * len(ahead)]
    for size in sorted({s["parameters"]["page_bytes"] for s in sweep}):
        cells = {s["parameters"]["prefetch_bytes"]: s for s in sweep if s["parameters"]["page_bytes"] == size}
        text = [f"{short(cells[a]['median'])} GB/s ({cells[a]['parameters']['remote_share'] * 100:.0f} % remote)" if a in cells else "" for a in ahead]
        rows.append(f"| {size >> 10} KiB | " + " | ".join(text) + " |")
    return rows


def paper_line(data):
    """What the paper reports for the same experiment, and the best of ours."""
    sweep = [s for s in data["series"] if s["parameters"].get("experiment") == "pages"]
    if not sweep:
        return []
    best = max(s["median"] * min(s["parameters"]["remote_share"], 1) for s in sweep)
    text = f"The paper's best is {PAPER_GB} GB/s ({PAPER_GB / PAPER_LINE_RATE_GB * 100:.0f} % of its 1 Gbit/s), without gain above 128 KB; the best here, by what came over the wire, is {short(best)} GB/s"
    if data["series"] and sweep[0]["parameters"].get("link") == "1 Gbit/s":
        text += f" ({best / PAPER_LINE_RATE_GB * 100:.0f} %, {best / PAPER_GB:.1f} times as much)"
    return textwrap.wrap(text + ".", 110)


def clients_table(data):
    runs = [s for s in data["series"] if s["parameters"].get("experiment") == "clients"]
    if not runs:
        return []
    rows = ["| clients | each, median | together | share of one client's, each | the paper's: in proportion |", "|---|---|---|---|---|"]
    alone = next((s["median"] for s in runs if s["parameters"]["clients"] == 1 and s["parameters"]["what"] == "each"), None)
    for count in sorted({s["parameters"]["clients"] for s in runs}):
        by = {s["parameters"]["what"]: s for s in runs if s["parameters"]["clients"] == count}
        rows.append(f"| {count} | {short(by['each']['median'])} GB/s | {short(by['together']['median'])} GB/s | {short(by['each']['median'] / alone) if alone else '-'} | {short(1 / count)} |")
    return rows


CATEGORIES = ["computing", "requests", "read fault", "write fault", "lock", "unlock", "barrier", "other"]


def time_runs(data):
    """Runs of `rampool bench shared --only time` in their order: (program, protocol) and the series of each category."""
    runs = {}
    for one in data["series"]:
        if one["parameters"].get("experiment") == "time":
            runs.setdefault((one["parameters"]["program"], one["parameters"]["protocol"]), {})[one["parameters"]["category"]] = one
    return runs


def time_table(data):
    runs = time_runs(data)
    if not runs:
        return []
    rows = ["| program | protocol | ms | " + " | ".join(CATEGORIES) + " | messages | KiB |", "|---|---|---|" + "---|" * (len(CATEGORIES) + 2)]
    for (program, protocol), by in runs.items():
        total = sum(one["median"] for one in by.values())
        shares = " | ".join(f"{by[category]['median'] / total * 100:.0f} %" for category in CATEGORIES)
        sent = by["computing"]["parameters"]
        rows.append(f"| {program} | {protocol} | {short(total * 1e3)} | {shares} | {sent['messages']} | {sent['bytes'] // 1024} |")
    return rows


def predict_table(data):
    """Rows of `rampool bench predict`: what was predicted for a link, and what was measured on it."""
    cells = {}
    for one in data["series"]:
        if one["parameters"].get("experiment") == "predict":
            key = (one["parameters"]["link"], one["parameters"]["program"], one["parameters"]["protocol"])
            cells.setdefault(key, {})[one["parameters"]["what"]] = one["median"]
    if not cells:
        return []
    rows = ["| link | program | protocol | measured ms | replayed ms | error | additive ms | error |", "|---|---|---|---|---|---|---|---|"]
    for (link, program, protocol), by in cells.items():
        error = lambda what: f"{(by[what] / by['measured'] - 1) * 100:+.0f} %"
        rows.append(f"| {link} | {program} | {protocol} | {short(by['measured'])} | {short(by['replayed'])} | {error('replayed')} | {short(by['additive'])} | {error('additive')} |")
    return rows


# Barli, Watanabe, Sakai, Tanaka: speed-up on 4 nodes, measured over 100BASE-TX and predicted for a low-overhead network of 1 Gbit/s; SC, LRC, HLRC, AURC.
S4_SPEED_UPS = {
    "eth100-1999": {"fft": [0.14, 0.13, 0.19, 0.21], "lu": [2.0, 2.0, 1.5, 2.2], "ocean": [0.07, 0.11, 0.15, 0.20], "water": [1.9, 2.3, 2.5, 3.1]},
    "loh-hb": {"fft": [0.18, 0.19, 0.30, 0.32], "lu": [2.2, 2.2, 2.1, 2.3], "ocean": [0.09, 0.15, 0.22, 0.28], "water": [2.1, 2.4, 2.8, 3.2]},
}


def papers_table(data):
    """Speed-ups predicted for S4's nodes, and S4's own."""
    cells = {}
    for one in data["series"]:
        if one["parameters"].get("experiment") == "papers":
            key = (one["parameters"]["network"], one["parameters"]["program"])
            cells.setdefault(key, {})[one["parameters"]["protocol"]] = one["median"]
    if not cells:
        return []
    protocols = ["sc", "lrc", "hlrc", "aurc"]
    rows = ["| network | program | " + " | ".join(f"{p} (S4's)" for p in protocols) + " |", "|---|---|" + "---|" * len(protocols)]
    for network in S4_SPEED_UPS:
        for program, theirs in S4_SPEED_UPS[network].items():
            ours = cells.get((network, program), {})
            rows.append(f"| {network} | {program} | " + " | ".join(f"{short(ours.get(p))} ({t})" for p, t in zip(protocols, theirs)) + " |")
    return rows


def register_runs(data):
    """Throughput by registrar, way and payload, in the order in which they were measured."""
    runs = {}
    for s in data["series"]:
        p = s["parameters"]
        if p.get("experiment") == "payload":
            runs.setdefault(p["registrar"], {}).setdefault(p["what"], {})[p["payload"]] = s["median"]
    return runs


def payload_table(data):
    runs = register_runs(data)
    if not runs:
        return []
    ways = [(registrar, what) for registrar in runs for what in runs[registrar]]
    names = [what if registrar == "none" else f"{registrar}, {what}" for registrar, what in ways]
    lines = ["| payload | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for payload in sorted({payload for registrar, what in ways for payload in runs[registrar][what]}):
        lines.append(f"| {payload >> 10} KiB | " + " | ".join(f"{short(runs[registrar][what][payload])} GB/s" for registrar, what in ways) + " |")
    return lines


def figures(data):
    """The figures of one file."""
    swept = ("pages", "clients", "time", "predict", "papers", "payload")
    conditions = f"{data['machine']}; load average {data['load_before']} before, {data['load_after']} after."
    if "defaults" not in data:
        conditions += " Measured before files recorded the defaults: today's may differ."
    lines = [*textwrap.wrap(conditions, 110), ""]
    if data["ratios"]:
        lines += [*ratio_table(data), ""]
    plain = [s for s in data["series"] if s["parameters"].get("experiment") not in swept]
    lines += [*series_table(plain), ""] if plain else []
    for table in (pages_table(data), paper_line(data), clients_table(data), time_table(data), predict_table(data), papers_table(data), payload_table(data)):
        lines += [*table, ""] if table else []
    for note in data["notes"]:
        lines += textwrap.wrap(note, 110, initial_indent="* ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
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
    """Every figure that has a reach, section by section, and how many of them are reached."""
    sections, rows = [], []
    for name, title in headings_above_tables(page).items():
        wanted = [ratio for ratio in found.get(name, {"ratios": []})["ratios"] if ratio["reach"]]
        if not wanted:
            continue
        link, machine = f"[{title}](#{anchor_of(title)})", processor(found[name])
        missed = sum(not ratio["met"] for ratio in wanted)
        sections.append((link, len(wanted) - missed, missed, machine))
        rows += [f"| {link} | {ratio_cells(ratio)} | {machine} |" for ratio in wanted]
    reached, missed = sum(section[1] for section in sections), sum(section[2] for section in sections)
    lines = [f"**{reached} of {reached + missed} reached, {missed} missed.**", "", "| section | reached | missed | machine |", "|---|---|---|---|"]
    lines += [f"| {link} | {ok} | {f'**{no}**' if no else ''} | {machine} |" for link, ok, no, machine in sections]
    lines += ["", "Each of them:", "", "| section | figure | reach | measured | quartiles | | machine |", "|---|---|---|---|---|---|---|", *rows]
    return "\n".join(lines)


def picture(name):
    """Where a plot lies."""
    return (ROOT / "docs/pictures" if name in IN_GUIDE else ROOT / "bench/plots") / f"{name}.svg"


def selection(found):
    """The table of the guide."""
    rows = ["| figure | measured | quartiles |", "|---|---|---|"]
    for label, file, name in SELECTED:
        measured = [*found.get(file, {"ratios": []})["ratios"], *found.get(file, {"series": []})["series"]]
        one = next((one for one in measured if one["name"] == name), None)
        if one is None:
            sys.exit(f"{file} has no figure {name!r}, which the guide shows")
        value = f"{short(one['median'])} {one['unit']}" if "median" in one else short(one["value"])
        rows.append(f"| {label} | {value} | {short(one['low'])} to {short(one['high'])} |")
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

    def fill(match):
        name = match.group(1)
        if name not in found:
            return match.group(0)
        plots = [(os.path.relpath(picture(plot), PAGE.parent), title) for plot, title in PLOTS_UNDER.get(name, []) if picture(plot).exists()]
        pictures = "".join(f"![{title}]({path})\n\n" for path, title in plots)
        return f"<!-- figures: {name} -->\n\n{figures(found[name])}\n\n{pictures}<!-- end -->"

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
        wrong = differences(found)
        print("\n".join(wrong) if wrong else f"figures: bench/figures.md, docs/guide/performance.md and README.md agree with {len(found)} files")
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

"""The tables, plots and text of docs/papers.md, of bench/papers.toml and bench/data/papers.json.

`page` and the tables are pure: the same data gives the same page. Python's standard library only, but for
`plots`, which need matplotlib.
"""

import statistics
import textwrap

from plot import short, spread

STATES = ("full", "partial", "missing", "not applicable")
# The categories of a rank's time, each with what it is counted to here.
CATEGORIES = ("computing", "read fault", "write fault", "requests", "lock", "barrier", "other")
SHOWN = {one: one for one in CATEGORIES} | {"unlock": "lock", "word": "other"}

# --- Finding samples ----------------------------------------------------------------------------------------


def pick(part, **wanted):
    """The series of a part that have these parameters."""
    return [one for one in part["series"] if wanted.items() <= one["parameters"].items()]


def only(part, **wanted):
    """The one series with these parameters, or None."""
    return next(iter(pick(part, **wanted)), None)


def cell(series, times=1.0):
    """A median and, where it is wide, its spread; empty for what was not measured."""
    if series is None:
        return ""
    of = {key: series[key] * times for key in ("median", "low", "high")}
    return short(of["median"]) + spread(of)


def table(head, rows):
    if not rows:
        return []
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + [
        "| " + " | ".join(row) + " |" for row in rows
    ]


# --- A table for each part; `paper`: the paper's own numbers ------------------------------------------------


def pages(part, paper):
    """STREAM's triad against the page size."""
    ways = sorted({one["parameters"]["prefetch_bytes"] for one in pick(part, experiment="pages")})
    sizes = sorted({one["parameters"]["page_bytes"] for one in pick(part, experiment="pages")})
    of = {
        (size, way): only(part, experiment="pages", page_bytes=size, prefetch_bytes=way)
        for size in sizes
        for way in ways
    }
    wire = lambda one: one["median"] * min(one["parameters"]["remote_share"], 1) * 1e3
    best = {way: max(wire(of[size, way]) for size in sizes) for way in ways}
    flat = paper["flat_from_kib"] << 10
    gain = max(wire(of[size, 0]) for size in sizes if size > flat) / wire(of[flat, 0])
    yield table(
        ["", "paper", "here", "here, reading ahead"],
        [
            ["best, MB/s on the wire", str(paper["best_mb_s"]), *(short(best[way]) for way in ways)],
            [
                "of the link's rate, %",
                *(short(100 * value / paper["line_mb_s"]) for value in (paper["best_mb_s"], *best.values())),
            ],
            [
                f"best above {paper['flat_from_kib']} KiB / at {paper['flat_from_kib']} KiB",
                "about 1",
                short(gain),
                "",
            ],
        ],
    )
    yield table(
        ["triad, MB/s", *(f"{size >> 10} KiB" for size in sizes)],
        [
            ["reading ahead" if way else "as the paper", *(cell(of[size, way], 1e3) for size in sizes)]
            for way in ways
        ],
    )


def clients(part, paper):
    """STREAM by several clients at once."""
    counts = sorted({one["parameters"]["clients"] for one in pick(part, experiment="clients")})
    each = [only(part, experiment="clients", clients=n, what="each") for n in counts]
    yield table(
        ["clients", *map(str, counts)],
        [
            ["each, MB/s", *(cell(one, 1e3) for one in each)],
            ["each / one alone", *(short(one["median"] / each[0]["median"]) for one in each)],
            ["the paper's: 1 / clients", *(short(1 / n) for n in counts)],
        ],
    )


def servers(part, _paper):
    """One client and several servers, next to the sum of the links."""
    counts = sorted({one["parameters"]["servers"] for one in pick(part, experiment="servers")})
    of = lambda what: [only(part, servers=n, what=what) for n in counts]
    rows = []
    for what in ("triad", "read in order"):
        rows.append([f"{what}, MB/s", *(cell(one, 1e3) for one in of(what))])
        rows.append([f"{what} / sum of the links", *map(cell, of(f"{what} / sum of the links"))])
    rows.append(["random fault, us", *map(cell, of("random fault"))])
    yield table(["servers, each behind 1 Gbit/s", *map(str, counts)], rows)


def allocation(part, _paper):
    """Taking and giving back, by size."""
    sizes = sorted({one["parameters"]["bytes"] for one in pick(part, experiment="allocation")})
    sizes = [sizes[0], sizes[len(sizes) // 3], sizes[-1]]
    rows = []
    for touched in (False, True):
        for what in ("alloc", "mmap", "free", "munmap"):
            of = [only(part, bytes=size, touched=touched, what=what) for size in sizes]
            rows.append([f"{what}, {'touched' if touched else 'untouched'}", *map(cell, of)])
    yield table(["us", *(f"{size >> 10} KiB" for size in sizes)], rows)


def sends(part, paper):
    """DIMMnet-3's four ways to send, and the order that the paper finds among them."""
    sizes = sorted({one["parameters"]["bytes"] for one in pick(part, experiment="sends")})
    ways = list(dict.fromkeys(one["parameters"]["way"] for one in pick(part, experiment="sends")))
    overs = list(dict.fromkeys(one["parameters"]["over"] for one in pick(part, experiment="sends")))
    plain_way, least, loaded, combined = ways
    middle = sorted(sizes)[len(sizes) // 2]
    at = lambda over, way, what="whole": only(part, over=over, way=way, bytes=middle, what=what)["median"]
    claims = [
        ("without LHS / with it", paper["without_lhs"], plain_way, least, "whole"),
        ("LHC / without LHS", paper["lhc_without_lhs"], combined, plain_way, "whole"),
        ("LHC / BOTF with LHS: the envelope", paper["lhc_least"], combined, least, "envelope"),
        ("LHC / BOTF with LHS: all bytes", paper["lhc_least"], combined, least, "whole"),
        ("LHC / VL", paper["lhc_vl"], combined, loaded, "whole"),
    ]
    rows = []
    for name, theirs, one, other, what in claims:
        rows.append([name, theirs, *(short(at(over, one, what) / at(over, other, what)) for over in overs)])
    vl = [short(at(over, loaded) - at(over, least)) for over in overs]
    rows.append(["VL takes longer than BOTF with LHS, us", paper["vl_us"], *vl])
    yield table([f"{middle} bytes", "paper", *(f"here, {over}" for over in overs)], rows)
    shown = [(over, size) for over in overs for size in (sizes[0], middle, sizes[-1])]
    row = lambda way, what: [cell(only(part, over=over, way=way, bytes=n, what=what)) for over, n in shown]
    rows = [[way, *row(way, "whole")] for way in ways]
    rows.append([f"{combined}, the envelope", *row(combined, "envelope")])
    yield table(["us", *(f"{over}, {size} B" for over, size in shown)], rows)


def ahead(part, _paper):
    """Bodies that come ahead by rule, and what matching costs."""
    rows = []
    for one in pick(part, experiment="ahead", how="by call"):
        where = {key: one["parameters"][key] for key in ("over", "bytes")}
        rule = only(part, experiment="ahead", how="by rule", **where)
        rows.append([where["over"], f"{where['bytes']} B", cell(one), cell(rule)])
    yield table(["us waited for a body, over", "body", "asked for by call", "comes by rule"], rows)
    rows = []
    for one in pick(part, experiment="matching", how="in turn"):
        over = one["parameters"]["over"]
        rows.append([over, cell(one), cell(only(part, experiment="matching", how="by tag", over=over))])
    yield table(["us a message, over", "taken in turn", "by tag"], rows)


def payload(part, paper):
    """Throughput of copies, hits and misses, and from which payload on each is faster than copies."""
    sizes = sorted({one["parameters"]["payload"] for one in pick(part, experiment="payload")})
    of = lambda what, size: only(part, experiment="payload", registrar="io_uring", payload=size, what=what)
    ratio = lambda what, size: of(what, size)["median"] / of("copy", size)["median"]
    at = paper["at_kib"] << 10
    rows = []
    for what in ("hit", "miss"):
        from_here = crossover([(size, ratio(what, size)) for size in sizes])
        theirs, ours = paper[f"{what}_mbit_s"] / paper["copy_mbit_s"], short(ratio(what, at))
        rows.append([f"{what} / copy at {paper['at_kib']} KiB", f"{theirs:.3f}", ours])
        rows.append([f"a {what} is faster than a copy from", f"{paper['crossover_kib']} KiB", from_here])
    yield table(["", "paper", "here"], rows)
    shown = [size for size in sizes if size.bit_length() % 4 == 3 or size == at]
    yield table(
        ["GB/s", *(f"{size >> 10} KiB" for size in shown)],
        [[what, *(cell(of(what, size)) for size in shown)] for what in ("copy", "hit", "miss")],
    )


def crossover(ratios):
    """From which payload on a way is always faster than copies, of (payload, ratio) in order."""
    found = None
    for size, ratio in reversed(ratios):
        if ratio <= 1:
            break
        found = size
    return f"{found >> 10} KiB" if found else "no payload measured"


def speedups(part, paper):
    """S4's tables 5 and 6, and 7 and 8, which follow from them."""
    protocols = paper["protocols"]
    of = by_network(part, "papers")
    for number, network, title in (
        (5, "eth100-1999", "Ethernet"),
        (6, "loh-hb", "1 Gbit/s, little overhead"),
    ):
        rows = []
        for nodes, programs in by_nodes(paper, f"table{number}"):
            for program, theirs in programs.items():
                ours = [cell(of[nodes, network, program, protocol]) for protocol in protocols]
                rows.append([f"{program}, {nodes} nodes", *(f"{a:.2g}, {b}" for a, b in zip(theirs, ours))])
        yield table([f"table {number}, {title}: paper, here", *protocols], rows)
    over = lambda key: 1 / of[key]["median"] - 1 / key[0]
    saved = lambda better, worse: f"{100 * (1 - over(better) / over(worse)):.0f}"
    rows = []
    for nodes, programs in by_nodes(paper, "table7"):
        for program, theirs in programs.items():
            at = lambda network, protocol: (nodes, network, program, protocol)
            ours = [saved(at("loh-hb", one), at("eth100-1999", one)) for one in protocols]
            aurc = saved(at("eth100-1999", "aurc"), at("eth100-1999", "hlrc"))
            cells = [f"{a}, {b}" for a, b in zip(theirs, ours)]
            cells.append(f"{paper[f'nodes{nodes}']['table8'][program]}, {aurc}")
            others = [one for one in protocols if one != "aurc"]
            best = min(others, key=lambda one: over(at("eth100-1999", one)))
            aurc = saved(at("eth100-1999", "aurc"), at("eth100-1999", best))
            cells.append(f"{paper[f'nodes{nodes}']['best'][program]}, {best} {aurc}")
            rows.append([f"{program}, {nodes} nodes", *cells])
    head = ["table 8, by AURC of HLRC's", "of the best's"]
    yield table(["table 7, overhead saved, %: paper, here", *protocols, *head], rows)


def by_network(part, experiment):
    keys = ("nodes", "network", "program", "protocol")
    return {tuple(one["parameters"][key] for key in keys): one for one in pick(part, experiment=experiment)}


def networks(part, paper):
    """S4's figures 12 to 15: times, and what each network saves of another's communication."""
    of = by_network(part, "networks")
    keys = list(dict.fromkeys((nodes, program) for nodes, _, program, _ in of))
    names, protocols = paper["networks"], paper["protocols"]
    rows = []
    for nodes, program in keys:
        times = [[cell(of[nodes, name, program, one]) for name in names.values()] for one in protocols]
        rows.append([f"{program}, {nodes} nodes", *map(", ".join, times)])
    yield table([f"s, {', '.join(names)}", *protocols], rows)
    rows = []
    for better, worse, *theirs in paper["saved"]:
        saved = []
        for nodes, program in keys:
            for one in protocols:
                at = lambda name: of[nodes, name, program, one]["median"]
                costs = [at(names[name]) - at("free") for name in (better, worse)]
                saved.append(100 * (1 - costs[0] / costs[1]))
        within = sum(theirs[0] <= round(one) <= theirs[1] for one in saved)
        rows.append(
            [
                f"{better} of {worse}'s",
                f"{theirs[0]} to {theirs[1]}",
                f"{min(saved):.0f} to {max(saved):.0f}",
                f"{within} of {len(saved)}",
            ]
        )
    yield table(["communication saved, %", "paper", "here", "of these in the paper's range"], rows)


def transposes(part, paper):
    """S4's figure 11: the most read faults of a rank in a transpose, by nodes, pages and protocol."""
    found = pick(part, experiment="transposes")
    pages = list(dict.fromkeys(one["parameters"]["page"] for one in found))
    rows = []
    for nodes, theirs in zip((2, 4), paper["faults"]):
        for protocol in ("lrc", "hlrc"):
            most = lambda page: only(part, page=page, nodes=nodes, protocol=protocol)["high"]
            rows.append([f"{nodes} nodes, {protocol}", str(theirs), *(f"{most(page):.0f}" for page in pages)])
    yield table(["", "paper", *(f"{page}iB" for page in pages)], rows)


def by_nodes(paper, name):
    """The paper's rows of a table for two nodes, and for four."""
    return [(nodes, paper[f"nodes{nodes}"][name]) for nodes in (2, 4) if f"nodes{nodes}" in paper]


def where_time_goes(part, _paper):
    """Shares of a rank's time; without a category that has none."""
    runs, rows = {}, []
    for one in pick(part, experiment="time"):
        by = one["parameters"]
        shares = runs.setdefault((by["program"], by["protocol"]), dict.fromkeys(CATEGORIES, 0))
        shares[SHOWN[by["category"]]] += one["median"]
    percent = lambda shares, one: f"{100 * shares[one] / sum(shares.values()):.0f}"
    shown = [one for one in CATEGORIES if any(percent(by, one) != "0" for by in runs.values())]
    for (program, protocol), shares in runs.items():
        percents = [percent(shares, one) for one in shown]
        rows.append([f"{program}, {protocol}", short(1e3 * sum(shares.values())), *percents])
    yield table(["share, %", "ms", *shown], rows)


def locks(part, paper):
    """S5's ratios by two processes."""
    rows = []
    low, high = paper["old_new"]
    for old in pick(part, what="old"):
        where = {key: old["parameters"][key] for key in ("over", "way")}
        new = only(part, **where, what="new")
        name = f"old / new scheme, over {where['over']}, {where['way']}"
        rows.append([name, f"{low} to {high}", short(old["median"] / new["median"])])
        chosen = only(part, **where, what="chosen")
        better = min(old["median"], new["median"])
        name = f"chosen by the manager / the better scheme, over {where['over']}, {where['way']}"
        rows.append([name, "", short(chosen["median"] / better)])
    for faults in pick(part, what="faults"):
        way = faults["parameters"]["of"]
        waiting = only(part, of=way, what="waiting")
        theirs = paper["faults_percent"]["plain" not in way]
        share = 100 * faults["median"] / waiting["median"]
        name = f"write faults, % of waiting, {way.removeprefix('SOR ')}"
        rows.append([name, str(theirs), short(share)])
    yield table(["", "paper", "here"], rows)


# Those shown of one to eight.
RANKS = (1, 2, 4, 8)


def locks_ranks(part, paper):
    """S5's locks: a section's time and messages by scheme, and next to lazy release consistency."""
    place_of = lambda by: (by["way"], by["managers"])
    places = dict.fromkeys(place_of(one["parameters"]) for one in part["series"])
    of = lambda figure, what, scheme, place: [
        only(part, experiment=figure, what=what, scheme=scheme, way=place[0], managers=place[1], ranks=n)
        for n in RANKS
    ]
    over = lambda a, b: [short(x["median"] / y["median"]) if y["median"] else "" for x, y in zip(a, b)]
    rows, messages, others, first = [], [], [], []
    for place in places:
        name = ", ".join(place)
        for scheme in ("old", "new"):
            rows.append([f"{scheme}, {name}", *map(cell, of("figure 2", "section", scheme, place))])
        pair = (of("figure 2", "messages", scheme, place) for scheme in ("old", "new"))
        messages.append([name, *over(*pair)])
        for what in ("messages", "bytes"):
            ours, theirs = paper[f"{what}_{'one' if 'one' in place[1] else 'spread'}"]
            pair = (of("table 3", what, scheme, place) for scheme in ("ibec", "lrc"))
            others.append([f"{what}, {name}", short(ours / theirs), *over(*pair)])
        for scheme in ("ibec", "lrc"):
            pair = (of("table 3", what, scheme, place) for what in ("first", "bytes"))
            shares = [f"{100 * float(one):.0f}" if one else "" for one in over(*pair)]
            first += [[f"{scheme}, {name}", *shares]] if "one" not in place[1] else []
    head = list(map(str, RANKS))
    yield table(["figure 2, us a section, processes", *head], rows)
    yield table(["figure 2, messages, old / new", *head], messages)
    yield table(["table 3, ibec / lrc", "paper, 8", *head], others)
    yield table(["figure 3, % of the bytes sent by the first process", *head], first)


def programs_ranks(part, paper):
    """S5's programs: the speed-up, and the share of write faults in the waiting of SOR."""
    of = lambda way, what: [only(part, **way, ranks=n, what=what)["median"] for n in RANKS]
    alone = lambda way: statistics.median(
        one["median"] for one in pick(part, experiment=way["experiment"], what="alone")
    )
    speed_ups, shares = [], []
    for one in pick(part, what="alone", ranks=1):
        way = {key: one["parameters"][key] for key in ("experiment", "way")}
        name = one["parameters"]["way"]
        times = [short(alone(way) / took) for took in of(way, "parallel")]
        speed_ups.append([f"{way['experiment']}, {name}", *times])
        if way["experiment"] == "sor" and name != "lrc":
            theirs = paper["faults_percent"]["plain" not in name]
            percents = [short(100 * x / y) for x, y in zip(of(way, "faults"), of(way, "overhead"))]
            shares.append([name, str(theirs), *percents])
    head = list(map(str, RANKS))
    yield table(["speed-up, processes", *head], speed_ups)
    yield table(["SOR: write faults, % of waiting", "paper, 8", *head], shares)


TABLES = {
    "pages": pages,
    "clients": clients,
    "servers": servers,
    "allocation": allocation,
    "sends": sends,
    "ahead": ahead,
    "payload": payload,
    "payload-link": payload,
    "speedups": speedups,
    "networks": networks,
    "transposes": transposes,
    "time": where_time_goes,
    "locks": locks,
    "locks-ranks": locks_ranks,
    "programs-ranks": programs_ranks,
}

# --- Plots --------------------------------------------------------------------------------------------------


def plot_pages(axes, part, paper):
    for ahead, label in ((False, "as the paper"), (True, "reading ahead")):
        found = [
            one
            for one in pick(part, experiment="pages")
            if bool(one["parameters"]["prefetch_bytes"]) == ahead
        ]
        points = sorted((one["parameters"]["page_bytes"] / 1024, one["median"] * 1e3) for one in found)
        axes.plot(*zip(*points), marker="o", label=f"here, {label}")
    axes.axhline(paper["best_mb_s"], color="gray", linestyle=":", label="the paper's best")
    axes.axvline(
        paper["flat_from_kib"], color="gray", linestyle="--", label="the paper's is flat from here on"
    )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="page, KiB", ylabel="triad, MB/s", ylim=(0, None))


def plot_clients(axes, part, _paper):
    counts = sorted({one["parameters"]["clients"] for one in pick(part, experiment="clients")})
    each = [only(part, clients=n, what="each")["median"] * 1e3 for n in counts]
    axes.plot(counts, each, marker="o", label="here, each client")
    axes.plot(
        counts,
        [each[0] / n for n in counts],
        color="gray",
        linestyle=":",
        label="in proportion, as the paper's",
    )
    axes.set(xlabel="clients", ylabel="triad, MB/s", ylim=(0, None))


def plot_payload(axes, part, paper):
    for what in ("copy", "hit", "miss"):
        points = sorted(
            (one["parameters"]["payload"] / 1024, one["median"])
            for one in pick(part, registrar="io_uring", what=what)
        )
        axes.plot(*zip(*points), marker="o", label=f"here, {what}")
    axes.axvline(paper["crossover_kib"], color="gray", linestyle="--", label="the paper's crossover")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="payload, KiB", ylabel="GB/s", ylim=(0, None))


def plot_servers(axes, part, _paper):
    for what in ("triad", "read in order"):
        found = pick(part, experiment="servers", what=f"{what} / sum of the links")
        axes.plot(
            [one["parameters"]["servers"] for one in found],
            [one["median"] for one in found],
            marker="o",
            label=what,
        )
    axes.axhline(1, color="gray", linestyle=":", label="sum of the links")
    axes.set(xlabel="servers", ylabel="of the links' rate", ylim=(0, 1.1), xticks=range(1, 5))


def plot_sends(axes, part, _paper):
    for way in dict.fromkeys(one["parameters"]["way"] for one in pick(part, experiment="sends")):
        found = pick(part, over="shared memory", way=way, what="whole")
        axes.plot(
            [one["parameters"]["bytes"] for one in found],
            [one["median"] for one in found],
            marker="o",
            label=way,
        )
    axes.set(xlabel="bytes, with an envelope of 8", ylabel="one way, us, over shared memory", ylim=(0, None))


PLOTS = {
    "pages": plot_pages,
    "clients": plot_clients,
    "servers": plot_servers,
    "sends": plot_sends,
    "payload": plot_payload,
    "payload-link": plot_payload,
}


def plots(data, said, folder):
    """Draws what has a plot; without matplotlib, says so."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not here: no plots are made")
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rampool"
    from matplotlib import pyplot

    for paper in said["paper"]:
        for experiment in paper.get("experiment", []):
            part = experiment["part"]
            if experiment.get("table", part) not in PLOTS or part not in data:
                continue
            figure, axes = pyplot.subplots(figsize=(6, 3.5))
            PLOTS[part](axes, data[part], experiment.get("paper", {}))
            axes.set_title(experiment["title"], fontsize=10)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
            figure.tight_layout()
            figure.savefig(folder / f"paper-{part}.svg", metadata={"Date": None})
            pyplot.close(figure)


# --- The page -----------------------------------------------------------------------------------------------

INTRODUCTION = """rampool stands on five published systems. For each, this page has what can be measured here,
the paper's numbers next to ours and why they differ, and then every item of the paper with what became of it:
a row without a state is done in full. `make papers` measures it again (twenty minutes, as root;
`QUICK=--quick` takes small sizes, `PARTS="payload locks"` some of it) and makes this page of
`bench/papers.toml` and `bench/data/papers.json`. Quartiles stand in parentheses where they are more than a
quarter away from the median."""


def wrapped(text, **how):
    return textwrap.fill(" ".join(text.split()), 110, break_long_words=False, break_on_hyphens=False, **how)


def where(part):
    """When and on what a part was measured."""
    return f"{part['date']}, on {part['machine']}"


def measured(part, mostly):
    """How an experiment was made. `mostly`: when and on what most were."""
    size = ", small sizes" if part["quick"] else ""
    load = "load " + "–".join(dict.fromkeys(part[when].split()[0] for when in ("load_before", "load_after")))
    other = "" if where(part) == mostly else f", {where(part)}"
    return f"`rampool bench {part['options']}`{size}, {load}{other}."


def experiment_text(experiment, data, mostly):
    name = experiment["part"]
    lines = [f"### {experiment['title']}", "", wrapped(experiment["about"]), ""]
    if name not in data:
        return [*lines, "Not measured yet.", ""]
    for found in TABLES[experiment.get("table", name)](data[name], experiment.get("paper", {})):
        lines += [*found, ""] if found else []
    if experiment.get("table", name) in PLOTS:
        lines += [f"![{experiment['title']}](pictures/paper-{name}.svg)", ""]
    why = [wrapped(f"*Why they differ.* {experiment['why']}"), ""] if experiment.get("why") else []
    return [*lines, *why, wrapped(measured(data[name], mostly)), ""]


def rows_text(rows, link):
    found = []
    for row in rows:
        state = "" if row["state"] == "full" else f"*{row['state']}*"
        here = ": ".join(part for part in (state, " ".join(row["here"].split())) if part)
        places = ", ".join(link(see) for see in row.get("see", []))
        here = "; ".join(part for part in (here, places) if part)
        found.append([f"{row['item']} ({row['where']})", here])
    return [*table(["item, and where in the paper", "here"], found), ""]


def page(said, data, link):
    """The whole page."""
    papers = said["paper"]
    times = [where(part) for part in data.values()]
    mostly = max(times, key=times.count) if times else ""
    introduction = f"{INTRODUCTION} Where nothing else is said, they are of {mostly}."
    lines = ["# The papers, side by side", "", wrapped(introduction), ""]
    count = lambda paper, state: str(sum(row["state"] == state for row in paper["row"]))
    lines += table(
        ["items", *STATES], [[paper["title"], *(count(paper, state) for state in STATES)] for paper in papers]
    )
    lines.append("")
    for paper in papers:
        short_title = paper["title"].split(":")[0]
        lines += [
            f"## {paper['title']}",
            "",
            wrapped(f"*{paper['authors']}.* {paper['idea']} Measured there on {paper['machines']}."),
            "",
        ]
        for experiment in paper.get("experiment", []):
            lines += experiment_text(experiment, data, mostly)
        lines += [f"### {short_title}, item by item", "", *rows_text(paper["row"], link)]
    lines += ["## Other sources", "", *(wrapped(f"* {one}", subsequent_indent="  ") for one in said["other"])]
    return "\n".join(lines).strip() + "\n"

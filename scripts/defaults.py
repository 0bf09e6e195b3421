#!/usr/bin/env python3
"""Which defaults the figures depend on, and which figures are older than them.

What is on by default is measured. So each file of bench/data records the defaults that it was measured with,
as the source has them, and `scripts/plot.py --check` fails when they are others now: measure again with
`scripts/bench-all.sh --old`. Formatting and comments do not count.

    scripts/defaults.py parts              every part of the measurements and about how many seconds it takes
    scripts/defaults.py old                those whose figures are missing, or older than the defaults
    scripts/defaults.py stamp PART FILE S  records what the defaults are in FILE, which measures PART and took
                                           S seconds

Python's standard library only.
"""

import hashlib
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "bench/data"

# What a default is read from: an option of a command (`--spin-us`), a constant (`GET_PAGES`), or an
# item with a body (`impl Default for Waiting`, `fn cache_config`). Whoever adds a default that a
# figure depends on adds it here.
SETTINGS = {
    "waiting": {
        "crates/net/src/adaptive_spin.rs": ["MEMORY", "KEEP_CPU", "TURNS"],
        "crates/net/src/two_ways.rs": ["SOON", "LATEST", "REST", "MARGIN", "WORSE"],
        "crates/paging/src/follow.rs": [
            "SAMPLE", "OTHERS", "SUSPECT", "OF_USE", "SHORTEST_PAUSE", "LONGEST_PAUSE"
        ],
    },
    "awake": {
        "crates/kernel/src/awake.rs": ["REST", "WINDOW", "CROWDED", "AWAY"],
        "crates/pager/src/pager/awake.rs": ["TURNS", "SHORTEST_PAUSE", "LONGEST_PAUSE"],
    },
    "paging": {
        "crates/cli/src/run.rs": [
            "--copies", "--encryption", "--page-size", "--prefetch", "--fault-mode", "--compression",
            "--spin-us", "--no-follow",
        ],
        "crates/pager/src/pager/waits.rs": ["impl Default for Waiting"],
        "crates/pager/src/region.rs": ["impl Default for PagedConfig", "fn cache_config"],
        "crates/pager/src/pager/pointer_prefetcher.rs": [
            "IDLE_RANDOM_FAULTS",
            "LEAST_BUDGET_PAGES",
            "LOOKS_A_PIECE",
        ],
        "crates/paging/src/cache/fault.rs": [
            "MAX_UNPROTECT_RUN", "LOOKS_PER_FAULT", "MOST_LOOKS", "STREAM_OF_WRITES"
        ],
        "crates/paging/src/cache/neighbours.rs": [
            "WITHIN", "PROBE_EVERY", "MEMORY", "WORTH_A_TRIAL", "WORTH_IT"
        ],
        "crates/paging/src/cache/policy.rs": [
            "BUSY_RETRY_FAULTS", "SAMPLE_BATCHES", "SMALL_SHARE", "EARLY_STEP", "EARLY_SHARE", "EARLY_MEMORY"
        ],
        "crates/paging/src/cache/prefetch.rs": [
            "STREAMS", "NEAR", "FIRST_WINDOW", "CHUNKS_AHEAD", "EXPECTED_PAGES", "MAX_FRESH_RUN"
        ],
        "crates/paging/src/cache/rival.rs": ["AGES", "FOLLOWED", "MEMORY", "ENOUGH", "CONTROL"],
        "crates/paging/src/cache/writeback.rs": ["MAX_STAGED_RUN"],
    },
    "servers": {
        "crates/cli/src/serve/settings.rs": [
            "--encryption", "--store", "--shards", "--spin-us", "--no-lock", "--no-rings"
        ],
        "crates/server/src/config.rs": ["impl ServerConfig"],
        "crates/client/src/pool.rs": ["GET_PAGES", "PUT_PAGES"],
        "crates/client/src/pool/config.rs": ["fn with_lease"],
        "crates/client/src/pool/direct.rs": [
            "REQUEST_BYTES", "COPY_REQUEST_BYTES", "BODY_REQUEST_BYTES", "REQUEST_RUNS"
        ],
        "crates/lease/src/queue.rs": ["impl Default for QueueLimits"],
        "crates/net/src/transport/rings.rs": ["RING_BYTES", "PUBLISH_BYTES", "LOOKS"],
        "crates/paging/src/placement.rs": ["DEFAULT_STRIPE_PAGES"],
        "crates/session/src/session.rs": ["BULK_WINDOW_BYTES", "LINK_QUEUE_BYTES"],
    },
    "copies": {
        "crates/session/src/copies.rs": ["PIECES", "PIECE_PAGES", "PASS"],
        "crates/session/src/hedge.rs": [
            "LONG_HALVES", "LEAST", "SLOW_TIMES", "SLOW", "LATE", "EARNS", "COSTS", "MOST_TOKENS",
            "PROBE_EVERY",
        ],
        "crates/session/src/pace.rs": [
            "CALM", "LOWEST", "HIGHEST", "LONGEST_PAUSE", "LATE_QUARTERS", "WINDOW", "MOST_PATIENCE",
            "ENOUGH",
        ],
        "crates/session/src/session.rs": [
            "SPARE_SILENCE", "SPARE_SLOWEST", "MOST_SPARE_SILENCE", "SUSPICION", "SLOWEST"
        ],
    },
    "files": {
        "crates/cli/src/mount.rs": ["READ_AHEAD_KIB", "DIRTY_PERCENT"],
        "crates/cli/src/mount/kernel_files.rs": ["REQUEST_BYTES", "BACKGROUND"],
        "crates/cli/src/mount/mover.rs": ["MOST_READ_BYTES"],
        "crates/net/src/transport/rings.rs": ["LONG_RING_BYTES"],
    },
    "sharing": {
        "crates/sharing/src/config.rs": ["impl Default for Tuning"],
        "crates/sharing/src/channel.rs": ["impl Default for ChannelConfig"],
        "crates/sharing/src/stream.rs": ["impl Default for Limits"],
        "crates/shared/src/host.rs": [
            "OFFER_LEAST", "OFFER_MOST", "OFFER_BYTES", "FEW_RANKS", "MUCH_BYTES", "MOMENT", "MOST_EXPECTED"
        ],
        "crates/shared/src/lib.rs": ["MOST_LOOKED_AT", "LOOKS_A_YIELD", "LONG_YIELD"],
    },
}

# What is on by default and no constant tells. To change a line makes the figures old, as a constant does.
ALSO = {
    "awake": "the other of two CPUs is kept awake while one thread waits for pages of the private store",
    "waiting": "looks for what comes next while most comes soon, and sleeps otherwise",
    "paging": "pages of the private store are read in place",
    "servers": "clients on the same machine use shared memory",
    "copies": "",
    "files": "a mount uses long rings, and the kernel's cache of what it writes",
    "sharing": "",
}

PAGED, DIRECT, SHARED = ("waiting", "paging", "servers"), ("waiting", "servers"), ("waiting", "sharing")
# Each part of the measurements, which is a file of bench/data: the defaults that it measures, and
# about how many seconds it takes.
PARTS = {
    "fault": (PAGED, 90),
    "sequential": (PAGED, 60),
    "stream-loopback": (PAGED, 90),
    "stream-10g": (PAGED, 90),
    "stream-1g": (PAGED, 180),
    "fit": (PAGED, 150),
    "programs": ((*PAGED, "awake"), 1800),
    "world": (PAGED, 1500),
    "miss": ((*PAGED, "awake"), 900),
    "redundancy": ((*PAGED, "copies"), 600),
    "server": (DIRECT, 40),
    "direct": (DIRECT, 90),
    "openmpi": (DIRECT, 20),
    "register": (DIRECT, 40),
    "fifo": (DIRECT, 60),
    "tenants": (DIRECT, 180),
    "examples": (DIRECT, 40),
    "shared": (SHARED, 180),
    "shared-time": (SHARED, 30),
    "predict": (SHARED, 180),
    "block": (DIRECT, 180),
    "files": ((*DIRECT, "files"), 60),
    "python": (PAGED, 1800),
}

# Figures that were measured before files recorded their defaults, or never yet. Only a new measurement takes
# a name off; none is added: figures that become old are measured again.
UNRECORDED = {"block", "programs"}


class NotFound(Exception):
    """The source has no such default."""


def plain(text):
    """Rust without comments, and with the spaces, commas and digits that every way of formatting it has."""
    text = re.sub(r"/\*.*?\*/", " ", re.sub(r"//[^\n]*", " ", text), flags=re.S)
    text = re.sub(r"(?<=\d)_(?=\w)", "", text)
    text = re.sub(r"\s*([^\w\s])\s*", r"\1", re.sub(r"\s+", " ", text)).strip()
    return re.sub(r",(?=[)\]}])", "", text)


def body_of(text, name):
    """What is between the braces behind a header."""
    header = re.search(rf"\b{name}\b", text)
    if header is None:
        raise NotFound
    start = text.index("{", header.end())
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return plain(text[start + 1 : at])
    raise NotFound


def option_of(text, name):
    """The default of a command's option: an attribute, or what its description says."""
    field = re.search(rf"^[ ]*(?:pub )?{name[2:].replace('-', '_')}: ", text, re.M)
    if field is None:
        raise NotFound
    above = text[: field.start()].rsplit("\n\n", 1)[-1].rsplit("{\n", 1)[-1]
    attributes = " ".join(line for line in above.splitlines() if not line.lstrip().startswith("///"))
    if found := re.search(r"\bdefault_value(?:_t)?\s*=\s*(\"[^\"]*\"|[\w:.]+)", attributes):
        return plain(found.group(1).strip('"'))
    said = " ".join(
        line.strip().removeprefix("///").strip()
        for line in above.splitlines()
        if line.lstrip().startswith("///")
    )
    if found := re.search(r"\[default: (.*?)\]", said):
        return found.group(1)
    raise NotFound


def constant_of(text, name):
    found = re.search(rf"\bconst {name}:[^=;]*=(.*?);", text, re.S)
    if found is None:
        raise NotFound
    return plain(found.group(1))


def default_of(text, name):
    """A default in a source text, as a short text of its own."""
    read = option_of if name.startswith("--") else constant_of if name.isupper() else body_of
    value = read(text, name)
    return value if len(value) <= 60 else "sha256 " + hashlib.sha256(value.encode()).hexdigest()[:16]


def defaults(groups, source=lambda path: (ROOT / path).read_text()):
    """The defaults of these groups, by `FILE NAME`; ends with a message where the source lacks one."""
    found = {}
    for group in groups:
        found[f"also, {group}"] = ALSO[group]
        for path, names in SETTINGS[group].items():
            text = source(path)
            for name in names:
                try:
                    found[f"{path} {name}"] = default_of(text, name)
                except NotFound:
                    sys.exit(
                        f"scripts/defaults.py: {path} has no default {name}; where it has another name or "
                        "place now, say so in SETTINGS"
                    )
    return found


def changes(recorded, now):
    """What differs, a text for each."""
    keys = [*now, *(key for key in recorded if key not in now)]
    return [
        f"{key}: {recorded.get(key, 'none')} then, {now.get(key, 'none')} now"
        for key in keys
        if recorded.get(key) != now.get(key)
    ]


def complaints(found, unrecorded=UNRECORDED, defaults=defaults):
    """A line for each file that is older than the defaults, of the measured files by their names."""
    lines = [f"{name}: measured, but no part in scripts/defaults.py" for name in found if name not in PARTS]
    for name, (groups, _) in PARTS.items():
        recorded = found.get(name, {}).get("defaults")
        if name in unrecorded:
            if recorded is not None:
                lines.append(
                    f"{name}: measured with its defaults recorded; take it off UNRECORDED in "
                    "scripts/defaults.py"
                )
        elif recorded is None:
            lines.append(
                f"{name}: not measured, or not by scripts/bench-all.sh, which records the defaults; run "
                f"scripts/bench-all.sh {name}"
            )
        elif changed := changes(recorded, defaults(groups)):
            lines.append(f"{name}: older than the defaults it measures; run scripts/bench-all.sh {name}")
            lines += [f"    {change}" for change in changed]
    return lines


def is_old(name):
    path = DATA / f"{name}.json"
    recorded = json.loads(path.read_text()).get("defaults") if path.exists() else None
    return recorded is None or bool(changes(recorded, defaults(PARTS[name][0])))


def main():
    match sys.argv[1:]:
        case ["parts"]:
            print("\n".join(f"{name} {seconds}" for name, (_, seconds) in PARTS.items()))
        case ["old"]:
            print("\n".join(name for name in PARTS if is_old(name)))
        case ["stamp", part, file, seconds]:
            path = pathlib.Path(file)
            data = json.loads(path.read_text())
            data |= {"defaults": defaults(PARTS[part][0]), "took_s": int(seconds)}
            path.write_text(json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()

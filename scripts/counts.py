#!/usr/bin/env python3
"""Counts what must not grow: long lines and functions, parameters, source, words, circles of imports.

Lines of .rs, .md, .py, .h and .c have at most 110 columns (but tables, addresses and generated files),
functions in Rust at most 70 lines and six parameters, and files of a crate do not import each other in a
circle. What was there before that was checked is listed in scripts/counts.json with a ceiling, as are the
lines of each crate's source outside tests and the words of the documents. A ceiling only shrinks: one that is
2 % above today's count, or no longer needed, fails.

    scripts/counts.py            what is above its limit or ceiling, a line each
    scripts/counts.py --shrink   writes the ceilings that can be smaller into scripts/counts.json; raises none

The Rust scanner blanks comments and strings and then goes by brackets. It sees macros as they are written.
Python's standard library only.
"""

import bisect
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CEILINGS = ROOT / "scripts/counts.json"
COLUMNS, FUNCTION_LINES, PARAMETERS = 110, 70, 6
# How far a ceiling may be above today's count, and how far --shrink puts that of a sum above it.
TOLERANCE, ROOM = 1.02, 1.01
GENERATED = {"crates/capi/include/rampool.h"}
DOCUMENTS = re.compile(r"(README|ARCHITECTURE|CONTRIBUTING|CHANGELOG)\.md|docs/.*\.md|bench/[^/]*\.md")
SHRINK = "run `scripts/counts.py --shrink`"

OR_RAISE = "or raise the ceiling in scripts/counts.json by hand, and say why in the commit"
# What to do, for each kind of count.
ADVICE = {
    "long lines": "wrap them",
    "long functions": "cut it in two where it does two things",
    "parameters": "give what belongs together a type of its own",
    "circles": "move what both need into a file below them",
    "source lines": f"delete what is superseded; {OR_RAISE}",
    "words": f"delete what is said twice; {OR_RAISE}",
}
# Each entry of these has a limit of its own; of the others every entry has its ceiling in the file.
LIMITS = {"long lines": 0, "long functions": FUNCTION_LINES, "parameters": PARAMETERS}

# --- Rust, as far as it is needed ---------------------------------------------------------------------------

# Comments, raw strings, strings, characters. A lifetime is none of them.
HIDDEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\bb?r(#*)".*?"\1|b?"(?:\\.|[^"\\])*\""""
    r"""|b?'(?:\\(?:x\w\w|u\{[^}]*\}|.)|[^\\'\n])'""",
    re.S,
)
TEST_MODULE = re.compile(r"^([ \t]*)#\[cfg\(test\)\]\n[ \t]*(?:pub )?mod \w+ \{.*?^\1\}$", re.M | re.S)
FUNCTION = re.compile(r"\bfn\s+(\w+)")
BRACKET = re.compile(r"->|=>|[(){}\[\]<>,;]")


def blanked(text):
    """The text with comments, strings and characters as spaces, line for line."""
    return HIDDEN.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def pairs(text):
    """For the place of each `{` that of its `}`."""
    opened, closes = [], {}
    for match in re.finditer(r"[{}]", text):
        if match.group() == "{":
            opened.append(match.start())
        elif opened:
            closes[opened.pop()] = match.start()
    return closes


def parameters(text, at):
    """How many parameters a function has whose name ends at `at`, and where they end; (None, at) for none."""
    inside, count, filled, generics = 0, 0, 0, 0
    for token in BRACKET.finditer(text, at):
        mark, place = token.group(), token.start()
        if inside == 0 and mark == "(" and generics == 0:
            inside, filled = 1, place + 1
        elif inside == 0 and mark in "<>":
            generics += 1 if mark == "<" else -1
        elif inside == 0 and generics == 0 and mark != "->":
            return None, at
        elif inside and mark in ("(", "[", "{", "<"):
            inside += 1
        elif inside and mark in (")", "]", "}", ">"):
            inside -= 1
        if inside == 1 and mark == "," or inside == 0 and mark == ")" and generics == 0:
            count += bool(text[filled:place].strip())
            filled = place + 1
            if inside == 0:
                return count, place + 1
    return None, at


def body(text, at):
    """Where the body of a function begins whose parameters end at `at`, or None for one without."""
    depth = 0
    for token in BRACKET.finditer(text, at):
        mark = token.group()
        if depth == 0 and mark in "{;":
            return token.start() if mark == "{" else None
        if mark in "([":
            depth += 1
        elif mark in ")]":
            depth -= 1
    return None


def functions(text):
    """(name, line, lines, parameters) of each function of a blanked text."""
    starts = [0, *(match.end() for match in re.finditer(r"\n", text))]
    line = lambda place: bisect.bisect_right(starts, place)
    closes = pairs(text)
    for match in FUNCTION.finditer(text):
        count, end = parameters(text, match.end())
        if count is None:
            continue
        begins = body(text, end)
        last = closes.get(begins, begins) if begins is not None else end
        yield match.group(1), line(match.start()), line(last) - line(match.start()) + 1, count


# --- circles ------------------------------------------------------------------------------------------------

PATH = re.compile(r"(?<![\w$])(?<!in )(crate|super(?:::super)*)::(?=[\w{*])")


def paths(text, at):
    """Every path that begins at `at`, with `{a, b}` as several; and where they end."""
    names = []
    while match := re.compile(r"(\w+)(\s*::\s*)?").match(text, at):
        names.append(match.group(1))
        at = match.end()
        if not match.group(2):
            return [names], at
    if not text.startswith("{", at):
        return [names], at
    found, at = [], at + 1
    while at < len(text) and text[at] != "}":
        inner, after = paths(text, at)
        found += [names + path for path in inner]
        at = after if after > at else at + 1
    return found, at + 1


def imports(text, own, modules):
    """The modules that the one named `own` refers to by `crate::` or `super::`."""
    for match in PATH.finditer(text):
        above = match.group(1).count("super")
        base = own[: max(len(own) - above, 0)] if above else ()
        for path in paths(text, match.end())[0]:
            full = (*base, *path)
            yield next(full[:n] for n in range(len(full), -1, -1) if full[:n] in modules or n == 0)


def circles(files):
    """Groups of a crate's files that reach each other. `files`: blanked text by path below `src`."""
    roots = ("lib", "main", "mod")
    module = lambda path: tuple(part for part in path.removesuffix(".rs").split("/") if part not in roots)
    modules = {module(path): path for path in files}
    to = {own: set(imports(files[path], own, modules)) - {own} for own, path in modules.items()}

    def reached(start):
        seen, left = set(), [start]
        while left:
            for other in to.get(left.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen

    reach = {own: reached(own) for own in modules}
    groups = {frozenset(other for other in reach[own] if own in reach.get(other, ())) for own in modules}
    return sorted(sorted(modules[own] for own in group) for group in groups if len(group) > 1)


# --- what there is today ------------------------------------------------------------------------------------


def listed():
    patterns = [f"*.{kind}" for kind in ("rs", "md", "py", "h", "c")]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in names if name and (ROOT / name).is_file()]


def long_lines(name, text):
    """The numbers of the lines that are too long."""
    tables = {"rs": r"\s*(//[/!]?)?\s*\|", "md": r"\s*\|"}.get(name.rpartition(".")[2], r"(?!)")
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > COLUMNS and not re.match(tables, line) and not re.search(r"https?://", line):
            yield number


def is_test(name):
    parts = pathlib.PurePath(name).parts
    return "tests" in parts or "benches" in parts or parts[-1] == "tests.rs"


def today(texts):
    """(kind, name, count, where) of everything that is counted. `texts`: content by path."""
    crates, sources, words = {}, {}, 0
    for name, text in texts.items():
        if DOCUMENTS.fullmatch(name):
            words += len(text.split())
        if name not in GENERATED and (numbers := list(long_lines(name, text))):
            more = ", ..." if len(numbers) > 8 else ""
            yield "long lines", name, len(numbers), f"{name}:{', '.join(map(str, numbers[:8]))}{more}"
        if not name.endswith(".rs"):
            continue
        clean = blanked(text)
        longest, most = {}, {}
        for function, line, lines, count in functions(clean):
            longest[function] = max(longest.get(function, (0, 0)), (lines, line))
            most[function] = max(most.get(function, (0, 0)), (count, line))
        yield from (("long functions", f"{name}::{f}", n, f"{name}:{at}") for f, (n, at) in longest.items())
        yield from (("parameters", f"{name}::{f}", n, f"{name}:{at}") for f, (n, at) in most.items())
        if (found := re.fullmatch(r"crates/([^/]+)/(.*)", name)) and not is_test(name):
            tested = sum(match.group().count("\n") + 1 for match in TEST_MODULE.finditer(text))
            crates[found.group(1)] = crates.get(found.group(1), 0) + text.count("\n") - tested
            if found.group(2).startswith("src/"):
                plain = blanked(TEST_MODULE.sub("", text))
                sources.setdefault(found.group(1), {})[found.group(2)[4:]] = plain
    for crate, lines in [*crates.items(), ("all crates", sum(crates.values()))]:
        yield "source lines", crate, lines, f"crates/{crate}" if crate in crates else crate
    yield "words", "all documents", words, "documents"
    for crate, files in sources.items():
        for group in circles(files):
            yield "circles", f"{crate}: {' '.join(group)}", len(group), f"crates/{crate}/src/{group[0]}"


# --- compared with what is allowed --------------------------------------------------------------------------


def circle_that_has(name, allowed):
    """The ceiling that covers a circle: it has all of its files."""
    crate, _, files = name.partition(": ")
    for other in allowed:
        theirs, _, more = other.partition(": ")
        if theirs == crate and set(files.split()) <= set(more.split()):
            return other
    return None


def said(kind, name, count, where, ceiling):
    what = {
        "long lines": f"{count} lines over {COLUMNS} columns, {ceiling} allowed",
        "long functions": f"`{name.split('::')[-1]}` has {count} lines, {ceiling} allowed",
        "parameters": f"`{name.split('::')[-1]}` has {count} parameters, {ceiling} allowed",
        "circles": f"files import each other in a circle: {name.split(': ')[-1]}",
        "source lines": f"{count} lines outside tests, {ceiling} allowed",
        "words": f"{count} words, {ceiling} allowed",
    }[kind]
    return f"{where}: {what}: {ADVICE[kind]}"


def compared(counts, allowed):
    """What is above its ceiling, a line each, and the ceilings that shrink, by kind and name."""
    wrong, smaller = [], {kind: {} for kind in ADVICE}
    needed = {kind: {} for kind in ADVICE}
    for kind, name, count, where in counts:
        known = allowed.get(kind, {})
        if kind == "circles":
            covered = circle_that_has(name, known)
            if covered is None:
                wrong.append(said(kind, name, count, where, 0))
            else:
                needed[kind][name] = count
            continue
        ceiling = known.get(name, LIMITS.get(kind, 0))
        if count > ceiling:
            wrong.append(said(kind, name, count, where, ceiling))
        if count > LIMITS.get(kind, 0):
            needed[kind][name] = count
    for kind, known in allowed.items():
        for name, ceiling in known.items():
            count = needed[kind].get(name)
            if count is None or ceiling > count * TOLERANCE:
                smaller[kind][name] = count
        if kind == "circles" and smaller[kind]:
            smaller[kind] |= {name: count for name, count in needed[kind].items() if name not in known}
    return wrong, {kind: names for kind, names in smaller.items() if names}


def shrunk(allowed, smaller):
    """The ceilings as they can be."""
    made = {}
    for kind, known in allowed.items():
        new = dict(known)
        for name, count in smaller.get(kind, {}).items():
            if count is None:
                new.pop(name)
            else:
                room = ROOM if kind in ("source lines", "words") else 1
                new[name] = min(new.get(name, count), int(count * room))
        made[kind] = dict(sorted(new.items()))
    return made


def main():
    texts = {name: (ROOT / name).read_text(errors="replace") for name in listed()}
    allowed = json.loads(CEILINGS.read_text())
    counts = list(today(texts))
    wrong, smaller = compared(counts, allowed)
    if sys.argv[1:] == ["--shrink"]:
        CEILINGS.write_text(json.dumps(shrunk(allowed, smaller), indent=1) + "\n")
        print(f"scripts/counts.json: {sum(map(len, smaller.values()))} ceilings are smaller now, or gone")
        smaller = {}
    for kind, names in smaller.items():
        for name, count in names.items():
            if name in allowed[kind]:
                now = f"{count} today" if count is not None else "not needed any more"
                ceiling = allowed[kind][name]
                wrong.append(f"scripts/counts.json: {kind}, {name}: {ceiling} allowed, {now}: {SHRINK}")
    left = ", ".join(f"{len(allowed[kind])} {kind}" for kind in (*LIMITS, "circles"))
    print("\n".join(wrong) if wrong else f"counts: nothing above its ceiling; exceptions left: {left}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

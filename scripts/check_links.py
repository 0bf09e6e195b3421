#!/usr/bin/env python3
"""Checks what the documents say about files: every relative link leads to a file, every #anchor to a heading.

Every page of docs/ is in its summary, every crate on the map of ARCHITECTURE.md.

A link whose text is code and whose target is a source file, such as
[`Pager::run`](crates/pager/src/pager.rs), must name something that this file defines: so the walks through
the code stay true. Addresses beyond this repository are not visited. Python's standard library only.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+(?:\([^()]*\))?)\)")
DEFINES = {
    ".rs": r"(?:fn|struct|enum|trait|type|mod|const|static|union|macro_rules!)\s+{name}\b"
    r"|^\s+{name}\s*(?:[:({{,=]|$)",
    ".py": r"(?:def|class)\s+{name}\b|^{name}\s*=",
    ".h": r"\b{name}\b",
    ".c": r"\b{name}\b",
}


def documents():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    names = (
        listed.stdout.split()
        if listed.returncode == 0
        else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.md") if "target" not in p.parts]
    )
    return [ROOT / name for name in names if (ROOT / name).exists()]


def without_code(text):
    """The text with fenced blocks blanked out, line for line."""
    fenced, out = False, []
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        out.append("" if fenced else line)
    return out


def heading(line):
    """The text of a line that is a heading, without links; otherwise None."""
    found = re.match(r"#+\s+(.*)", line)
    return found and re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found.group(1))


def anchor_of(text):
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def anchors(path):
    return {anchor_of(text) for line in without_code(path.read_text()) if (text := heading(line))}


def defines(path, name):
    if path.name in ("lib.rs", "main.rs") and path.parent.parent.name == name:
        return True  # a crate, by its folder
    pattern = DEFINES.get(path.suffix)
    return pattern is None or re.search(pattern.format(name=re.escape(name)), path.read_text(), re.MULTILINE)


def check(path):
    for number, line in enumerate(without_code(path.read_text()), 1):
        where = f"{path.relative_to(ROOT)}:{number}"
        # `[text](target)` quoted as code is no link, code inside a link's text is part of it.
        quoted = [code.span() for code in re.finditer(r"`[^`]*`", line)]
        for link in LINK.finditer(line):
            target, text = link.group(3), link.group(2)
            if any(a <= link.start() < b for a, b in quoted) or re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            to = (path.parent / file).resolve() if file else path
            if not to.exists():
                yield f"{where}: {target} does not exist"
            elif anchor and to.suffix == ".md" and anchor not in anchors(to):
                yield f"{where}: {file or path.name} has no heading #{anchor}"
            elif text.startswith("`") and to.suffix in DEFINES and to.is_file():
                name = re.sub(r"<[^`]*>|\(.*?\)", "", text.strip("`")).split("::")[-1]
                if re.fullmatch(r"\w+", name) and not defines(to, name):
                    yield f"{where}: {file} does not define {name}"


def main():
    problems = [problem for path in documents() for problem in check(path)]
    summary = ROOT / "docs/SUMMARY.md"
    if summary.exists():
        listed = {(summary.parent / m.group(3)).resolve() for m in LINK.finditer(summary.read_text())}
        for page in sorted((ROOT / "docs").rglob("*.md")):
            if page != summary and page.resolve() not in listed:
                problems.append(f"docs/SUMMARY.md does not list {page.relative_to(ROOT / 'docs')}")
    map_of_crates = (ROOT / "ARCHITECTURE.md").read_text()
    crates = sorted(path.parent.name for path in (ROOT / "crates").glob("*/Cargo.toml"))
    unknown = [name for name in crates if f"(crates/{name}/" not in map_of_crates]
    problems += [f"ARCHITECTURE.md: no link into crates/{name}" for name in unknown]
    print("\n".join(problems) if problems else f"links: {len(documents())} documents, all well")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

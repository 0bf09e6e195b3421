"""Tests of the walks in ARCHITECTURE.md and docs/internals/walks.md: `python3 -m unittest discover scripts`.

An arrow between two links says that the first function calls the second one: [`a`](file) → [`b`](other). By
text: the body of `a` has a call of `b`, whichever type it is of. That each function is in its file is checked
by scripts/check_links.py.
"""

import re
import unittest

import counts
from check_links import LINK, ROOT, heading

PAGES = ("ARCHITECTURE.md", "docs/internals/walks.md")
# How many crates and files a walk may lead through.
MOST = {"A fault": (5, 14), "A barrier": (3, 10), "A strided get": (5, 12)}
ARCHITECTURE_WORDS = 3000


def sections(page):
    """(heading, text) of a page, without line breaks."""
    found, text = [], page.replace("\r", "")
    for line in text.split("\n"):
        if title := heading(line):
            found.append((title, []))
        elif found:
            found[-1][1].append(line.strip())
    return [(title, " ".join(lines)) for title, lines in found]


def places(text):
    """(function, file below the repository, start, end) of each link to a source."""
    for link in LINK.finditer(text):
        file = re.sub(r"^(\.\./)+", "", link.group(3))
        if link.group(2).startswith("`") and file.endswith(".rs"):
            yield link.group(2).strip("`").split("::")[-1], file, link.start(), link.end()


def arrows(text):
    """The pairs ((function, file), (function, file)) of which the first calls the second."""
    found = list(places(text))
    for (one, file, _, end), (other, there, start, _) in zip(found, found[1:]):
        if text[end:start].strip() == "→":
            yield (one, file), (other, there)


def calls(source, caller, callee):
    """Whether a function of that name in a Rust source has a call of the other one in its body."""
    text = counts.blanked(source)
    lines = text.split("\n")
    for name, line, height, _ in counts.functions(text):
        body = "\n".join(lines[line - 1 : line - 1 + height]).partition("{")[2]
        if name == caller and re.search(rf"\b{callee}\s*(::<[^()]*>)?\(", body):
            return True
    return False


class Walks(unittest.TestCase):
    def test_functions_of_a_walk_call_each_other_in_that_order(self):
        missing, seen = [], 0
        for page in PAGES:
            for title, text in sections((ROOT / page).read_text()):
                for (caller, file), (callee, _) in arrows(text):
                    seen += 1
                    if not calls((ROOT / file).read_text(), caller, callee):
                        missing.append(f"{page}, {title}: {caller} in {file} does not call {callee}")
        self.assertEqual(missing, [])
        self.assertGreater(seen, 50)

    def test_a_walk_leads_through_few_crates_and_files(self):
        walks = dict(one for page in PAGES for one in sections((ROOT / page).read_text()))
        for title, (crates, files) in MOST.items():
            seen = {file for _, file, _, _ in places(walks[title])}
            self.assertLessEqual(len({file.split("/")[1] for file in seen}), crates, title)
            self.assertLessEqual(len(seen), files, title)
            self.assertTrue(list(arrows(walks[title])), title)

    def test_the_architecture_is_short(self):
        self.assertLessEqual(len((ROOT / "ARCHITECTURE.md").read_text().split()), ARCHITECTURE_WORDS)


class Arrows(unittest.TestCase):
    SOURCE = """
fn a(x: u8) -> u8 {
    b::<u8>(x); // c()
    self.d(2)
}
fn b() { a() }
fn release() { p.release() }
"""

    def test_what_a_body_calls(self):
        for caller, callee, wanted in (
            *(("a", "b", True), ("a", "c", False), ("a", "d", True), ("b", "d", False)),
            *(("release", "release", True), ("b", "b", False), ("none", "a", False)),
        ):
            self.assertEqual(calls(self.SOURCE, caller, callee), wanted, (caller, callee))

    def test_an_arrow_is_between_two_links_alone(self):
        text = "[`X::a`](../../crates/x/a.rs) → [`b`](crates/y/b.rs), [`c`](c.rs) and → [`d`](d.rs)"
        self.assertEqual(list(arrows(text)), [(("a", "crates/x/a.rs"), ("b", "crates/y/b.rs"))])


if __name__ == "__main__":
    unittest.main()

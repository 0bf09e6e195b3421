"""Tests of scripts/counts.py: `python3 -m unittest discover scripts`."""

import unittest

import counts

HARD = r"""
// fn comment(a: u8) { {
/* fn block(a: u8) { */
const QUOTE: &str = "fn string() { \" {";
const RAW: &str = r#"fn raw() { " {"#;
const BRACE: char = '{';
const ESCAPED: [char; 2] = ['\'', '\u{7b}'];

pub fn long<'a, F: Fn(u8, u8) -> u8>(a: &'a [u8; 4], (b, c): (u8, u8), d: Map<u8, Vec<u8>>,) -> [u8; 2]
where
    F: Clone,
{
    let inner = |a: u8, b: u8| { a + b };
    fn nested() {}
    [0; 2]
}
trait Of { fn without_body(&self, a: u8) -> u8; }
type Pointer = fn(u8, u8);
"""


def rust(lines, name="f", arguments=""):
    return f"fn {name}({arguments}) {{\n" + "    x();\n" * (lines - 2) + "}\n"


def found(texts, kind):
    return {name: count for one, name, count, _ in counts.today(texts) if one == kind}


class Scanner(unittest.TestCase):
    def test_what_looks_like_code_in_comments_and_strings_is_none(self):
        clean = counts.blanked(HARD)
        self.assertEqual(clean.count("{"), clean.count("}"))
        self.assertEqual(clean.count("\n"), HARD.count("\n"))

    def test_functions_with_their_lines_and_parameters(self):
        by = {name: (lines, count) for name, _, lines, count in counts.functions(counts.blanked(HARD))}
        self.assertEqual(by, {"long": (8, 3), "nested": (1, 0), "without_body": (1, 2)})

    def test_the_line_is_that_of_the_name(self):
        self.assertEqual(next(counts.functions("\n\nfn f(\n  a: u8,\n) {\n}\n")), ("f", 3, 4, 1))


class Lines(unittest.TestCase):
    def test_tables_addresses_and_generated_files_may_be_long(self):
        long = "x " * 60
        self.assertEqual(list(counts.long_lines("a.md", f"| {long}\n{long}\nhttps://{long}\n")), [2])
        self.assertEqual(list(counts.long_lines("a.rs", f"/// | {long}\n// {long}\n    {long}\n")), [2, 3])
        self.assertEqual(list(counts.long_lines("a.py", f"| {long}\n")), [1])
        self.assertEqual(found({name: long for name in counts.GENERATED}, "long lines"), {})

    def test_tests_are_no_source(self):
        text = "fn f() {}\n#[cfg(test)]\nmod tests {\n    mod inner {\n    }\n}\nfn g() {}\n"
        texts = {"crates/a/src/b.rs": text, "crates/a/tests/c.rs": "x\n", "crates/a/src/b/tests.rs": "x\n"}
        self.assertEqual(found(texts, "source lines"), {"a": 2, "all crates": 2})

    def test_words_are_those_of_the_documents(self):
        texts = {"README.md": "a b", "docs/guide/a.md": "c", "bench/b.md": "d"}
        texts |= {"crates/a/README.md": "e", "a.py": "f"}
        self.assertEqual(found(texts, "words"), {"all documents": 4})


class Circles(unittest.TestCase):
    def circles(self, **files):
        named = {name.replace("__", "/") + ".rs": counts.blanked(text) for name, text in files.items()}
        return counts.circles(named)

    def test_files_that_import_each_other(self):
        self.assertEqual(self.circles(lib="", a="use crate::b::B;", b="use super::a::A;"), [["a.rs", "b.rs"]])

    def test_through_a_third_in_braces_and_in_code(self):
        files = {"a": "use crate::{x::X, b::{self, B}};", "b": "fn f() { crate::b::c::g() }"}
        files["b__c"] = "use super::super::a::A;"
        self.assertEqual(self.circles(lib="", **files), [["a.rs", "b.rs", "b/c.rs"]])

    def test_one_way_is_none(self):
        files = {"a": "use crate::b::B; // crate::c", "b": "pub(in crate::a) fn f() {}"}
        self.assertEqual(self.circles(lib="mod a;", **files), [])
        self.assertEqual(self.circles(lib="use a::A;", a="use crate::Config;", a__b="use super::A;"), [])


class Ceilings(unittest.TestCase):
    def compared(self, text, allowed):
        path = "crates/a/src/b.rs"
        every = {"source lines": {"a": 1000, "all crates": 1000}, "words": {"all documents": 0}} | allowed
        kinds = ("long lines", "long functions", "parameters", "circles")
        wrong, smaller = counts.compared(counts.today({path: text}), every)
        return wrong, {kind: names for kind, names in smaller.items() if kind in kinds}

    def test_what_is_above_its_limit_is_said_with_its_place(self):
        seven = "a: A, b: B, c: C, d: D, e: E, f: F, g: G"
        wrong, _ = self.compared("\n" + rust(71, arguments=seven) + "x" * 111, {})
        self.assertEqual(len(wrong), 3)
        self.assertIn("crates/a/src/b.rs:73: 1 lines over 110 columns, 0 allowed", wrong[0])
        self.assertIn("crates/a/src/b.rs:2: `f` has 71 lines, 70 allowed", wrong[1])
        self.assertIn("`f` has 7 parameters, 6 allowed", wrong[2])

    def test_a_ceiling_lets_it_be_and_no_more(self):
        allowed = {"long functions": {"crates/a/src/b.rs::f": 80}}
        self.assertEqual(self.compared(rust(80), allowed), ([], {}))
        self.assertEqual(self.compared(rust(79), allowed), ([], {}))
        self.assertEqual(len(self.compared(rust(81), allowed)[0]), 1)

    def test_a_ceiling_that_can_shrink_is_one_that_must(self):
        allowed = {"long functions": {"crates/a/src/b.rs::f": 80}}
        for text, ceiling in ((rust(75), 75), (rust(70), None), (rust(80, "g"), None)):
            smaller = self.compared(text, allowed)[1]
            self.assertEqual(smaller, {"long functions": {"crates/a/src/b.rs::f": ceiling}})

    def test_a_new_circle_is_said_and_a_broken_one_shrinks(self):
        src = "crates/a/src"
        texts = {f"{src}/lib.rs": "", f"{src}/b.rs": "use crate::c::C;", f"{src}/c.rs": "use crate::b::B;"}
        wide = {"circles": {"a: b.rs c.rs d.rs": 3}}
        circles = [one for one in counts.today(texts) if one[0] == "circles"]
        self.assertIn("b.rs c.rs", counts.compared(circles, {})[0][0])
        wrong, smaller = counts.compared(circles, wide)
        self.assertEqual(wrong, [])
        self.assertEqual(counts.shrunk(wide, smaller), {"circles": {"a: b.rs c.rs": 2}})

    def test_shrinking_never_raises(self):
        allowed = {"source lines": {"a": 1000}, "long functions": {"x::f": 80, "x::g": 90}}
        smaller = {"source lines": {"a": 500}, "long functions": {"x::f": 72, "x::g": None}}
        made = {"source lines": {"a": 505}, "long functions": {"x::f": 72}}
        self.assertEqual(counts.shrunk(allowed, smaller), made)
        self.assertEqual(counts.shrunk(allowed, {"source lines": {"a": 999}})["source lines"], {"a": 1000})

    def test_the_ceilings_of_this_repository_name_what_there_is(self):
        import json

        for kind, names in json.loads(counts.CEILINGS.read_text()).items():
            self.assertIn(kind, counts.ADVICE)
            for name in names if kind in counts.LIMITS else ():
                self.assertTrue((counts.ROOT / name.partition("::")[0]).is_file(), name)


if __name__ == "__main__":
    unittest.main()

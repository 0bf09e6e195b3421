"""Tests of the tables that scripts/plot.py makes: `python3 -m unittest discover scripts`."""

import unittest

import plot


def ratio(name, value, low, high, reach=None, met=None):
    return {"name": name, "value": value, "low": low, "high": high, "reach": reach, "met": met}


class Cells(unittest.TestCase):
    def test_quartiles_stand_where_they_say_something(self):
        self.assertEqual(plot.ratio_cell(ratio("a", 2, 1.9, 2.1)), "2")
        self.assertEqual(plot.ratio_cell(ratio("a", 2, 1.4, 2.1)), "2 (1.4–2.1)")
        self.assertEqual(plot.ratio_cell(ratio("a", 2, 1.99, 2.1, "<= 2.05", True)), "2 (1.99–2.1) [<=2.05]")

    def test_a_missed_reach_is_bold(self):
        self.assertEqual(plot.ratio_cell(ratio("a", 2, 2, 2, "<= 1", False)), "**2** [<=1]")


class Tables(unittest.TestCase):
    GRID = [[r"(?P<column>quiet|busy): (?P<row>.*)"], [r"(?P<row>.*?)(?P<column>, there)?"]]

    def tables(self, *names):
        return plot.figure_tables([(name, "1") for name in names], self.GRID, "figure", "here")

    def test_figures_of_one_row_stand_next_to_each_other(self):
        wanted = [["| figure | quiet | busy |", "|---|---|---|", "| a | 1 | 1 |", "| b | 1 |  |"]]
        self.assertEqual(self.tables("quiet: a", "busy: a", "quiet: b"), wanted)

    def test_a_figure_alone_in_its_table_has_its_whole_name(self):
        self.assertEqual(self.tables("quiet: a"), [["| figure | |", "|---|---|", "| quiet: a | 1 |"]])

    def test_a_column_without_a_name_is_one_only_next_to_another(self):
        alone, beside = self.tables("c", "d", "d, there")
        self.assertEqual(alone[2:], ["| c | 1 |"])
        self.assertEqual(beside[::2], ["| figure | here | there |", "| d | 1 | 1 |"])

    def test_a_unit_of_a_whole_row_stands_once(self):
        self.assertEqual(plot.with_unit("a", ["1 us", "", "2.5 us"]), ("a, us", ["1", "", "2.5"]))
        for cells in (["1 us", "2 s"], ["1 us", "2"], ["1 us", ""], ["1 us", "2 us (1–3)"]):
            self.assertEqual(plot.with_unit("a", cells), ("a", cells))

    def test_two_of_one_name_share_a_row(self):
        self.assertEqual(self.tables("c", "c")[0][2:], ["| c | 1, 1 |"])

    def test_what_was_measured_stands_behind_its_first_ratio(self):
        measured = {"name": "get, big, p50", "median": 3, "low": 3, "high": 3, "unit": "us"}
        other = measured | {"name": "put, p50"}
        ratios = [ratio(name, 2, 2, 2) for name in ("get / raw, big", "get / stream, big", "none")]
        cells = ["2; 3 us", "2", "2", "3 us"]
        wanted = list(zip(["get / raw, big", "get / stream, big", "none", "put, p50"], cells))
        self.assertEqual(plot.joined(ratios, [measured, other]), wanted)

    def test_files_of_one_place_on_the_page_are_summed_up(self):
        page = "## A\n<!-- figures: a b -->\n<!-- end -->"
        found = {name: {"ratios": [ratio("x", 1, 1, 1, "<= 1", name == "a")]} for name in "ab"}
        self.assertEqual(plot.summary(page, found), "**1 of 2 reached, 1 missed**: [A](#a) 1 of 2.")

    def test_a_program_has_its_ratios_what_was_wrong_and_what_it_held(self):
        said = {"experiment": "world", "program": "xz", "bound": [4, 20], "peak_mib": 40}
        said |= {"stays": None}
        half = said | {"what": "50%", "cpu_s": [3], "lasting_mib": 23, "local_mib": 20, "wrong": None}
        native = said | {"what": "native", "cpu_s": [2], "wrong": "at 25% no end in 90 s"}
        swapped = said | {"what": "50% swap", "cpu_s": [4]}
        runs = ((2, native), (5, half), (3, swapped))
        series = [{"median": median, "parameters": by} for median, by in runs]
        reach = ratio("xz, 50% local: rampool / native", 2.5, 2.5, 2.5, "<= 2", False)
        table = plot.world_table({"series": series, "ratios": [reach], "left_out": {"R": "not here"}})
        self.assertEqual(
            table[2:],
            [
                "| xz | 2, 40 | **2.5** [<=2], 1.5 | 1.5, 2 |",
                "",
                "* xz: **at 25% no end in 90 s**; held 23 of 20 MiB at 50%",
                "* R: not here",
            ],
        )


if __name__ == "__main__":
    unittest.main()

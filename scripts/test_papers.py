"""Tests of scripts/papers.py and its page: `python3 -m unittest discover scripts`."""

import unittest

import papers
import papers_page


def series(median, **parameters):
    return {
        "name": "a",
        "unit": "",
        "median": median,
        "low": median,
        "high": median,
        "parameters": parameters,
    }


def part(*found):
    return {
        "series": list(found),
        "quick": True,
        "options": "x",
        "date": "",
        "machine": "",
        "load_before": "1",
    }


class Rows(unittest.TestCase):
    def wrong(self, **row):
        row = {"item": "a", "where": "1", "here": "", **row}
        return papers.gone({"paper": [{"row": [row]}]})

    def test_a_place_that_is_there_is_no_complaint(self):
        places = ["scripts/papers.py::rounded", "CONTRIBUTING.md::Commits", "README.md"]
        self.assertEqual(self.wrong(state="full", see=places), [])

    def test_what_is_gone_is_named(self):
        self.assertIn("there is no scripts/x.py", self.wrong(state="full", see=["scripts/x.py"])[0])
        self.assertIn("has no 'roundedd'", self.wrong(state="full", see=["scripts/papers.py::roundedd"])[0])
        self.assertIn("has no 'Commit'", self.wrong(state="full", see=["CONTRIBUTING.md::Commit"])[0])

    def test_full_needs_a_place_and_a_state_a_name(self):
        self.assertIn("names no place", self.wrong(state="full")[0])
        self.assertIn("no state is called 'done'", self.wrong(state="done")[0])


class Tables(unittest.TestCase):
    def test_a_way_is_faster_from_where_it_stays_faster(self):
        self.assertEqual(papers_page.crossover([(1024, 1.1), (2048, 0.9), (4096, 1.2)]), "4 KiB")
        self.assertEqual(papers_page.crossover([(1024, 1.1), (2048, 0.9)]), "no payload measured")

    def test_what_a_network_saves_follows_from_the_speed_ups(self):
        # S4's own numbers: FFT under SC goes from 0.14 to 0.18, and its table 7 says 23 %.
        tables = {"table5": {"fft": [0.14]}, "table6": {"fft": [0.18]}, "table7": {"fft": [23]}}
        tables |= {"table8": {"fft": 11}, "best": {"fft": "hlrc 11"}}
        paper = {"protocols": ["hlrc"], "nodes4": tables}
        of = lambda speed_up, network, protocol: series(
            speed_up, experiment="papers", nodes=4, network=network, program="fft", protocol=protocol
        )
        found = part(
            of(0.14, "eth100-1999", "hlrc"), of(0.18, "loh-hb", "hlrc"), of(0.15, "eth100-1999", "aurc")
        )
        *_, saved = papers_page.speedups(found, paper)
        self.assertEqual(saved[-1], "| fft, 4 nodes | 23, 23 | 11, 7 | hlrc 11, hlrc 7 |")

    def test_what_a_network_saves_is_of_the_time_beyond_that_of_free_messages(self):
        of = lambda time, network: series(
            time, experiment="networks", nodes=2, network=network, program="lu", protocol="sc"
        )
        paper = {"protocols": ["sc"], "networks": {"A": "a", "B": "b"}, "saved": [["B", "A", 40, 63]]}
        _, saved = papers_page.networks(part(of(3, "a"), of(2, "b"), of(1, "free")), paper)
        self.assertEqual(saved[-1], "| B of A's | 40 to 63 | 50 to 50 | 1 of 1 |")

    def test_a_category_without_time_has_no_column_and_unlock_counts_as_lock(self):
        run = {"experiment": "time", "program": "lu", "protocol": "sc"}
        of = lambda median, category: series(median, **run, category=category)
        found = part(of(0.06, "computing"), of(0.01, "lock"), of(0.03, "unlock"), of(0, "other"))
        (table,) = papers_page.where_time_goes(found, {})
        self.assertEqual(table[0], "| share, % | ms | computing | lock |")
        self.assertEqual(table[2:], ["| lu, sc | 100 | 60 | 40 |"])

    def test_locks_by_ranks_are_compared_by_scheme_and_place(self):
        found = []
        for ranks in range(1, 9):
            where = {"ranks": ranks, "managers": "one manager", "way": "back to back"}
            for figure, scheme, times in (
                ("figure 2", "old", 6),
                ("figure 2", "new", 2),
                ("table 3", "ibec", ranks - 1),
                ("table 3", "lrc", 2 * (ranks - 1)),
            ):
                for what in ("section", "messages", "bytes", "first"):
                    found.append(series(times, experiment=figure, scheme=scheme, what=what, **where))
        paper = {"messages_one": [1, 4], "bytes_one": [1, 2]}
        times, messages, others, first = papers_page.locks_ranks(part(*found), paper)
        self.assertEqual(times[2], "| old, back to back, one manager |" + " 6 |" * 4)
        self.assertEqual(messages[2], "| back to back, one manager |" + " 3 |" * 4)
        self.assertEqual(others[2], "| messages, back to back, one manager | 0.25 |  |" + " 0.5 |" * 3)
        self.assertEqual(first, [])

    def test_programs_by_ranks_have_a_speed_up_and_a_share_of_faults(self):
        found = [
            series(median, experiment=program, way=way, ranks=ranks, what=what)
            for program, way in (("water", "new locks"), ("sor", "plain barriers"), ("sor", "lrc"))
            for ranks in range(1, 9)
            for what, median in (("alone", 8), ("parallel", 4), ("faults", 1), ("overhead", 2))
        ]
        speed_ups, shares = papers_page.programs_ranks(part(*found), {"faults_percent": [49, 9]})
        self.assertEqual(speed_ups[2], "| water, new locks |" + " 2 |" * 4)
        self.assertEqual(shares[2:], ["| plain barriers | 49 |" + " 50 |" * 4])

    def test_a_row_says_its_state_unless_it_is_full(self):
        rows = [{"item": "a", "where": "1", "state": state, "here": "b"} for state in ("full", "partial")]
        table = papers_page.rows_text(rows, str)
        self.assertEqual(table[2:4], ["| a (1) | b |", "| a (1) | *partial*: b |"])


class Samples(unittest.TestCase):
    def test_five_digits_are_kept(self):
        kept = papers.rounded(series(1.23456789) | {"samples": [0.000123456789]})
        self.assertEqual((kept["median"], kept["samples"]), (1.2346, [0.00012346]))


if __name__ == "__main__":
    unittest.main()

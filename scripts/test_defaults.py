"""Tests of scripts/defaults.py: `python3 -m unittest discover scripts`."""

import unittest

import defaults

SOURCE = """
/// How long.
const KEEP: Duration = Duration::from_micros(5_000);
pub(super) const BATCH: u32 = 64;

impl Default for Waiting {
    fn default() -> Self {
        Self { spin: Duration::from_micros(100), follow_faults: true }
    }
}

pub struct Options {
    /// Bytes that one fault fetches, 4K to 2M
    #[arg(long, default_value = "4K", value_name = "SIZE")]
    page_size: ByteLen,

    /// Microseconds
    #[arg(
        long,
        default_value_t = 100,
        value_name = "US"
    )]
    spin_us: u64,

    /// Copies [default: 2 where two or more
    /// servers have room]
    #[arg(long)]
    copies: Option<u8>,
}
"""
NAMES = ["KEEP", "BATCH", "impl Default for Waiting", "--page-size", "--spin-us", "--copies"]


def read(source):
    return {name: defaults.default_of(source, name) for name in NAMES}


class Reading(unittest.TestCase):
    def test_values_are_read(self):
        found = read(SOURCE)
        self.assertEqual(found["KEEP"], "Duration::from_micros(5000)")
        self.assertEqual((found["BATCH"], found["--page-size"], found["--spin-us"]), ("64", "4K", "100"))
        self.assertEqual(found["--copies"], "2 where two or more servers have room")

    def test_formatting_and_comments_do_not_count(self):
        other = SOURCE.replace("from_micros(5_000)", "from_micros(\n    5000, // five ms\n)")
        other = other.replace(
            "Self { spin: Duration::from_micros(100), follow_faults: true }",
            "Self {\n  /* long */ spin: Duration::from_micros(100),\n  follow_faults: true,\n}",
        )
        self.assertNotEqual(other, SOURCE)
        self.assertEqual(read(other), read(SOURCE))

    def test_every_changed_default_is_seen(self):
        for old, new, name in [
            ("5_000", "5_001", "KEEP"),
            ("= 64", "= 512", "BATCH"),
            ("from_micros(100)", "from_micros(50)", "impl Default for Waiting"),
            ("follow_faults: true", "follow_faults: false", "impl Default for Waiting"),
            ('"4K"', '"64K"', "--page-size"),
            ("default_value_t = 100", "default_value_t = 0", "--spin-us"),
            ("[default: 2 where", "[default: 3 where", "--copies"),
        ]:
            changed = defaults.changes(read(SOURCE), read(SOURCE.replace(old, new)))
            self.assertEqual([line.split(": ")[0] for line in changed], [name])

    def test_a_default_that_is_gone_is_an_error(self):
        for name in ["OTHER", "--other", "impl Default for Other"]:
            self.assertRaises(defaults.NotFound, defaults.default_of, SOURCE, name)


class Complaining(unittest.TestCase):
    """With the source as it is, and with one constant of it changed."""

    def setUp(self):
        self.found = {
            name: {"defaults": defaults.defaults(groups)} for name, (groups, _) in defaults.PARTS.items()
        }

    def test_what_is_measured_with_these_defaults_is_fine(self):
        self.assertEqual(defaults.complaints(self.found, set()), [])

    def test_a_changed_default_makes_those_old_that_measure_it(self):
        def other(path):
            text = (defaults.ROOT / path).read_text()
            return text.replace("prefetch_bytes: 2 << 20", "prefetch_bytes: 4 << 20")

        lines = defaults.complaints(self.found, set(), lambda groups: defaults.defaults(groups, other))
        old = {line.split(":")[0] for line in lines if not line.startswith(" ")}
        self.assertEqual(old, {name for name, (groups, _) in defaults.PARTS.items() if "paging" in groups})
        self.assertTrue(any("impl Default for PagedConfig" in line for line in lines), lines)

    def test_files_without_a_record_or_missing_are_told_unless_excepted(self):
        del self.found["miss"], self.found["fit"]["defaults"]
        self.assertEqual(
            [line.split(":")[0] for line in defaults.complaints(self.found, set())], ["fit", "miss"]
        )
        self.assertEqual(defaults.complaints(self.found, {"fit", "miss"}), [])

    def test_an_exception_that_is_measured_must_go(self):
        self.assertIn("take it off", defaults.complaints(self.found, {"fit"})[0])

    def test_every_exception_is_a_part(self):
        self.assertLessEqual(defaults.UNRECORDED, set(defaults.PARTS))


if __name__ == "__main__":
    unittest.main()

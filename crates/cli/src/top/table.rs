//! Rows as text: the cells that the screen and `--once` show.

use std::cmp::Ordering;
use std::fmt::Write as _;

use rampool_wire::units::ByteLen;

use crate::advice::argument;

use super::rates::{ClientRow, ProcessRow, Rows, ServerRow, ServerState, TrafficRates};

rampool_wire::listed! {
    /// A column of the table of processes.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Column {
        Run,
        Pid,
        Program,
        Resident,
        Local,
        Faults,
        Hits,
        Waiting,
        In,
        Out,
        P50,
        P99,
        P999,
    }
}

impl Column {
    pub fn title(self) -> &'static str {
        match self {
            Self::Run => "RUN",
            Self::Pid => "PID",
            Self::Program => "PROGRAM",
            Self::Resident => "RESIDENT",
            Self::Local => "LOCAL",
            Self::Faults => "FAULTS/s",
            Self::Hits => "HIT",
            Self::Waiting => "WAIT",
            Self::In => "IN/s",
            Self::Out => "OUT/s",
            Self::P50 => "P50",
            Self::P99 => "P99",
            Self::P999 => "P99.9",
        }
    }

    pub fn cell(self, row: &ProcessRow) -> String {
        match self {
            Self::Run => row.run.to_string(),
            Self::Pid => row.pid.to_string(),
            Self::Program => row.name.clone(),
            Self::Resident => bytes(row.resident_bytes),
            Self::Local => bytes(row.local_bytes),
            Self::Faults => count(row.faults_per_s),
            Self::Hits => {
                row.hit_rate.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", share * 100.0))
            }
            Self::Waiting => format!("{:.0} %", row.waiting * 100.0),
            Self::In => byte_rate(row.in_bytes_per_s),
            Self::Out => byte_rate(row.out_bytes_per_s),
            Self::P50 => time(row.latency_ns[0]),
            Self::P99 => time(row.latency_ns[1]),
            Self::P999 => time(row.latency_ns[2]),
        }
    }

    /// The default order of this column: names and numbers upwards, amounts from the largest down.
    pub fn order(self, a: &ProcessRow, b: &ProcessRow) -> Ordering {
        match self {
            Self::Run => a.run.cmp(&b.run),
            Self::Pid => a.pid.cmp(&b.pid),
            Self::Program => a.name.cmp(&b.name),
            Self::Resident => b.resident_bytes.cmp(&a.resident_bytes),
            Self::Local => b.local_bytes.cmp(&a.local_bytes),
            Self::Faults => b.faults_per_s.total_cmp(&a.faults_per_s),
            // The worst first.
            Self::Hits => a.hit_rate.unwrap_or(1.0).total_cmp(&b.hit_rate.unwrap_or(1.0)),
            Self::Waiting => b.waiting.total_cmp(&a.waiting),
            Self::In => b.in_bytes_per_s.total_cmp(&a.in_bytes_per_s),
            Self::Out => b.out_bytes_per_s.total_cmp(&a.out_bytes_per_s),
            Self::P50 => b.latency_ns[0].cmp(&a.latency_ns[0]),
            Self::P99 => b.latency_ns[1].cmp(&a.latency_ns[1]),
            Self::P999 => b.latency_ns[2].cmp(&a.latency_ns[2]),
        }
    }

    pub fn is_text(self) -> bool {
        self == Self::Program
    }
}

pub const SERVER_TITLES: [&str; 12] = [
    "SERVER",
    "STATE",
    "LENDS",
    "LEASED",
    "HELD",
    "FREE",
    "CLIENTS",
    "REQUESTS/s",
    "READ/s",
    "WRITTEN/s",
    "P50",
    "P99",
];

/// How many of [`SERVER_TITLES`] are text, not numbers.
pub const SERVER_TEXTS: usize = 2;

pub fn server_cells(row: &ServerRow) -> [String; 12] {
    let state = match &row.state {
        ServerState::Serving => "serving",
        ServerState::Draining => "draining",
        // The cells are empty, because nothing is known; the reason has a line of its own.
        ServerState::Silent(_) => {
            let mut cells: [String; 12] = std::array::from_fn(|_| "-".to_owned());
            (cells[0], cells[1]) = (row.name.clone(), "SILENT".to_owned());
            return cells;
        }
    };
    let [requests, read, written] = traffic(&row.rates);
    [
        row.name.clone(),
        state.to_owned(),
        bytes(row.memory_bytes),
        bytes(row.lent_bytes),
        bytes(row.held_bytes),
        bytes(row.free_bytes),
        row.clients.len().to_string(),
        requests,
        read,
        written,
        time(row.latency_ns[0]),
        time(row.latency_ns[1]),
    ]
}

/// A client stands below its server, in the same columns.
pub fn client_cells(row: &ClientRow) -> [String; 12] {
    let [requests, read, written] = traffic(&row.rates);
    let processes =
        if row.processes == 1 { "1 process".to_owned() } else { format!("{} processes", row.processes) };
    let name = format!("  {} on {}", row.name, row.host);
    let empty = String::new;
    let [p50, p99] = row.latency_ns.map(time);
    [
        name,
        processes,
        empty(),
        bytes(row.leased_bytes),
        bytes(row.used_bytes),
        empty(),
        empty(),
        requests,
        read,
        written,
        p50,
        p99,
    ]
}

fn traffic(rates: &TrafficRates) -> [String; 3] {
    [count(rates.requests_per_s), byte_rate(rates.read_bytes_per_s), byte_rate(rates.written_bytes_per_s)]
}

/// Which processes wait, and what more local memory would change, as lines.
pub fn advice(rows: &Rows) -> Vec<String> {
    let told = rows.processes.iter().filter_map(|row| {
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        let with_more = row.with_more.as_ref()?;
        let mut line =
            format!("{} ({}) waits {} of the time for pages", row.name, row.pid, percent(row.waiting));
        if with_more.is_empty() {
            line.push_str("; more --local would hardly help");
        }
        for (local, waiting) in with_more {
            let _ = write!(line, ", with --local {} about {}", argument(*local), percent(*waiting));
        }
        Some(line)
    });
    told.collect()
}

/// Why a server is silent, and which runs lack copies, as lines.
pub fn reasons(rows: &Rows) -> Vec<String> {
    let silent = rows.servers.iter().filter_map(|row| match &row.state {
        ServerState::Silent(reason) => Some(reason.clone()),
        _ => None,
    });
    silent.chain(rows.lacking.iter().cloned()).collect()
}

/// Everything as plain text.
pub fn text(rows: &Rows) -> String {
    let mut out = String::new();
    if rows.processes.is_empty() {
        out.push_str("No process of this user is larger than its local memory at the moment.\n");
    } else {
        let mut lines = vec![Column::ALL.map(|c| c.title().to_owned())];
        lines.extend(rows.processes.iter().map(|row| Column::ALL.map(|c| c.cell(row))));
        let texts: Vec<bool> = Column::ALL.iter().map(|c| c.is_text()).collect();
        aligned(&mut out, &lines, &texts);
        for line in advice(rows) {
            let _ = writeln!(out, "{line}");
        }
    }
    if !rows.servers.is_empty() {
        out.push('\n');
        let mut lines = vec![SERVER_TITLES.map(str::to_owned)];
        for server in &rows.servers {
            lines.push(server_cells(server));
            lines.extend(server.clients.iter().map(client_cells));
        }
        let texts: Vec<bool> = (0..SERVER_TITLES.len()).map(|i| i < SERVER_TEXTS).collect();
        aligned(&mut out, &lines, &texts);
        for reason in reasons(rows) {
            let _ = writeln!(out, "{reason}");
        }
    }
    out
}

/// Texts to the left, numbers to the right.
pub fn aligned<const N: usize>(out: &mut String, lines: &[[String; N]], texts: &[bool]) {
    let widths: [usize; N] =
        std::array::from_fn(|i| lines.iter().map(|line| line[i].chars().count()).max().unwrap_or(0));
    for line in lines {
        let mut text = String::new();
        for (i, cell) in line.iter().enumerate() {
            let width = widths[i];
            let _ =
                if texts[i] { write!(text, "{cell:<width$}  ") } else { write!(text, "{cell:>width$}  ") };
        }
        let _ = writeln!(out, "{}", text.trim_end());
    }
}

pub fn bytes(count: u64) -> String {
    ByteLen(count).to_string()
}

pub fn byte_rate(rate: f64) -> String {
    if rate < 1.0 { "0".to_owned() } else { bytes(rounded(rate)) }
}

pub fn count(rate: f64) -> String {
    match rate {
        r if r >= 10_000_000.0 => format!("{:.1} M", r / 1e6),
        r if r >= 10_000.0 => format!("{:.1} k", r / 1e3),
        r => rounded(r).to_string(),
    }
}

pub fn time(nanos: u64) -> String {
    match nanos {
        0 => "-".to_owned(),
        1..1_000 => format!("{nanos} ns"),
        1_000..1_000_000 => format!("{} us", nanos / 1_000),
        1_000_000..1_000_000_000 => format!("{} ms", nanos / 1_000_000),
        _ => format!("{} s", nanos / 1_000_000_000),
    }
}

/// A rate is a count over a time: never negative, far below 2^64.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn rounded(rate: f64) -> u64 {
    rate.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_every_process_server_and_client() {
        let rows = super::super::screen::tests::rows();
        let text = text(&rows);
        let expected = "\
RUN  PID  PROGRAM  RESIDENT    LOCAL  FAULTS/s     HIT  WAIT     IN/s    OUT/s    P50     P99  P99.9
 40   41  sort      500 MiB  512 MiB    25.0 k  92.5 %  64 %  100 MiB  1.5 MiB  16 us  262 us   1 ms
 50   51  python3    12 MiB   64 MiB         0       -   0 %        0        0      -       -      -
sort (41) waits 64 % of the time for pages, with --local 768M about 30 %, with --local 1G about 2 %

SERVER          STATE      LENDS  LEASED     HELD   FREE  CLIENTS  REQUESTS/s   READ/s  WRITTEN/s    P50   P99
127.0.0.1:7117  serving    8 GiB   4 GiB    2 GiB  4 GiB        1        3000  100 MiB    1.5 MiB  32 us  2 ms
  sort on here  1 process          4 GiB  1.9 GiB                        3000  100 MiB    1.5 MiB  32 us  2 ms
memhost1:7117   SILENT         -       -        -      -        -           -        -          -      -     -
cannot reach memhost1:7117: connection refused
";
        assert_eq!(text, expected, "\n{text}");
    }

    #[test]
    fn a_run_that_lacks_copies_is_named_below_the_servers() {
        let said = "Run 7 has 1.6 of 2 copies of each page (81 %): 3 MiB lack one, which are being copied.";
        let lacking = Rows { lacking: vec![said.to_owned()], ..super::super::screen::tests::rows() };
        assert!(
            text(&lacking).ends_with(&format!("{said}\n"))
                && !text(&super::super::screen::tests::rows()).contains("copies")
        );
    }

    #[test]
    fn without_anything_to_show_the_table_says_so() {
        assert!(text(&Rows::default()).starts_with("No process"));
    }

    #[test]
    fn numbers_stay_short() {
        for (rate, shown) in [(0.4, "0"), (9999.0, "9999"), (10_000.0, "10.0 k"), (12_345_678.0, "12.3 M")] {
            assert_eq!(count(rate), shown);
        }
        for (nanos, shown) in
            [(0, "-"), (512, "512 ns"), (16_384, "16 us"), (2_097_152, "2 ms"), (3_000_000_000, "3 s")]
        {
            assert_eq!(time(nanos), shown);
        }
    }
}

//! The live view: what keys do, and how the rows are drawn.

use std::collections::VecDeque;

use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Sparkline, Table};

use super::rates::{ProcessRow, Rows, ServerState};
use super::table::{self, Column};

/// What the caller does after a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    Quit,
    Redraw,
    Nothing,
}

/// Readings kept for the curve of faults.
const HISTORY: usize = 400;

#[derive(Default)]
pub struct Screen {
    rows: Option<Rows>,
    paused: bool,
    sort: Sort,
    scroll: usize,
    faults: VecDeque<u64>,
}

struct Sort {
    column: Column,
    reverse: bool,
}

impl Default for Sort {
    fn default() -> Self {
        Self { column: Column::Faults, reverse: false }
    }
}

impl Screen {
    /// New rows. Nothing changes while the view is paused.
    pub fn show(&mut self, rows: Rows) {
        if self.paused {
            return;
        }
        let faults: f64 = rows.processes.iter().map(|row| row.faults_per_s).sum();
        // Negative or infinite rates do not exist, and a cast of a float saturates.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        self.faults.push_back(faults as u64);
        if self.faults.len() > HISTORY {
            self.faults.pop_front();
        }
        self.rows = Some(rows);
    }

    pub fn key(&mut self, key: KeyEvent) -> Action {
        let columns = Column::ALL;
        let at = columns.iter().position(|c| *c == self.sort.column).unwrap_or(0);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Action::Quit,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Action::Quit,
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Char('s') | KeyCode::Right => {
                self.sort = Sort { column: columns[(at + 1) % columns.len()], reverse: false }
            }
            KeyCode::Left => {
                self.sort = Sort { column: columns[(at + columns.len() - 1) % columns.len()], reverse: false }
            }
            KeyCode::Char('r') => self.sort.reverse = !self.sort.reverse,
            KeyCode::Down | KeyCode::Char('j') => {
                self.scroll = (self.scroll + 1).min(self.lines().saturating_sub(1))
            }
            KeyCode::Up | KeyCode::Char('k') => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::Home => self.scroll = 0,
            _ => return Action::Nothing,
        }
        Action::Redraw
    }

    fn lines(&self) -> usize {
        self.rows.as_ref().map_or(0, |rows| rows.processes.len())
    }

    fn sorted(&self) -> Vec<&ProcessRow> {
        let mut processes: Vec<&ProcessRow> = self.rows.iter().flat_map(|rows| &rows.processes).collect();
        processes.sort_by(|a, b| {
            let order = self.sort.column.order(a, b);
            if self.sort.reverse { order.reverse() } else { order }.then(a.pid.cmp(&b.pid))
        });
        processes
    }

    pub fn draw(&self, frame: &mut Frame) {
        let servers = self.rows.as_ref().map_or(0, server_lines);
        // The processes get what is left, but never less than a title and three lines.
        let server_height =
            u16::try_from(servers).unwrap_or(u16::MAX).min(frame.area().height.saturating_sub(10)).max(2);
        let [head, curve, processes, servers, keys] = Layout::vertical([
            Constraint::Length(2),
            Constraint::Length(2),
            Constraint::Min(4),
            Constraint::Length(server_height),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        self.draw_head(frame, head);
        self.draw_curve(frame, curve);
        self.draw_processes(frame, processes);
        self.draw_servers(frame, servers);
        let keys_line = "q quit  p pause  s sort by the next column  r reverse  up/down scroll";
        frame.render_widget(Paragraph::new(keys_line).dim(), keys);
    }

    fn draw_head(&self, frame: &mut Frame, area: Rect) {
        let mut title = vec!["rampool top".bold()];
        let Some(rows) = &self.rows else {
            frame.render_widget(Paragraph::new(vec![Line::from(title), Line::from("looking ...")]), area);
            return;
        };
        let mut runs: Vec<u32> = rows.processes.iter().map(|p| p.run).collect();
        runs.sort_unstable();
        runs.dedup();
        let amount =
            |count: usize, one: &str, more: &str| format!("{count} {}", if count == 1 { one } else { more });
        let text = format!(
            "  {}, {}, {}",
            amount(runs.len(), "run", "runs"),
            amount(rows.processes.len(), "process", "processes"),
            amount(rows.servers.len(), "server", "servers")
        );
        title.push(text.into());
        if self.paused {
            title.push("  PAUSED".yellow().bold());
        }
        let sum = |value: fn(&ProcessRow) -> f64| rows.processes.iter().map(value).sum::<f64>();
        let totals = format!(
            "faults {}/s   in {}/s   out {}/s   resident {}",
            table::count(sum(|p| p.faults_per_s)),
            table::byte_rate(sum(|p| p.in_bytes_per_s)),
            table::byte_rate(sum(|p| p.out_bytes_per_s)),
            table::bytes(rows.processes.iter().map(|p| p.resident_bytes).sum()),
        );
        frame.render_widget(Paragraph::new(vec![Line::from(title), Line::from(totals)]), area);
    }

    /// Faults a second over time, the newest at the right.
    fn draw_curve(&self, frame: &mut Frame, area: Rect) {
        let width = usize::from(area.width);
        let newest = self.faults.iter().skip(self.faults.len().saturating_sub(width)).copied();
        let mut data = vec![0; width.saturating_sub(self.faults.len())];
        data.extend(newest);
        frame.render_widget(Sparkline::default().data(data).style(Style::new().cyan()), area);
    }

    fn draw_processes(&self, frame: &mut Frame, area: Rect) {
        let titles = Column::ALL.map(|column| {
            let mark = match (column == self.sort.column, self.sort.reverse) {
                (true, false) => "*",
                (true, true) => "^",
                _ => "",
            };
            let title = Span::from(format!("{}{mark}", column.title()));
            aligned(if column == self.sort.column { title.underlined() } else { title }, column.is_text())
        });
        let rows = self.sorted().into_iter().skip(self.scroll).map(|row| {
            Row::new(Column::ALL.map(|column| {
                let over =
                    column == Column::Resident && row.resident_bytes > row.local_bytes + row.local_bytes / 8;
                let cell = Span::from(column.cell(row));
                aligned(if over { cell.fg(Color::Red) } else { cell }, column.is_text())
            }))
        });
        let widths = [7, 7, 15, 9, 9, 9, 7, 6, 9, 9, 7, 7, 7].map(Constraint::Length);
        let table = Table::new(rows, widths).header(Row::new(titles).bold()).column_spacing(1);
        let advice = self.rows.as_ref().map(table::advice).unwrap_or_default();
        let advice_height =
            u16::try_from(advice.len()).unwrap_or(u16::MAX).min(area.height.saturating_sub(4));
        let [table_area, advice_area] =
            Layout::vertical([Constraint::Min(2), Constraint::Length(advice_height)]).areas(area);
        frame.render_widget(table, table_area);
        frame.render_widget(Paragraph::new(Text::from_iter(advice)).yellow(), advice_area);
    }

    fn draw_servers(&self, frame: &mut Frame, area: Rect) {
        let Some(rows) = &self.rows else { return };
        if rows.servers.is_empty() {
            let text = "No servers: none is used by a run of yours, and none is named by --server.";
            frame.render_widget(Paragraph::new(vec![Line::default(), Line::from(text).dim()]), area);
            return;
        }
        let reasons = table::reasons(rows);
        let reason_height = u16::try_from(reasons.len()).unwrap_or(u16::MAX);
        let [table_area, reason_area] =
            Layout::vertical([Constraint::Min(2), Constraint::Length(reason_height)]).areas(area);
        let line = |cells: [String; 12], style: Style| {
            let mut index = 0;
            Row::new(cells.map(|cell| {
                index += 1;
                aligned(Span::from(cell), index <= table::SERVER_TEXTS)
            }))
            .style(style)
        };
        let mut lines = Vec::new();
        for server in &rows.servers {
            let style = match server.state {
                ServerState::Serving => Style::new(),
                ServerState::Draining => Style::new().fg(Color::Yellow),
                ServerState::Silent(_) => Style::new().fg(Color::Red),
            };
            lines.push(line(table::server_cells(server), style));
            lines.extend(server.clients.iter().map(|client| line(table::client_cells(client), Style::new())));
        }
        let widths = [28, 11, 9, 9, 9, 9, 7, 10, 9, 9, 6, 6].map(Constraint::Length);
        let table = Table::new(lines, widths)
            .header(line(table::SERVER_TITLES.map(str::to_owned), Style::new().bold()))
            .column_spacing(1);
        frame.render_widget(table, table_area);
        frame.render_widget(Paragraph::new(Text::from_iter(reasons)).red(), reason_area);
    }
}

fn server_lines(rows: &Rows) -> usize {
    1 + rows.servers.iter().map(|s| 1 + s.clients.len()).sum::<usize>() + table::reasons(rows).len()
}

fn aligned(cell: Span<'_>, is_text: bool) -> Cell<'_> {
    let line = Line::from(cell);
    Cell::from(if is_text { line } else { line.right_aligned() })
}

#[cfg(test)]
pub mod tests {
    use rampool_wire::units::ByteLen;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::rates::{ClientRow, ServerRow, TrafficRates};
    use super::*;

    const MIB: u64 = 1 << 20;

    pub fn rows() -> Rows {
        let sort = ProcessRow {
            run: 40,
            pid: 41,
            name: "sort".into(),
            resident_bytes: 500 * MIB,
            local_bytes: 512 * MIB,
            faults_per_s: 25_000.0,
            hit_rate: Some(0.925),
            waiting: 0.64,
            in_bytes_per_s: (100 * MIB) as f64,
            out_bytes_per_s: 1.5 * MIB as f64,
            latency_ns: [1 << 14, 1 << 18, 1 << 20],
            with_more: Some(vec![(ByteLen(768 * MIB), 0.3), (ByteLen(1024 * MIB), 0.02)]),
        };
        let python = ProcessRow {
            run: 50,
            pid: 51,
            name: "python3".into(),
            resident_bytes: 12 * MIB,
            local_bytes: 64 * MIB,
            ..ProcessRow::default()
        };
        let rates = TrafficRates {
            requests_per_s: 3000.0,
            read_bytes_per_s: (100 * MIB) as f64,
            written_bytes_per_s: 1.5 * MIB as f64,
        };
        let latency_ns = [1 << 15, 1 << 21];
        let client = ClientRow {
            name: "sort".into(),
            host: "here".into(),
            processes: 1,
            leased_bytes: 4096 * MIB,
            used_bytes: 1950 * MIB,
            rates,
            latency_ns,
        };
        let server = ServerRow {
            name: "127.0.0.1:7117".into(),
            memory_bytes: 8192 * MIB,
            lent_bytes: 4096 * MIB,
            held_bytes: 2048 * MIB,
            free_bytes: 4096 * MIB,
            connections: 2,
            rates,
            latency_ns,
            clients: vec![client],
            ..ServerRow::default()
        };
        let silent = ServerRow {
            name: "memhost1:7117".into(),
            state: ServerState::Silent("cannot reach memhost1:7117: connection refused".into()),
            ..ServerRow::default()
        };
        Rows { processes: vec![sort, python], servers: vec![server, silent], lacking: Vec::new() }
    }

    fn lines(screen: &Screen, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |y| {
            (0..width).map(|x| buffer[(x, y)].symbol().to_owned()).collect::<String>().trim_end().to_owned()
        };
        (0..height).map(line).collect()
    }

    fn press(screen: &mut Screen, key: char) -> Action {
        screen.key(KeyEvent::from(KeyCode::Char(key)))
    }

    fn shown() -> Screen {
        let mut screen = Screen::default();
        screen.show(rows());
        screen
    }

    #[test]
    fn the_screen_shows_totals_processes_servers_clients_and_what_is_wrong() {
        let lines = lines(&shown(), 140, 18);
        let expected = [
            "rampool top  2 runs, 2 processes, 2 servers",
            "faults 25.0 k/s   in 100 MiB/s   out 1.5 MiB/s   resident 512 MiB",
            "    RUN     PID PROGRAM          RESIDENT     LOCAL FAULTS/s*     HIT   WAIT      IN/s     OUT/s     P50     P99   P99.9",
            "     40      41 sort              500 MiB   512 MiB    25.0 k  92.5 %   64 %   100 MiB   1.5 MiB   16 us  262 us    1 ms",
            "     50      51 python3            12 MiB    64 MiB         0       -    0 %         0         0       -       -       -",
            "sort (41) waits 64 % of the time for pages, with --local 768M about 30 %, with --local 1G about \
             2 %",
            "SERVER                       STATE           LENDS    LEASED      HELD      FREE CLIENTS REQUESTS/s    READ/s WRITTEN/s    P50    P99",
            "127.0.0.1:7117               serving         8 GiB     4 GiB     2 GiB     4 GiB       1       3000   100 MiB   1.5 MiB  32 us   2 ms",
            "  sort on here               1 process                 4 GiB   1.9 GiB                         3000   100 MiB   1.5 MiB  32 us   2 ms",
            "memhost1:7117                SILENT              -         -         -         -       -          -         -         -      -      -",
            "cannot reach memhost1:7117: connection refused",
        ];
        for line in expected {
            assert!(lines.iter().any(|l| l == line), "{line:?} is not in\n{}", lines.join("\n"));
        }
        assert!(lines[17].starts_with("q quit"), "{}", lines[17]);
    }

    #[test]
    fn while_paused_nothing_changes_and_the_screen_says_so() {
        let mut screen = shown();
        assert_eq!(press(&mut screen, 'p'), Action::Redraw);
        screen.show(Rows::default());
        let paused = lines(&screen, 132, 18);
        assert!(paused[0].ends_with("PAUSED"), "{}", paused[0]);
        assert!(paused.iter().any(|l| l.contains("sort on here")));
        press(&mut screen, 'p');
        screen.show(Rows::default());
        let going = lines(&screen, 132, 18);
        assert!(going[0].contains("0 runs") && !going[0].contains("PAUSED"), "{}", going[0]);
        assert!(going.iter().any(|l| l.starts_with("No servers")));
    }

    #[test]
    fn rows_are_sorted_by_the_column_the_user_picks() {
        let mut screen = shown();
        let order = |screen: &Screen| screen.sorted().iter().map(|p| p.pid).collect::<Vec<_>>();
        assert_eq!(order(&screen), [41, 51], "most faults first");
        press(&mut screen, 'r');
        assert_eq!(order(&screen), [51, 41]);
        while screen.sort.column != Column::Program {
            press(&mut screen, 's');
        }
        assert_eq!(order(&screen), [51, 41], "python3 before sort, and the reversal is forgotten");
        assert!(lines(&screen, 132, 18).iter().any(|l| l.contains("PROGRAM*")));
        let before = screen.sort.column;
        for _ in Column::ALL {
            screen.key(KeyEvent::from(KeyCode::Left));
        }
        assert_eq!(screen.sort.column, before, "round the whole circle");
    }

    #[test]
    fn keys_end_the_view_scroll_it_or_do_nothing() {
        let mut screen = shown();
        assert_eq!(press(&mut screen, 'q'), Action::Quit);
        assert_eq!(screen.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Action::Quit);
        assert_eq!(press(&mut screen, 'x'), Action::Nothing);
        for _ in 0..9 {
            screen.key(KeyEvent::from(KeyCode::Down));
        }
        assert_eq!(screen.scroll, 1, "the last row stays in sight");
        assert!(!lines(&screen, 132, 18).iter().any(|l| l.contains(" sort  ")));
    }

    #[test]
    fn any_size_of_terminal_is_drawn_without_a_panic() {
        let first = Screen::default();
        for (width, height) in [(1, 1), (20, 5), (80, 24), (300, 100)] {
            lines(&first, width, height);
            lines(&shown(), width, height);
        }
        assert!(lines(&first, 80, 24)[1].starts_with("looking"));
    }
}

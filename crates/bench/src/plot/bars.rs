//! Stacked bars as in S4's figures 7 to 15: what each rank spent its time on, written as SVG.
//!
//! The picture has a background of its own, light or dark as the viewer prefers, so its text is readable on
//! any page. The colours are those of Okabe and Ito, which most colour-blind people can tell apart. Each part
//! gives its name, time and share where a viewer shows titles.

use std::fmt::Write as _;

use rampool_shared::TimeReport;

/// A run: what stands below its bars, and its ranks.
#[derive(Clone, Debug)]
pub struct Run {
    pub label: String,
    pub ranks: Vec<TimeReport>,
}

/// The colour of each of [`TimeReport::CATEGORIES`], and of text on it.
const COLOURS: [(&str, &str); TimeReport::CATEGORIES.len()] = [
    ("#009e73", "#000000"),
    ("#56b4e9", "#000000"),
    ("#0072b2", "#ffffff"),
    ("#cc79a7", "#000000"),
    ("#f0e442", "#000000"),
    ("#e69f00", "#000000"),
    ("#d55e00", "#000000"),
    ("#8c564b", "#ffffff"),
    ("#999999", "#000000"),
];

const STYLE: &str = "text{font:12px sans-serif}.title{font-weight:bold}\
                     .ground{fill:#fff}.ink{fill:#24292f}.line{stroke:#d0d7de}\
                     @media(prefers-color-scheme:dark)\
                     {.ground{fill:#0d1117}.ink{fill:#e6edf3}.line{stroke:#30363d}}";

/// The tallest bar, in pixels, like all lengths here.
const TALLEST: f64 = 320.0;
/// Above the bars: the title, and a bar's time.
const ABOVE: f64 = 64.0;
/// Left of them: the axis.
const LEFT: f64 = 64.0;
/// Right of them: the legend.
const RIGHT: f64 = 136.0;
/// Below them: ranks, and two lines for each run.
const BELOW: f64 = 64.0;
const BETWEEN_RUNS: f64 = 28.0;
/// All bars together are about this wide, within the limits of a bar.
const WIDE: f64 = 900.0;
const BAR: std::ops::RangeInclusive<f64> = 4.0..=44.0;
/// The width of a letter, at most of the common ones, and the height of a line of text.
const LETTER: f64 = 7.0;
const LINE: f64 = 16.0;

/// Seconds, as they are shown.
struct Unit {
    name: &'static str,
    in_a_second: f64,
}

impl Unit {
    /// In which this many seconds are a number of few digits.
    fn for_up_to(seconds: f64) -> Self {
        match seconds {
            1.0.. => Self { name: "s", in_a_second: 1.0 },
            1e-3.. => Self { name: "ms", in_a_second: 1e3 },
            _ => Self { name: "us", in_a_second: 1e6 },
        }
    }

    fn show(&self, seconds: f64) -> String {
        let number = seconds * self.in_a_second;
        match number {
            100.0.. => format!("{number:.0}"),
            10.0.. => format!("{number:.1}"),
            _ => format!("{number:.2}"),
        }
    }
}

/// Draws the runs side by side, a bar for each rank.
#[must_use]
pub fn draw(title: &str, runs: &[Run]) -> String {
    Picture::new(runs).draw(title, runs)
}

/// A picture under construction.
struct Picture {
    svg: String,
    unit: Unit,
    /// Seconds of the tallest bar.
    most: f64,
    /// A bar, and from one to the next.
    bar: f64,
    step: f64,
}

impl Picture {
    fn new(runs: &[Run]) -> Self {
        let ranks = || runs.iter().flat_map(|run| &run.ranks);
        let most = ranks().map(TimeReport::total_s).fold(0.0, f64::max);
        let most = if most > 0.0 { most } else { 1.0 };
        let step = (WIDE / ranks().count().max(1) as f64).clamp(BAR.start() * 1.25, BAR.end() * 1.25);
        Self { svg: String::new(), unit: Unit::for_up_to(most), most, bar: step * 0.8, step }
    }

    fn draw(mut self, title: &str, runs: &[Run]) -> String {
        let captions: Vec<[String; 2]> = runs.iter().map(|run| caption(run, &self.unit)).collect();
        let width_of = |run: &Run, lines: &[String; 2]| {
            let text = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
            (run.ranks.len() as f64 * self.step).max(text as f64 * LETTER)
        };
        let widths: Vec<f64> = runs.iter().zip(&captions).map(|(run, lines)| width_of(run, lines)).collect();
        let bars = widths.iter().sum::<f64>() + BETWEEN_RUNS * (runs.len() + 1) as f64;
        let width = (LEFT + bars + RIGHT).max(title.chars().count() as f64 * LETTER + 2.0 * LINE);
        let height = ABOVE + TALLEST + BELOW;
        let _ = write!(
            self.svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\">\n\
             <title>{}</title>\n<style>{STYLE}</style>\n<rect class=\"ground\" width=\"100%\" \
                 height=\"100%\" fill=\"#fff\"/>\n",
            escaped(title)
        );
        let _ = writeln!(
            self.svg,
            "<text class=\"ink title\" x=\"{LINE}\" y=\"24\" fill=\"#24292f\">{}</text>",
            escaped(title)
        );
        self.axis(LEFT + bars, runs);
        let mut x = LEFT + BETWEEN_RUNS;
        for ((run, lines), width) in runs.iter().zip(&captions).zip(widths) {
            self.run(x, width, run);
            for (line, y) in lines.iter().zip([2.0, 3.0]) {
                self.text(x + width / 2.0, ABOVE + TALLEST + y * LINE, "middle", line);
            }
            x += width + BETWEEN_RUNS;
        }
        self.legend(LEFT + bars + LINE);
        self.svg + "</svg>\n"
    }

    /// Above the bottom line, where so many seconds are.
    fn tall(&self, seconds: f64) -> f64 {
        seconds / self.most * TALLEST
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, text: &str) {
        let text = escaped(text);
        let _ = writeln!(
            self.svg,
            "<text class=\"ink\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" \
             fill=\"#24292f\">{text}</text>"
        );
    }

    /// Times at the left, with a line across for each.
    fn axis(&mut self, right: f64, runs: &[Run]) {
        let bottom = ABOVE + TALLEST;
        let several = runs.iter().flat_map(|run| &run.ranks).any(|rank| rank.threads > 1);
        let all = if several { ", all threads of a rank together" } else { "" };
        self.text(LINE, ABOVE - LINE, "start", &format!("{}{all}", self.unit.name));
        let step = round_step(self.most * self.unit.in_a_second / 6.0);
        let mut value = 0.0;
        while value <= self.most * self.unit.in_a_second {
            let y = bottom - self.tall(value / self.unit.in_a_second);
            let _ = writeln!(
                self.svg,
                "<line class=\"line\" x1=\"{LEFT:.1}\" y1=\"{y:.3}\" x2=\"{right:.1}\" y2=\"{y:.3}\" \
                 stroke=\"#d0d7de\"/>"
            );
            self.text(LEFT - LETTER, y + 4.0, "end", &shortest(value, step));
            value += step;
        }
        self.text(LEFT - LETTER, bottom + LINE, "end", "rank");
    }

    /// A run's bars from `x` on, in the middle of `width`.
    fn run(&mut self, x: f64, width: f64, run: &Run) {
        let first = x + (width - run.ranks.len() as f64 * self.step) / 2.0;
        let digits = run.ranks.iter().map(|rank| rank.rank.to_string().len()).max().unwrap_or(1);
        let named = ((digits as f64 + 1.0) * LETTER / self.step).ceil().max(1.0);
        for (rank, number) in run.ranks.iter().zip(0_u16..) {
            let at = first + f64::from(number) * self.step + (self.step - self.bar) / 2.0;
            self.rank(at, rank);
            let middle = at + self.bar / 2.0;
            if f64::from(number) % named == 0.0 {
                self.text(middle, ABOVE + TALLEST + LINE, "middle", &rank.rank.to_string());
            }
            let time = self.unit.show(rank.total_s());
            if time.len() as f64 * LETTER <= self.step {
                self.text(middle, ABOVE + TALLEST - self.tall(rank.total_s()) - 4.0, "middle", &time);
            }
        }
    }

    /// One bar, from below.
    fn rank(&mut self, x: f64, rank: &TimeReport) {
        let (all, bar) = (rank.total_s(), self.bar);
        let mut top = ABOVE + TALLEST;
        for ((name, seconds), (fill, ink)) in TimeReport::CATEGORIES.iter().zip(COLOURS) {
            let seconds = seconds(rank);
            if seconds <= 0.0 {
                continue;
            }
            let tall = self.tall(seconds);
            top -= tall;
            let percent = format!("{:.0} %", seconds / all * 100.0);
            let told = format!(
                "rank {}, {name}: {} {}, {percent}",
                rank.rank,
                self.unit.show(seconds),
                self.unit.name
            );
            let _ = writeln!(
                self.svg,
                "<rect x=\"{x:.2}\" y=\"{top:.3}\" width=\"{bar:.2}\" height=\"{tall:.3}\" \
                 fill=\"{fill}\"><title>{told}</title></rect>"
            );
            if tall >= LINE && bar >= percent.len() as f64 * LETTER {
                let (middle, y) = (x + bar / 2.0, top + tall / 2.0 + 4.0);
                let _ = writeln!(
                    self.svg,
                    "<text x=\"{middle:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" \
                     fill=\"{ink}\">{percent}</text>"
                );
            }
        }
    }

    /// In the order of the bars' parts.
    fn legend(&mut self, x: f64) {
        let mut y = ABOVE + 4.0;
        for ((name, _), (fill, _)) in TimeReport::CATEGORIES.iter().zip(COLOURS).rev() {
            let _ = writeln!(
                self.svg,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"12\" height=\"12\" fill=\"{fill}\"/>"
            );
            self.text(x + 20.0, y + 10.0, "start", name);
            y += LINE + 4.0;
        }
    }
}

/// Two lines below a run: its name, and what it was.
fn caption(run: &Run, unit: &Unit) -> [String; 2] {
    let elapsed = run.ranks.iter().map(|rank| rank.elapsed_s).fold(0.0, f64::max);
    let protocol = run.ranks.first().map_or("", |rank| &rank.protocol);
    let time = format!("{protocol}, {} {}", unit.show(elapsed), unit.name);
    if run.label.is_empty() || run.label == protocol {
        [time, String::new()]
    } else {
        [run.label.clone(), time]
    }
}

/// 1, 2 or 5 times a power of ten, not less than `least`.
fn round_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    let times = [1.0, 2.0, 5.0, 10.0];
    times.into_iter().map(|times| times * power).find(|&step| step >= least).unwrap_or(10.0 * power)
}

/// A value next to an axis with such steps.
fn shortest(value: f64, step: f64) -> String {
    match step {
        1.0.. => format!("{value:.0}"),
        0.1.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Escapes a text for XML. Characters that XML cannot represent are replaced.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&apos;",
            '\u{fffe}' | '\u{ffff}' => out.push(char::REPLACEMENT_CHARACTER),
            letter if letter.is_control() => out.push(char::REPLACEMENT_CHARACTER),
            letter => out.push(letter),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: u16, parts: [f64; 9]) -> TimeReport {
        let [
            computing_s,
            read_fault_s,
            write_fault_s,
            requests_s,
            lock_s,
            unlock_s,
            barrier_s,
            word_s,
            other_s,
        ] = parts;
        TimeReport {
            rank,
            protocol: "hlrc".to_owned(),
            threads: 1,
            elapsed_s: parts.iter().sum(),
            computing_s,
            read_fault_s,
            write_fault_s,
            requests_s,
            lock_s,
            unlock_s,
            barrier_s,
            word_s,
            other_s,
            ..TimeReport::default()
        }
    }

    fn run(label: &str, ranks: Vec<TimeReport>) -> Run {
        Run { label: label.to_owned(), ranks }
    }

    type Attributes = Vec<(String, String)>;
    /// Its name, its attributes, and the text behind it.
    type Tag = (String, Attributes, String);
    /// The parts of a bar, from below: names and seconds.
    type Parts = Vec<(String, f64)>;

    /// The tags of a document. Panics if it is not XML.
    fn tags(svg: &str) -> Vec<Tag> {
        let (mut open, mut found) = (Vec::new(), Vec::new());
        for piece in svg.strip_prefix('<').unwrap().split('<') {
            let (tag, text) =
                piece.split_once('>').unwrap_or_else(|| panic!("a < that begins no tag: {piece}"));
            for entity in text.split('&').skip(1).chain(tag.split('&').skip(1)) {
                let name = entity.split_once(';').unwrap_or_else(|| panic!("& alone: {entity}")).0;
                assert!(["amp", "lt", "gt", "quot", "apos"].contains(&name), "{entity}");
            }
            assert!(!piece.chars().any(|letter| letter.is_control() && letter != '\n'), "{piece:?}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop().as_deref(), Some(name), "closed in order");
                continue;
            }
            let (inside, closed) = tag.strip_suffix('/').map_or((tag, false), |inside| (inside, true));
            let (name, mut rest) = inside.split_once(' ').unwrap_or((inside, ""));
            let mut attributes = Vec::new();
            while let Some((attribute, behind)) = rest.split_once("=\"") {
                let (value, behind) = behind.split_once('"').expect("a value ends");
                attributes.push((attribute.trim().to_owned(), value.to_owned()));
                rest = behind;
            }
            assert!(rest.trim().is_empty(), "{tag}");
            if !closed {
                open.push(name.to_owned());
            }
            found.push((name.to_owned(), attributes, text.to_owned()));
        }
        assert!(open.is_empty(), "{open:?} are not closed");
        found
    }

    fn number(attributes: &[(String, String)], name: &str) -> f64 {
        attributes.iter().find(|(attribute, _)| attribute == name).unwrap().1.parse().unwrap()
    }

    /// The bars, each as the names of its parts and their seconds by what the axis says.
    fn bars(svg: &str) -> Vec<Parts> {
        let tags = tags(svg);
        let units = [("s", 1.0), ("ms", 1e3), ("us", 1e6)];
        let unit_of = |text: &str| units.iter().find(|(name, _)| text.trim().split(',').next() == Some(name));
        let (_, in_a_second) = tags
            .iter()
            .find_map(|(name, _, text)| unit_of(text).filter(|_| name == "text"))
            .expect("the axis has a unit");
        // Each line across is followed by its value.
        let marks = tags.windows(2).filter(|pair| pair[0].0 == "line");
        let marks: Vec<(f64, f64)> =
            marks.map(|pair| (pair[1].2.trim().parse().unwrap(), number(&pair[0].1, "y1"))).collect();
        let (bottom, top) = (marks[0], *marks.last().unwrap());
        let seconds = |tall: f64| tall * (top.0 - bottom.0) / (bottom.1 - top.1) / in_a_second;
        let mut bars: Vec<(f64, f64, Parts)> = Vec::new();
        for pair in tags.windows(2).filter(|pair| pair[0].0 == "rect" && pair[1].0 == "title") {
            let (x, y, tall) =
                (number(&pair[0].1, "x"), number(&pair[0].1, "y"), number(&pair[0].1, "height"));
            let (_, name) = pair[1].2.split_once(':').unwrap().0.split_once(", ").unwrap();
            if bars.last().is_none_or(|(before, _, _)| *before != x) {
                bars.push((x, bottom.1, Vec::new()));
            }
            let (_, above, parts) = bars.last_mut().unwrap();
            assert!((*above - (y + tall)).abs() < 0.01, "{name} does not lie on the part before it");
            *above = y;
            parts.push((name.to_owned(), seconds(tall)));
        }
        bars.into_iter().map(|(_, _, parts)| parts).collect()
    }

    #[test]
    fn a_bar_is_as_tall_as_its_ranks_time_and_its_parts_are_the_categories() {
        for scale in [1.0, 1e-3, 1e-6] {
            let times = [
                [50.0, 12.0, 9.0, 3.0, 0.0, 0.0, 41.0, 5.0, 0.25],
                [1.0, 0.0, 0.0, 0.0, 7.0, 2.0, 0.0, 0.0, 0.0],
                [30.0; 9],
            ];
            let times = times.map(|parts| parts.map(|part| part * scale));
            let svg = draw(
                "x",
                &[
                    run("one", vec![rank(0, times[0]), rank(1, times[1])]),
                    run("two", vec![rank(0, times[2])]),
                ],
            );
            let bars = bars(&svg);
            assert_eq!(bars.len(), 3, "{svg}");
            for (bar, parts) in bars.iter().zip(times) {
                let expected: Vec<(&str, f64)> = TimeReport::CATEGORIES
                    .iter()
                    .zip(parts)
                    .filter(|&(_, part)| part > 0.0)
                    .map(|(&(name, _), part)| (name, part))
                    .collect();
                assert_eq!(bar.len(), expected.len(), "{bar:?}");
                for ((name, seconds), (wanted, part)) in bar.iter().zip(expected) {
                    assert!(
                        name == wanted && (seconds - part).abs() < scale * 0.01,
                        "{name} {seconds} for {wanted} {part}"
                    );
                }
            }
        }
    }

    #[test]
    fn names_are_told_as_they_are_and_never_break_the_picture() {
        let nasty = "<prog> \"a\" & 'b' \u{1}\u{1b}[0m \u{ffff} \u{fc}\u{2026}";
        let svg = draw(nasty, &[run(nasty, vec![rank(0, [1.0; 9])])]);
        let tags = tags(&svg);
        let shown =
            "&lt;prog&gt; &quot;a&quot; &amp; &apos;b&apos; \u{fffd}\u{fffd}[0m \u{fffd} \u{fc}\u{2026}";
        assert_eq!(
            tags.iter().filter(|(_, _, text)| text == shown || text.trim_end() == shown).count(),
            3,
            "{svg}"
        );
    }

    #[test]
    fn many_ranks_and_none_that_took_any_time_are_drawn_too() {
        let ranks = (0..300)
            .map(|number| rank(number, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, f64::from(number), 0.0, 0.0]))
            .collect();
        assert_eq!(bars(&draw("many", &[run("", ranks)])).len(), 300);
        let svg = draw("none", &[run("", vec![rank(0, [0.0; 9])])]);
        assert!(bars(&svg).is_empty() && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn everything_lies_inside_of_the_picture() {
        let runs = ["hlrc", "a rather long name of a run"]
            .map(|label| run(label, (0..3).map(|number| rank(number, [1.0; 9])).collect()));
        let svg = draw(
            "a title that is longer than everything else in this picture, and so decides how wide it has to \
             be at the very least",
            &runs,
        );
        let tags = tags(&svg);
        let (width, height) = (number(&tags[0].1, "width"), number(&tags[0].1, "height"));
        for (name, attributes, text) in
            tags.iter().filter(|(_, attributes, _)| attributes.iter().any(|(name, _)| name == "x"))
        {
            let long = match name.as_str() {
                "text" => text.trim().chars().count() as f64 * LETTER,
                _ => number(attributes, "width"),
            };
            let anchored = attributes
                .iter()
                .find(|(name, _)| name == "text-anchor")
                .map_or("start", |(_, anchor)| anchor.as_str());
            let before = match anchored {
                "middle" => long / 2.0,
                "end" => long,
                _ => 0.0,
            };
            let left = number(attributes, "x") - before;
            assert!(left >= 0.0 && left + long <= width, "{name} {text} from {left} on in {width}");
            assert!((0.0..=height).contains(&number(attributes, "y")), "{name} {text}");
        }
    }
}

//! How many copies of each page a run has, in words.

use rampool_client::stats::StatsSnapshot;
use rampool_wire::units::{ByteLen, OS_PAGE_BYTES};

/// Copies of each page that the processes have, on average.
pub fn left(copies: u8, processes: &[StatsSnapshot]) -> f64 {
    let sum = |of: fn(&StatsSnapshot) -> u64| processes.iter().map(of).sum::<u64>();
    let lacking = sum(|process| process.lacking_pages) as f64;
    f64::from(copies) - lacking / sum(|process| process.stored_pages).max(1) as f64
}

/// A run whose pages do not have all of their copies.
#[derive(Debug)]
pub struct Lacking {
    /// Pages that lack one.
    pub pages: u64,
    pub said: String,
}

/// What a run lacks, if anything; `servers`: those of its lease.
pub fn lacking(
    copies: u8,
    servers: impl Iterator<Item = String>,
    processes: &[StatsSnapshot],
) -> Option<Lacking> {
    let lacking: u64 = processes.iter().map(|process| process.lacking_pages).sum();
    let mask = processes.iter().fold(0, |mask, process| mask | process.lost_mask);
    // Others may have taken the place of a server that is not there.
    let stored = processes.iter().any(|process| process.stored_pages > 0);
    if copies < 2 || lacking == 0 && (mask == 0 || stored) {
        return None;
    }
    let bytes = ByteLen(lacking * OS_PAGE_BYTES as u64);
    let left = left(copies, processes);
    let percent = left / f64::from(copies) * 100.0;
    // What is almost whole is not.
    let (left, percent) = ((left * 10.0).floor() / 10.0, percent.floor());
    let out = |index: &u32| 1u64.checked_shl(*index).unwrap_or(0) & mask != 0;
    let out: Vec<String> =
        (0..).zip(servers).filter(|(index, _)| out(index)).map(|(_, server)| server).collect();
    let why = match &out[..] {
        [] => "which are being copied".to_owned(),
        [server] => format!("because server {server} is not there"),
        servers => format!("because servers {} are not there", servers.join(", ")),
    };
    let said = format!("{left:.1} of {copies} copies of each page ({percent} %): {bytes} lack one, {why}");
    Some(Lacking { pages: lacking, said })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lacks_is_said_with_the_reason() {
        let process = |stored_pages, lacking_pages, lost_mask| StatsSnapshot {
            stored_pages,
            lacking_pages,
            lost_mask,
            ..StatsSnapshot::default()
        };
        let of =
            |processes: &[StatsSnapshot]| lacking(2, ["a:1", "b:2"].map(String::from).into_iter(), processes);
        let said = |processes: &[StatsSnapshot]| of(processes).map(|lacking| lacking.said);
        assert_eq!(said(&[process(2048, 0, 0)]), None);
        assert_eq!(said(&[process(2048, 0, 2)]), None, "others have taken its place");
        assert!(lacking(1, std::iter::empty(), &[process(2048, 5, 0)]).is_none());
        assert_eq!(of(&[process(1024, 512, 0), process(1024, 256, 2)]).unwrap().pages, 768);
        let refilling = said(&[process(1024, 512, 0), process(1024, 256, 0)]).unwrap();
        assert_eq!(refilling, "1.6 of 2 copies of each page (81 %): 3 MiB lack one, which are being copied");
        let lost = said(&[process(1024, 1024, 2)]).unwrap();
        assert_eq!(
            lost,
            "1.0 of 2 copies of each page (50 %): 4 MiB lack one, because server b:2 is not there"
        );
        let almost = said(&[process(1 << 30, 1, 0)]).unwrap();
        assert!(almost.starts_with("1.9 of 2") && almost.contains("(99 %)"), "{almost}");
        assert!(said(&[process(0, 0, 3)]).unwrap().contains("servers a:1, b:2 are"), "nothing is stored yet");
    }
}

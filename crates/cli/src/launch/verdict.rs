//! Which rank ended a run, and why: when many ranks end at about the same time, the one that the others
//! followed.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use rampool_shared::{EXIT_FAILED, EXIT_FOLLOWED};

/// How a rank ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct End {
    pub rank: usize,
    pub status: ExitStatus,
    /// Its place in the order of ends.
    pub order: usize,
    /// The launcher had begun to end the others.
    pub ended_by_us: bool,
}

/// The message, and the exit code of the run. `None` if all went well.
///
/// `reports` has a line `rank N: why` from each rank whose library saw the run fail. `machines` names the
/// machine of each rank that was started through a remote shell.
pub fn verdict(ends: &[End], reports: &str, machines: &[String]) -> Option<(String, i32)> {
    // Ranks that ended by themselves say more than those that followed. A rank that crashed ended by itself:
    // it seemed silent while its core was written.
    let weight = |end: &&End| match (end.status.signal(), end.status.code()) {
        (Some(signal), _) if end.ended_by_us && is_crash(signal) => 2,
        _ if end.ended_by_us => 4,
        (None, Some(EXIT_FOLLOWED)) => 3,
        (None, Some(EXIT_FAILED)) => 1,
        _ => 0,
    };
    let cause = ends.iter().filter(|end| !end.status.success()).min_by_key(|end| (weight(end), end.order))?;
    let own = format!("rank {}: ", cause.rank);
    let machine = machines.get(cause.rank);
    let on = machine.map(|machine| format!(" on {machine}")).unwrap_or_default();
    let why = match (cause.status.signal(), cause.status.code()) {
        (Some(signal), _) => format!("rank {} was killed by signal {signal}{}", cause.rank, name(signal)),
        (None, Some(code @ (EXIT_FAILED | EXIT_FOLLOWED))) => {
            let said = reports.lines().find(|line| line.starts_with(&own));
            said.map_or_else(
                || format!("rank {} ended the run (exit code {code})", cause.rank),
                str::to_owned,
            )
        }
        (None, Some(SHELL_FAILED)) if machine.is_some() => {
            let lost = format!(": rank {} is lost: ", cause.rank);
            let (what, seen) = match reports.lines().find(|line| line.contains(&lost)) {
                Some(line) => ("was killed", format!(" ({line})")),
                None => ("could not be started", String::new()),
            };
            format!(
                "rank {}{on} {what}, or the connection to it broke: the remote shell ended with exit code \
                 {SHELL_FAILED}{seen}",
                cause.rank
            )
        }
        (None, code) => format!("rank {}{on} ended with exit code {}", cause.rank, code.unwrap_or(1)),
    };
    let others = match ends.len() - 1 {
        0 => String::new(),
        1 => "; so the other rank was ended".to_owned(),
        count => format!("; so the {count} other ranks were ended"),
    };
    let code = cause.status.code().unwrap_or_else(|| 128 + cause.status.signal().unwrap_or(0));
    Some((format!("{why}{others}"), code))
}

/// ssh uses this exit code for its own failures, and when a signal killed the command, without saying which.
const SHELL_FAILED: i32 = 255;

/// A signal that the launcher never sends, and for which the kernel writes a core.
fn is_crash(signal: i32) -> bool {
    matches!(
        signal,
        libc::SIGSEGV
            | libc::SIGBUS
            | libc::SIGABRT
            | libc::SIGILL
            | libc::SIGFPE
            | libc::SIGTRAP
            | libc::SIGSYS
    )
}

fn name(signal: i32) -> &'static str {
    match signal {
        libc::SIGKILL => " (SIGKILL)",
        libc::SIGSEGV => " (SIGSEGV)",
        libc::SIGBUS => " (SIGBUS)",
        libc::SIGABRT => " (SIGABRT)",
        libc::SIGTERM => " (SIGTERM)",
        libc::SIGINT => " (SIGINT)",
        libc::SIGILL => " (SIGILL)",
        libc::SIGFPE => " (SIGFPE)",
        libc::SIGPIPE => " (SIGPIPE)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On one machine.
    fn verdict(ends: &[End], reports: &str) -> Option<(String, i32)> {
        super::verdict(ends, reports, &[])
    }

    fn end(rank: usize, raw: i32, order: usize) -> End {
        End { rank, status: ExitStatus::from_raw(raw), order, ended_by_us: false }
    }

    #[test]
    fn no_rank_is_blamed_when_all_go_well() {
        assert_eq!(verdict(&[end(0, 0, 1), end(1, 0, 0)], ""), None);
    }

    #[test]
    fn the_rank_that_was_killed_is_named_even_if_those_that_followed_ended_first() {
        let ends = [end(0, EXIT_FOLLOWED << 8, 0), end(1, libc::SIGKILL, 2), end(2, EXIT_FOLLOWED << 8, 1)];
        let (message, code) = verdict(&ends, "rank 0: rank 1 is lost: x\n").unwrap();
        assert_eq!(message, "rank 1 was killed by signal 9 (SIGKILL); so the 2 other ranks were ended");
        assert_eq!(code, 137);
    }

    #[test]
    fn what_a_rank_saw_is_told_in_its_words() {
        let ends = [end(0, EXIT_FOLLOWED << 8, 0), end(1, EXIT_FAILED << 8, 1)];
        let reports = "rank 0: rank 1 ended the run: y\nrank 1: ranks meet at different barriers\n";
        assert_eq!(
            verdict(&ends, reports).unwrap().0,
            "rank 1: ranks meet at different barriers; so the other rank was ended"
        );
        assert_eq!(
            verdict(&ends, "").unwrap().0,
            "rank 1 ended the run (exit code 86); so the other rank was ended"
        );
    }

    #[test]
    fn a_rank_that_the_launcher_ended_is_not_to_blame() {
        let mut hung = end(1, libc::SIGTERM, 1);
        hung.ended_by_us = true;
        let (message, code) =
            verdict(&[end(0, EXIT_FOLLOWED << 8, 0), hung], "rank 0: rank 1 is lost: silent\n").unwrap();
        assert_eq!(
            (message.as_str(), code),
            ("rank 0: rank 1 is lost: silent; so the other rank was ended", EXIT_FOLLOWED)
        );
    }

    #[test]
    fn a_rank_whose_core_took_longer_to_write_than_a_silence_is_named_by_its_crash() {
        let mut crashed = end(1, libc::SIGSEGV, 2);
        crashed.ended_by_us = true;
        let reports = "rank 0: rank 1 is lost: it has said nothing for 30 s\nrank 2: rank 0 ended the run\n";
        let (message, code) =
            verdict(&[end(0, EXIT_FOLLOWED << 8, 0), crashed, end(2, EXIT_FOLLOWED << 8, 1)], reports)
                .unwrap();
        assert_eq!(
            (message.as_str(), code),
            ("rank 1 was killed by signal 11 (SIGSEGV); so the 2 other ranks were ended", 139)
        );
        // It may have crashed because it was ended.
        let (message, _) =
            verdict(&[end(0, EXIT_FAILED << 8, 0), crashed], "rank 0: ranks meet at different barriers\n")
                .unwrap();
        assert!(message.starts_with("rank 0: ranks meet"), "{message}");
    }

    #[test]
    fn an_exit_code_passes_through() {
        let (message, code) = verdict(&[end(0, 3 << 8, 0), end(1, EXIT_FOLLOWED << 8, 1)], "").unwrap();
        assert_eq!(
            (message.as_str(), code),
            ("rank 0 ended with exit code 3; so the other rank was ended", 3)
        );
    }

    #[test]
    fn a_machine_that_cannot_be_reached_is_named() {
        let machines = ["near".to_owned(), "far".to_owned()];
        let (message, code) =
            super::verdict(&[end(0, EXIT_FOLLOWED << 8, 1), end(1, 255 << 8, 0)], "", &machines).unwrap();
        assert!(message.contains("rank 1 on far could not be started") && code == 255, "{message}");
        let reports = "rank 0: rank 1 is lost: its process ended without finishing\n";
        let (message, _) =
            super::verdict(&[end(0, EXIT_FOLLOWED << 8, 1), end(1, 255 << 8, 0)], reports, &machines)
                .unwrap();
        assert!(
            message.starts_with("rank 1 on far was killed, or the connection")
                && message.contains("(rank 0: rank 1 is lost: its"),
            "{message}"
        );
        let (message, _) = super::verdict(&[end(0, 0, 1), end(1, 3 << 8, 0)], "", &machines).unwrap();
        assert!(message.starts_with("rank 1 on far ended with exit code 3"), "{message}");
    }
}

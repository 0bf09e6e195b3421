//! Heaps that are shared memory: they stay on this machine, and are not part of the local memory that the
//! user sets. ZGC has its heap in a memory file, and PostgreSQL its buffers in shared anonymous memory.

use std::collections::BTreeMap;
use std::fs;

/// Shared memory of a process from which on it is worth a line.
const LEAST: u64 = 64 << 20;

/// What a process holds in shared memory that is no file, if that is much: bytes, and the name
/// of the largest.
pub(super) fn much(process: u32) -> Option<(u64, String)> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let resident = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).and_then(kib)?;
    (resident >= LEAST).then_some(())?;
    held(&fs::read_to_string(format!("/proc/{process}/smaps")).ok()?)
}

fn held(smaps: &str) -> Option<(u64, String)> {
    let mut by_name: BTreeMap<&str, u64> = BTreeMap::new();
    let mut name = None;
    for line in smaps.lines() {
        if let Some(resident) = line.strip_prefix("Rss:") {
            let held = name.map(|name| by_name.entry(name).or_default());
            held.into_iter().for_each(|held| *held += kib(resident).unwrap_or(0));
        } else if line.starts_with(|first: char| first.is_ascii_digit() || matches!(first, 'a'..='f')) {
            name = shared_name(line);
        }
    }
    let bytes = by_name.values().sum();
    let (largest, _) = by_name.into_iter().max_by_key(|(_, held)| *held)?;
    (bytes >= LEAST).then(|| (bytes, largest.trim_end_matches(" (deleted)").to_owned()))
}

/// The name of a mapping that is writable shared memory of the program's: a memory file, shared anonymous
/// memory, or a segment of System V or of POSIX.
fn shared_name(line: &str) -> Option<&str> {
    let mut fields = line.splitn(6, ' ');
    let flags = fields.nth(1)?;
    let name = fields.nth(3)?.trim_start();
    let memory = ["/memfd:", "/dev/zero", "/SYSV", "/dev/shm/"].iter().any(|start| name.starts_with(start));
    (flags.starts_with("rw") && flags.ends_with('s') && memory && !name.contains("rampool")).then_some(name)
}

fn kib(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(flags: &str, name: &str, mib: u64) -> String {
        format!(
            "7f00a000-7f00b000 {flags} 00000000 00:01 7                      {name}\nSize: 4 kB\n\
             Rss:  {} kB\n",
            mib << 10
        )
    }

    #[test]
    fn a_heap_in_shared_memory_is_named_and_nothing_else_is() {
        let heap = mapping("rw-s", "/memfd:java_heap (deleted)", 70);
        let others = mapping("rw-p", "", 900)
            + &mapping("r--s", "/memfd:fonts (deleted)", 900)
            + &mapping("rw-s", "/home/me/data.bin", 900)
            + &mapping("rw-s", "/memfd:rampool-shared (deleted)", 900)
            + &mapping("rw-p", "[heap]", 900);
        assert_eq!(held(&others), None);
        let small = mapping("rw-s", "/dev/zero (deleted)", 10);
        assert_eq!(held(&small), None);
        let found = held(&(heap + &others + &small));
        assert_eq!(found, Some((80 << 20, "/memfd:java_heap".into())));
    }
}

//! How much memory this process can use: the machine's, or the limit of its control group (a container, a
//! batch job).

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Bytes that can be allocated without pushing anything else out.
///
/// # Errors
/// If /proc does not report it.
pub fn bytes() -> Result<u64> {
    let machine = of_machine("MemAvailable:")?;
    Ok(own_groups().iter().map(Group::left).fold(machine, u64::min))
}

/// Total bytes.
///
/// # Errors
/// As [`bytes`].
pub fn in_all() -> Result<u64> {
    let machine = of_machine("MemTotal:")?;
    Ok(own_groups().iter().map(|group| group.limit).fold(machine, u64::min))
}

/// Where the kernel says how long this machine, and the control groups that this process is in, wait for
/// memory.
pub fn pressure_files() -> Vec<PathBuf> {
    let cgroup = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut files = vec![PathBuf::from("/proc/pressure/memory")];
    files.extend(pressure_of_groups(Path::new("/sys/fs/cgroup"), &cgroup));
    files
}

fn pressure_of_groups(mounts: &Path, cgroup: &str) -> Vec<PathBuf> {
    // Of version 2 only; in a container the path may be one of the host's, as in `groups`.
    let Some(path) = cgroup.lines().find_map(|line| line.strip_prefix("0::/")) else { return Vec::new() };
    let below = Path::new(path).ancestors().map(|part| mounts.join(part).join("memory.pressure"));
    below.filter(|file| file.exists()).collect()
}

fn of_machine(field: &str) -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("/proc/meminfo cannot be read")?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix(field))
        .and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .with_context(|| format!("/proc/meminfo does not say {}", field.trim_end_matches(':')))?;
    Ok(kib.saturating_mul(1024))
}

/// A control group with a limit.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    limit: u64,
    used: u64,
    /// Cached files within that usage, which the kernel drops first.
    cached: u64,
}

impl Group {
    fn left(&self) -> u64 {
        self.limit.saturating_sub(self.used.saturating_sub(self.cached))
    }
}

/// What a directory of one version's control groups reports.
type Read = fn(&Path) -> Option<Group>;

fn own_groups() -> Vec<Group> {
    groups(Path::new("/sys/fs/cgroup"), &std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default())
}

/// The groups with limits that a process with this `/proc/self/cgroup` is in, innermost first. A group that
/// cannot be read imposes no limit.
fn groups(mounts: &Path, cgroup: &str) -> Vec<Group> {
    let mut found = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        // Version 2, alone or together with version 1 (cgroups(7)), and version 1.
        let (roots, read): (&[&str], Read) = match controllers {
            "" => (&["", "unified"], of_version_2),
            _ if controllers.split(',').any(|controller| controller == "memory") => {
                (&["memory"], of_version_1)
            }
            _ => continue,
        };
        for root in roots.iter().map(|root| mounts.join(root)) {
            // In a container the path may be one of the host's, which does not exist here; the container's
            // own group is then the root.
            let below = Path::new(path.trim_start_matches('/'));
            found.extend(below.ancestors().filter_map(|part| read(&root.join(part))));
        }
    }
    found
}

fn of_version_2(group: &Path) -> Option<Group> {
    Some(Group {
        limit: number(group.join("memory.max"))?,
        used: number(group.join("memory.current"))?,
        cached: cached(&group.join("memory.stat"), ["inactive_file", "active_file"]),
    })
}

fn of_version_1(group: &Path) -> Option<Group> {
    Some(Group {
        limit: number(group.join("memory.limit_in_bytes"))?,
        used: number(group.join("memory.usage_in_bytes"))?,
        cached: cached(&group.join("memory.stat"), ["total_inactive_file", "total_active_file"]),
    })
}

/// `None` also for `max`, which is no limit.
fn number(file: PathBuf) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn cached(file: &Path, names: [&str; 2]) -> u64 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let value = |line: &str| {
        line.split_once(' ')
            .filter(|(name, _)| names.contains(name))
            .and_then(|(_, bytes)| bytes.trim().parse::<u64>().ok())
    };
    text.lines().filter_map(value).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn tree(files: &[(&str, String)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn pressure_is_that_of_all_groups_above() {
        let dir = tree(&[
            ("memory.pressure", String::new()),
            ("jobs/1/memory.pressure", String::new()),
            ("jobs/2/memory.pressure", String::new()),
        ]);
        let expected = ["jobs/1/memory.pressure", "memory.pressure"].map(|file| dir.path().join(file));
        assert_eq!(pressure_of_groups(dir.path(), "4:cpu:/x\n0::/jobs/1\n"), expected);
        assert_eq!(pressure_of_groups(dir.path(), "0::/elsewhere\n"), expected[1..]);
        assert!(pressure_of_groups(dir.path(), "4:memory:/jobs/1\n").is_empty());
    }

    #[test]
    fn the_tightest_group_counts() {
        let stat = format!("anon 5\nactive_file {}\ninactive_file {}\nfile_mapped 7\n", 10 * MIB, 20 * MIB);
        let dir = tree(&[
            ("jobs/memory.max", format!("{}\n", 400 * MIB)),
            ("jobs/memory.current", format!("{}\n", 390 * MIB)),
            ("jobs/memory.stat", stat),
            ("jobs/1/memory.max", "max\n".into()),
            ("jobs/1/memory.current", format!("{}\n", 90 * MIB)),
            ("jobs/1/step/memory.max", format!("{}\n", 100 * MIB)),
            ("jobs/1/step/memory.current", format!("{}\n", 30 * MIB)),
        ]);
        let left: Vec<u64> =
            groups(dir.path(), "0::/jobs/1/step\n").iter().map(|group| group.left() / MIB).collect();
        assert_eq!(left, [70, 40], "the step's, and all the jobs' without what is cached");
        assert_eq!(groups(dir.path(), "0::/elsewhere\n"), []);
        assert_eq!(groups(dir.path(), "no line\n0\n:::\n"), []);
    }

    #[test]
    fn a_container_sees_its_own_group_as_the_root() {
        let dir = tree(&[
            ("memory/memory.limit_in_bytes", format!("{}\n", 64 * MIB)),
            ("memory/memory.usage_in_bytes", format!("{}\n", 70 * MIB)),
            ("memory/memory.stat", format!("active_file 1\ntotal_active_file {}\n", 8 * MIB)),
        ]);
        let found = groups(dir.path(), "9:name=systemd:/\n4:cpu,memory:/docker/0123\n0::/\n");
        assert_eq!(found, [Group { limit: 64 * MIB, used: 70 * MIB, cached: 8 * MIB }]);
        assert_eq!(found[0].left(), 2 * MIB);
    }

    #[test]
    fn this_machine_has_some() {
        assert!(bytes().unwrap() <= in_all().unwrap() && in_all().unwrap() > MIB);
    }
}

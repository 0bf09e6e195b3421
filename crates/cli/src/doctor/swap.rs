//! Swap on block devices, which a memory server on the same machine must not serve.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Says what swap is on network block devices, and warns where this machine may serve it itself.
pub fn show() {
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    let devices = network_devices(&swaps);
    if devices.is_empty() {
        return;
    }
    println!("swap over network  {}", devices.join(", "));
    let servers = servers(Path::new("/proc"));
    if let Some(warning) = warning(&devices, &servers) {
        println!("WARNING: {warning}");
    }
}

/// The network block devices in the text of /proc/swaps.
fn network_devices(swaps: &str) -> Vec<&str> {
    let names = swaps.lines().filter_map(|line| line.split_ascii_whitespace().next());
    names.filter(|name| name.starts_with("/dev/nbd")).collect()
}

/// Processes of this machine that serve block devices.
fn servers(proc: &Path) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(proc) else { return Vec::new() };
    let mut found: Vec<u32> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let pid = entry.file_name().to_str()?.parse().ok()?;
            serves(&std::fs::read(entry.path().join("cmdline")).ok()?).then_some(pid)
        })
        .collect();
    found.sort_unstable();
    found
}

/// Whether this command line is that of a memory server.
fn serves(command_line: &[u8]) -> bool {
    let mut arguments = command_line.split(|byte| *byte == 0);
    let program = arguments.next().map(|program| Path::new(OsStr::from_bytes(program)));
    program.and_then(Path::file_name) == Some(OsStr::new("rampool")) && arguments.next() == Some(b"serve")
}

fn warning(devices: &[&str], servers: &[u32]) -> Option<String> {
    let list: Vec<String> = servers.iter().map(u32::to_string).collect();
    (!devices.is_empty() && !servers.is_empty()).then(|| {
        format!(
            "a memory server runs on this machine (process {}), and swap is on {}. If that server serves \
             that swap, the machine can hang: \
             the server needs memory to take a page, and there is none. Serve swap from another machine.",
            list.join(", "),
            devices.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_on_network_devices_is_found() {
        let swaps = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/zram0 partition 1 0 100\n\
                     /dev/nbd3                               partition\t1048572\t\t0\t\t-2\n\
                     /swap/nbd file 1 0 -3\n";
        assert_eq!(network_devices(swaps), ["/dev/nbd3"]);
        assert!(network_devices("").is_empty());
    }

    #[test]
    fn servers_of_this_machine_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let process = |pid: &str, command: &[u8]| {
            std::fs::create_dir(dir.path().join(pid)).unwrap();
            std::fs::write(dir.path().join(pid).join("cmdline"), command).unwrap();
        };
        process("12", b"/usr/bin/rampool\0serve\0--memory\x001G\0");
        process("13", b"/usr/bin/rampool\0run\0--\0serve\0");
        process("14", b"serve\0rampool\0");
        process("15", b"");
        process("self", b"rampool\0serve\0");
        assert_eq!(servers(dir.path()), [12]);
    }

    #[test]
    fn swap_next_to_a_server_is_warned_of_and_nothing_else_is() {
        let text = warning(&["/dev/nbd3"], &[12]).unwrap();
        assert!(
            text.contains("/dev/nbd3") && text.contains("12") && text.contains("another machine"),
            "{text}"
        );
        assert_eq!((warning(&[], &[12]), warning(&["/dev/nbd3"], &[])), (None, None));
    }
}

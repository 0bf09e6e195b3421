//! `dlmm_server [PORT [MEGABYTES]]`: the command of DLM-M's memory server (Saito, Midorikawa, Kai), as a name
//! for `rampool serve`.
//!
//! `rampool` accepts it when started under that name (a link `dlmm_server` to the binary), and as `rampool
//! dlmm_server`. The two numbers may be followed by options of `rampool serve`.

use std::ffi::OsString;
use std::path::Path;

use rampool_net::DEFAULT_PORT;

const NAME: &str = "dlmm_server";

/// The command line to parse: `dlmm_server 7117 2048 ...` becomes `rampool serve --listen ADDR:7117 --memory
/// 2048M ...`. Others are returned unchanged.
///
/// Without a key (`--key-file`, `RAMPOOL_KEY_FILE`), ADDR is this machine's loopback address, because a
/// server without a key does not authenticate its clients. With a key, ADDR is every address of the machine.
/// Without MEGABYTES, half of the machine's memory is lent.
pub fn translate(arguments: Vec<OsString>, key_in_environment: bool, memory_megabytes: u64) -> Vec<OsString> {
    let own_name = arguments.first().and_then(|a| Path::new(a).file_name()).is_some_and(|name| name == NAME);
    let skip = match (own_name, arguments.get(1)) {
        (true, _) => 1,
        (false, Some(word)) if word == NAME => 2,
        _ => return arguments,
    };
    let mut rest = arguments[skip..].iter().peekable();
    let mut number = || {
        let value: u64 = rest.peek()?.to_str()?.parse().ok()?;
        rest.next();
        Some(value)
    };
    let port = number().unwrap_or(u64::from(DEFAULT_PORT));
    let megabytes = number().unwrap_or(memory_megabytes / 2);
    let options: Vec<OsString> = rest.cloned().collect();
    let keyed = key_in_environment || options.iter().any(|o| o.to_string_lossy().starts_with("--key-file"));
    let mut serve: Vec<OsString> = vec!["rampool".into(), "serve".into()];
    if !options.iter().any(|o| o.to_string_lossy().starts_with("--listen")) {
        let address = if keyed { "0.0.0.0" } else { "127.0.0.1" };
        serve.extend(["--listen".into(), format!("{address}:{port}").into()]);
    }
    serve.extend(["--memory".into(), format!("{megabytes}M").into()]);
    serve.extend(options);
    serve
}

/// Megabytes of memory in this machine.
pub fn machine_megabytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(info.mem_unit.into()) >> 20
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(line: &str, key: bool) -> String {
        let words = line.split(' ').map(OsString::from).collect();
        translate(words, key, 8192)
            .into_iter()
            .map(|w| w.into_string().unwrap())
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn the_papers_command_is_a_server() {
        assert_eq!(
            translated("/usr/bin/dlmm_server 7000 2048", false),
            "rampool serve --listen 127.0.0.1:7000 --memory 2048M"
        );
        assert_eq!(
            translated("rampool dlmm_server 7000 2048", false),
            "rampool serve --listen 127.0.0.1:7000 --memory 2048M"
        );
        assert_eq!(translated("dlmm_server", false), "rampool serve --listen 127.0.0.1:7117 --memory 4096M");
        assert_eq!(
            translated("dlmm_server 7000 --no-lock", false),
            "rampool serve --listen 127.0.0.1:7000 --memory 4096M --no-lock"
        );
    }

    #[test]
    fn only_a_server_with_a_key_listens_to_others() {
        assert_eq!(
            translated("dlmm_server 7000 64 --key-file k", false),
            "rampool serve --listen 0.0.0.0:7000 --memory 64M --key-file k"
        );
        assert_eq!(
            translated("dlmm_server 7000 64", true),
            "rampool serve --listen 0.0.0.0:7000 --memory 64M"
        );
        assert_eq!(
            translated("dlmm_server 7000 64 --listen 10.0.0.1:5", false),
            "rampool serve --memory 64M --listen 10.0.0.1:5"
        );
    }

    #[test]
    fn other_command_lines_stay_as_they_are() {
        for line in ["rampool serve --memory 1G", "rampool", "rampool run -- dlmm_server 1 2"] {
            assert_eq!(translated(line, false), line);
        }
    }
}

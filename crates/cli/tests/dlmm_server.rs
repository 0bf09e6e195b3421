//! The memory server's command of DLM-M, as a process.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};

use rampool_client::pool::{Pool, PoolConfig};
use rampool_wire::units::ByteLen;

/// Ends the server with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_link_named_dlmm_server_lends_what_its_second_number_says() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("dlmm_server");
    symlink(env!("CARGO_BIN_EXE_rampool"), &link).unwrap();
    for command in
        [vec![link.as_os_str()], vec![env!("CARGO_BIN_EXE_rampool").as_ref(), "dlmm_server".as_ref()]]
    {
        let child = Command::new(command[0])
            .args(&command[1..])
            .args(["0", "8", "--no-lock"])
            .env_remove("RAMPOOL_KEY_FILE")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut server = Ended(child.unwrap());
        let mut line = String::new();
        BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}"));
        assert!(address.starts_with("127.0.0.1:"), "{address}");
        let config = |megabytes: u64| {
            PoolConfig::new(vec![address.parse().unwrap()], ByteLen(megabytes << 20), "test")
        };
        let error = Pool::connect(&config(9)).err().unwrap().to_string();
        assert!(error.contains("8 MiB free"), "{error}");
        Pool::connect(&config(8)).unwrap().close();
    }
}

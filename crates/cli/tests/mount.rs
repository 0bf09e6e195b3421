//! `rampool mount --regions`: what programs name in their lease, as files. Each byte is compared.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rampool_client::direct::Direct;
use rampool_client::pool::PoolConfig;
use rampool_testing::skip;
use rampool_wire::units::ByteLen;

mod settings;

struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// A command that says something when it is ready, and what that is.
fn start(arguments: &[&str]) -> (Started, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rampool"));
    settings::clear(&mut command);
    let mut child = command.args(arguments).stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (Started(child), line.trim().to_owned())
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < until, "after 30 s: not {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn named_regions_are_files() {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        return skip("fuse", "no /dev/fuse, or not root");
    }
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().join("at");
    fs::create_dir(&at).unwrap();
    let (servers, addresses): (Vec<_>, Vec<_>) = (0..2)
        .map(|number| {
            let address = format!("unix:{}/s{number}", directory.path().display());
            (start(&["serve", "--memory", "64M", "--no-lock", "--listen", &address]).0, address)
        })
        .unzip();
    let specs = addresses.iter().map(|address| address.parse().unwrap()).collect();
    let mut direct = Direct::connect(&PoolConfig::new(specs, ByteLen(64 << 20), "owner")).unwrap();
    let bytes: Vec<u8> =
        (0..5_000_003u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let orders = direct.open_or_create("orders", bytes.len() as u64).unwrap();
    direct.put(orders, 0, &bytes).unwrap();
    let ticket = directory.path().join("ticket");
    fs::write(&ticket, direct.pool().lease_ticket().to_string()).unwrap();
    let (mut mount, said) = start(&["mount", at.to_str().unwrap(), "--regions", ticket.to_str().unwrap()]);
    assert_eq!(said, format!("files on {}: named regions", at.display()));

    assert_eq!(names(&at), ["orders"]);
    assert_eq!(fs::metadata(at.join("orders")).unwrap().len(), bytes.len() as u64);
    assert!(fs::read(at.join("orders")).unwrap() == bytes, "other bytes come");
    assert_eq!(fs::write(at.join("new"), b"x").unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
    assert_eq!(fs::read(at.join("none")).unwrap_err().kind(), ErrorKind::NotFound);

    // What is written later is there for who opens it later.
    direct.put(orders, 4_999_999, b"last").unwrap();
    let mut file = fs::File::open(at.join("orders")).unwrap();
    let mut last = String::new();
    file.seek(SeekFrom::End(-4)).unwrap();
    file.read_to_string(&mut last).unwrap();
    assert_eq!(last, "last");

    // More names than one answer has room for; a name that no file has.
    for number in 0..400 {
        direct.open_or_create(&format!("{number:0200}"), 1).unwrap();
    }
    direct.open_or_create("a/b", 8192).unwrap();
    direct.open_or_create("rampool.names.0", 8192).unwrap();
    wait_until("all are listed", || names(&at).len() == 402);
    assert_eq!(fs::read(at.join("a%2Fb")).unwrap(), [0; 8192]);

    // A region goes, while it is open, and another one gets its name.
    direct.free(orders);
    wait_until("it is gone", || {
        fs::metadata(at.join("orders")).is_err_and(|error| error.kind() == ErrorKind::NotFound)
    });
    file.seek(SeekFrom::Start(0)).unwrap();
    assert!(file.read(&mut [0; 10]).is_err(), "it is gone");
    let anew = direct.open_or_create("orders", 3).unwrap();
    direct.put(anew, 0, b"new").unwrap();
    wait_until("it is there anew", || fs::read(at.join("orders")).is_ok_and(|read| read == b"new"));

    // A server goes: reading is an error, and the directory can be unmounted.
    drop(file);
    drop(servers);
    assert!(fs::read(at.join("a%2Fb")).is_err());
    rustix::process::kill_process(rustix::process::Pid::from_child(&mount.0), rustix::process::Signal::TERM)
        .unwrap();
    assert!(mount.0.wait().unwrap().success());
    assert_eq!(names(&at), [""; 0]);
}

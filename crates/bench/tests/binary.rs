//! Which `rampool` is measured.

use std::process::Command;

fn quick_fault(rampool: &str) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rampool-bench"));
    command.args(["bench", "fault", "--quick"]);
    command.env("RAMPOOL_BIN", rampool).output().expect("the binary starts")
}

#[test]
fn rampool_bin_names_the_rampool_that_is_measured() {
    let copied = tempfile::tempdir().expect("a directory");
    let other = copied.path().join("rampool");
    std::os::unix::fs::symlink("/bin/false", &other).expect("a link");
    let failed = quick_fault(other.to_str().expect("UTF-8"));
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && said.contains(other.to_str().expect("UTF-8")), "{said}");
}

#[test]
fn a_rampool_bin_that_is_no_file_is_named() {
    let failed = quick_fault("/no/where/rampool");
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && said.contains("RAMPOOL_BIN names /no/where/rampool"), "{said}");
}

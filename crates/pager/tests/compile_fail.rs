//! What safe code cannot do with a pager or a `Direct`: it does not compile, for just the reason that is meant.
//!
//! A `compile_fail` in the documentation passes for any error, on a stable compiler. Here each program is compiled
//! alone, and the codes of its errors are compared.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The newest build of a crate that this test is linked with.
fn library(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let found = std::fs::read_dir(test.parent().expect("it is in a directory")).expect("that can be read");
    let of_crate = |path: &PathBuf| {
        let file = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        file.starts_with(&format!("lib{name}-")) && file.ends_with(".rlib")
    };
    let built = found.map(|entry| entry.expect("an entry").path()).filter(of_crate);
    built
        .max_by_key(|path| path.metadata().and_then(|data| data.modified()).expect("a time"))
        .expect("the crate is built before its tests")
}

/// The codes of the errors that a library of this source has.
fn errors(source: &str) -> Vec<String> {
    let thread = std::thread::current().name().map_or_else(String::new, |name| name.replace("::", "-"));
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(thread);
    std::fs::create_dir_all(&place).expect("a directory can be made");
    let path = place.join("program.rs");
    std::fs::write(&path, source).expect("the source can be written");
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--crate-type=lib", "--edition=2024", "--emit=metadata", "--error-format=json"]);
    rustc.arg("--out-dir").arg(&place).arg(&path);
    for name in ["rampool_pager", "rampool_client"] {
        let library = library(name);
        rustc.arg("-L").arg(format!("dependency={}", library.parent().unwrap_or(Path::new(".")).display()));
        rustc.arg("--extern").arg(format!("{name}={}", library.display()));
    }
    let output = rustc.output().expect("the compiler that built this test runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let mut codes: Vec<String> = said
        .lines()
        .filter(|line| line.contains("\"level\":\"error\""))
        .filter_map(|line| Some(line.split("\"code\":\"").nth(1)?.split('"').next()?.to_owned()))
        .collect();
    codes.dedup();
    assert_eq!(output.status.success(), codes.is_empty(), "{said}");
    codes
}

const PAGER: &str = "use rampool_pager::{backing::Backing, pager::Pager};
pub fn of<B: Backing>(one: &mut Pager<B>, two: &mut Pager<B>)";
const DIRECT: &str = "use rampool_client::direct::Direct;
pub fn of(one: &mut Direct, two: &mut Direct)";

#[test]
fn two_pagers_or_directs_cannot_exchange_what_writes_into_their_memory() {
    assert_eq!(errors(&format!("{PAGER} {{ let _ = (one.backing(), two.backing()); }}")), [""; 0]);
    assert_eq!(errors(&format!("{PAGER} {{ std::mem::swap(one.backing(), two.backing()); }}")), ["E0308"]);
    assert_eq!(errors(&format!("{PAGER} {{ let _ = (one.backing_mut(), two); }}")), ["E0599"]);
    assert_eq!(errors(&format!("{DIRECT} {{ let _ = (one.pool(), two.pool()); }}")), [""; 0]);
    assert_eq!(errors(&format!("{DIRECT} {{ std::mem::swap(one.pool(), two.pool()); }}")), ["E0308"]);
}

#[test]
fn safe_code_cannot_say_that_memory_was_given_up() {
    for call in ["adopt_mapped(0, 1)", "discard(0, 1)", "forget(0, 1)", "give_back(0, 1)"] {
        assert_eq!(errors(&format!("{PAGER} {{ let _ = (one.{call}, two); }}")), ["E0133"], "{call}");
    }
    for call in ["adopt(0, 1)", "moved(0, 1, 1)"] {
        assert_eq!(errors(&format!("{PAGER} {{ let _ = (one.{call}, two); }}")), ["E0624"], "{call}");
    }
}

//! The binary `rampool`, which starts `rampool-bench` and is started by it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The binary that `RAMPOOL_BIN` names, as `make test` does after building everything. Otherwise it is built
/// here, in the directory of `rampool-bench`: tests of one package do not build the binaries of another.
pub fn rampool() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        if let Some(binary) = std::env::var_os("RAMPOOL_BIN") {
            return here.join("../..").join(binary);
        }
        let binary = Path::new(env!("CARGO_BIN_EXE_rampool-bench")).with_file_name("rampool");
        let profile = binary.parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build
            .args(["build", "--quiet", "--offline", "--package", "rampool-cli", "--target-dir"])
            .arg(profile.parent().unwrap());
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.current_dir(here).status().unwrap().success());
        binary
    })
}

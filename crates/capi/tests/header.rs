//! `include/rampool.h` is generated from the Rust source. `RAMPOOL_WRITE_HEADER=1 cargo test -p rampool-capi
//! --test header` (`make header`) writes it.

use std::path::Path;

#[test]
fn the_committed_header_is_current() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(here.join("cbindgen.toml")).unwrap();
    // Only this file and its modules, not the dependencies. The papers' headers are written by hand: their
    // modules are marked to be ignored.
    let bindings =
        cbindgen::Builder::new().with_src(here.join("src/lib.rs")).with_config(config).generate().unwrap();
    let mut generated = Vec::new();
    bindings.write(&mut generated);
    // Rust's heading for what a caller of an unsafe function promises, in C's words.
    let generated = String::from_utf8(generated).unwrap().replace(" * # Safety\n", " * Requirements:\n");
    let path = here.join("include/rampool.h");
    if std::env::var_os("RAMPOOL_WRITE_HEADER").is_some() {
        std::fs::write(&path, generated).unwrap();
        return;
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == generated,
        "include/rampool.h differs from the Rust source; run `make header` and commit it"
    );
}

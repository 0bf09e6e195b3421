//! Gives the shared library its soname.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Until 1.0, programs link against the minor version.
    let minor = std::env::var("CARGO_PKG_VERSION_MINOR").unwrap_or_default();
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,librampool.so.0.{minor}");
}

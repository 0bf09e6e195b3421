//! For cargo-fuzz: `cargo +nightly fuzz run --features libfuzzer server`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| rampool_fuzz::server(data));

//! For cargo-fuzz: `cargo +nightly fuzz run --features libfuzzer trace`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| rampool_fuzz::trace(data));

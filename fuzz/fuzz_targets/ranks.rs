//! For cargo-fuzz: `cargo +nightly fuzz run --features libfuzzer ranks`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| rampool_fuzz::ranks(data));

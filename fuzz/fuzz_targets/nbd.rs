//! For cargo-fuzz: `cargo +nightly fuzz run --features libfuzzer nbd`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| rampool_fuzz::nbd(data));

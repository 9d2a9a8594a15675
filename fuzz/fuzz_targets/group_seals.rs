#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tensorwire::group::fuzz::seals(data));

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tensorwire::lease::fuzz_frames(data));

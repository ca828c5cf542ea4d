#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wald_storage::fuzzing::cursor(data));

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wald_server_fuzz::manifest(data));

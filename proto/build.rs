//! Compiles the contract, without protoc: messages and stubs for both sides, and the
//! descriptor set that reflection serves.

use std::path::PathBuf;

use prost::Message;

const FILES: [&str; 7] = [
    "wald/v1/errors.proto",
    "wald/v1/types.proto",
    "wald/v1/record.proto",
    "wald/v1/cursor.proto",
    "wald/v1/log.proto",
    "wald/v1/wal.proto",
    "wald/v1/ops.proto",
];

/// Apart, because reflection shows it only where it is served.
const ECHO: [&str; 1] = ["wald/echo/v1/echo.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=wald");
    compile(&FILES, "wald.v1.bin")?;
    compile(&ECHO, "wald.echo.v1.bin")
}

fn compile(files: &[&str], set: &str) -> Result<(), Box<dyn std::error::Error>> {
    // Imports are included so that reflection can answer for Duration and the like, source
    // info so that `grpcurl describe` shows the comments.
    let descriptors = protox::Compiler::new(["."])?
        .include_imports(true)
        .include_source_info(true)
        .open_files(files)?
        .file_descriptor_set();
    let out_dir = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out_dir.join(set), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".")
        .codec_path("crate::codec::MessageCodec")
        // A program that compares reasons must not break when the contract gets a new one.
        .enum_attribute("wald.v1.Reason", "#[non_exhaustive]")
        .compile_fds(descriptors)?;
    Ok(())
}

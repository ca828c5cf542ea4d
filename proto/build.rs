//! Compiles the contract, without protoc: messages and stubs for both sides, and the
//! descriptor set that reflection serves.

use std::path::PathBuf;

use prost::Message;
use prost_types::FileDescriptorSet;

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
    let contract = compile(&FILES, "wald.v1.bin")?;
    compile(&ECHO, "wald.echo.v1.bin")?;
    serve_unary(contract)
}

fn compile(files: &[&str], set: &str) -> Result<FileDescriptorSet, Box<dyn std::error::Error>> {
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
        .compile_fds(descriptors.clone())?;
    Ok(descriptors)
}

/// The unary calls of `WalService`, as the daemon serves them. Batches arrive in the bytes that the client sent. The
/// daemon serves the streams itself.
fn serve_unary(mut contract: FileDescriptorSet) -> Result<(), Box<dyn std::error::Error>> {
    for file in &mut contract.file {
        file.service
            .retain(|service| service.name() == "WalService");
        for service in &mut file.service {
            service
                .method
                .retain(|method| !method.client_streaming() && !method.server_streaming());
        }
    }
    let out_dir = PathBuf::from(std::env::var("OUT_DIR")?).join("unary");
    std::fs::create_dir_all(&out_dir)?;
    tonic_prost_build::configure()
        .build_client(false)
        .extern_path(
            ".wald.v1.AppendBatchRequest",
            "crate::codec::Sent<crate::v1::AppendBatchRequest>",
        )
        .extern_path(".wald.v1", "crate::v1")
        .codec_path("crate::codec::MessageCodec")
        .out_dir(out_dir)
        .compile_fds(contract)?;
    Ok(())
}

//! Compiles the contract, without protoc: messages and stubs for both sides, and the
//! descriptor set that reflection serves.

use std::path::PathBuf;

use prost::Message;
use prost_types::FileDescriptorSet;

const FILES: [&str; 8] = [
    "wald/v1/errors.proto",
    "wald/v1/types.proto",
    "wald/v1/record.proto",
    "wald/v1/cursor.proto",
    "wald/v1/log.proto",
    "wald/v1/wal.proto",
    "wald/v1/ops.proto",
    "wald/v1/state.proto",
];

/// Apart, because reflection shows it only where it is served.
const ECHO: [&str; 1] = ["wald/echo/v1/echo.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=wald");
    let contract = compile(&FILES, "wald.v1.bin")?;
    compile(&ECHO, "wald.echo.v1.bin")?;
    let out_dir = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out_dir.join("methods.rs"), methods(&contract))?;
    Ok(())
}

/// The source of `Method`: each RPC of the package `wald.v1` as a value.
fn methods(contract: &FileDescriptorSet) -> String {
    let files = contract.file.iter();
    let services = files
        .filter(|file| file.package() == "wald.v1")
        .flat_map(|file| &file.service);
    let (mut variants, mut all, mut paths) = (String::new(), String::new(), String::new());
    let (mut kinds, mut names) = (String::new(), String::new());
    for service in services {
        for method in &service.method {
            let (service, name) = (service.name(), method.name());
            // The compiler refuses a name that two services have.
            variants += &format!("/// `{service}.{name}`.\n{name},\n");
            all += &format!("Self::{name}, ");
            names += &format!("Self::{name} => (\"wald.v1.{service}\", \"{name}\"),\n");
            paths += &format!("Self::{name} => \"/wald.v1.{service}/{name}\",\n");
            let kind = match (method.client_streaming(), method.server_streaming()) {
                (false, false) => "unary",
                (true, false) => "client_stream",
                (false, true) => "server_stream",
                (true, true) => "bidi_stream",
            };
            kinds += &format!("Self::{name} => \"{kind}\",\n");
        }
    }
    format!(
        "/// An RPC of the package `wald.v1`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Method {{ {variants} }}

        impl Method {{
            /// All RPCs, in the order of the contract.
            pub const ALL: &[Self] = &[{all}];

            /// Path of its calls, such as `/wald.v1.WalService/Append`.
            pub const fn path(self) -> &'static str {{ match self {{ {paths} }} }}

            /// Its service, with the package, and its name.
            pub const fn service_and_name(self) -> (&'static str, &'static str) {{ match self {{ {names} }} }}

            /// Kind of its calls, such as `unary` or `bidi_stream`.
            pub const fn kind(self) -> &'static str {{ match self {{ {kinds} }} }}
        }}"
    )
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

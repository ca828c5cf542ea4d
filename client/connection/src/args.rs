//! The options.

use std::path::PathBuf;

use clap::Args;

/// Heading of these options in the help of a command.
pub const HEADING: &str = "Connection";

// There is no option for the token itself: a list of processes shows arguments.
// A doc comment here would replace the description of the command in its help.
#[derive(Debug, Clone, Args)]
#[allow(missing_docs, reason = "the help of the options")]
pub struct ConnectionArgs {
    /// Address of the server: HOST:PORT, http://HOST:PORT, or https://HOST:PORT for TLS. The
    /// default port is 6925. Several servers that share a store have commas between them [default:
    /// that of the context, else http://127.0.0.1:6925]
    #[arg(long, global = true, help_heading = HEADING, env = "WALD_ENDPOINT")]
    pub endpoint: Option<String>,
    /// Context with the settings that neither options nor variables give [default: the current
    /// one of `walctl context`, unless there is an endpoint]
    #[arg(long, global = true, help_heading = HEADING, env = "WALD_CONTEXT", value_name = "NAME")]
    pub context: Option<String>,
    /// File with the CAs that may sign the server's certificate, in PEM [default: the CAs of this
    /// system]
    #[arg(long, global = true, help_heading = HEADING, env = "WALD_TLS_CA", value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,
    /// File with the certificate of this client, followed by its issuers, in PEM; for servers that
    /// require one
    #[arg(
        long,
        global = true, help_heading = HEADING,
        env = "WALD_TLS_CERT",
        value_name = "FILE",
        requires = "tls_key"
    )]
    pub tls_cert: Option<PathBuf>,
    /// File with the key of the certificate, in PEM without a password, which other users of this
    /// machine must not be able to read (mode 0600 or 0640)
    #[arg(
        long,
        global = true, help_heading = HEADING,
        env = "WALD_TLS_KEY",
        value_name = "FILE",
        requires = "tls_cert"
    )]
    pub tls_key: Option<PathBuf>,
    /// Name that the server's certificate must have [default: the host of the endpoint]
    #[arg(long, global = true, help_heading = HEADING, env = "WALD_TLS_SERVER_NAME", value_name = "NAME")]
    pub tls_server_name: Option<String>,
    /// File with the token that every call carries, which other users of this machine must not be
    /// able to read (mode 0600 or 0640) [default: the token in WALD_TOKEN]
    #[arg(long, global = true, help_heading = HEADING, env = "WALD_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Let the token cross a connection without TLS to another machine
    #[arg(long, global = true, help_heading = HEADING)]
    pub allow_insecure_token: bool,
}

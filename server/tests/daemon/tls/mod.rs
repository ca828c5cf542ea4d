//! TLS of both ports, over the built daemon: handshakes, certificates of clients, files that change, bounds, the end.

mod bounds;
mod certificates;
mod client;
mod clients;
mod drain;
mod files;
mod ports;
mod principals;
mod reload;
mod rust_client;

use crate::support::Daemon;

/// Starts a daemon with these arguments.
fn start(arguments: &[String]) -> Daemon {
    Daemon::start(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

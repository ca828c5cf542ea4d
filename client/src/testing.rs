//! A server for tests: `wald --ephemeral`, which ends with the test.

use std::ffi::OsStr;
use std::io::{self, BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// The program, if it is not the `wald` of PATH.
const BINARY: &str = "WALD_BINARY";
/// Level of the daemon's log, which goes to the standard error of the test.
const LOG_FILTER: &str = "WALD_LOG_FILTER";

/// A server with an empty store of its own. It ends when this value is dropped, or with the process of the test.
///
/// The program is the one of the variable `WALD_BINARY`, or else the `wald` of PATH. Its errors go to the standard error of
/// the test; the variable `WALD_LOG_FILTER` shows more.
///
/// ```no_run
/// use wald_client::{Client, testing::EphemeralServer};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let server = EphemeralServer::start()?;
/// let client = Client::connect(server.endpoint()).await?;
/// client.append("orders", "first").await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct EphemeralServer {
    child: Child,
    endpoint: String,
    http: String,
}

impl EphemeralServer {
    /// Starts a server with the default settings. Waits until it serves.
    ///
    /// # Errors
    /// If there is no such program, or it does not serve.
    pub fn start() -> io::Result<Self> {
        Self::start_with([] as [&str; 0])
    }

    /// Starts a server with further arguments, such as `--sync-mode` and `async`. Waits until it serves.
    ///
    /// # Errors
    /// If there is no such program, or it does not serve.
    pub fn start_with(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> io::Result<Self> {
        let named = std::env::var_os(BINARY).filter(|name| !name.is_empty());
        let binary = named.unwrap_or_else(|| "wald".into());
        let mut command = Command::new(&binary);
        command.arg("--ephemeral").args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        if std::env::var_os(LOG_FILTER).is_none() {
            command.env(LOG_FILTER, "error");
        }
        let program = binary.display();
        let mut child = command.spawn().map_err(|error| {
            let text = format!("cannot start {program}: {error}; install wald, or set {BINARY}");
            io::Error::new(error.kind(), text)
        })?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let address = |name: &str| {
            let mut words = line.split_whitespace();
            words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
        };
        let (Some(grpc), Some(http)) = (address("grpc"), address("http")) else {
            // It has ended, or is another program.
            let _ = child.kill();
            let status = child.wait()?;
            let text =
                format!("{program} --ephemeral does not serve: {status}; its own error is above");
            return Err(io::Error::other(text));
        };
        Ok(Self {
            endpoint: format!("http://{grpc}"),
            http: format!("http://{http}"),
            child,
        })
    }

    /// Address of the gRPC service, as [`Client::connect`](crate::Client::connect) takes it: `http://127.0.0.1:PORT`. A
    /// server with TLS needs `https` instead.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Address of metrics, probes and the console.
    pub fn http(&self) -> &str {
        &self.http
    }
}

impl Drop for EphemeralServer {
    fn drop(&mut self) {
        // SIGTERM, so that it removes its directory.
        if kill_process(Pid::from_child(&self.child), Signal::TERM).is_err() {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

//! A daemon for tests: a new store in a temporary directory, free ports, and an end with the process that started it.

use std::collections::HashMap;
use std::fs::Permissions;
use std::io::{ErrorKind, Write as _};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::process::{PidfdFlags, Signal, getpid, getppid, kill_process, pidfd_open};
use tempfile::TempDir;

use crate::config::Config;
use crate::serve::Exit;

/// Port 0 takes a free one.
const ANY_PORT: &str = "127.0.0.1:0";

/// The directory of the store, which goes with this value, and the process that started this one.
pub(crate) struct Ephemeral {
    directory: TempDir,
    /// `None`: it has none, as in a container of its own. It ends with the container.
    parent: Option<OwnedFd>,
}

impl Ephemeral {
    /// Makes the directory, and sets the flags that the command line leaves out.
    ///
    /// # Errors
    /// If the command line has a directory of its own, the system makes none, or it does not show the parent.
    pub(crate) fn begin(flags: &mut HashMap<&'static str, String>) -> Result<Self, Exit> {
        // At once: after the end of the parent another process would be taken for it.
        let parent = getppid().map(|parent| pidfd_open(parent, PidfdFlags::empty()));
        let parent = parent.transpose().map_err(|error| unseen(error.into()))?;
        if flags.contains_key("data_dir") {
            let text = "--ephemeral makes a data directory of its own; leave out --data-dir, or --ephemeral";
            return Err(Exit::new(Exit::CONFIG, text));
        }
        // Other users of the machine must not read it: the temporary directory is theirs, too.
        let only_owner = Permissions::from_mode(0o700);
        let mut builder = tempfile::Builder::new();
        let made = builder.prefix("wald-").permissions(only_owner).tempdir();
        let directory = made.map_err(|error| {
            let place = std::env::temp_dir();
            let text = format!(
                "cannot make a directory in {}: {error}; TMPDIR names another place",
                place.display()
            );
            Exit::new(Exit::IO, text)
        })?;
        let Some(path) = directory.path().to_str() else {
            let text = format!(
                "{} is not UTF-8; TMPDIR names another place",
                directory.path().display()
            );
            return Err(Exit::new(Exit::CONFIG, text));
        };
        flags.insert("data_dir", path.to_owned());
        for setting in ["listen", "http_listen"] {
            flags.entry(setting).or_insert_with(|| ANY_PORT.to_owned());
        }
        Ok(Self { directory, parent })
    }

    /// Refuses settings with which a test would write into a bucket.
    ///
    /// # Errors
    /// If they name a bucket.
    pub(crate) fn check(config: &Config) -> Result<(), Exit> {
        if config.has_replica() {
            // Perhaps a variable of the environment.
            let text = "an ephemeral store has no replica; leave out bucket_url, or --ephemeral";
            return Err(Exit::new(Exit::CONFIG, text));
        }
        Ok(())
    }

    /// Ends this process, as SIGTERM does, when its parent ends. The process must have its handlers of signals.
    ///
    /// # Errors
    /// If the system makes no thread.
    pub(crate) fn end_with_parent(self) -> Result<TempDir, Exit> {
        if let Some(parent) = self.parent {
            std::thread::Builder::new()
                .name("wald-parent".to_owned())
                .spawn(move || end_with(&parent))
                .map_err(unseen)?;
        }
        Ok(self.directory)
    }
}

fn unseen(error: std::io::Error) -> Exit {
    let text = format!("cannot watch the process that started this one: {error}");
    Exit::new(Exit::SYSTEM, text)
}

/// Shows the ports to the program that started this one.
pub(crate) fn print_ports(grpc: SocketAddr, http: Option<SocketAddr>) {
    let http = http.map(|http| format!(" http={http}"));
    let line = format!("grpc={grpc}{}\n", http.unwrap_or_default());
    let mut stdout = std::io::stdout();
    let shown = stdout
        .write_all(line.as_bytes())
        .and_then(|()| stdout.flush());
    // That program has ended before it could read them.
    if shown.is_err_and(|error| error.kind() == ErrorKind::BrokenPipe) {
        stop();
    }
}

fn end_with(parent: &OwnedFd) {
    // A descriptor of a process is readable once the process has ended.
    let mut ended = [PollFd::new(parent, PollFlags::IN)];
    if retry_on_intr(|| poll(&mut ended, None)).is_ok() {
        stop();
    }
}

fn stop() {
    // A process may always signal itself.
    let _ = kill_process(getpid(), Signal::TERM);
}

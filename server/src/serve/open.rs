//! Opening the store, on a thread of its own.

use std::sync::Arc;

use tokio::sync::oneshot;
use wald_storage::{
    LocalEngine, LogEngine, OpenError, RealDisk, RecoveryReport, StorageConfig, SystemClock,
    block_on,
};

use super::Exit;
use crate::config::Config;
use crate::metrics::Metrics;

/// A store that is open.
pub(super) struct Opened {
    pub(super) engine: Arc<dyn LogEngine>,
    pub(super) report: RecoveryReport,
}

/// A store that is being opened.
pub(super) struct Opening(oneshot::Receiver<Result<Opened, OpenError>>);

/// Begins to open the store that the configuration names.
///
/// # Errors
/// If no thread can be made.
pub(super) fn start(config: &Config, metrics: Arc<Metrics>) -> Result<Opening, Exit> {
    let storage = config
        .storage()
        .map_err(|why| Exit::new(Exit::CONFIG, why))?;
    let directory = config.data_dir.clone();
    let (sender, receiver) = oneshot::channel();
    std::thread::Builder::new()
        .name("wald-open".to_owned())
        .spawn(move || {
            // Nobody waits any more if the process is ending.
            let _ = sender.send(open(&directory, storage, metrics));
        })
        .map_err(|error| Exit::new(Exit::SYSTEM, format!("cannot start a thread: {error}")))?;
    Ok(Opening(receiver))
}

fn open(
    directory: &std::path::Path,
    config: StorageConfig,
    metrics: Arc<Metrics>,
) -> Result<Opened, OpenError> {
    let disk = RealDisk::open(directory)?;
    let (engine, report) = LocalEngine::open(disk, config, Arc::new(SystemClock), metrics)?;
    Ok(Opened { engine, report })
}

impl Opening {
    /// Waits for the store.
    ///
    /// # Errors
    /// With the exit code for what went wrong.
    pub(super) async fn opened(self) -> Result<Opened, Exit> {
        match self.0.await {
            Ok(opened) => opened.map_err(|error| exit(&error)),
            Err(_) => Err(Exit::new(Exit::SYSTEM, "opening the store panicked")),
        }
    }

    /// Waits for the store only to close it again; says why it could not be opened, if so.
    pub(super) fn give_up(self) -> Option<Exit> {
        match block_on(self.opened()) {
            Ok(opened) => {
                let drained = block_on(opened.engine.drain());
                drained
                    .err()
                    .map(|error| Exit::new(Exit::IO, error.to_string()))
            }
            Err(exit) => Some(exit),
        }
    }
}

fn exit(error: &OpenError) -> Exit {
    let code = match error {
        OpenError::Config(_) => Exit::CONFIG,
        OpenError::Locked { .. } => Exit::LOCKED,
        OpenError::NotAStore { .. } | OpenError::Version { .. } | OpenError::Damaged(_) => {
            Exit::BAD_DATA
        }
        OpenError::Io { .. } => Exit::IO,
    };
    Exit::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn what_stops_a_start_has_its_exit_code_and_one_line() {
        let cases = [
            (
                OpenError::Locked {
                    directory: PathBuf::from("d"),
                    holder: "process 7".to_owned(),
                },
                75,
            ),
            (
                OpenError::NotAStore {
                    what: "a cat".to_owned(),
                },
                65,
            ),
            (
                OpenError::Version {
                    found: 9,
                    supported: 1,
                },
                65,
            ),
            (OpenError::Damaged("lsn 7".to_owned()), 65),
            (
                OpenError::Io {
                    action: "making d".to_owned(),
                    source: io::Error::other("no"),
                },
                74,
            ),
        ];
        for (error, code) in cases {
            let exit = exit(&error);
            assert_eq!(exit.code, code);
            assert!(!exit.message.is_empty() && !exit.message.contains('\n'));
        }
    }
}

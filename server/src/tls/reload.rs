//! The thread that reads the files of TLS again. It compares contents, because Kubernetes changes the directory
//! behind a link and keeps the times of the files.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;

use super::check::CheckedFiles;
use super::files::{Contents, Fault, TlsFiles};
use super::{TlsAcceptor, TlsPort, TlsState};
use crate::config::Config;
use crate::metrics::TlsMetrics;

/// Pause between two reads of the files.
const EVERY: Duration = Duration::from_secs(10);

/// Pause before a second read after a fault: a writer may have replaced one file of two.
const SECOND_READ: Duration = Duration::from_millis(200);

/// Files that were read and passed the check. The thread does not run yet.
pub(crate) struct Reloader {
    files: TlsFiles,
    metrics: TlsMetrics,
    /// Contents in force.
    contents: Contents,
    generation: u64,
    state: watch::Sender<Arc<TlsState>>,
}

/// The thread at work. Dropping it ends the thread.
pub(crate) struct ReloadThread(Sender<()>);

impl ReloadThread {
    /// Reads the files now.
    pub(crate) fn reload(&self) {
        // The thread ends only after this value.
        let _ = self.0.send(());
    }
}

/// Reads and checks the files. `None` without the setting `tls_cert`.
///
/// # Errors
/// A sentence with the setting, the file and the fault.
pub(crate) fn start(config: &Config, metrics: &TlsMetrics) -> Result<Option<Reloader>, String> {
    let Some(files) = TlsFiles::new(config) else {
        return Ok(None);
    };
    let read = || {
        let contents = files.read()?;
        let checked = files.check(&contents, 0, SystemTime::now())?;
        Ok::<_, Fault>((contents, checked))
    };
    let (contents, checked) = twice(read).map_err(|fault| fault.to_string())?;
    report(metrics, &checked);
    metrics.reloaded(SystemTime::now());
    Ok(Some(Reloader {
        files,
        metrics: metrics.clone(),
        contents,
        generation: 0,
        state: watch::channel(Arc::new(checked.state)).0,
    }))
}

/// Tries once more after a fault.
fn twice<T>(mut read: impl FnMut() -> Result<T, Fault>) -> Result<T, Fault> {
    read().or_else(|_| {
        std::thread::sleep(SECOND_READ);
        read()
    })
}

fn report(metrics: &TlsMetrics, checked: &CheckedFiles) {
    metrics.expire(checked.server_expires, checked.client_ca_expires);
}

impl Reloader {
    /// TLS for one event loop.
    pub(crate) fn acceptor(&self, port: TlsPort) -> TlsAcceptor {
        TlsAcceptor::new(port, self.state.subscribe(), self.metrics.clone())
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// If the system starts none.
    pub(crate) fn run(mut self) -> io::Result<ReloadThread> {
        let (requests, requested) = channel();
        std::thread::Builder::new()
            .name("wald-reload".to_owned())
            .spawn(move || {
                let mut fault = None;
                while let Ok(()) | Err(RecvTimeoutError::Timeout) = requested.recv_timeout(EVERY) {
                    self.reload(&mut fault);
                }
            })?;
        Ok(ReloadThread(requests))
    }

    /// Reads the files once. `fault` is that of the last time, so that the log has each only once.
    fn reload(&mut self, last_fault: &mut Option<Fault>) {
        match twice(|| self.try_reload()) {
            Ok(changed) => {
                if changed || last_fault.is_some() {
                    tracing::info!("the changed files of TLS are in force");
                }
                *last_fault = None;
                self.metrics.reloaded(SystemTime::now());
            }
            Err(fault) => {
                self.metrics.reload_failed();
                if last_fault.as_ref() != Some(&fault) {
                    tracing::error!(%fault, "the files of TLS cannot be used; the earlier ones stay in force");
                    *last_fault = Some(fault);
                }
            }
        }
    }

    /// Takes the files into force if they have changed. Returns whether they have.
    fn try_reload(&mut self) -> Result<bool, Fault> {
        let contents = self.files.read()?;
        if contents == self.contents {
            return Ok(false);
        }
        let generation = match contents.verifies_clients_as(&self.contents) {
            true => self.generation,
            false => self.generation + 1,
        };
        let checked = (self.files).check(&contents, generation, SystemTime::now())?;
        self.generation = generation;
        self.contents = contents;
        report(&self.metrics, &checked);
        self.state.send_replace(Arc::new(checked.state));
        Ok(true)
    }
}

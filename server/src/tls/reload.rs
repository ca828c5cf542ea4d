//! The files of TLS as the thread `wald-reload` reads them again.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::watch;

use super::check::CheckedFiles;
use super::files::{Contents, TlsFiles};
use super::{TlsAcceptor, TlsPort, TlsState};
use crate::config::Config;
use crate::metrics::{Metrics, TlsMetrics};
use crate::reload::{Fault, FileKind, ReloadedFiles, Reloader};

/// Maximum number of certificates that one line of the log names.
const SHOWN_WARNINGS: usize = 8;

/// The files, and the terms of handshakes that are made of them.
pub(crate) struct TlsSource {
    files: TlsFiles,
    metrics: TlsMetrics,
    generation: u64,
    state: watch::Sender<Arc<TlsState>>,
}

impl ReloadedFiles for TlsSource {
    const KIND: FileKind = FileKind::Tls;
    type Contents = Contents;

    fn read(&self) -> Result<Contents, Fault> {
        self.files.read()
    }

    fn digests(&self, contents: &Contents) -> Vec<(Cow<'static, str>, String)> {
        contents.digests()
    }

    fn put_in_force(&mut self, contents: Contents, in_force: &mut Contents) -> Result<(), Fault> {
        let generation = match contents.verifies_clients_as(in_force) {
            true => self.generation,
            false => self.generation + 1,
        };
        let checked = (self.files).check(&contents, generation, SystemTime::now())?;
        self.generation = generation;
        report(&self.metrics, &checked);
        self.state.send_replace(Arc::new(checked.state));
        *in_force = contents;
        Ok(())
    }
}

fn report(metrics: &TlsMetrics, checked: &CheckedFiles) {
    let CheckedFiles {
        server_expires,
        client_ca_expires,
        client_crl_expires,
        ..
    } = *checked;
    metrics.expire(server_expires, client_ca_expires, client_crl_expires);
    // In one line: the log takes one line a second from one place.
    let (shown, more) = checked
        .warnings
        .split_at(checked.warnings.len().min(SHOWN_WARNINGS));
    match more.len() {
        0 if shown.is_empty() => {}
        0 => tracing::warn!("{}", shown.join("; ")),
        more => tracing::warn!("{}; {more} more", shown.join("; ")),
    }
}

/// Reads and checks the files. `None` without the setting `tls_cert`.
///
/// # Errors
/// A sentence with the setting, the file and the fault.
pub(crate) fn start(
    config: &Config,
    metrics: &Metrics,
) -> Result<Option<Reloader<TlsSource>>, String> {
    let Some(files) = TlsFiles::new(config) else {
        return Ok(None);
    };
    let begin = || {
        let contents = files.read()?;
        let checked = files.check(&contents, 0, SystemTime::now())?;
        report(&metrics.tls, &checked);
        let source = TlsSource {
            files: files.clone(),
            metrics: metrics.tls.clone(),
            generation: 0,
            state: watch::channel(Arc::new(checked.state)).0,
        };
        Ok((source, contents))
    };
    let reloader = Reloader::start(&metrics.reloads, begin);
    reloader.map(Some).map_err(|fault| fault.to_string())
}

impl Reloader<TlsSource> {
    /// TLS for one event loop.
    pub(crate) fn acceptor(&self, port: TlsPort) -> TlsAcceptor {
        let source = &self.files;
        let audit = self.audit.clone();
        TlsAcceptor::new(
            port,
            source.state.subscribe(),
            source.metrics.clone(),
            audit,
        )
    }
}

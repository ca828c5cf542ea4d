//! The files of TLS as the thread `wald-reload` reads them again.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::watch;

use super::check::{CheckedClients, CheckedServer};
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
    server: CheckedServer,
    clients: CheckedClients,
    state: watch::Sender<Arc<TlsState>>,
}

impl ReloadedFiles for TlsSource {
    const KIND: FileKind = FileKind::Tls;
    type Contents = Contents;

    fn read(&self) -> Result<Contents, Fault> {
        Ok(self.files.read())
    }

    fn digests(&self, contents: &Contents) -> Vec<(Cow<'static, str>, String)> {
        contents.digests()
    }

    fn put_in_force(&mut self, contents: Contents, in_force: &mut Contents) -> Result<(), Fault> {
        let (files, now) = (&self.files, SystemTime::now());
        let server = checked(&contents.server, &in_force.server, |server| {
            files.check_server(server, now)
        });
        let clients = checked(&contents.clients, &in_force.clients, |clients| {
            files.check_clients(clients, now)
        });
        let (server, clients, fault) = match (server, clients) {
            (Ok(server), Ok(clients)) => (server, clients, None),
            (Err(fault), Ok(clients)) => (None, clients, Some(fault)),
            (Ok(server), Err(fault)) => (server, None, Some(fault)),
            (Err(fault), Err(_)) => (None, None, Some(fault)),
        };
        if server.is_some() || clients.is_some() {
            let generation = self.generation + u64::from(clients.is_some());
            let state = files.state(
                server.as_ref().unwrap_or(&self.server),
                clients.as_ref().unwrap_or(&self.clients),
                generation,
            )?;
            if let Some(server) = server {
                (self.server, in_force.server) = (server, contents.server);
            }
            if let Some(clients) = clients {
                (self.clients, in_force.clients) = (clients, contents.clients);
            }
            self.generation = generation;
            report(&self.metrics, &self.server, &self.clients);
            self.state.send_replace(Arc::new(state));
        }
        fault.map_or(Ok(()), Err)
    }
}

/// A half of the contents that has changed, if it passes its check.
fn checked<T: PartialEq, C>(
    half: &Result<T, Fault>,
    in_force: &Result<T, Fault>,
    check: impl FnOnce(&T) -> Result<C, Fault>,
) -> Result<Option<C>, Fault> {
    match half {
        _ if half == in_force => Ok(None),
        Ok(half) => check(half).map(Some),
        Err(fault) => Err(fault.clone()),
    }
}

fn report(metrics: &TlsMetrics, server: &CheckedServer, clients: &CheckedClients) {
    metrics.expire(server.expires, clients.ca_expires, clients.crl_expires);
    // In one line: the log takes one line a second from one place.
    let warnings: Vec<&str> = (server.warnings.iter().chain(&clients.warnings))
        .map(String::as_str)
        .collect();
    let (shown, more) = warnings.split_at(warnings.len().min(SHOWN_WARNINGS));
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
        let (contents, now) = (files.read(), SystemTime::now());
        let server = files.check_server(contents.server.as_ref().map_err(Fault::clone)?, now)?;
        let clients = files.check_clients(contents.clients.as_ref().map_err(Fault::clone)?, now)?;
        let state = files.state(&server, &clients, 0)?;
        report(&metrics.tls, &server, &clients);
        let source = TlsSource {
            files: files.clone(),
            metrics: metrics.tls.clone(),
            generation: 0,
            server,
            clients,
            state: watch::channel(Arc::new(state)).0,
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

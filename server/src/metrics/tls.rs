//! Metrics of TLS.

use std::time::{Duration, SystemTime};

use prometheus::{Error, GaugeVec, Histogram, IntCounterVec, Opts};

use super::{Maker, latency_buckets};

/// Certificates whose expiry is exported.
const CERTIFICATES: [&str; 2] = ["server", "client_ca"];
/// The one set of files that is read again so far.
const TLS: &str = "tls";

/// The end of a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandshakeResult {
    Done,
    NoProtocol,
    ClientCertificate,
    Failed,
    Abandoned,
}

impl HandshakeResult {
    const ALL: [Self; 5] = [
        Self::Done,
        Self::NoProtocol,
        Self::ClientCertificate,
        Self::Failed,
        Self::Abandoned,
    ];

    fn label(self) -> &'static str {
        match self {
            Self::Done => "ok",
            Self::NoProtocol => "alpn",
            Self::ClientCertificate => "client_certificate",
            Self::Failed => "failed",
            Self::Abandoned => "abandoned",
        }
    }
}

/// Handshakes, certificates and reloads.
#[derive(Debug, Clone)]
pub(crate) struct TlsMetrics {
    handshakes: IntCounterVec,
    handshake: Histogram,
    expires: GaugeVec,
    reloaded: GaugeVec,
    reload_failures: IntCounterVec,
}

impl TlsMetrics {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
        let gauges = |name: &str, help: &str, kinds: &[&str]| {
            let gauges = make.register(GaugeVec::new(Opts::new(name, help), &["kind"])?)?;
            for kind in kinds {
                gauges.get_metric_with_label_values(&[kind])?;
            }
            Ok::<_, Error>(gauges)
        };
        Ok(Self {
            handshakes: make.counters(
                "wald_tls_handshakes_total",
                "TLS handshakes on both ports, by result: ok; alpn: the client offered no protocol of the port; \
                 client_certificate: it was missing or refused; failed: anything else; abandoned: ended by the server, \
                 because the client took too long, another connection needed its place or the server stopped.",
                "result",
                &HandshakeResult::ALL.map(HandshakeResult::label),
            )?,
            handshake: make.histogram(
                "wald_tls_handshake_seconds",
                "Time from the first byte of a connection to the end of its TLS handshake, waits for the client \
                 included.",
                latency_buckets(),
            )?,
            expires: gauges(
                "wald_tls_certificate_not_after_timestamp_seconds",
                "Time in seconds since 1970 at which the first certificate in force expires, by kind: server (tls_cert), \
                 client_ca (tls_client_ca). 0: there is none. Renew it 14 days before.",
                &CERTIFICATES,
            )?,
            reloaded: gauges(
                "wald_reload_last_success_timestamp_seconds",
                "Time in seconds since 1970 at which files were last read without a fault, by kind. 0: there are none. \
                 More than 1 hour ago: the files have a fault, which the log names.",
                &[TLS],
            )?,
            reload_failures: make.counters(
                "wald_reload_failures_total",
                "Attempts to read files again that found a fault, by kind; the earlier files stay in force. Above 0, the \
                 log names file and fault.",
                "kind",
                &[TLS],
            )?,
        })
    }

    /// Counts a handshake.
    pub(crate) fn handshake(&self, time: Duration, result: HandshakeResult) {
        (self.handshakes.with_label_values(&[result.label()])).inc();
        self.handshake.observe(time.as_secs_f64());
    }

    /// Records when the certificates in force expire.
    pub(crate) fn expire(&self, server: SystemTime, client_ca: Option<SystemTime>) {
        for (kind, at) in CERTIFICATES.into_iter().zip([Some(server), client_ca]) {
            let gauge = self.expires.with_label_values(&[kind]);
            gauge.set(at.map_or(0.0, seconds));
        }
    }

    /// Records that the files were read without a fault.
    pub(crate) fn reloaded(&self, now: SystemTime) {
        self.reloaded.with_label_values(&[TLS]).set(seconds(now));
    }

    /// Counts an attempt that found a fault.
    pub(crate) fn reload_failed(&self) {
        self.reload_failures.with_label_values(&[TLS]).inc();
    }
}

/// Seconds since 1970; 0 before.
fn seconds(time: SystemTime) -> f64 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

//! Metrics of TLS.

use std::time::{Duration, SystemTime};

use prometheus::{Error, GaugeVec, Histogram, IntCounterVec};

use super::{Maker, latency_buckets, seconds_since_1970};

/// Certificates and lists whose expiry is exported.
const CERTIFICATES: [&str; 3] = ["server", "client_ca", "client_crl"];

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

/// Handshakes and certificates.
#[derive(Debug, Clone)]
pub(crate) struct TlsMetrics {
    handshakes: IntCounterVec,
    handshake: Histogram,
    expires: GaugeVec,
}

impl TlsMetrics {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
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
            expires: make.gauges_by_kind(
                "wald_tls_certificate_not_after_timestamp_seconds",
                "Time in seconds since 1970 at which the first certificate in force expires, by kind: server (tls_cert), \
                 client_ca (tls_client_ca), client_crl (the time by which tls_client_crl promises a newer list; an older \
                 one still counts). 0: there is none. Renew a certificate 14 days before.",
                &CERTIFICATES,
            )?,
        })
    }

    /// Counts a handshake.
    pub(crate) fn handshake(&self, time: Duration, result: HandshakeResult) {
        (self.handshakes.with_label_values(&[result.label()])).inc();
        self.handshake.observe(time.as_secs_f64());
    }

    /// Records when the certificates in force expire, and by when there should be a newer revocation list.
    pub(crate) fn expire(
        &self,
        server: SystemTime,
        client_ca: Option<SystemTime>,
        client_crl: Option<SystemTime>,
    ) {
        let times = [Some(server), client_ca, client_crl];
        for (kind, at) in CERTIFICATES.into_iter().zip(times) {
            let gauge = self.expires.with_label_values(&[kind]);
            gauge.set(at.map_or(0.0, seconds_since_1970));
        }
    }
}

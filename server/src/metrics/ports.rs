//! Both ports: their connections, the bytes of these, and the time in which a port accepts none.
//!
//! A connection that finds no place waits, and all later ones wait behind it. So the port counts the
//! time and not the connections: those in the kernel's queue have not been seen.

use std::time::Duration;

use prometheus::{
    Counter, CounterVec, Error, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
};

use super::Maker;

/// Metrics of one port.
#[derive(Debug, Clone)]
pub(crate) struct PortMetrics {
    port: &'static str,
    waits: Counter,
    connections: IntGauge,
    received: IntCounter,
    sent: IntCounter,
}

impl PortMetrics {
    /// Adds a time in which the port accepted no connection.
    pub(crate) fn waited(&self, time: Duration) {
        self.waits.inc_by(time.as_secs_f64());
    }

    /// Name of the port in log lines.
    pub(crate) fn port(&self) -> &'static str {
        self.port
    }

    /// Counts a connection until the value is dropped.
    pub(crate) fn connected(&self) -> CountedConnection {
        self.connections.inc();
        CountedConnection(self.clone())
    }

    /// Time in seconds since the process started.
    #[cfg(test)]
    pub(crate) fn seconds(&self) -> f64 {
        self.waits.get()
    }
}

/// A connection that is open.
#[derive(Debug)]
pub(crate) struct CountedConnection(PortMetrics);

impl CountedConnection {
    /// Counts bytes that it has received.
    pub(crate) fn received(&self, bytes: usize) {
        self.0.received.inc_by(bytes as u64);
    }

    /// Counts bytes that it has sent.
    pub(crate) fn sent(&self, bytes: usize) {
        self.0.sent.inc_by(bytes as u64);
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.0.connections.dec();
    }
}

/// Metrics of both ports.
#[derive(Debug)]
pub(crate) struct BothPorts {
    pub(crate) grpc: PortMetrics,
    pub(crate) http: PortMetrics,
}

impl BothPorts {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
        let waits = make.register(CounterVec::new(
            Opts::new(
                "wald_accept_wait_seconds_total",
                "Time in seconds in which a port accepted no connection, by port: all its places were taken, or no descriptor was free. At 1 a second new clients get no answer.",
            ),
            &["port"],
        )?)?;
        let connections = make.register(IntGaugeVec::new(
            Opts::new(
                "wald_connections",
                "Open connections, by port: at most max_connections of gRPC, and http_max_connections of HTTP.",
            ),
            &["port"],
        )?)?;
        let bytes = make.register(IntCounterVec::new(
            Opts::new(
                "wald_network_bytes_total",
                "Bytes that connections have received or sent, by port and direction. Bytes that TLS adds do not count.",
            ),
            &["port", "direction"],
        )?)?;
        let of = |port| PortMetrics {
            port,
            waits: waits.with_label_values(&[port]),
            connections: connections.with_label_values(&[port]),
            received: bytes.with_label_values(&[port, "received"]),
            sent: bytes.with_label_values(&[port, "sent"]),
        };
        Ok(Self {
            grpc: of("grpc"),
            http: of("http"),
        })
    }
}

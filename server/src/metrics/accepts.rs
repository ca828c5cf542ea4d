//! Time in which a port accepts no connection.
//!
//! A connection that finds no place waits, and all later ones wait behind it. So the port counts the
//! time and not the connections: those in the kernel's queue have not been seen.

use std::time::Duration;

use prometheus::{Counter, CounterVec, Error, Opts};

use super::Maker;

/// The time of one port.
#[derive(Debug, Clone)]
pub(crate) struct AcceptWaits {
    port: &'static str,
    seconds: Counter,
}

impl AcceptWaits {
    /// Adds a time in which the port accepted no connection.
    pub(crate) fn add(&self, time: Duration) {
        self.seconds.inc_by(time.as_secs_f64());
    }

    /// Name of the port in log lines.
    pub(crate) fn port(&self) -> &'static str {
        self.port
    }

    /// Time in seconds since the process started.
    #[cfg(test)]
    pub(crate) fn seconds(&self) -> f64 {
        self.seconds.get()
    }
}

/// The times of both ports.
#[derive(Debug)]
pub(crate) struct AllAcceptWaits {
    pub(crate) grpc: AcceptWaits,
    pub(crate) http: AcceptWaits,
}

impl AllAcceptWaits {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
        let seconds = make.register(CounterVec::new(
            Opts::new(
                "wald_accept_wait_seconds_total",
                "Time in seconds in which a port accepted no connection, by port: all its places were taken, or no descriptor was free. At 1 a second new clients get no answer.",
            ),
            &["port"],
        )?)?;
        let of = |port| AcceptWaits {
            port,
            seconds: seconds.with_label_values(&[port]),
        };
        Ok(Self {
            grpc: of("grpc"),
            http: of("http"),
        })
    }
}

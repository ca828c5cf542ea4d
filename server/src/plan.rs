//! The plan of a start. The host gives file descriptors and memory; each part of the daemon
//! takes at most a share of them. Bounds are lowered until all of it fits.
//!
//! ```text
//! host's limit = fixed parts + reserve + bound 1 × cost + bound 2 × cost + ...
//!                                        └─ lowered first, down to its least value
//! ```
//!
//! Sockets, segments and everything else share one table of descriptors. Bounds that do not fit would
//! let idle sockets take the descriptor that the next segment needs.

mod host;

use wald_storage::StorageConfig;

use crate::admission::{HEALTH_BYTES, OTHERS_BYTES};
use crate::answers::ANSWERS_BYTES;
use crate::config::{Config, LEAST_HTTP_CONNECTIONS};
use crate::serve::Exit;
use crate::tls::CONNECTION_BYTES as TLS_BYTES;
use crate::transport::{
    ALL_FAREWELLS_BYTES, ALL_FREE_CALLS_BYTES, ALL_QUEUES_BYTES, ALL_WINDOWS_BYTES,
    FREE_CALL_BYTES, LEAST_WINDOW, SHORT_QUEUE_BYTES,
};
pub(crate) use host::Host;

/// Descriptors that stay free: for /proc on scrapes, name resolution, libraries.
const RESERVE_DESCRIPTORS: u64 = 64;

/// Descriptors of one runtime of tokio: epoll, its duplicate, a wake-up, a signal pipe.
const PER_RUNTIME: u64 = 4;

/// Runtimes in addition to the event loops: one for the life cycle, one for the HTTP port.
const RUNTIMES: u64 = 2;

/// Connections of a stand-by's event loop, or of its HTTP port, to the owner, at most.
pub(crate) const LINKS_OF_LOOP: usize = 8;

/// Descriptors of the replica: its runtime, connections to the bucket, and links of the HTTP port to the owner.
const OF_REPLICA: u64 = PER_RUNTIME + 32 + LINKS_OF_LOOP as u64;

/// Memory of the replica without the part that is on its way, bytes: 192 MiB of rows, files on their way of 40 MiB.
/// A stand-by has no rows, but the windows of forwarded calls: 64 MiB.
const REPLICA_BYTES: u64 = 232 << 20;

/// Least size of the largest part of the journal that is stored at once, bytes.
const REPLICA_PART_BYTES: u64 = 8 << 20;

/// Memory of the replica, bytes. The part that is on its way is there twice: as it is, and as an object of the bucket. It may be
/// one large group.
fn replica_bytes(config: &Config) -> u64 {
    let storage = config.storage();
    let group = config.max_batch_bytes.0 + config.buffer_bytes.0;
    let part = group.min(storage.largest_batch()).max(REPLICA_PART_BYTES);
    REPLICA_BYTES + 2 * part
}

/// Both ports, the two ends of the signal pipe, a socket that is accepted and waits for a permit, a
/// trace collector.
const PORTS: u64 = 6;

/// Least values of bounds. Below them the start is refused.
const LEAST_CONNECTIONS: u64 = 32;
const LEAST_OPEN_SEGMENTS: u64 = 16;
const LEAST_WORKERS: u64 = 1;
const LEAST_CALLS: u64 = 4096;

/// Memory of code, stacks, metrics and the allocator, without the parts below.
const PROCESS_BYTES: u64 = 48 << 20;

/// Memory of the engine that no setting bounds: newest groups 8 MiB, indexes 38 MiB, buffers of reads
/// 8 MiB, the group that is written 5 MiB, a step of the sorter 8 MiB.
const ENGINE_BYTES: u64 = 67 << 20;

/// Memory of one connection: buffers and HTTP/2 state, the least window of data that it may send ahead,
/// answers that wait for its socket, two calls, and one for which nobody needs a credential.
const CONNECTION_BYTES: u64 = (24 << 10)
    + LEAST_WINDOW as u64
    + SHORT_QUEUE_BYTES as u64
    + CALLS_OF_CONNECTION * CALL_BYTES
    + FREE_CALL_BYTES;
const HTTP_CONNECTION_BYTES: u64 = 40 << 10;

/// Memory of connections, bytes: one of gRPC, one of HTTP.
fn connection_bytes(config: &Config) -> (u64, u64) {
    let inside = |has_tls: bool| if has_tls { TLS_BYTES } else { 0 };
    (
        CONNECTION_BYTES + inside(config.has_tls()),
        HTTP_CONNECTION_BYTES + inside(config.http_tls),
    )
}

/// Calls that the memory of a connection has room for.
const CALLS_OF_CONNECTION: u64 = 2;

/// Memory of one call: its task, its HTTP/2 stream, and an answer that is too small to be counted.
const CALL_BYTES: u64 = 8 << 10;

/// One bound that may be lowered.
struct Bound<'a> {
    setting: &'static str,
    value: &'a mut u64,
    /// Least value that a start accepts. A smaller configured value stays.
    least: u64,
    /// Cost of 1, in descriptors or in bytes.
    cost: u64,
}

impl Bound<'_> {
    fn takes(&self) -> u64 {
        self.value.saturating_mul(self.cost)
    }
}

/// The reason why the bounds do not fit.
#[derive(Debug, PartialEq, Eq)]
struct Lacking {
    /// The need of the fixed parts and of the least values.
    least: u64,
}

/// The changes that made everything fit.
#[derive(Debug, PartialEq, Eq)]
struct Fitted {
    /// The need of all configured values.
    wanted: u64,
    /// Lowered settings: name, configured value, value in force.
    lowered: Vec<(&'static str, u64, u64)>,
}

/// Lowers bounds, the first one first, until they fit together with the fixed parts.
fn fit(available: u64, fixed: u64, bounds: &mut [Bound<'_>]) -> Result<Fitted, Lacking> {
    let least = bounds.iter().fold(fixed, |sum, bound| {
        let least = bound.least.min(*bound.value);
        sum.saturating_add(least.saturating_mul(bound.cost))
    });
    if least > available {
        return Err(Lacking { least });
    }
    let wanted = bounds
        .iter()
        .fold(fixed, |sum, bound| sum.saturating_add(bound.takes()));
    let mut excess = wanted.saturating_sub(available);
    let mut lowered = Vec::new();
    for bound in bounds {
        let spare = bound.value.saturating_sub(bound.least);
        let less = excess.div_ceil(bound.cost).min(spare);
        if less > 0 {
            lowered.push((bound.setting, *bound.value, *bound.value - less));
            *bound.value -= less;
            excess = excess.saturating_sub(less.saturating_mul(bound.cost));
        }
    }
    Ok(Fitted { wanted, lowered })
}

/// The resources of the host, and their source.
#[derive(Debug)]
pub(crate) struct HostLimits {
    open_files: u64,
    /// In bytes.
    memory: u64,
    memory_from: &'static str,
}

impl HostLimits {
    /// Logs the limits and the bounds in force.
    pub(crate) fn tell(&self, config: &Config) {
        tracing::info!(
            open_files = self.open_files,
            memory_limit = mebibytes(self.memory),
            memory_limit_from = self.memory_from,
            max_connections = config.max_connections,
            max_calls = config.max_calls,
            http_max_connections = config.http_max_connections,
            max_open_segments = config.max_open_segments,
            max_inflight_bytes = config.max_inflight_bytes.to_string(),
            "limits of this process"
        );
    }
}

/// Lowers bounds of the configuration until everything fits the host, and warns of each.
///
/// # Errors
/// If not even the least values fit.
pub(crate) fn make(config: &mut Config, host: &Host) -> Result<HostLimits, Exit> {
    let storage = config.storage();
    let files = fit_descriptors(config, &storage, host)?;
    let memory = fit_memory(config, host)?;
    for warning in files.into_iter().chain(memory) {
        tracing::warn!("{warning}");
    }
    Ok(HostLimits {
        open_files: host.descriptors,
        memory: memory_limit(config, host),
        memory_from: host.memory_origin(config.memory_limit.0),
    })
}

/// Whether the settings fit each other, whatever the host has.
///
/// # Errors
/// [`Exit::CONFIG`] if `memory_limit` is given and less than the other settings take.
pub(crate) fn check(config: &Config) -> Result<(), Exit> {
    if config.memory_limit.0 > 0 {
        fit_memory(&mut config.clone(), &Host::unlimited())?;
    }
    Ok(())
}

/// Memory that the plan may give out, in bytes.
fn memory_limit(config: &Config, host: &Host) -> u64 {
    match config.memory_limit.0 {
        0 => host.memory,
        given => given,
    }
}

/// The share of the replica, if there is one.
fn of_replica(config: &Config, share: u64) -> u64 {
    if config.has_replica() { share } else { 0 }
}

fn fit_descriptors(
    config: &mut Config,
    storage: &StorageConfig,
    host: &Host,
) -> Result<Option<String>, Exit> {
    let traces = u64::from(!config.otlp_endpoint.is_empty());
    let store = storage.descriptors(!config.archive_dir.is_empty());
    let replica = of_replica(config, OF_REPLICA);
    let links = of_replica(config, LINKS_OF_LOOP as u64);
    let fixed = host.inherited
        + PORTS
        + PER_RUNTIME * (RUNTIMES + traces)
        + store
        + replica
        + RESERVE_DESCRIPTORS;
    let mut connections = match config.max_connections {
        0 => UNBOUNDED,
        most => most as u64,
    };
    let mut http = config.http_max_connections as u64;
    let mut segments = config.max_open_segments as u64;
    let mut workers = config.workers() as u64;
    // Event loops that the operator has set stay.
    let least_workers = match config.worker_threads {
        0 => LEAST_WORKERS,
        _ => workers,
    };
    let mut bounds = [
        Bound {
            setting: "max_connections",
            value: &mut connections,
            least: LEAST_CONNECTIONS,
            cost: 1,
        },
        Bound {
            setting: "http_max_connections",
            value: &mut http,
            least: LEAST_HTTP_CONNECTIONS as u64,
            cost: 1,
        },
        Bound {
            setting: "max_open_segments",
            value: &mut segments,
            least: LEAST_OPEN_SEGMENTS,
            cost: 1,
        },
        Bound {
            setting: "worker_threads",
            value: &mut workers,
            least: least_workers,
            cost: PER_RUNTIME + links,
        },
    ];
    let available = host.descriptors;
    let fitted = fit(available, fixed, &mut bounds).map_err(|lacking| {
        let least = lacking.least;
        Exit::new(
            Exit::CONFIG,
            format!(
                "at most {available} files may be open, and Wald needs {least}; raise the hard limit \
                 (ulimit -Hn, LimitNOFILE) to at least {least}, or lower reader_threads, \
                 pool_segments or worker_threads"
            ),
        )
    })?;
    config.max_connections = narrow(connections);
    config.http_max_connections = narrow(http);
    config.max_open_segments = narrow(segments);
    if workers < config.workers() as u64 {
        config.worker_threads = narrow(workers);
    }
    let raise = match fitted.wanted < UNBOUNDED {
        true => format!(
            "raise it to at least {} for the configured values",
            fitted.wanted
        ),
        false => "raise it for more".to_owned(),
    };
    Ok(lowered(&fitted).map(|lowered| {
        format!(
            "the hard limit of open files is {available} (ulimit -Hn, LimitNOFILE): {lowered}; {raise}"
        )
    }))
}

fn fit_memory(config: &mut Config, host: &Host) -> Result<Option<String>, Exit> {
    let available = memory_limit(config, host);
    let fixed = PROCESS_BYTES
        + ENGINE_BYTES
        + OTHERS_BYTES
        + HEALTH_BYTES
        + ANSWERS_BYTES
        + ALL_WINDOWS_BYTES
        + ALL_QUEUES_BYTES
        + ALL_FAREWELLS_BYTES
        + ALL_FREE_CALLS_BYTES
        + config.max_inflight_bytes.0
        + config.buffer_bytes.0
        + of_replica(config, replica_bytes(config));
    let mut connections = config.max_connections as u64;
    let mut http = config.http_max_connections as u64;
    // Beyond those that each connection has.
    let most_calls = config.max_calls as u64;
    let mut calls = most_calls;
    let (connection_bytes, http_connection_bytes) = connection_bytes(config);
    let mut bounds = [
        Bound {
            setting: "max_calls",
            value: &mut calls,
            least: LEAST_CALLS,
            cost: CALL_BYTES,
        },
        Bound {
            setting: "max_connections",
            value: &mut connections,
            least: LEAST_CONNECTIONS,
            cost: connection_bytes,
        },
        Bound {
            setting: "http_max_connections",
            value: &mut http,
            least: LEAST_HTTP_CONNECTIONS as u64,
            cost: http_connection_bytes,
        },
    ];
    let origin = host.memory_origin(config.memory_limit.0);
    let mut fitted = match fit(available, fixed, &mut bounds) {
        Ok(fitted) => fitted,
        Err(lacking) => {
            let text = format!(
                "memory_limit is {} ({origin}), and at its bounds Wald takes {}; give it more memory, raise \
                 memory_limit, or lower max_inflight_bytes or buffer_bytes",
                mebibytes(available),
                mebibytes(lacking.least)
            );
            if config.memory_limit.0 > 0 {
                return Err(Exit::new(Exit::CONFIG, text));
            }
            // Little traffic takes less than the bounds, and the operator has not set this
            // limit.
            connections = connections.min(LEAST_CONNECTIONS);
            http = http.min(LEAST_HTTP_CONNECTIONS as u64);
            calls = most_calls.min(LEAST_CALLS + CALLS_OF_CONNECTION * connections);
            config.max_connections = narrow(connections);
            config.http_max_connections = narrow(http);
            config.max_calls = narrow(calls);
            return Ok(Some(format!(
                "{text}; max_calls is {calls}, max_connections is {connections}, http_max_connections is {http}"
            )));
        }
    };
    config.max_connections = narrow(connections);
    config.http_max_connections = narrow(http);
    let calls = most_calls.min(calls + CALLS_OF_CONNECTION * connections);
    config.max_calls = narrow(calls);
    for (setting, _, in_force) in &mut fitted.lowered {
        if *setting == "max_calls" {
            *in_force = calls;
        }
    }
    Ok(lowered(&fitted).map(|lowered| {
        format!(
            "memory_limit is {} ({origin}): {lowered}; raise it to at least {} for the configured \
             values",
            mebibytes(available),
            mebibytes(fitted.wanted)
        )
    }))
}

/// The lowered settings in words, `None` if there are none.
fn lowered(fitted: &Fitted) -> Option<String> {
    let each = fitted
        .lowered
        .iter()
        .map(|(setting, from, to)| match *from {
            UNBOUNDED => format!("{setting} is {to}, not unbounded"),
            from => format!("{setting} is {to}, not {from}"),
        });
    let words = each.collect::<Vec<_>>().join(", ");
    (!words.is_empty()).then_some(words)
}

/// A number of bytes, rounded up.
fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// The value of a bound that is not configured.
const UNBOUNDED: u64 = 1 << 32;

fn narrow(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests;

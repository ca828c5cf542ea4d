//! The traffic of a service mesh, as BanyanDB's stress run had it: 256 services of 8
//! instances send items of some 262 bytes over streams, in bursts of 2,000.
//!
//! Here each instance has a log, each item is a record with an ack of its own, and a burst
//! waits for its acks. The original paced itself by the clock (7,020 items a second) and called
//! the life of a stream divided by its items a latency; neither is done here unless --rate asks
//! for the former.

use indicatif::{HumanBytes, HumanCount};

use crate::figure::Measurement;
use crate::spec::{Level, LoadKind, Spec};

/// Items of the whole scenario.
pub(crate) const ITEMS: u64 = 16_186_000;
/// 256 services, each of 8 instances.
const INSTANCES: usize = 256 * 8;
const ITEM_BYTES: u32 = 262;
const BURST: usize = 2_000;

/// The published figures of the original, for people.
pub(crate) const PUBLISHED: &str = "published (BanyanDB, 16 cores, paced by the clock): 16,186,000 \
    items in 38 m 26 s = 7,020 items/s, 1.8 MB/s, 0.75 cores (p95), 431 MB of heap, 14.9 writes/s";

/// The scenario as a load.
pub(crate) fn spec(sessions: usize, prefix: &str, durability: Level, rate: Option<f64>) -> Spec {
    Spec {
        work: LoadKind::Session,
        in_flight: BURST * sessions,
        connections: sessions,
        logs: INSTANCES,
        record_bytes: ITEM_BYTES,
        durability,
        rate,
        burst: rate.is_none(),
        prefix: format!("{prefix}/istio"),
        ..Spec::default()
    }
}

/// The resources used, in the form of the original's figures; `None` without metrics.
pub(crate) fn used(measured: &Measurement) -> Option<String> {
    let figure = measured.first();
    let server = measured.server.as_ref()?;
    let bytes = |number: f64| HumanBytes(whole(number));
    Some(format!(
        "measured: {} items in {:.1} s = {} items/s, {}/s of payload, {:.2} cores of the server, {} of \
         memory at the end; {} written to the journal in {:.1} groups/s and {:.1} flushes/s, {} \
         by the sorter, the disk grew by {}\n",
        HumanCount(figure.records),
        figure.seconds,
        HumanCount(whole(figure.records_per_second)),
        bytes(figure.bytes_per_second),
        server.cpu_seconds / figure.seconds,
        bytes(server.rss_bytes),
        bytes(server.journal_bytes),
        server.groups / figure.seconds,
        server.flushes / figure.seconds,
        bytes(server.sorter_written_bytes),
        bytes(server.disk_growth_bytes),
    ))
}

#[allow(
    clippy::cast_possible_truncation,
    reason = "a size or a rate is far below 2^53"
)]
fn whole(number: f64) -> u64 {
    number.max(0.0) as u64
}

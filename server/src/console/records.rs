//! Records of one log, as a page shows them: in lsn order, with gaps between them, and with
//! long records cut.

use std::sync::Arc;

use axum::extract::{Extension, Query, State};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedSemaphorePermit;
use tonic::Status;
use wald_proto::v1;
use wald_storage::{
    Gap, GapReason, LogInfo, LogTarget, Lsn, ReadError, ScanRequest, ScanStart, StoredBatch,
    Timestamp,
};

use super::{Console, ConsoleError};
use crate::auth::{Amount, Caller, Engine, LogRight, Permitted, TenantUsage};
use crate::convert;
use crate::status::{self, Access};

/// Maximum number of records of a page, and the default.
const MAX_PAGE: u64 = 500;
const DEFAULT_PAGE: u64 = 100;
/// A page reads no more than about this, and sends no more than about that; it is
/// shorter then.
const READ_BYTES: usize = 16 << 20;
const SEND_BYTES: usize = 1 << 20;
/// Asked of the engine at a time.
const CHUNK_BYTES: u32 = 256 << 10;

/// Maximum bytes of each record that are sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    data: usize,
    header: usize,
}

impl Cut {
    /// A line of a list.
    pub(super) const LINE: Self = Self {
        data: 1 << 10,
        header: 128,
    };
    /// One record alone.
    const WHOLE: Self = Self {
        data: 4 << 20,
        header: usize::MAX,
    };
}

/// The content of a log at one place.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum RecordOrGap {
    Record(RecordView),
    Gap { gap: GapView },
}

/// A record.
#[derive(Serialize)]
pub(super) struct RecordView {
    lsn: u64,
    /// Stored time, microseconds since the Unix epoch.
    time_us: i64,
    /// Time of arrival, microseconds since the Unix epoch.
    arrival_us: i64,
    #[serde(flatten)]
    data: DataView,
    headers: Vec<HeaderView>,
    /// Checksum of the data, eight hexadecimal digits, if the record has one.
    crc32c: Option<String>,
}

/// A header of a record.
#[derive(Serialize)]
struct HeaderView {
    key: String,
    #[serde(flatten)]
    value: DataView,
}

/// The first bytes of a value.
#[derive(Serialize)]
struct DataView {
    /// Number of all bytes.
    size: usize,
    /// The first of them, base64.
    data: String,
    /// Whether there are more.
    cut: bool,
}

impl DataView {
    fn new(bytes: &[u8], most: usize) -> Self {
        let sent = &bytes[..bytes.len().min(most)];
        Self {
            size: bytes.len(),
            data: STANDARD.encode(sent),
            cut: sent.len() < bytes.len(),
        }
    }
}

/// Records that are missing.
#[derive(Serialize)]
pub(super) struct GapView {
    log: Option<String>,
    from_lsn: Option<u64>,
    /// Exclusive.
    to_lsn: Option<u64>,
    reason: &'static str,
}

impl GapView {
    pub(super) fn new(gap: &Gap) -> Self {
        Self {
            log: gap.log.as_ref().map(|log| log.as_str().to_owned()),
            from_lsn: gap.from.map(Lsn::get),
            to_lsn: gap.to.map(Lsn::get),
            reason: match gap.reason {
                GapReason::Trimmed => "TRIMMED",
                GapReason::Expired => "EXPIRED",
                GapReason::Quarantined => "QUARANTINED",
                GapReason::Lost => "LOST",
                GapReason::Deleted => "DELETED",
            },
        }
    }

    /// Records that a crash took back after the page had seen them.
    pub(super) fn lost(from: Lsn, to: Lsn) -> Self {
        Self::of(from, to, "LOST")
    }

    /// Records that came faster than the page is shown them; they are there.
    pub(super) fn passed(from: Lsn, to: Lsn) -> Self {
        Self::of(from, to, "PASSED")
    }

    fn of(from: Lsn, to: Lsn, reason: &'static str) -> Self {
        Self {
            log: None,
            from_lsn: Some(from.get()),
            to_lsn: Some(to.get()),
            reason,
        }
    }
}

/// A page of records.
#[derive(Serialize)]
pub(super) struct RecordsPage {
    pub(super) items: Vec<RecordOrGap>,
    /// The lsn at which the next read begins.
    pub(super) next_lsn: u64,
    log_id: String,
    first_lsn: u64,
    /// Number of records directly below the first that retention expired.
    #[serde(skip)]
    expired: u64,
    tail_lsn: u64,
    durable_lsn: u64,
}

/// A page that is being filled.
struct Filling {
    items: Vec<RecordOrGap>,
    next: Lsn,
    cut: Cut,
    read: usize,
    sent: usize,
}

impl Filling {
    fn is_full(&self) -> bool {
        self.read >= READ_BYTES || self.sent >= SEND_BYTES
    }

    fn gap(&mut self, gap: &Gap) {
        self.next = gap.to.unwrap_or(self.next);
        let gap = GapView::new(gap);
        self.items.push(RecordOrGap::Gap { gap });
    }

    fn batch(&mut self, batch: &StoredBatch) -> Result<(), Status> {
        self.read += batch.body.len();
        for (lsn, record) in (batch.first_lsn.get()..).zip(convert::decode(batch)?) {
            if self.sent >= SEND_BYTES {
                return Ok(());
            }
            self.record(Lsn::new(lsn), record, batch.arrival);
        }
        Ok(())
    }

    fn record(&mut self, lsn: Lsn, record: v1::Record, arrival: Timestamp) {
        let payload = match record.payload {
            Some(v1::record::Payload::Data(data)) => data,
            Some(v1::record::Payload::Text(text)) => text.into(),
            None => Bytes::new(),
        };
        let data = DataView::new(&payload, self.cut.data);
        let header = |header: v1::Header| HeaderView {
            value: DataView::new(&header.value, self.cut.header),
            key: header.key,
        };
        let headers: Vec<_> = record.headers.into_iter().map(header).collect();
        let of_header = |header: &HeaderView| header.key.len() + header.value.data.len() + 48;
        self.sent += data.data.len() + 128 + headers.iter().map(of_header).sum::<usize>();
        self.items.push(RecordOrGap::Record(RecordView {
            lsn: lsn.get(),
            time_us: match record.timestamp_us {
                0 => arrival.micros(),
                own => own,
            },
            arrival_us: arrival.micros(),
            data,
            headers,
            crc32c: record.crc32c.map(|crc| format!("{crc:08x}")),
        }));
        self.next = lsn.advance(1);
    }
}

/// Reads a page of at most `limit` records, which count for a tenant if there is one.
///
/// # Errors
/// As a scan of the log would give.
pub(super) async fn read(
    engine: &Engine,
    tenant: Option<&TenantUsage>,
    target: &Permitted<LogTarget>,
    start: ScanStart,
    until: Option<Lsn>,
    limit: u64,
    cut: Cut,
) -> Result<RecordsPage, Status> {
    let stat = engine.stat(target, None, None).await;
    let info = stat.map_err(|error| status::read(&error))?.info;
    let mut filling = Filling {
        items: Vec::new(),
        next: match start {
            ScanStart::Lsn(lsn) => lsn,
            _ => info.tail_lsn,
        },
        cut,
        read: 0,
        sent: 0,
    };
    let mut scan = engine
        .scan(target.scanned(|selector| ScanRequest {
            selector,
            start,
            until_lsn: until,
            max_records: limit,
            follow: false,
            visibility: None,
            chunk_bytes: CHUNK_BYTES,
        }))
        .await
        .map_err(|error| status::read(&error))?;
    let mut ends = (info.tail_lsn, info.durable_lsn);
    while !filling.is_full() {
        let chunk = scan.next().await.map_err(|error| status::read(&error))?;
        let Some(chunk) = chunk else { break };
        if let Some(tenant) = tenant {
            tenant.delivered(Amount::of(&chunk.batches));
        }
        ends = (
            chunk.tail_lsn.unwrap_or(ends.0),
            chunk.durable_lsn.unwrap_or(ends.1),
        );
        for gap in &chunk.gaps {
            filling.gap(gap);
        }
        for batch in &chunk.batches {
            filling.batch(batch)?;
        }
    }
    Ok(RecordsPage {
        items: filling.items,
        next_lsn: filling.next.get(),
        log_id: info.log_id.to_string(),
        first_lsn: info.first_lsn.get(),
        expired: info.expired,
        tail_lsn: ends.0.get(),
        durable_lsn: ends.1.get(),
    })
}

/// Which records: at most one of the places, or the newest.
#[derive(Deserialize)]
pub(super) struct PageQuery {
    log: String,
    /// From this record on.
    lsn: Option<u64>,
    /// The missing records just before this record.
    before: Option<u64>,
    /// From the first record on whose time is not before this.
    time_us: Option<i64>,
    limit: Option<u64>,
}

impl PageQuery {
    /// Begin, end and maximum number of records.
    fn range(&self, info: &LogInfo) -> (ScanStart, Option<Lsn>, u64) {
        let limit = self.limit.unwrap_or(DEFAULT_PAGE).clamp(1, MAX_PAGE);
        if let Some(lsn) = self.lsn {
            return (ScanStart::Lsn(Lsn::new(lsn)), None, limit);
        }
        if let Some(time) = self.time_us {
            return (ScanStart::Time(Timestamp::from_micros(time)), None, limit);
        }
        // Counted from the end, records of usual size must fit, or the end is cut off.
        let records = info.tail_lsn.since(info.first_lsn).max(1);
        let usual = (info.stored_bytes / records).max(1);
        let fitting = limit.min((READ_BYTES as u64 / 2 / usual).max(1));
        let end = self.before.map_or(info.tail_lsn, Lsn::new);
        let start = Lsn::new(end.get().saturating_sub(fitting)).max(info.first_lsn.min(end));
        (ScanStart::Lsn(start), Some(end), fitting)
    }
}

/// `GET /console/api/records?log=&lsn=|before=|time_us=&limit=`
pub(super) async fn page(
    State(console): State<Arc<Console>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<PageQuery>,
) -> Result<Response, ConsoleError> {
    let tenant = caller.tenant().map(Arc::as_ref);
    // First: a page that waits here takes no turn from other pages.
    let _place = place(tenant).await?;
    let _turn = console.turn().await;
    let engine = &console.node.store(Access::Read)?.engine;
    let target = convert::target(&query.log, None, Access::Read)?;
    let target = caller.allow_by(LogRight::Read, target)?;
    let stat = engine.stat(&target, None, None).await;
    let info = stat.map_err(|error| status::read(&error))?.info;
    let (start, until, limit) = query.range(&info);
    let mut page = read(engine, tenant, &target, start, until, limit, Cut::LINE).await?;
    page.name_what_was_trimmed();
    Ok(console.counted(&page).await?)
}

impl RecordsPage {
    /// A page that begins with the first record kept reports the trimmed records before it.
    fn name_what_was_trimmed(&mut self) {
        let first = self.first_lsn;
        let begins = match self.items.first() {
            Some(RecordOrGap::Record(record)) => record.lsn == first,
            Some(RecordOrGap::Gap { gap }) => {
                !["TRIMMED", "EXPIRED"].contains(&gap.reason) && gap.from_lsn == Some(first)
            }
            None => self.next_lsn == first,
        };
        if begins && first > 0 {
            let border = first.saturating_sub(self.expired);
            let gone = [(0, border, "TRIMMED"), (border, first, "EXPIRED")];
            let gone = gone.into_iter().filter(|(from, to, _)| from < to);
            let gaps = gone.map(|(from, to, reason)| RecordOrGap::Gap {
                gap: GapView::of(Lsn::new(from), Lsn::new(to), reason),
            });
            self.items.splice(0..0, gaps);
        }
    }
}

/// Which record.
#[derive(Deserialize)]
pub(super) struct OneQuery {
    log: String,
    lsn: u64,
}

/// `GET /console/api/record?log=&lsn=`: the record, or the gap it lies in.
pub(super) async fn one(
    State(console): State<Arc<Console>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<OneQuery>,
) -> Result<Response, ConsoleError> {
    let tenant = caller.tenant().map(Arc::as_ref);
    // First: a page that waits here takes no turn from other pages.
    let _place = place(tenant).await?;
    let _turn = console.turn().await;
    let engine = &console.node.store(Access::Read)?.engine;
    let target = convert::target(&query.log, None, Access::Read)?;
    let target = caller.allow_by(LogRight::Read, target)?;
    let name = target.get().name.clone();
    let lsn = Lsn::new(query.lsn);
    let start = ScanStart::Lsn(lsn);
    let page = read(engine, tenant, &target, start, None, 1, Cut::WHOLE).await?;
    let tail = Lsn::new(page.tail_lsn);
    let item = page.items.into_iter().next();
    let beyond = || {
        status::read(&ReadError::BeyondTail {
            log: name,
            tail,
            asked: lsn,
        })
    };
    Ok(console.counted(&item.ok_or_else(beyond)?).await?)
}

/// A place among the reads of the tenant, if there is one.
///
/// # Errors
/// RATE.
async fn place(tenant: Option<&TenantUsage>) -> Result<Option<OwnedSemaphorePermit>, Status> {
    match tenant {
        Some(tenant) => tenant.read_place_if_paid().await,
        None => Ok(None),
    }
}

impl Console {
    /// Waits until few enough read at the same time.
    async fn turn(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        Arc::clone(&self.reads).acquire_owned().await.ok()
    }
}

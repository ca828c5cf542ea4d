//! Lists: logs in the order and pages of ListLogs, segments newest first.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Extension, Query, State};
use serde::{Deserialize, Serialize};
use tonic::Status;
use wald_storage::{Compression, LogInfo, ProducerInfo, SegmentInfo};

use super::{Console, ConsoleError, Json};
use crate::auth::{Caller, LogRight, ServerRight};
use crate::config::SettingValue as _;
use crate::convert;
use crate::status::{self, Access};

/// Maximum number of entries of a page, and the default.
const MAX_PAGE: usize = 500;
const DEFAULT_PAGE: usize = 100;
/// Maximum number of cursors, and of producers, on the page of a log.
const MAX_CURSORS: usize = 20;
const MAX_PRODUCERS: usize = 20;

/// Longest time in which producers are listed, others' turns included.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

fn page_size(asked: Option<usize>) -> usize {
    asked.unwrap_or(DEFAULT_PAGE).clamp(1, MAX_PAGE)
}

/// Which logs.
#[derive(Deserialize)]
pub(super) struct LogsQuery {
    /// Only names that begin so.
    #[serde(default)]
    prefix: String,
    /// Only names after this one.
    after: Option<String>,
    limit: Option<usize>,
}

/// A page of logs.
#[derive(Serialize)]
pub(super) struct LogsPage {
    logs: Vec<LogView>,
    /// Continues with the next page; null: this is the last.
    next_after: Option<String>,
    /// Number of all logs, whatever their names.
    total: u64,
}

/// A log. Numbers are exact up to 2^53, which `log_id` can pass: it is text.
#[derive(Serialize)]
pub(super) struct LogView {
    name: String,
    log_id: String,
    first_lsn: u64,
    tail_lsn: u64,
    durable_lsn: u64,
    stored_bytes: u64,
    create_time_us: i64,
    update_time_us: i64,
    /// The log's own mode; null: the server's.
    sync_mode: Option<String>,
    compression: Option<&'static str>,
    max_record_bytes: Option<u32>,
}

impl LogView {
    fn new(info: &LogInfo) -> Self {
        Self {
            name: info.name.as_str().to_owned(),
            log_id: info.log_id.to_string(),
            first_lsn: info.first_lsn.get(),
            tail_lsn: info.tail_lsn.get(),
            durable_lsn: info.durable_lsn.get(),
            stored_bytes: info.stored_bytes,
            create_time_us: info.create_time.micros(),
            update_time_us: info.update_time.micros(),
            sync_mode: info.config.sync_mode.map(|mode| mode.show()),
            compression: info
                .config
                .compression
                .map(|compression| match compression {
                    Compression::None => "none",
                    Compression::Lz4 => "lz4",
                    Compression::Zstd => "zstd",
                }),
            max_record_bytes: info.config.max_record_bytes,
        }
    }
}

/// `GET /console/api/logs?prefix=&after=&limit=`
pub(super) async fn logs(
    State(console): State<Arc<Console>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<LogsQuery>,
) -> Result<Json<LogsPage>, ConsoleError> {
    let engine = &console.node.store(Access::Read)?.engine;
    let size = page_size(query.limit);
    // One more than asked tells whether there is a next page.
    let found = engine.list_logs(caller.listed(query.prefix)?, query.after, size + 1);
    let mut found = found.await.map_err(|error| status::read(&error))?;
    let more = found.len() > size;
    found.truncate(size);
    let last = found.last().filter(|_| more);
    Ok(Json(LogsPage {
        next_after: last.map(|log| log.name.as_str().to_owned()),
        logs: found.iter().map(LogView::new).collect(),
        total: engine.statistics().logs,
    }))
}

/// Which log.
#[derive(Deserialize)]
pub(super) struct LogQuery {
    log: String,
}

/// Everything about one log.
#[derive(Serialize)]
pub(super) struct OneLog {
    #[serde(flatten)]
    log: LogView,
    /// 0 until the first fence.
    writer_epoch: u64,
    retention: RetentionView,
    /// The first by name.
    cursors: Vec<CursorView>,
    more_cursors: bool,
}

/// The bounds beyond which the log drops records; null: no such bound.
#[derive(Serialize)]
struct RetentionView {
    /// Whether these are the log's own bounds, not the server's.
    own: bool,
    max_age_seconds: Option<u64>,
    max_bytes: Option<u64>,
    max_records: Option<u64>,
    respect_cursors: bool,
}

/// A cursor of a log.
#[derive(Serialize)]
struct CursorView {
    name: String,
    lsn: u64,
    /// Durable records from the cursor on.
    lag: u64,
    update_time_us: i64,
}

/// The producers of a log.
#[derive(Serialize)]
pub(super) struct ProducersPage {
    /// The first by id.
    producers: Vec<ProducerView>,
    more_producers: bool,
}

/// A producer of a log. Its numbers are text: clients may choose some above 2^53.
#[derive(Serialize)]
struct ProducerView {
    id: String,
    epoch: String,
    /// Sequence number of the newest batch in this epoch; null: there is none.
    last_sequence: Option<String>,
    /// Arrival time of the newest batch.
    last_append_us: i64,
    /// Time at which the producer expires if it stays idle; null: producers of this server do
    /// not expire.
    expires_us: Option<i64>,
}

impl ProducerView {
    fn new(info: &ProducerInfo, max_idle: Duration) -> Self {
        let idle = i64::try_from(max_idle.as_micros()).unwrap_or(i64::MAX);
        let last = info.last_append.micros();
        Self {
            id: info.id.as_str().to_owned(),
            epoch: info.epoch.to_string(),
            last_sequence: info
                .next_sequence
                .checked_sub(1)
                .map(|last| last.to_string()),
            last_append_us: last,
            expires_us: (idle > 0).then(|| last.saturating_add(idle)),
        }
    }
}

/// `GET /console/api/producers?log=`
///
/// This is no part of `log`: the engine flushes before it names producers, and a page must still
/// show its log while the device hangs. So lists wait for each other, and for [`LIST_TIMEOUT`].
pub(super) async fn producers(
    State(console): State<Arc<Console>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<LogQuery>,
) -> Result<Json<ProducersPage>, ConsoleError> {
    let engine = &console.node.store(Access::Read)?.engine;
    let target = convert::target(&query.log, None, Access::Read)?;
    let target = caller.allow_by(LogRight::Read, target)?;
    let list = async {
        let _turn = console.producers.acquire().await;
        engine.list_producers(target, None, MAX_PRODUCERS + 1).await
    };
    let found = tokio::time::timeout(LIST_TIMEOUT, list).await;
    let found =
        found.map_err(|_| Status::unavailable("the device flushes too slowly; ask again"))?;
    let found = found.map_err(|error| status::read(&error))?;
    let max_idle = console.node.limits.producer_max_idle;
    Ok(Json(ProducersPage {
        more_producers: found.len() > MAX_PRODUCERS,
        producers: (found.iter().take(MAX_PRODUCERS))
            .map(|producer| ProducerView::new(producer, max_idle))
            .collect(),
    }))
}

/// `GET /console/api/log?log=`
pub(super) async fn log(
    State(console): State<Arc<Console>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<LogQuery>,
) -> Result<Json<OneLog>, ConsoleError> {
    let engine = &console.node.store(Access::Read)?.engine;
    let target = convert::target(&query.log, None, Access::Read)?;
    let target = caller.allow_by(LogRight::Read, target)?;
    let stat = engine.stat(&target, None, None).await;
    let info = stat.map_err(|error| status::read(&error))?.info;
    let cursors = engine.list_cursors(&target, None, MAX_CURSORS + 1);
    let cursors = cursors
        .await
        .map_err(|error| status::cursor(&error, Access::Read))?;
    let own = info.config.retention.as_deref();
    let retention = own.copied().unwrap_or(console.node.retention);
    Ok(Json(OneLog {
        writer_epoch: info.writer_epoch,
        retention: RetentionView {
            own: own.is_some(),
            max_age_seconds: retention.max_age.map(|age| age.as_secs()),
            max_bytes: retention.max_bytes,
            max_records: retention.max_records,
            respect_cursors: retention.respect_cursors,
        },
        more_cursors: cursors.len() > MAX_CURSORS,
        cursors: (cursors.iter().take(MAX_CURSORS))
            .map(|cursor| CursorView {
                name: cursor.name.as_str().to_owned(),
                lsn: cursor.lsn.get(),
                lag: info.durable_lsn.get().saturating_sub(cursor.lsn.get()),
                update_time_us: cursor.update_time.micros(),
            })
            .collect(),
        log: LogView::new(&info),
    }))
}

/// Which segments.
#[derive(Deserialize)]
pub(super) struct SegmentsQuery {
    /// Only those that begin below this position.
    before: Option<u64>,
    limit: Option<usize>,
}

/// A page of segments, newest first.
#[derive(Serialize)]
pub(super) struct Segments {
    segments: Vec<SegmentView>,
    /// Continues with older ones; null: these are the oldest.
    next_before: Option<u64>,
    total: usize,
}

/// A segment of the journal, or a sorted run.
#[derive(Serialize)]
pub(super) struct SegmentView {
    segment_id: u64,
    base_position: u64,
    end_position: u64,
    file_bytes: u64,
    sealed: bool,
    sorted: bool,
}

impl SegmentView {
    fn new(info: &SegmentInfo) -> Self {
        Self {
            segment_id: info.id,
            base_position: info.base.get(),
            end_position: info.end.get(),
            file_bytes: info.bytes,
            sealed: info.sealed,
            sorted: info.sorted.is_some(),
        }
    }
}

/// `GET /console/api/segments?before=&limit=`
pub(super) async fn segments(
    State(console): State<Arc<Console>>,
    Extension(caller): Extension<Caller>,
    Query(query): Query<SegmentsQuery>,
) -> Result<Json<Segments>, ConsoleError> {
    let allowed = caller.allow_server(ServerRight::Ops)?;
    let all = console.node.store(Access::Read)?.engine.segments(&allowed);
    let size = page_size(query.limit);
    let mut older = all.iter().rev().filter(|segment| {
        query
            .before
            .is_none_or(|before| segment.base.get() < before)
    });
    let segments: Vec<_> = older.by_ref().take(size).map(SegmentView::new).collect();
    let last = segments.last().map(|segment| segment.base_position);
    Ok(Json(Segments {
        next_before: last.filter(|_| older.next().is_some()),
        segments,
        total: all.len(),
    }))
}

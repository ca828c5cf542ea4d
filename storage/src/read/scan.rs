//! Begins scans, and holds the state that scans of one log and of many share.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::cursor::{self, ScanCursor};
use super::journal_scan::JournalScan;
use super::log_scan::LogScan;
use crate::api::engine::{Room, Scan, ScanRequest, ScanStart, Selector};
use crate::api::error::ReadError;
use crate::api::record::Visibility;
use crate::api::watch::WatchFollower;
use crate::base::threads::Workers;
use crate::read::store::Store;

/// State of every scan.
pub(super) struct Common {
    pub(super) store: Arc<Store>,
    pub(super) workers: Arc<Workers>,
    /// The visibility that the request names; `None` = the one of the sync mode.
    pub(super) asked: Option<Visibility>,
    pub(super) visibility: Visibility,
    pub(super) follow: bool,
    /// Maximum number of records still to return; `u64::MAX` = no bound.
    pub(super) remaining: u64,
    pub(super) chunk_bytes: usize,
    pub(super) selection: u64,
    /// Set when the scan waits for more records for the first time.
    pub(super) follower: Option<WatchFollower>,
    /// Whether the end, as it is now, has been reported.
    pub(super) caught_up: bool,
    pub(super) done: bool,
    /// Source of the memory for chunks.
    pub(super) room: Option<Arc<dyn Room>>,
}

impl Common {
    /// Whether the journal has failed under a reader of records that are not durable. Records beyond the durable lsn
    /// are then unknown, so the visible end is not the end.
    pub(super) fn in_doubt(&self) -> bool {
        self.visibility.sees_unflushed() && self.store.journal.failure().is_some()
    }

    /// Waits for the memory of a chunk.
    pub(super) async fn reserve(&self) {
        if let Some(room) = &self.room {
            room.reserve(self.chunk_bytes as u64).await;
        }
    }

    /// Gives back the memory of a chunk: there is nothing to read.
    pub(super) fn give_back(&self) {
        if let Some(room) = &self.room {
            room.give_back();
        }
    }

    /// A value for the thread that reads a chunk to keep meanwhile.
    pub(super) fn at_work(&self) -> Option<Arc<dyn Send + Sync>> {
        self.room.as_ref()?.at_work()
    }

    pub(super) fn followers(&self) -> usize {
        self.follower.as_ref().map_or(0, WatchFollower::count)
    }
}

/// Counts a scan among those that wait for data.
pub(super) struct Following(Arc<Store>);

impl Following {
    pub(super) fn new(store: &Arc<Store>) -> Self {
        store.followers.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(store))
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.0.followers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Begins a scan. One of many logs by time reads the beginnings of segments, so it begins on a reader thread.
pub(crate) async fn begin_without_blocking(
    store: &Arc<Store>,
    workers: &Arc<Workers>,
    request: ScanRequest,
) -> Result<Box<dyn Scan>, ReadError> {
    let is_of_one = matches!(request.selector, Selector::Log(_));
    if is_of_one || !matches!(request.start, ScanStart::Time(_)) {
        return begin(store, workers, request);
    }
    let (store, threads) = (Arc::clone(store), Arc::clone(workers));
    let begun = workers.run_if_awaited(move || begin(&store, &threads, request));
    begun.await
}

/// Begins a scan on this thread.
pub(crate) fn begin(
    store: &Arc<Store>,
    workers: &Arc<Workers>,
    request: ScanRequest,
) -> Result<Box<dyn Scan>, ReadError> {
    let selection = cursor::selection(store.store_id, &request.selector);
    let cursor = match &request.start {
        ScanStart::Cursor(bytes) => Some(ScanCursor::decode(bytes, selection)?),
        _ => None,
    };
    let name = match &request.selector {
        Selector::Log(target) => Some(&target.name),
        Selector::Prefix(_) | Selector::All => None,
    };
    let common = Common {
        store: Arc::clone(store),
        workers: Arc::clone(workers),
        asked: request.visibility,
        visibility: store.visibility(request.visibility, name)?,
        follow: request.follow,
        remaining: if request.max_records == 0 {
            u64::MAX
        } else {
            request.max_records
        },
        chunk_bytes: request.chunk_bytes.max(1) as usize,
        selection,
        follower: None,
        caught_up: false,
        done: false,
        room: None,
    };
    match request.selector {
        Selector::Log(target) => {
            LogScan::begin(common, target, request.start, cursor, request.until_lsn)
                .map(|scan| Box::new(scan) as _)
        }
        Selector::Prefix(prefix) => {
            check_many(&request.start, request.until_lsn.is_some())?;
            Ok(Box::new(JournalScan::begin(
                common,
                prefix,
                request.start,
                cursor,
            )?))
        }
        Selector::All => {
            check_many(&request.start, request.until_lsn.is_some())?;
            Ok(Box::new(JournalScan::begin(
                common,
                String::new(),
                request.start,
                cursor,
            )?))
        }
    }
}

/// Refuses bounds in lsns for a scan of many logs: an lsn has a meaning in one log only.
fn check_many(start: &ScanStart, has_until: bool) -> Result<(), ReadError> {
    let wrong = match start {
        ScanStart::Lsn(_) => "start lsn needs a scan of one log; use cursor or timestamp_us",
        ScanStart::TailOffset(1..) => {
            "tail_offset above 0 needs a scan of one log; 0 means from now on"
        }
        _ if has_until => "until_lsn needs a scan of one log",
        _ => return Ok(()),
    };
    Err(ReadError::InvalidScan(wrong))
}

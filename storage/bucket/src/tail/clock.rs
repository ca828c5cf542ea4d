//! The time of the tail. It is never behind a time that an earlier owner has stored.
//!
//! SlateDB orders rows, files and merges by wall clocks. An owner whose clock is behind the one before waits for up to
//! 10 s with its first row, and stops if that does not help. This clock begins at the newest stored time instead.
//!
//! A clock that was far ahead once therefore stays ahead. The collector then removes unused objects early.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use chrono::{DateTime, Utc};
use object_store::ObjectStore;
use slatedb::admin::Admin;
use slatedb::{Error, VersionedManifest, WalReader};
use slatedb_common::{DefaultSystemClock, SystemClock, SystemClockTicker};
use tokio::time::{Instant, sleep, timeout_at};
use tokio::try_join;

use super::error::TailError;
use super::settings::OPEN_TIMEOUT;
use super::{DATABASE, log};
use crate::error::store_words;

/// Pause before a read that failed is repeated.
const PAUSE: Duration = Duration::from_millis(100);
/// Largest time in milliseconds: the year 6,400. Later ones are damage, and do not fit into names of files.
const LATEST: u64 = 1 << 47;

#[derive(Debug, Default)]
pub(super) struct TailClock {
    wall: DefaultSystemClock,
    /// Milliseconds by which the tail is ahead of the machine.
    ahead: AtomicU64,
}

impl TailClock {
    /// Moves the clock to the newest time that is stored, if it is behind. Reads the newest state of the database, unless it is
    /// `known`, and returns it; `None` if there is no database.
    ///
    /// # Errors
    /// `Unreachable` if the bucket gives no answer, `Damaged` if the tail cannot be read.
    pub(super) async fn catch_up(
        &self,
        place: &str,
        store: &Arc<dyn ObjectStore>,
        known: Option<VersionedManifest>,
    ) -> Result<Option<VersionedManifest>, TailError> {
        let action = "read the newest time";
        let deadline = Instant::now() + OPEN_TIMEOUT;
        let (newest, manifest) = loop {
            let error = match timeout_at(deadline, newest_time(store, known.as_ref())).await {
                Ok(Ok((newest, manifest))) => break (newest.min(LATEST), manifest),
                Ok(Err(error)) => error,
                Err(_) => return Err(TailError::late(place, action)),
            };
            // The reader of the log does not repeat requests, and objects leave while the owner before goes on.
            if Instant::now() + PAUSE >= deadline {
                return Err(TailError::of(place, action, &error, None));
            }
            sleep(PAUSE).await;
        };
        let now = u64::try_from(self.wall.now().timestamp_millis()).unwrap_or(0);
        self.ahead
            .fetch_max(newest.saturating_sub(now), Ordering::Relaxed);
        Ok(manifest)
    }
}

impl SystemClock for TailClock {
    fn now(&self) -> DateTime<Utc> {
        self.wall.now() + Duration::from_millis(self.ahead.load(Ordering::Relaxed))
    }

    fn sleep<'a>(
        &'a self,
        duration: Duration,
    ) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        self.wall.sleep(duration)
    }

    fn ticker<'a>(&'a self, duration: Duration) -> SystemClockTicker<'a> {
        SystemClockTicker::new(self, duration)
    }
}

/// The newest time in files, merges and rows, in milliseconds since 1970, and the state of the database. 0 if there is none.
async fn newest_time(
    store: &Arc<dyn ObjectStore>,
    known: Option<&VersionedManifest>,
) -> Result<(u64, Option<VersionedManifest>), Error> {
    let admin = Admin::builder(DATABASE, Arc::clone(store)).build();
    let files_and_rows = async {
        let manifest = match known {
            Some(known) => Some(known.clone()),
            None => admin.read_manifest(None).await?,
        };
        let Some(manifest) = manifest else {
            return Ok::<_, Error>((0, None));
        };
        let rows = newest_row(store, manifest.replay_after_wal_id()).await?;
        Ok((rows.max(newest_file(&manifest)), Some(manifest)))
    };
    let merges = async {
        let compactions = admin.read_compactions(None).await?;
        let merges = compactions.iter().flat_map(|all| all.recent_compactions());
        Ok(merges.map(|merge| merge.id().timestamp_ms()).max())
    };
    // Each takes some requests in turn, and clients wait.
    let ((newest, manifest), merged) = try_join!(files_and_rows, merges)?;
    Ok((newest.max(merged.unwrap_or(0)), manifest))
}

fn newest_file(manifest: &VersionedManifest) -> u64 {
    let files = manifest
        .all_sst_views()
        .map(|file| file.sst.id.value().timestamp_ms());
    let merged = manifest.segments().iter();
    let merged = merged.filter_map(|segment| segment.last_compacted_l0_sst_view_id());
    let newest = files
        .chain(merged.map(|file| file.timestamp_ms()))
        .chain([row_time(manifest.last_l0_clock_tick())])
        .max();
    newest.unwrap_or(0)
}

/// The newest time of the rows in the write-ahead log above `replayed`.
async fn newest_row(store: &Arc<dyn ObjectStore>, replayed: u64) -> Result<u64, Error> {
    let objects = log::numbers_after(store, replayed).await;
    let objects = objects.map_err(|error| Error::unavailable(store_words(&error)))?;
    let log = WalReader::new(DATABASE, Arc::clone(store));
    // Times of rows never go down, so the last object with rows has the newest.
    for number in objects.into_iter().rev() {
        let mut rows = log.get(number).iterator().await?;
        let mut latest = None;
        while let Some(entry) = rows.next().await? {
            latest = latest.max(entry.create_ts);
        }
        if let Some(latest) = latest {
            return Ok(row_time(latest));
        }
    }
    Ok(0)
}

fn row_time(time: i64) -> u64 {
    u64::try_from(time).unwrap_or(0)
}

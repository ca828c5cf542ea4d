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
use slatedb::{Error, WalReader};
use slatedb_common::{DefaultSystemClock, SystemClock, SystemClockTicker};
use tokio::time::{Instant, sleep, timeout_at};

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
    /// Moves the clock to the newest time that is stored, if it is behind.
    ///
    /// # Errors
    /// `Unreachable` if the bucket gives no answer, `Damaged` if the tail cannot be read.
    pub(super) async fn catch_up(
        &self,
        place: &str,
        store: &Arc<dyn ObjectStore>,
    ) -> Result<(), TailError> {
        let action = "read the newest time";
        let deadline = Instant::now() + OPEN_TIMEOUT;
        let newest = loop {
            let error = match timeout_at(deadline, newest_time(store)).await {
                Ok(Ok(newest)) => break newest.min(LATEST),
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
        Ok(())
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

/// The newest time in files, merges and rows, in milliseconds since 1970. 0 if there is no database.
async fn newest_time(store: &Arc<dyn ObjectStore>) -> Result<u64, Error> {
    let admin = Admin::builder(DATABASE, Arc::clone(store)).build();
    let Some(manifest) = admin.read_manifest(None).await? else {
        return Ok(0);
    };
    let compactions = admin.read_compactions(None).await?;
    let files = manifest
        .all_sst_views()
        .map(|file| file.sst.id.value().timestamp_ms());
    let merged = manifest.segments().iter();
    let merged = merged.filter_map(|segment| segment.last_compacted_l0_sst_view_id());
    let merges = compactions.iter().flat_map(|all| all.recent_compactions());
    let row = |time: i64| u64::try_from(time).unwrap_or(0);
    let newest = files
        .chain(merged.map(|file| file.timestamp_ms()))
        .chain(merges.map(|merge| merge.id().timestamp_ms()))
        .chain([row(manifest.last_l0_clock_tick())])
        .max();
    let newest = newest.unwrap_or(0);
    // Times of rows never go down, so the last object with rows has the newest.
    let objects = log::numbers_after(store, manifest.replay_after_wal_id()).await;
    let objects = objects.map_err(|error| Error::unavailable(store_words(&error)))?;
    let log = WalReader::new(DATABASE, Arc::clone(store));
    for number in objects.into_iter().rev() {
        let mut rows = log.get(number).iterator().await?;
        let mut latest = None;
        while let Some(entry) = rows.next().await? {
            latest = latest.max(entry.create_ts);
        }
        if let Some(latest) = latest {
            return Ok(newest.max(row(latest)));
        }
    }
    Ok(newest)
}

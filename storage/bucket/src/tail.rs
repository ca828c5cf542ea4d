//! The tail of a replica: the journal's bytes that no file in the bucket holds yet. It is one SlateDB database.
//!
//! ```text
//! put(part) ─▶ one object of the write-ahead log ─▶ files of the segment ─▶ drain(segment): they leave as a whole
//!
//! term E ─▶ open(E) claims E + 1 ─▶ the owner before is fenced: it stores nothing any more
//! ```
//!
//! - A row is in the bucket when [`ReplicaTail::put`] returns `Ok`. Every later owner and every copy then reads it.
//! - One row is on its way at a time, in the order of the calls. The rows of a large group travel together: the tail has all of
//!   them or none, because a later owner could not use a part of a group.
//! - Rows leave only with their whole segment, after the caller has stored the segment as a file and has named it in a
//!   manifest. Only [`ReplicaTail::put_manifest`] makes a manifest count, because an owner that was fenced cannot store its row.
//! - Drains last as long as the owner: after each open the caller drains again.
//!
//! The object store must keep the metadata of objects ([`probe_metadata`]): a writer recognises its own object by them
//! after a lost answer.

mod clock;
mod collect;
mod compact;
mod error;
mod follow;
mod keys;
mod log;
mod metadata;
mod probes;
mod reader;
mod rows;
mod settings;
#[cfg(test)]
mod tests;
mod undecided;
mod writer;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use object_store::ObjectStore;
use slatedb::admin::Admin;
use slatedb::config::CloseOptions;
use slatedb::{CloseReason, Db, VersionedManifest};
use tokio::sync::{Mutex, oneshot};
use tokio::time::timeout;

use self::clock::TailClock;
use self::compact::{Compaction, Drained};
use self::settings::{CLOSE_TIMEOUT, OPEN_TIMEOUT, READ_TIMEOUT};
use self::undecided::Undecided;
use self::writer::Writer;
use crate::bucket::Bucket;

pub use self::error::{TailError, TailErrorKind};
pub use self::follow::TailFollower;
pub use self::keys::{LARGEST_PART, LONGEST_MANIFEST_NAME, TailManifest, TailPart};
pub use self::metadata::probe_metadata;
pub(crate) use self::reader::COPY_ATTEMPTS;
pub use self::reader::TailCopy;
pub use self::rows::TailRows;

/// Directory of the database below the prefix of the bucket.
const DATABASE: &str = "shards/0/db";

/// The newest term, and a clock that is not behind any time stored in it. Both take the same requests.
pub(crate) struct NewestTail {
    term: u64,
    clock: Arc<TailClock>,
}

impl NewestTail {
    /// Reads the newest state of the tail.
    ///
    /// # Errors
    /// As [`ReplicaTail::newest_term`].
    pub(crate) async fn read(bucket: &Bucket) -> Result<Self, TailError> {
        let (store, clock) = (undecided(bucket), TailClock::default());
        let newest = clock.catch_up(bucket.place(), &store, None).await?;
        Ok(Self {
            term: newest.map_or(0, |newest| newest.writer_epoch()),
            clock: Arc::new(clock),
        })
    }

    /// Number of the newest owner's term; 0 if there has been none.
    pub(crate) fn term(&self) -> u64 {
        self.term
    }
}

/// The tail, as its owner has it.
pub struct ReplicaTail {
    place: String,
    term: u64,
    db: Db,
    writer: Writer,
    drained: Drained,
    compaction: Mutex<Compaction>,
}

impl fmt::Debug for ReplicaTail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicaTail")
            .field("place", &self.place)
            .field("term", &self.term)
            .finish_non_exhaustive()
    }
}

impl ReplicaTail {
    /// Number of the newest owner's term; 0 if there has been none.
    ///
    /// # Errors
    /// `Unreachable` if the bucket gives no answer, `Damaged` if the tail cannot be read.
    pub async fn newest_term(bucket: &Bucket) -> Result<u64, TailError> {
        let newest = Self::newest(bucket).await?;
        Ok(newest.map_or(0, |newest| newest.writer_epoch()))
    }

    async fn newest(bucket: &Bucket) -> Result<Option<VersionedManifest>, TailError> {
        let admin = Admin::builder(DATABASE, undecided(bucket)).build();
        reader::newest(bucket.place(), &admin).await
    }

    /// Opens the tail as the owner of the term with the number `newest` + 1, as [`ReplicaTail::open_after`] does.
    ///
    /// # Errors
    /// As [`ReplicaTail::open_after`].
    pub async fn open(bucket: &Bucket, newest: u64) -> Result<Self, TailError> {
        let found = NewestTail::read(bucket).await?;
        if found.term != newest {
            return Err(TailError::fenced(bucket.place(), "open the tail"));
        }
        Self::open_after(bucket, found).await
    }

    /// Opens the tail as the owner of the term after the newest one, and fences the owner before. Reads the rows of the write-ahead
    /// log: at most 256 objects.
    ///
    /// # Errors
    /// `Fenced` if there is a newer term meanwhile: the caller reads it again. `Unreachable` if the
    /// bucket gives no answer; the term may be taken then, so the caller reads it again, too. `Damaged` if the tail cannot
    /// be read.
    pub(crate) async fn open_after(bucket: &Bucket, newest: NewestTail) -> Result<Self, TailError> {
        let place = bucket.place();
        let store = undecided(bucket);
        let NewestTail {
            term: newest,
            clock,
        } = newest;
        let open = Db::builder(DATABASE, Arc::clone(&store))
            .with_settings(settings::owner())
            .with_system_clock(Arc::clone(&clock) as _)
            .with_segment_extractor(Arc::new(keys::FirstNineBytes))
            .with_expected_epoch(newest)
            .with_db_cache_disabled();
        // A caller that gives up leaves no database behind that nobody closes.
        let (give, take) = oneshot::channel();
        tokio::spawn(async move {
            if let Err(Ok(db)) = give.send(open.build().await) {
                let _ = db.close_with_options(without_flush()).await;
            }
        });
        let opened = timeout(OPEN_TIMEOUT, take)
            .await
            .map_err(|_| TailError::late(place, "open the tail"))?
            .map_err(|_| TailError::new(TailErrorKind::Stopped, place, "the open has stopped"))?;
        let db = match opened {
            Ok(db) => db,
            Err(error) => {
                let error = TailError::of(place, "open the tail", &error, None);
                // Of two owners that create the database at once, one finds an object that it did not expect.
                let created = newest == 0
                    && error.kind() == TailErrorKind::Damaged
                    && Self::newest(bucket).await?.is_some();
                return Err(match created {
                    true => TailError::fenced(place, "create the tail"),
                    false => error,
                });
            }
        };
        // The owner before may have stored rows until it was fenced.
        let known = Some(db.manifest());
        if let Err(error) = clock.catch_up(place, &store, known).await {
            tokio::spawn(async move { db.close_with_options(without_flush()).await });
            return Err(error);
        }
        let drained = Drained::default();
        let compaction = Compaction::start(store, clock, drained.clone(), db.subscribe());
        Ok(Self {
            place: place.to_owned(),
            term: newest + 1,
            writer: Writer::new(db.clone(), place),
            db,
            drained,
            compaction: Mutex::new(compaction),
        })
    }

    /// Number of this owner's term.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Stores a part. A part with the same segment and position is replaced.
    ///
    /// # Errors
    /// `Refused` if the part is empty or larger than [`LARGEST_PART`]. `Fenced` and `Stopped`: nothing is stored any more.
    /// `Unreachable`: the row stays on its way. The next call waits for it; a call with the same part ends with it.
    pub async fn put(&self, part: &TailPart) -> Result<(), TailError> {
        self.put_all(std::slice::from_ref(part)).await
    }

    /// Stores parts, all of them or none: no other owner sees some of them alone. Each becomes a row.
    ///
    /// # Errors
    /// As [`ReplicaTail::put`].
    pub async fn put_all(&self, parts: &[TailPart]) -> Result<(), TailError> {
        let mut rows = Vec::with_capacity(parts.len());
        for part in parts {
            let bytes = part.bytes.len();
            if bytes == 0 || bytes > LARGEST_PART {
                let what = format!("a part has {bytes} bytes; 1 to {LARGEST_PART} fit");
                return Err(self.refused(what));
            }
            let key = keys::part_key(part.segment, part.position);
            rows.push((key, part.bytes.clone()));
        }
        self.writer.store(rows).await
    }

    /// Makes a manifest count: a restore then begins with it. Files hold the journal below `position`.
    ///
    /// # Errors
    /// `Refused` if the name is empty or longer than [`LONGEST_MANIFEST_NAME`]; others as [`ReplicaTail::put`].
    pub async fn put_manifest(&self, name: &str, position: u64) -> Result<(), TailError> {
        let Some(value) = keys::manifest_value(name, position) else {
            let bytes = name.len();
            return Err(self.refused(format!("the name of a manifest has {bytes} bytes")));
        };
        let key = keys::MANIFEST_KEY.to_vec().into();
        self.writer.store(vec![(key, value)]).await
    }

    /// The newest manifest that counts; `None` before the first.
    ///
    /// # Errors
    /// As [`ReplicaTail::rows`].
    pub async fn manifest(&self) -> Result<Option<TailManifest>, TailError> {
        let options = slatedb::config::ReadOptions {
            durability_filter: slatedb::config::DurabilityLevel::Remote,
            ..slatedb::config::ReadOptions::default()
        };
        let read = self.db.get_with_options(keys::MANIFEST_KEY, &options);
        let read = timeout(READ_TIMEOUT, read)
            .await
            .map_err(|_| TailError::late(&self.place, "read the manifest's row"))?;
        let row = read.map_err(|error| self.failed("read the manifest's row", &error))?;
        let manifest = row.map(|value| keys::read_manifest(&value)).transpose();
        manifest.map_err(|what| TailError::new(TailErrorKind::Damaged, &self.place, what))
    }

    /// Lets the rows of the segment with this number, and of all before it, leave the tail. A manifest that counts must hold them. Returns
    /// at once; the rows leave about 5 s after they are in a file. No row of such a segment may be put afterwards.
    pub fn drain(&self, segment: u64) {
        self.drained.through(segment);
        self.writer.file_soon();
    }

    /// Reads all stored parts in order.
    ///
    /// # Errors
    /// `Unreachable` if the bucket gives no answer, `Fenced` and `Stopped` as [`ReplicaTail::put`].
    pub async fn rows(&self) -> Result<TailRows, TailError> {
        let options = settings::scan();
        let parts = self.db.scan_with_options(part_range(), &options);
        let parts = timeout(READ_TIMEOUT, parts)
            .await
            .map_err(|_| TailError::late(&self.place, "read the rows"))?
            .map_err(|error| self.failed("read the rows", &error))?;
        Ok(TailRows::new(&self.place, parts))
    }

    /// The first object that the write-ahead log lacks between others, as [`TailCopy::open`] looks for it.
    async fn missing_object(&self, bucket: &Bucket) -> Result<Option<String>, TailError> {
        let store = undecided(bucket);
        loop {
            let replayed = self.db.manifest().replay_after_wal_id();
            let missing = reader::missing_object(&self.place, &store, replayed).await?;
            // Objects whose rows are in files meanwhile may be removed.
            if missing.is_none() || self.db.manifest().replay_after_wal_id() == replayed {
                return Ok(missing);
            }
        }
    }

    /// Resolves when this owner stores nothing any more, with the reason: `Fenced` or `Stopped`.
    pub async fn ended(&self) -> TailError {
        let mut status = self.db.subscribe();
        let reason = match status.wait_for(|now| now.close_reason.is_some()).await {
            Ok(now) => now.close_reason,
            Err(_) => None,
        };
        let error = slatedb::Error::closed(
            "the database of the tail has stopped".to_owned(),
            reason.unwrap_or(CloseReason::Panic),
        );
        TailError::of(&self.place, "go on", &error, reason)
    }

    /// Writes all rows as files, so that the next open is short, and ends.
    ///
    /// # Errors
    /// `Unreachable` if the bucket gives no answer in time. Stored rows stay stored.
    pub async fn close(&self) -> Result<(), TailError> {
        let late = |_| TailError::late(&self.place, "close the tail");
        timeout(CLOSE_TIMEOUT, async {
            let mut compaction = self.compaction.lock().await;
            compaction.stop();
            compaction.ended().await;
            match self.db.close().await {
                Err(error) if self.db.status().close_reason == Some(CloseReason::Clean) => {
                    Err(TailError::of(&self.place, "close the tail", &error, None))
                }
                _ => Ok(()),
            }
        })
        .await
        .map_err(late)?
    }

    fn refused(&self, what: String) -> TailError {
        TailError::new(TailErrorKind::Refused, &self.place, what)
    }

    fn failed(&self, action: &str, error: &slatedb::Error) -> TailError {
        TailError::of(&self.place, action, error, self.db.status().close_reason)
    }
}

impl Drop for ReplicaTail {
    /// An owner that is dropped without a close leaves no task behind.
    fn drop(&mut self) {
        self.compaction.get_mut().stop();
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let db = self.db.clone();
        runtime.spawn(async move {
            let _ = db.close_with_options(without_flush()).await;
        });
    }
}

fn without_flush() -> CloseOptions {
    CloseOptions::default().with_flush_type(None)
}

fn undecided(bucket: &Bucket) -> Arc<dyn ObjectStore> {
    Arc::new(Undecided::new(Arc::clone(bucket.store())))
}

fn part_range() -> Range<&'static [u8]> {
    keys::FIRST_PART..keys::BEHIND_PARTS
}

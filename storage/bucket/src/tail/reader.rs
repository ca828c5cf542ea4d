//! A copy of the tail as of one moment, for a restore. Nothing is written, and the owner goes on.
//!
//! The owner may remove objects during the read. Objects of the write-ahead log would be missed in silence, so the read
//! begins again if the owner has let go of any since it began. An object of the log that is missing before others, and a
//! file that is missing later, are errors.

use std::sync::Arc;

use object_store::ObjectStore;
use slatedb::admin::Admin;
use slatedb::{DbReader, DbReaderMode, VersionedManifest};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::error::{TailError, TailErrorKind};
use super::keys::{self, TailManifest, TailPart};
use super::rows::TailRows;
use super::settings::{self, OPEN_TIMEOUT};
use super::{DATABASE, ReplicaTail, log, part_range, undecided};
use crate::bucket::Bucket;
use crate::error::store_words;

/// Maximum number of reads of a tail whose owner removes rows meanwhile.
pub(crate) const COPY_ATTEMPTS: usize = 5;

/// The tail as of one moment.
pub struct TailCopy {
    place: String,
    /// `None`: this process owns the tail, and removes no rows of the copy.
    other: Option<OtherOwner>,
    term: u64,
    manifest: Option<TailManifest>,
    rows: TailRows,
}

/// An owner that goes on while its tail is read.
struct OtherOwner {
    admin: Admin,
    _reader: OpenReader,
    /// Number of the state that was read.
    seen: u64,
}

impl TailCopy {
    /// Reads the newest state of the tail; `None` if there has been no owner yet.
    ///
    /// # Errors
    /// `Unreachable` if the bucket gives no answer, `Changed` if a busy owner has removed rows in each attempt, `Damaged` if
    /// the tail cannot be read.
    pub async fn open(bucket: &Bucket) -> Result<Option<Self>, TailError> {
        let place = bucket.place();
        let store = undecided(bucket);
        let admin = Admin::builder(DATABASE, Arc::clone(&store)).build();
        // An owner lets go of objects once in 12 s at most, and an attempt takes a few requests.
        for _ in 0..COPY_ATTEMPTS {
            let Some(before) = newest(place, &admin).await? else {
                return Ok(None);
            };
            let attempt = timeout(OPEN_TIMEOUT, Self::attempt(place, &store, &admin, &before));
            let attempt = attempt.await;
            match attempt.map_err(|_| TailError::late(place, "read the tail"))? {
                Ok(Some((reader, manifest, rows))) => {
                    return Ok(Some(Self {
                        place: place.to_owned(),
                        other: Some(OtherOwner {
                            admin,
                            _reader: reader,
                            seen: before.id(),
                        }),
                        term: before.writer_epoch(),
                        manifest,
                        rows,
                    }));
                }
                Ok(None) => {}
                Err(error) => {
                    if !moved(place, &admin, before.id()).await? {
                        return Err(error);
                    }
                }
            }
        }
        Err(changed(place))
    }

    /// The tail of its owner, which stores nothing meanwhile. An owner has opened the tail already, so that this takes few requests.
    ///
    /// # Errors
    /// As [`ReplicaTail::rows`], and `Damaged` as [`TailCopy::open`].
    pub(crate) async fn of_owner(bucket: &Bucket, tail: &ReplicaTail) -> Result<Self, TailError> {
        let place = bucket.place();
        let (rows, manifest, missing) =
            tokio::try_join!(tail.rows(), tail.manifest(), tail.missing_object(bucket))?;
        if let Some(missing) = missing {
            return Err(TailError::new(
                TailErrorKind::Damaged,
                place,
                hole(&missing),
            ));
        }
        Ok(Self {
            place: place.to_owned(),
            other: None,
            term: tail.term(),
            manifest,
            rows,
        })
    }

    /// One attempt; `None` if the owner has let go of rows meanwhile.
    async fn attempt(
        place: &str,
        store: &Arc<dyn ObjectStore>,
        admin: &Admin,
        before: &VersionedManifest,
    ) -> Result<Option<(OpenReader, Option<TailManifest>, TailRows)>, TailError> {
        let failed = |error| TailError::of(place, "read the tail", &error, None);
        let reader = DbReader::builder(DATABASE, Arc::clone(store))
            .with_reader_mode(DbReaderMode::FollowLatest)
            .with_segment_extractor(Arc::new(keys::FirstNineBytes))
            .with_options(settings::reader())
            .with_db_cache_disabled()
            .build()
            .await
            .map_err(failed)?;
        let open = OpenReader::new(reader);
        let reader = open.get(place)?;
        let seen = reader.manifest().id();
        // The rows come first: a manifest that is newer than they are has more in its files, never less.
        let options = settings::scan();
        let parts = reader.scan_with_options(part_range(), &options).await;
        let parts = parts.map_err(failed)?;
        let manifest = reader.get(keys::MANIFEST_KEY).await.map_err(failed)?;
        let now = newest(place, admin).await?;
        let kept = now.is_some_and(|now| now.replay_after_wal_id() == before.replay_after_wal_id());
        if !kept || reader.manifest().id() != seen {
            return Ok(None);
        }
        let damaged = |what| TailError::new(TailErrorKind::Damaged, place, what);
        let missing = missing_object(place, store, before.replay_after_wal_id()).await?;
        if let Some(missing) = missing {
            return Err(damaged(hole(&missing)));
        }
        let manifest = manifest.map(|value| keys::read_manifest(&value));
        let manifest = manifest.transpose().map_err(damaged)?;
        Ok(Some((open, manifest, TailRows::new(place, parts))))
    }

    /// Number of the newest owner's term.
    pub fn term(&self) -> u64 {
        self.term
    }

    /// The newest manifest that counts; `None` before the first.
    pub fn manifest(&self) -> Option<&TailManifest> {
        self.manifest.as_ref()
    }

    /// The next part; `None` behind the last.
    ///
    /// # Errors
    /// `Changed` if the owner has removed rows that were still to come: the read must begin again with
    /// [`TailCopy::open`]. `Unreachable` if the bucket gives no answer. `Damaged` if a row is missing or has another form.
    pub async fn next(&mut self) -> Result<Option<TailPart>, TailError> {
        let error = match self.rows.next().await {
            Ok(part) => return Ok(part),
            Err(error) => error,
        };
        if let Some(other) = &self.other
            && error.kind() == TailErrorKind::Damaged
            && moved(&self.place, &other.admin, other.seen).await?
        {
            return Err(changed(&self.place));
        }
        Err(error)
    }
}

/// A reader that is closed at its end, also after an error and on a thread without a runtime: it has a task that would keep its
/// rows in memory.
pub(super) struct OpenReader {
    reader: Option<DbReader>,
    runtime: Handle,
}

impl OpenReader {
    /// Keeps a reader that was opened in the current runtime.
    pub(super) fn new(reader: DbReader) -> Self {
        Self {
            reader: Some(reader),
            runtime: Handle::current(),
        }
    }

    /// The reader, which is there until the end.
    pub(super) fn get(&self, place: &str) -> Result<&DbReader, TailError> {
        let closed = || TailError::new(TailErrorKind::Stopped, place, "the reader is closed");
        self.reader.as_ref().ok_or_else(closed)
    }
}

impl Drop for OpenReader {
    fn drop(&mut self) {
        if let Some(reader) = self.reader.take() {
            self.runtime.spawn(async move { reader.close().await });
        }
    }
}

/// The first object that the write-ahead log lacks between those that it has. SlateDB takes such a hole for the end of the
/// log. Objects with numbers up to `replayed` are in files.
///
/// # Errors
/// `Unreachable` if the bucket gives no answer.
pub(super) async fn missing_object(
    place: &str,
    store: &Arc<dyn ObjectStore>,
    replayed: u64,
) -> Result<Option<String>, TailError> {
    let numbers = timeout(OPEN_TIMEOUT, log::numbers_after(store, replayed)).await;
    let numbers = numbers.map_err(|_| TailError::late(place, "list the write-ahead log"))?;
    let numbers = numbers.map_err(|error| {
        let why = store_words(&error);
        let what = format!("cannot list the write-ahead log of the tail: {why}");
        TailError::new(TailErrorKind::Unreachable, place, what)
    })?;
    let missing = (replayed + 1..)
        .zip(numbers)
        .find(|(next, there)| next != there);
    Ok(missing.map(|(next, _)| log::path(next).to_string()))
}

/// The newest state of the database; `None` if there is no database.
pub(super) async fn newest(
    place: &str,
    admin: &Admin,
) -> Result<Option<VersionedManifest>, TailError> {
    timeout(OPEN_TIMEOUT, admin.read_manifest(None))
        .await
        .map_err(|_| TailError::late(place, "read the term"))?
        .map_err(|error| TailError::of(place, "read the term", &error, None))
}

async fn moved(place: &str, admin: &Admin, seen: u64) -> Result<bool, TailError> {
    Ok(newest(place, admin).await?.map(|now| now.id()) != Some(seen))
}

fn hole(missing: &str) -> String {
    format!("the rows have a hole: the object {missing} is missing")
}

fn changed(place: &str) -> TailError {
    let what = "the owner of the store has removed rows during the read; read again";
    TailError::new(TailErrorKind::Changed, place, what)
}

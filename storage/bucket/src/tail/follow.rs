//! Follows the tail of a store that another node owns. Nothing is written.
//!
//! The reader of the database looks for newer rows once a second. It keeps the rows that it has, and says nothing, while the
//! bucket gives no answer. So the caller must compare the end of the rows with the position that the owner shows.

use std::sync::Arc;

use slatedb::{DbReader, DbReaderMode};
use tokio::time::timeout;

use super::error::{TailError, TailErrorKind};
use super::keys::{self, TailManifest, TailPart};
use super::probes::FewProbes;
use super::reader::OpenReader;
use super::rows::TailRows;
use super::settings::{self, OPEN_TIMEOUT, READ_TIMEOUT};
use super::{DATABASE, ReplicaTail, undecided};
use crate::bucket::Bucket;

/// The tail, as it grows.
pub struct TailFollower {
    place: String,
    reader: OpenReader,
    /// Segment and end of the last part that was given.
    last: Option<(u64, u64)>,
    rows: Option<TailRows>,
}

impl TailFollower {
    /// Opens the tail; `None` if there has been no owner yet.
    ///
    /// # Errors
    /// `Unreachable` if the bucket gives no answer, `Damaged` if the tail cannot be read.
    pub async fn open(bucket: &Bucket) -> Result<Option<Self>, TailError> {
        let place = bucket.place();
        if ReplicaTail::newest(bucket).await?.is_none() {
            return Ok(None);
        }
        let store = Arc::new(FewProbes::new(undecided(bucket)));
        let builder = DbReader::builder(DATABASE, store)
            .with_reader_mode(DbReaderMode::FollowLatest)
            .with_segment_extractor(Arc::new(keys::FirstNineBytes))
            .with_options(settings::follower())
            .with_db_cache_disabled();
        let opened = timeout(OPEN_TIMEOUT, builder.build()).await;
        let opened = opened.map_err(|_| TailError::late(place, "open the tail"))?;
        let reader = opened.map_err(|error| TailError::of(place, "open the tail", &error, None))?;
        Ok(Some(Self {
            place: place.to_owned(),
            reader: OpenReader::new(reader),
            last: None,
            rows: None,
        }))
    }

    /// The newest manifest that counts, as far as this reader has seen; `None` before the first.
    ///
    /// # Errors
    /// `Unreachable` if the bucket gives no answer, `Damaged` if the row has another form.
    pub async fn manifest(&self) -> Result<Option<TailManifest>, TailError> {
        let reader = self.reader.get(&self.place)?;
        let failed = |error| TailError::of(&self.place, "read the manifest's row", &error, None);
        let row = timeout(READ_TIMEOUT, reader.get(keys::MANIFEST_KEY)).await;
        let row = row.map_err(|_| TailError::late(&self.place, "read the manifest's row"))?;
        let row = row.map_err(failed)?;
        let manifest = row.map(|value| keys::read_manifest(&value)).transpose();
        manifest.map_err(|what| TailError::new(TailErrorKind::Damaged, &self.place, what))
    }

    /// The next part behind the last one that was given; `None` behind the newest. A later call gives parts that have come
    /// meanwhile.
    ///
    /// # Errors
    /// `Damaged` if a row is missing between others, or has another form: the caller opens the tail again. `Unreachable` if the
    /// bucket gives no answer.
    pub async fn next(&mut self) -> Result<Option<TailPart>, TailError> {
        let mut rows = match self.rows.take() {
            Some(rows) => rows,
            None => self.begin().await?,
        };
        let part = rows.next().await?;
        if let Some(part) = &part {
            let end = part.position.saturating_add(part.bytes.len() as u64);
            self.last = Some((part.segment, end));
            self.rows = Some(rows);
        }
        Ok(part)
    }

    async fn begin(&self) -> Result<TailRows, TailError> {
        let first = match self.last {
            Some((segment, end)) => keys::part_key(segment, end),
            None => bytes::Bytes::from_static(keys::FIRST_PART),
        };
        let behind = bytes::Bytes::from_static(keys::BEHIND_PARTS);
        let reader = self.reader.get(&self.place)?;
        let options = settings::scan();
        let parts = reader.scan_with_options(first..behind, &options);
        let parts = timeout(READ_TIMEOUT, parts).await;
        let parts = parts.map_err(|_| TailError::late(&self.place, "read the rows"))?;
        let parts =
            parts.map_err(|error| TailError::of(&self.place, "read the rows", &error, None))?;
        Ok(TailRows::after(&self.place, parts, self.last))
    }
}

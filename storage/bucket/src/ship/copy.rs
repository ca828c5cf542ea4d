//! Reads a replica, to make a store of it. Writes nothing.
//!
//! ```text
//! positions   ▐ manifest 1 ▐ manifest 2 ▐ newest manifest ▐ rows ▌
//!                                  ▲ files of manifest 2 alone, cut      ▲ newest files, and rows up to here
//! ```
//!
//! A copy of a busy owner fails when rows or content leave meanwhile ([`ReplicaCopy::is_outdated`]): the caller begins again.

use std::collections::{BTreeMap, HashSet};

use wald_storage::{BackupManifest, ContentDigest, JournalPart, Position, SegmentId};

use super::error::ShipError;
use super::files::{CONTENT, MANIFESTS, content_of, read_manifest};
use super::keeper::FencedTail;
use super::resume::SeenRows;
use super::{ManifestFormat, cluster};
use crate::bucket::Bucket;
use crate::known_bad;
use crate::known_bad::ShipMistake;
use crate::tail::{TailCopy, TailManifest};

/// Content of a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaFile {
    /// Its path in the bucket.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

/// A replica as of its newest position, or of an earlier one.
pub struct ReplicaCopy {
    bucket: Bucket,
    store_id: u128,
    tail: TailCopy,
    manifest: Option<BackupManifest>,
    files: BTreeMap<ContentDigest, ReplicaFile>,
    /// Whether the files have everything up to the requested position.
    without_rows: bool,
    began: bool,
    /// The rows that were read, and the tail that gets them, if this node owns the store.
    seen: Option<(SeenRows, FencedTail)>,
}

impl ReplicaCopy {
    /// The id of the store whose replica is in the bucket; `None` if there is no replica.
    ///
    /// # Errors
    /// If the bucket fails, or is of a version that this one does not know.
    pub async fn store_of(bucket: &Bucket) -> Result<Option<u128>, ShipError> {
        Ok(cluster::store_id(bucket).await?)
    }

    /// Opens the replica in a bucket; `None` if there is none. With a position, it has the oldest files that reach the position,
    /// so that their journal begins as early as possible.
    ///
    /// # Errors
    /// If the bucket fails, or the manifest cannot be used.
    pub async fn open(
        bucket: &Bucket,
        format: &dyn ManifestFormat,
        at: Option<Position>,
    ) -> Result<Option<Self>, ShipError> {
        let Some(store_id) = cluster::store_id(bucket).await? else {
            return Ok(None);
        };
        let Some(tail) = TailCopy::open(bucket).await? else {
            return Ok(None);
        };
        let copy = Self::with(bucket, format, at, store_id, tail).await?;
        Ok(Some(copy))
    }

    /// As [`ReplicaCopy::open`] as of the newest position, of a store that this node owns. Takes fewer requests, and keeps the rows for the
    /// start.
    ///
    /// # Errors
    /// As [`ReplicaCopy::open`].
    pub async fn of_fenced(
        bucket: &Bucket,
        format: &dyn ManifestFormat,
        fenced: &FencedTail,
    ) -> Result<Option<Self>, ShipError> {
        let tail = TailCopy::of_owner(bucket, &fenced.tail);
        let (store_id, tail) = tokio::join!(cluster::store_id(bucket), tail);
        let (Some(store_id), tail) = (store_id?, tail?) else {
            return Ok(None);
        };
        let copy = Self::with(bucket, format, None, store_id, tail).await?;
        Ok(Some(Self {
            seen: Some((SeenRows::default(), fenced.clone())),
            ..copy
        }))
    }

    async fn with(
        bucket: &Bucket,
        format: &dyn ManifestFormat,
        at: Option<Position>,
        store_id: u128,
        tail: TailCopy,
    ) -> Result<Self, ShipError> {
        let early = |row: &&TailManifest| at.is_some_and(|at| at.get() <= row.position);
        let early = tail.manifest().filter(early);
        let without_rows = early.is_some();
        let manifest = async {
            Ok::<_, ShipError>(match (tail.manifest(), at) {
                (Some(newest), Some(at)) if without_rows => {
                    Some(oldest_manifest(bucket, &newest.name, format, at).await?)
                }
                (Some(row), _) => Some(read_manifest(bucket, &row.name, format).await?),
                (None, _) => None,
            })
        };
        // Clients may wait for a take-over.
        let (manifest, found) = tokio::join!(manifest, bucket.list_below(CONTENT));
        let (manifest, mut found) = (manifest?, found?);
        let named = manifest.iter().flat_map(|manifest| &manifest.files);
        let named: HashSet<ContentDigest> = named.map(|file| file.digest).collect();
        let mut files = BTreeMap::new();
        if !named.is_empty() {
            // The newest term last: no other owner removes anything from it.
            found.sort_by_key(|file| content_of(&file.name));
            for file in found {
                if let Some((_, digest)) = content_of(&file.name)
                    && named.contains(&digest)
                {
                    let path = format!("{CONTENT}/{}", file.name);
                    let bytes = file.bytes;
                    files.insert(digest, ReplicaFile { path, bytes });
                }
            }
        }
        Ok(Self {
            bucket: bucket.clone(),
            store_id,
            tail,
            manifest,
            files,
            without_rows,
            began: false,
            seen: None,
        })
    }

    /// Identity of the store.
    pub fn store_id(&self) -> u128 {
        self.store_id
    }

    /// Number of the newest owner's term.
    pub fn term(&self) -> u64 {
        self.tail.term()
    }

    /// The manifest of its files; `None` if rows have everything.
    pub fn manifest(&self) -> Option<&BackupManifest> {
        self.manifest.as_ref()
    }

    /// The content of the manifest that is in the bucket, by digest.
    pub fn files(&self) -> &BTreeMap<ContentDigest, ReplicaFile> {
        &self.files
    }

    /// Whether the owner has named another manifest since the copy began. An error of the copy may come from that.
    ///
    /// # Errors
    /// If the bucket fails.
    pub async fn is_outdated(&self) -> Result<bool, ShipError> {
        let name = |tail: &TailCopy| tail.manifest().map(|row| row.name.clone());
        let now = TailCopy::open(&self.bucket).await?;
        Ok(now.as_ref().and_then(name) != name(&self.tail))
    }

    /// The next part of the journal behind the files; `None` behind the last.
    ///
    /// # Errors
    /// `Incomplete` if the first owner has not stored the files yet; others if the bucket fails or a row is missing.
    pub async fn next(&mut self) -> Result<Option<JournalPart>, ShipError> {
        if self.without_rows {
            return Ok(None);
        }
        if !self.began && known_bad::makes(ShipMistake::StandBySkipsRow) {
            self.tail.next().await?;
        }
        let Some(row) = self.tail.next().await? else {
            if let Some((rows, fenced)) = self.seen.take() {
                fenced.note(rows);
            }
            return Ok(None);
        };
        if let Some((rows, _)) = &mut self.seen {
            rows.add(row.clone());
        }
        let segment = SegmentId::new(row.segment);
        if !self.began && self.manifest.is_none() && segment != SegmentId::FIRST {
            return Err(ShipError::Incomplete {
                place: self.bucket.place().to_owned(),
                segment: segment.get(),
            });
        }
        self.began = true;
        let position = Position::new(row.position);
        Ok(Some(JournalPart {
            segment,
            position,
            end: position.advance(row.bytes.len() as u64),
            bytes: row.bytes,
        }))
    }
}

/// The oldest manifest that reaches a position, which the newest one does. Manifests of a term have rising numbers and
/// positions, and so have terms.
async fn oldest_manifest(
    bucket: &Bucket,
    newest: &str,
    format: &dyn ManifestFormat,
    at: Position,
) -> Result<BackupManifest, ShipError> {
    let last = manifest_number(newest);
    let names = bucket.list(MANIFESTS).await?.into_iter();
    let mut names: Vec<_> = names
        .filter_map(|file| Some((manifest_number(&file.name)?, file.name)))
        // A manifest that no row has named yet does not count.
        .filter(|(number, _)| Some(*number) < last)
        .collect();
    names.sort_unstable();
    let mut found = None;
    while !names.is_empty() {
        let middle = names.len() / 2;
        let name = &names[middle].1;
        let manifest = match read_manifest(bucket, name, format).await {
            Ok(manifest) => Some(manifest),
            // The owner removes old ones first.
            Err(ShipError::Manifest { .. })
                if bucket.size(&format!("{MANIFESTS}/{name}")).await?.is_none() =>
            {
                None
            }
            Err(error) => return Err(error),
        };
        match manifest.filter(|manifest| manifest.position >= at) {
            Some(manifest) => {
                found = Some(manifest);
                names.truncate(middle);
            }
            None => drop(names.drain(..=middle)),
        }
    }
    match found {
        Some(manifest) => Ok(manifest),
        None => read_manifest(bucket, newest, format).await,
    }
}

/// Term and number of a manifest.
fn manifest_number(name: &str) -> Option<(u64, u64)> {
    let (term, number) = name.split_once('-')?;
    Some((term.parse().ok()?, number.parse().ok()?))
}

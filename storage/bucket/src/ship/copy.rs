//! Reads a replica, to make a store of it. Writes nothing.
//!
//! A copy of a busy owner may fail with `Unreachable` when rows or content leave meanwhile: the caller begins again.

use std::collections::{BTreeMap, HashSet};

use wald_storage::{BackupManifest, JournalPart, Position, SegmentId};

use super::error::ShipError;
use super::files::{CONTENT, content_of, read_manifest};
use super::{ManifestFormat, cluster};
use crate::bucket::Bucket;
use crate::tail::TailCopy;

/// Content of a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaFile {
    /// Its path in the bucket.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

/// A replica as of its newest position.
pub struct ReplicaCopy {
    place: String,
    store_id: u128,
    tail: TailCopy,
    manifest: Option<BackupManifest>,
    files: BTreeMap<u128, ReplicaFile>,
    began: bool,
}

impl ReplicaCopy {
    /// The id of the store whose replica is in the bucket; `None` if there is no replica.
    ///
    /// # Errors
    /// If the bucket fails, or is of a version that this one does not know.
    pub async fn store_of(bucket: &Bucket) -> Result<Option<u128>, ShipError> {
        Ok(cluster::store_id(bucket).await?)
    }

    /// Opens the replica in a bucket; `None` if there is none.
    ///
    /// # Errors
    /// If the bucket fails, or the manifest cannot be used.
    pub async fn open(
        bucket: &Bucket,
        format: &dyn ManifestFormat,
    ) -> Result<Option<Self>, ShipError> {
        let Some(store_id) = cluster::store_id(bucket).await? else {
            return Ok(None);
        };
        let Some(tail) = TailCopy::open(bucket).await? else {
            return Ok(None);
        };
        let manifest = match tail.manifest() {
            None => None,
            Some(row) => Some(read_manifest(bucket, &row.name, format).await?),
        };
        let named = manifest.iter().flat_map(|manifest| &manifest.files);
        let named: HashSet<u128> = named.map(|file| file.digest).collect();
        let mut files = BTreeMap::new();
        if !named.is_empty() {
            // The newest term last: no other owner removes anything from it.
            let mut found = bucket.list_below(CONTENT).await?;
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
        Ok(Some(Self {
            place: bucket.place().to_owned(),
            store_id,
            tail,
            manifest,
            files,
            began: false,
        }))
    }

    /// Identity of the store.
    pub fn store_id(&self) -> u128 {
        self.store_id
    }

    /// Number of the newest owner's term.
    pub fn term(&self) -> u64 {
        self.tail.term()
    }

    /// The newest manifest; `None` if rows have everything.
    pub fn manifest(&self) -> Option<&BackupManifest> {
        self.manifest.as_ref()
    }

    /// The content of the manifest that is in the bucket, by digest.
    pub fn files(&self) -> &BTreeMap<u128, ReplicaFile> {
        &self.files
    }

    /// The next part of the journal; `None` behind the last.
    ///
    /// # Errors
    /// `Incomplete` if the first owner has not stored the files yet; others if the bucket fails or a row is missing.
    pub async fn next(&mut self) -> Result<Option<JournalPart>, ShipError> {
        let Some(row) = self.tail.next().await? else {
            return Ok(None);
        };
        let segment = SegmentId::new(row.segment);
        if !self.began && self.manifest.is_none() && segment != SegmentId::FIRST {
            return Err(ShipError::Incomplete {
                place: self.place.clone(),
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

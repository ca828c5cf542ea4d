//! Makes a store of the replica in a bucket: to take it over, or as a copy.

use std::io;
use std::path::Path;
use std::sync::Arc;

use wald_bucket::{BucketErrorKind, ReplicaCopy, ShipError, TailErrorKind};
use wald_storage::{
    BackupManifest, BackupView, Disk, OpenError, RealDisk, ReplicaContent, RestoreError, Restored,
    RestoredAs, StorageConfig,
};

use super::manifests::ProtoManifests;
use crate::backups::bucket::{BucketDisk, Remote};
use crate::config::Config;

/// An error of a fetch.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    /// The replica cannot be read.
    #[error(transparent)]
    Ship(#[from] ShipError),
    /// The bucket has no store to fetch.
    #[error("{place} has no records of a store: its owner ended before it stored any")]
    Empty {
        /// The bucket.
        place: String,
    },
    /// The directory cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The store cannot be made.
    #[error(transparent)]
    Restore(#[from] RestoreError),
}

impl FetchError {
    /// Whether the replica lacks something, or its bytes are not the expected ones.
    pub(crate) fn is_damage(&self) -> bool {
        match self {
            Self::Ship(ShipError::Bucket(error)) => error.kind() == BucketErrorKind::Damaged,
            Self::Ship(ShipError::Tail(error)) => error.kind() == TailErrorKind::Damaged,
            Self::Ship(error) => {
                matches!(
                    error,
                    ShipError::Manifest { .. } | ShipError::Incomplete { .. }
                )
            }
            Self::Restore(error) => {
                matches!(
                    error,
                    RestoreError::Manifest(_) | RestoreError::Damaged { .. }
                )
            }
            Self::Open(_) | Self::Empty { .. } => false,
        }
    }
}

/// A replica as of its newest position.
pub(crate) struct Fetch {
    remote: Arc<Remote>,
    copy: ReplicaCopy,
    files: Option<BackupView>,
    storage: StorageConfig,
}

impl Fetch {
    /// Opens the replica.
    ///
    /// # Errors
    /// If there is none, if its manifest cannot be used, or if the bucket fails.
    pub(crate) fn begin(remote: &Arc<Remote>, config: &Config) -> Result<Self, FetchError> {
        let open = ReplicaCopy::open(&remote.bucket, &ProtoManifests);
        let copy = remote.runtime.block_on(open)?;
        let copy = copy.ok_or_else(|| FetchError::Empty {
            place: remote.bucket.place().to_owned(),
        })?;
        let files = match copy.manifest() {
            None => None,
            Some(manifest) => {
                let content = BucketDisk::of_replica(Arc::clone(remote), copy.files());
                Some(BackupView::open(Arc::new(content), manifest, None)?)
            }
        };
        Ok(Self {
            remote: Arc::clone(remote),
            copy,
            files,
            storage: config.storage_without_replica(),
        })
    }

    /// Number that identifies the store.
    pub(crate) fn store_id(&self) -> u128 {
        self.copy.store_id()
    }

    /// The newest manifest; `None` if rows have everything.
    pub(crate) fn manifest(&self) -> Option<&BackupManifest> {
        self.copy.manifest()
    }

    /// Bytes of the files.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.as_ref().map_or(0, BackupView::bytes)
    }

    /// Makes a store of it in an empty directory. `progress` receives the number of bytes read from files since its last
    /// call.
    ///
    /// # Errors
    /// As [`ReplicaContent::restore`].
    pub(crate) fn restore(
        &mut self,
        target: &Path,
        restored_as: RestoredAs,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Restored, FetchError> {
        let disk: Arc<dyn Disk> = RealDisk::open(target)?;
        let store_id = self.store_id();
        let (copy, runtime) = (&mut self.copy, &self.remote.runtime);
        let mut parts = std::iter::from_fn(|| {
            let part = runtime.block_on(copy.next()).transpose()?;
            Some(part.map_err(|error| RestoreError::Io {
                action: "reading the rows of the replica".to_owned(),
                source: io::Error::other(error),
            }))
        });
        let content = ReplicaContent {
            store_id,
            files: self.files.as_ref(),
            parts: &mut parts,
        };
        Ok(content.restore(&disk, &self.storage, restored_as, progress)?)
    }
}

//! Makes a store of the replica in a bucket: to take it over, or as a copy.

use std::io;
use std::path::Path;
use std::sync::Arc;

use wald_bucket::{
    BucketErrorKind, FencedTail, ReplicaCopy, ShipError, TailErrorKind, read_key_ring,
};
use wald_storage::{
    BackupManifest, BackupView, CopyTail, Disk, KeptContent, OpenError, Position, RealDisk,
    RecoveryReport, ReplicaCheck, ReplicaContent, RestoreError, Restored, RestoredAs,
    StorageConfig, refuse_if_used,
};

use super::manifests::ProtoManifests;
use crate::backups::bucket::{BucketDisk, Remote};
use crate::config::Config;

/// Maximum number of copies of a replica whose owner goes on meanwhile. Each begins with the newest manifest.
const ATTEMPTS: usize = 8;

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
    /// The bucket does not have the store as of this position.
    #[error(
        "{place} has the store as of the positions {first} to {end}; it cannot be restored as of {asked}. Files of earlier \
         positions stay for replica_keep"
    )]
    Outside {
        /// The bucket.
        place: String,
        /// The position asked for.
        asked: Position,
        /// The lowest position that can be asked for.
        first: Position,
        /// The highest position that can be asked for.
        end: Position,
    },
    /// The caller names trusted keys, and the bucket has only rows, which no key signs.
    #[error(
        "{place} has no files of a signed manifest yet, only rows, which no key signs; restore it without --trust"
    )]
    OnlyRows {
        /// The bucket.
        place: String,
    },
    /// Trusted keys are asked for, and the position is in rows.
    #[error(
        "{place} has signed files as of position {end}; position {asked} is in the rows behind them, which no key signs"
    )]
    InRows {
        /// The bucket.
        place: String,
        /// The position asked for.
        asked: Position,
        /// End of the signed files.
        end: Position,
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
            Self::OnlyRows { .. } => true,
            Self::Open(_) | Self::Empty { .. } | Self::Outside { .. } | Self::InRows { .. } => {
                false
            }
        }
    }

    /// Whether the disk of this node is full.
    pub(crate) fn is_out_of_space(&self) -> bool {
        let is_full = |source: &io::Error| {
            let kind = source.kind();
            [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded].contains(&kind)
        };
        matches!(self, Self::Restore(RestoreError::Io { source, .. }) if is_full(source))
    }

    /// Whether the owner has removed rows during the read, which shows for certain.
    fn is_changed(&self) -> bool {
        matches!(self, Self::Ship(ShipError::Tail(error)) if error.kind() == TailErrorKind::Changed)
    }

    /// Whether something is missing that an owner removes once it has named another manifest.
    fn may_be_removal(&self) -> bool {
        let is_absent = |source: &io::Error| source.kind() == io::ErrorKind::NotFound;
        match self {
            Self::Restore(RestoreError::Io { source, .. }) => is_absent(source),
            error => error.is_damage(),
        }
    }
}

/// A replica as of its newest position, or of an earlier one.
pub(crate) struct Fetch {
    remote: Arc<Remote>,
    copy: ReplicaCopy,
    files: Option<Arc<BackupView>>,
    at: Option<Position>,
    /// Whether the rows behind the files are left out, because no key signs them.
    without_rows: bool,
    storage: StorageConfig,
    /// The directory of a stand-by.
    kept: Option<Arc<dyn Disk>>,
    /// The tail, if this node owns the store.
    fenced: Option<FencedTail>,
}

/// Result of a verification.
#[derive(Debug)]
pub(crate) struct FetchCheck {
    /// Files of the manifest.
    pub(crate) files: u64,
    /// Bytes of files that were read.
    pub(crate) bytes: u64,
    /// Files that do not match their digest, or are missing: path in the store, object in the bucket, and fault.
    pub(crate) bad_files: Vec<(String, String, String)>,
    /// Findings of a start from the files; `None` if there are none, or bad ones.
    pub(crate) report: Option<RecoveryReport>,
    /// The rows behind the files, or their fault.
    pub(crate) rows: Result<ReplicaCheck, String>,
}

impl FetchCheck {
    /// Whether something is missing or bad that an owner may have removed.
    fn is_bad(&self) -> bool {
        self.rows.is_err() || !self.bad_files.is_empty()
    }
}

impl Fetch {
    /// Opens the replica as of a position; `None` = its newest one. Begins again if the owner removes objects meanwhile.
    ///
    /// # Errors
    /// `Outside` if the bucket does not have the position; others if there is no replica, if its manifest cannot be used, or
    /// if the bucket fails.
    pub(crate) fn begin(
        remote: &Arc<Remote>,
        config: &Config,
        at: Option<Position>,
    ) -> Result<Self, FetchError> {
        let mut fetch = Self::open(remote, config.storage_without_replica(), at, None, None)?;
        fetch.leave_rows_out()?;
        Ok(fetch)
    }

    /// Leaves the rows out if trusted keys are asked for.
    fn leave_rows_out(&mut self) -> Result<(), FetchError> {
        self.without_rows = self.remote.trusted.asks();
        if !self.without_rows {
            return Ok(());
        }
        let place = self.remote.bucket.place().to_owned();
        match (self.manifest(), self.at) {
            (None, _) => Err(FetchError::OnlyRows { place }),
            (Some(manifest), Some(asked)) if asked > manifest.position => {
                let end = manifest.position;
                Err(FetchError::InRows { place, asked, end })
            }
            (Some(_), _) => Ok(()),
        }
    }

    /// As [`Fetch::begin`], as of the newest position. Content that the stand-by keeps in its directory is not read from the
    /// bucket, so that a take-over needs no request for it. A node that owns the store gives its `fenced` tail.
    ///
    /// # Errors
    /// As [`Fetch::begin`].
    pub(crate) fn begin_with_kept(
        remote: &Arc<Remote>,
        config: &Config,
        directory: &Path,
        fenced: Option<&FencedTail>,
    ) -> Result<Self, FetchError> {
        let kept: Arc<dyn Disk> = RealDisk::open(directory)?;
        let storage = config.storage_without_replica();
        Self::open(remote, storage, None, Some(kept), fenced.cloned())
    }

    fn open(
        remote: &Arc<Remote>,
        storage: StorageConfig,
        at: Option<Position>,
        kept: Option<Arc<dyn Disk>>,
        fenced: Option<FencedTail>,
    ) -> Result<Self, FetchError> {
        let mut attempt = 1;
        loop {
            let (copy, error) = match Self::copy(remote, at, fenced.as_ref()) {
                Err(error) => (None, error),
                Ok(copy) => match Self::files(remote, &copy, at, kept.clone()) {
                    Ok(files) => {
                        return Ok(Self {
                            remote: Arc::clone(remote),
                            copy,
                            files,
                            at,
                            without_rows: false,
                            storage,
                            kept,
                            fenced,
                        });
                    }
                    Err(RestoreError::Before { asked, .. }) => {
                        return Err(outside(remote, &storage, asked));
                    }
                    Err(error) => (Some(copy), error.into()),
                },
            };
            if attempt == ATTEMPTS || !is_removal(remote, copy.as_ref(), &error)? {
                return Err(error);
            }
            attempt += 1;
        }
    }

    fn copy(
        remote: &Remote,
        at: Option<Position>,
        fenced: Option<&FencedTail>,
    ) -> Result<ReplicaCopy, FetchError> {
        let bucket = &remote.bucket;
        let format = ProtoManifests {
            signing_key: None,
            trusted: remote.trusted.clone(),
        };
        let open = async {
            match fenced {
                Some(fenced) => ReplicaCopy::of_fenced(bucket, &format, fenced).await,
                None => ReplicaCopy::open(bucket, &format, at).await,
            }
        };
        let copy = remote.runtime.block_on(open)?;
        copy.ok_or_else(|| FetchError::Empty {
            place: remote.bucket.place().to_owned(),
        })
    }

    fn files(
        remote: &Arc<Remote>,
        copy: &ReplicaCopy,
        at: Option<Position>,
        kept: Option<Arc<dyn Disk>>,
    ) -> Result<Option<Arc<BackupView>>, RestoreError> {
        let Some(manifest) = copy.manifest() else {
            return Ok(None);
        };
        let content = BucketDisk::of_replica(Arc::clone(remote), copy.files(), kept);
        let at = at.filter(|at| *at <= manifest.position);
        let view = BackupView::open(Arc::new(content), manifest, at)?;
        Ok(Some(Arc::new(view)))
    }

    /// The key ring of the store as it is now; `None` if the bucket has none. It has the keys of all records that were read
    /// before, except for those that were destroyed.
    ///
    /// # Errors
    /// If the bucket fails.
    pub(crate) fn key_ring(&self) -> Result<Option<bytes::Bytes>, FetchError> {
        let remote = &self.remote;
        let ring = remote.runtime.block_on(read_key_ring(&remote.bucket));
        Ok(ring.map_err(ShipError::Bucket)?)
    }

    /// Number that identifies the store.
    pub(crate) fn store_id(&self) -> u128 {
        self.copy.store_id()
    }

    /// The manifest of the files; `None` if rows have everything.
    pub(crate) fn manifest(&self) -> Option<&BackupManifest> {
        self.copy.manifest()
    }

    /// Bytes of the files.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.as_ref().map_or(0, |files| files.bytes())
    }

    /// Removes content that a stand-by has kept and that no restore needs, and returns the bytes that a restore reads from the
    /// bucket.
    ///
    /// # Errors
    /// If the file system fails.
    pub(crate) fn make_room(&self, target: &Path) -> Result<u64, FetchError> {
        let Some(files) = &self.files else {
            return Ok(0);
        };
        let disk = RealDisk::open(target)?;
        files.forget_others(&*disk)?;
        Ok(files.missing_bytes(&*disk)?)
    }

    /// Makes sure that a restore could begin: the directory is empty, and the first part of the journal is there. Reads that
    /// part, so a restore needs another fetch.
    ///
    /// # Errors
    /// As [`Fetch::restore`].
    pub(crate) fn may_restore(&mut self, target: &Path) -> Result<(), FetchError> {
        refuse_if_used(&*RealDisk::open(target)?)?;
        self.remote.runtime.block_on(self.copy.next())?;
        Ok(())
    }

    /// Keeps the content of the files in the directory of a copy, for readers and for a later restore there. `goes_on` is
    /// asked before each piece, and receives the number of bytes that have come since its last call.
    ///
    /// # Errors
    /// If the bucket or the file system fails.
    pub(crate) fn keep(
        &self,
        copy: &CopyTail,
        goes_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<KeptContent, FetchError> {
        match &self.files {
            Some(files) => Ok(files.keep(copy, goes_on)?),
            None => Ok(KeptContent::default()),
        }
    }

    /// Removes content that the files do not name. Nobody may read an earlier copy any more.
    ///
    /// # Errors
    /// If the file system fails.
    pub(crate) fn forget_others(&self, target: &Path) -> Result<(), FetchError> {
        match &self.files {
            Some(files) => Ok(files.forget_others(&*RealDisk::open(target)?)?),
            None => Ok(()),
        }
    }

    /// The files, if there are any.
    pub(crate) fn into_files(self) -> Option<Arc<BackupView>> {
        self.files
    }

    /// Makes a store of it in an empty directory. Begins again with the newest manifest if the owner removes rows or files
    /// meanwhile, and calls `repeats` with the reason. `keys` writes the key ring each time, as in
    /// [`ReplicaContent::restore_with`]. `progress` receives the number of bytes read from files since its last call.
    ///
    /// # Errors
    /// As [`ReplicaContent::restore`], and [`Fetch::begin`].
    pub(crate) fn restore(
        &mut self,
        target: &Path,
        restored_as: RestoredAs,
        keys: &mut dyn FnMut(&dyn Disk) -> io::Result<()>,
        progress: &mut dyn FnMut(u64),
        repeats: &mut dyn FnMut(&FetchError),
    ) -> Result<Restored, FetchError> {
        let mut attempt = 1;
        let mut earlier = None;
        loop {
            let disk: Arc<dyn Disk> = RealDisk::open(target)?;
            let storage = self.storage.clone();
            let restored = self.with_content(|content| {
                content.restore_with(keys, &disk, &storage, restored_as, progress)
            });
            let error = match restored {
                Ok(restored) => return Ok(restored),
                Err(FetchError::Restore(
                    RestoreError::Beyond { asked, .. } | RestoreError::Before { asked, .. },
                )) => return Err(outside(&self.remote, &self.storage, asked)),
                // The files of an earlier attempt could not be removed.
                Err(FetchError::Restore(error @ RestoreError::NotEmpty { .. })) => {
                    return Err(earlier.unwrap_or_else(|| error.into()));
                }
                Err(error) => error,
            };
            if attempt == ATTEMPTS || !is_removal(&self.remote, Some(&self.copy), &error)? {
                return Err(error);
            }
            repeats(&error);
            earlier = Some(error);
            attempt += 1;
            self.begin_again()?;
        }
    }

    /// Opens the replica again, as of its newest manifest.
    fn begin_again(&mut self) -> Result<(), FetchError> {
        let without_rows = self.without_rows;
        *self = Self::open(
            &self.remote,
            self.storage.clone(),
            self.at,
            self.kept.clone(),
            self.fenced.clone(),
        )?;
        match without_rows {
            true => self.leave_rows_out(),
            false => Ok(()),
        }
    }

    /// Whether the rows behind the files are left out, because no key signs them.
    pub(crate) fn is_without_rows(&self) -> bool {
        self.without_rows
    }

    /// Reads all files and compares them with their digests, then reads them like a start; reads all rows. Begins again as
    /// [`Fetch::restore`] does. Writes nothing.
    ///
    /// # Errors
    /// If the bucket fails, or if the replica cannot be opened. Damage is no error: the check reports it.
    pub(crate) fn verify(
        &mut self,
        progress: &mut dyn FnMut(u64),
        repeats: &mut dyn FnMut(&FetchError),
    ) -> Result<FetchCheck, FetchError> {
        let mut attempt = 1;
        loop {
            let checked = self.check(progress);
            let is_bad = checked.as_ref().is_ok_and(FetchCheck::is_bad);
            let is_removed = match &checked {
                Err(error) => is_removal(&self.remote, Some(&self.copy), error)?,
                Ok(_) => is_bad && self.remote.runtime.block_on(self.copy.is_outdated())?,
            };
            if attempt == ATTEMPTS || !is_removed {
                return checked;
            }
            if let Err(error) = &checked {
                repeats(error);
            }
            attempt += 1;
            self.begin_again()?;
        }
    }

    fn check(&mut self, progress: &mut dyn FnMut(u64)) -> Result<FetchCheck, FetchError> {
        // Rows leave sooner than files do.
        let rows = match self.with_content(|content| content.check()) {
            Err(error) if error.is_damage() => Err(error.to_string()),
            rows => Ok(rows?),
        };
        let mut check = FetchCheck {
            files: 0,
            bytes: 0,
            bad_files: Vec::new(),
            report: None,
            rows,
        };
        let (Some(files), Some(manifest)) = (&self.files, self.copy.manifest()) else {
            return Ok(check);
        };
        let found = files.verify(&self.storage, progress)?;
        let object = |path: &str| {
            let file = manifest.files.iter().find(|file| file.path == path);
            let object = file.and_then(|file| self.copy.files().get(&file.digest));
            object
                .map_or("no object", |object| object.path.as_str())
                .to_owned()
        };
        let bad = found.bad_files.into_iter();
        check.bad_files = bad
            .map(|(path, what)| (path.clone(), object(&path), what))
            .collect();
        (check.files, check.bytes, check.report) = (found.files, found.bytes, found.report);
        Ok(check)
    }

    /// Runs a step with the content of the replica. An error of the bucket stays one.
    fn with_content<T>(
        &mut self,
        step: impl FnOnce(ReplicaContent<'_>) -> Result<T, RestoreError>,
    ) -> Result<T, FetchError> {
        let store_id = self.store_id();
        let in_files = self.manifest().map(|manifest| manifest.position);
        let until = self.at.filter(|at| in_files.is_none_or(|end| *at > end));
        let (copy, runtime) = (&mut self.copy, &self.remote.runtime);
        let mut failed = None;
        let without_rows = self.without_rows;
        let mut parts = std::iter::from_fn(|| {
            if without_rows {
                return None;
            }
            let part = runtime.block_on(copy.next()).transpose()?;
            Some(part.map_err(|error| {
                failed = Some(error);
                RestoreError::Io {
                    action: "reading the rows of the replica".to_owned(),
                    source: io::Error::other("the bucket failed"),
                }
            }))
        });
        let content = ReplicaContent {
            store_id,
            files: self.files.as_deref(),
            parts: &mut parts,
            until,
        };
        let done = step(content);
        match failed {
            Some(error) => Err(error.into()),
            None => Ok(done?),
        }
    }
}

/// Whether an error comes from an owner that has removed objects since the copy began.
fn is_removal(
    remote: &Remote,
    copy: Option<&ReplicaCopy>,
    error: &FetchError,
) -> Result<bool, FetchError> {
    if error.is_changed() {
        return Ok(true);
    }
    if !error.may_be_removal() {
        return Ok(false);
    }
    match copy {
        Some(copy) => Ok(remote.runtime.block_on(copy.is_outdated())?),
        // The manifest was removed between the read of its row and its own.
        None => Ok(matches!(
            error,
            FetchError::Ship(ShipError::Manifest { .. })
        )),
    }
}

/// The error for a position that the bucket does not have: names the range that it has.
fn outside(remote: &Arc<Remote>, storage: &StorageConfig, asked: Position) -> FetchError {
    let range = || -> Result<(Position, Position), FetchError> {
        let earliest = Position::ZERO;
        let copy = Fetch::copy(remote, Some(earliest), None)?;
        let mut oldest = Fetch {
            remote: Arc::clone(remote),
            files: None,
            copy,
            at: Some(earliest),
            without_rows: false,
            storage: storage.clone(),
            kept: None,
            fenced: None,
        };
        let first = if oldest.manifest().is_some() {
            Fetch::files(remote, &oldest.copy, Some(earliest), None).map(drop)
        } else {
            match oldest.with_content(|content| content.check().map(drop)) {
                Err(FetchError::Restore(error)) => Err(error),
                checked => Ok(checked?),
            }
        };
        let first = match first {
            Err(RestoreError::Before { first, .. }) => first,
            Err(error) => return Err(error.into()),
            Ok(()) => earliest,
        };
        let mut newest = Fetch::open(remote, storage.clone(), None, None, None)?;
        let end = newest.with_content(|content| content.check())?.position;
        Ok((first, end))
    };
    match range() {
        Ok((first, end)) => FetchError::Outside {
            place: remote.bucket.place().to_owned(),
            asked,
            first,
            end,
        },
        Err(error) => error,
    }
}

//! A bucket of backups as a read-only `Disk`, so that a backup in a bucket is verified and restored by the same code as one
//! in a directory.
//!
//! Names and sizes come from one list for each directory, which is made when it is first needed. A file that is read in
//! order is fetched ahead, in windows of [`WINDOW_BYTES`] by [`FETCHES`] requests at a time. Each open file holds at most
//! one window.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::try_join_all;
use parking_lot::Mutex;
use wald_bucket::{Bucket, BucketError, BucketErrorKind, BucketUrl, ReplicaFile, Tally};
use wald_storage::{
    ContentDigest, Disk, DiskFile, DiskLock, FileSystem, Unreadable, content_path, open_kept,
};

use super::keys::TrustedKeys;
use super::{FAILED, USAGE, unusable};
use crate::bucket::{self, BucketRuntime};
use crate::config::Config;
use crate::serve::Exit;

/// Bytes fetched ahead.
const WINDOW_BYTES: u64 = 8 << 20;
/// Requests for one window at the same time.
const FETCHES: u64 = 4;

/// A bucket, and the runtime of its requests.
pub(crate) struct Remote {
    pub(crate) bucket: Bucket,
    pub(crate) runtime: BucketRuntime,
    /// The keys that must have signed its manifests, if there are any.
    pub(crate) trusted: TrustedKeys,
}

impl Remote {
    /// Opens the bucket that a command names. The first request shows whether it exists.
    ///
    /// # Errors
    /// If the URL or the settings cannot be used.
    pub(super) fn open(url: &str, config: &Config) -> Result<Arc<Self>, Exit> {
        let url: BucketUrl = url
            .parse()
            .map_err(|bad: wald_bucket::BadUrl| Exit::new(USAGE, bad.to_string()))?;
        let opened = bucket::open(&url, config, Arc::new(Tally::default()));
        let bucket = opened.map_err(|error| {
            let code = match error.kind() {
                BucketErrorKind::Settings => Exit::CONFIG,
                _ => FAILED,
            };
            Exit::new(code, error.to_string())
        })?;
        let trusted = TrustedKeys::of(config).map_err(|fault| unusable(&fault))?;
        Ok(Arc::new(Self::new(bucket, trusted)?))
    }

    fn new(bucket: Bucket, trusted: TrustedKeys) -> Result<Self, Exit> {
        let runtime = BucketRuntime::start()
            .map_err(|error| Exit::new(FAILED, format!("starting a runtime: {error}")))?;
        Ok(Self {
            bucket,
            runtime,
            trusted,
        })
    }
}

/// A bucket as a directory of backups.
pub(crate) struct BucketDisk {
    remote: Arc<Remote>,
    /// Digests, paths and sizes of content that has other names in the bucket, by its path here.
    renamed: HashMap<String, (ContentDigest, ReplicaFile)>,
    /// The directory of a stand-by, which keeps content that need not be read from the bucket again.
    kept: Option<Arc<dyn Disk>>,
    /// Names and sizes by directory.
    sizes: Mutex<HashMap<String, Arc<HashMap<String, u64>>>>,
    unreadable: Unreadable,
}

fn failed(error: BucketError) -> io::Error {
    match error.kind() {
        BucketErrorKind::NotFound => io::Error::new(io::ErrorKind::NotFound, error),
        _ => io::Error::other(error),
    }
}

fn read_only<T>() -> io::Result<T> {
    Err(io::ErrorKind::ReadOnlyFilesystem.into())
}

impl BucketDisk {
    /// The directory of backups in the bucket.
    pub(super) fn new(remote: Arc<Remote>) -> Self {
        Self::with_names(remote, HashMap::new(), None)
    }

    /// The content of a replica, under the names that content has in a directory of backups. `kept`: the directory of a
    /// stand-by; its content is read there.
    pub(crate) fn of_replica(
        remote: Arc<Remote>,
        files: &BTreeMap<ContentDigest, ReplicaFile>,
        kept: Option<Arc<dyn Disk>>,
    ) -> Self {
        let named = files.iter();
        let named = named.map(|(digest, file)| (content_path(*digest), (*digest, file.clone())));
        Self::with_names(remote, named.collect(), kept)
    }

    fn with_names(
        remote: Arc<Remote>,
        renamed: HashMap<String, (ContentDigest, ReplicaFile)>,
        kept: Option<Arc<dyn Disk>>,
    ) -> Self {
        Self {
            remote,
            renamed,
            kept,
            sizes: Mutex::default(),
            unreadable: Unreadable::default(),
        }
    }

    fn sizes(&self, directory: &str) -> io::Result<Arc<HashMap<String, u64>>> {
        if let Some(sizes) = self.sizes.lock().get(directory) {
            return Ok(Arc::clone(sizes));
        }
        let remote = &self.remote;
        // A missing bucket is no missing directory.
        let listed = remote.runtime.block_on(remote.bucket.list(directory));
        let listed = listed.map_err(io::Error::other)?.into_iter();
        let sizes: HashMap<_, _> = listed.map(|file| (file.name, file.bytes)).collect();
        let sizes = Arc::new(sizes);
        let mut all = self.sizes.lock();
        all.insert(directory.to_owned(), Arc::clone(&sizes));
        Ok(sizes)
    }
}

impl Disk for BucketDisk {
    fn location(&self) -> String {
        self.remote.bucket.place().to_owned()
    }

    fn lock(&self, _path: &str, _holder: &str) -> io::Result<Result<Box<dyn DiskLock>, String>> {
        read_only()
    }

    /// A backup does not change once it has its manifest.
    fn lock_shared(&self, _path: &str) -> io::Result<Result<Option<Box<dyn DiskLock>>, String>> {
        Ok(Ok(None))
    }

    fn create_directory(&self, _path: &str) -> io::Result<()> {
        read_only()
    }

    fn visit(&self, directory: &str, each: &mut dyn FnMut(&str)) -> io::Result<()> {
        let sizes = self.sizes(directory)?;
        sizes.keys().for_each(|name| each(name));
        Ok(())
    }

    fn create(&self, _path: &str) -> io::Result<Arc<dyn DiskFile>> {
        read_only()
    }

    fn open(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        let (path, size) = match self.renamed.get(path) {
            Some((digest, file)) => {
                if let Some(disk) = &self.kept {
                    match open_kept(&**disk, *digest, file.bytes) {
                        Ok(Some(kept)) => return Ok(kept),
                        Ok(None) => {}
                        Err(error) => tracing::warn!(
                            directory = disk.location(),
                            object = file.path,
                            %error,
                            "the kept copy of an object cannot be read; reading it from the bucket"
                        ),
                    }
                }
                (file.path.clone(), file.bytes)
            }
            None => {
                let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
                let sizes = self.sizes(directory)?;
                let size = *sizes.get(name).ok_or(io::ErrorKind::NotFound)?;
                (path.to_owned(), size)
            }
        };
        Ok(Arc::new(BucketFile {
            remote: Arc::clone(&self.remote),
            path,
            size,
            window: Mutex::default(),
        }))
    }

    fn read_direct(&self, _path: &str, _from: u64, _bytes: u64) -> io::Result<Option<Bytes>> {
        Ok(None)
    }

    fn unreadable(&self) -> &Unreadable {
        &self.unreadable
    }

    fn rename(&self, _from: &str, _to: &str) -> io::Result<()> {
        read_only()
    }

    fn remove(&self, _path: &str) -> io::Result<()> {
        read_only()
    }

    fn sync_directory(&self, _directory: &str) -> io::Result<()> {
        Ok(())
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        Ok(Some(0))
    }

    fn file_system(&self) -> FileSystem {
        FileSystem {
            name: "bucket".to_owned(),
            volatile: false,
            caveats: Vec::new(),
        }
    }
}

struct BucketFile {
    remote: Arc<Remote>,
    path: String,
    size: u64,
    window: Mutex<ReadAhead>,
}

/// Bytes that were fetched and not read yet.
#[derive(Default)]
struct ReadAhead {
    from: u64,
    bytes: Bytes,
}

impl BucketFile {
    /// Reads a range, by several requests if it is large.
    fn fetch(&self, from: u64, to: u64) -> io::Result<Bytes> {
        let piece = (to - from).div_ceil(FETCHES).max(1 << 20);
        let mut ranges = Vec::new();
        let mut at = from;
        while at < to {
            let end = to.min(at + piece);
            ranges.push(self.remote.bucket.read_range(&self.path, at..end));
            at = end;
        }
        let pieces = self.remote.runtime.block_on(try_join_all(ranges));
        let mut pieces = pieces.map_err(failed)?;
        match pieces.len() {
            1 => Ok(pieces.remove(0)),
            _ => Ok(pieces.concat().into()),
        }
    }
}

impl DiskFile for BucketFile {
    fn size(&self) -> io::Result<u64> {
        Ok(self.size)
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let end = self.size.min(offset.saturating_add(buffer.len() as u64));
        if offset >= end {
            return Ok(0);
        }
        let mut window = self.window.lock();
        if window.bytes.is_empty() || window.from != offset {
            // A read that continues the last one will be followed by more.
            let continues = offset > 0 && window.from == offset;
            let to = match continues {
                true => self.size.min(end.max(offset + WINDOW_BYTES)),
                false => end,
            };
            window.bytes = self.fetch(offset, to)?;
        }
        let length = window.bytes.len().min(buffer.len());
        buffer[..length].copy_from_slice(&window.bytes.split_to(length));
        window.from = offset + length as u64;
        Ok(length)
    }

    fn write_at(&self, _bytes: &[u8], _offset: u64) -> io::Result<usize> {
        read_only()
    }

    fn set_size(&self, _bytes: u64) -> io::Result<()> {
        read_only()
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use wald_bucket::{Direction, Op};

    use super::*;

    #[test]
    fn a_file_read_in_order_is_fetched_ahead_once() {
        let tally = Arc::new(Tally::default());
        let url = "s3://memory/orders".parse().unwrap();
        let bucket = Bucket::in_memory(&url, Arc::clone(&tally) as _);
        let disk = BucketDisk::new(Arc::new(
            Remote::new(bucket, TrustedKeys::default()).unwrap(),
        ));
        let content: Vec<u8> = (0..20 << 20).map(|at: u32| (at % 251) as u8).collect();
        let remote = &disk.remote;
        let put = remote.bucket.put("files/x", content.clone().into());
        remote.runtime.block_on(put).unwrap();
        assert_eq!(disk.list("files").unwrap(), ["x"]);
        assert_eq!(
            disk.open("files/y").err().unwrap().kind(),
            io::ErrorKind::NotFound
        );
        let file = disk.open("files/x").unwrap();
        assert_eq!(file.size().unwrap(), content.len() as u64);
        let mut read = Vec::new();
        let mut buffer = vec![0; 300_000];
        loop {
            let length = file.read_full_at(&mut buffer, read.len() as u64).unwrap();
            read.extend_from_slice(&buffer[..length]);
            if length < buffer.len() {
                break;
            }
        }
        assert!(read == content);
        assert_eq!(
            tally.bytes(Direction::Received),
            content.len() as u64,
            "nothing twice"
        );
        let gets = || {
            let all = tally.requests();
            all.iter()
                .filter(|(op, ..)| *op == Op::Get)
                .map(|(.., count)| count)
                .sum::<u64>()
        };
        assert!(gets() <= 1 + 3 * FETCHES, "{} requests", gets());
        // A read elsewhere fetches its own bytes only.
        let mut few = [0; 10];
        assert_eq!(file.read_full_at(&mut few, 7_000_000).unwrap(), 10);
        assert_eq!(few[..], content[7_000_000..7_000_010]);
        assert_eq!(tally.bytes(Direction::Received), content.len() as u64 + 10);
    }

    #[test]
    fn content_of_a_replica_is_read_where_it_is_kept_and_whole() {
        let url = "s3://memory/orders".parse().unwrap();
        let bucket = Bucket::in_memory(&url, Arc::new(Tally::default()) as _);
        let remote = Arc::new(Remote::new(bucket, TrustedKeys::default()).unwrap());
        let digest = |number: u8| ContentDigest::of(&[number]);
        let files: BTreeMap<ContentDigest, ReplicaFile> = (0..4)
            .map(|number| {
                let path = format!("content/{number}");
                let put = remote.bucket.put(&path, b"bucket".as_slice().into());
                remote.runtime.block_on(put).unwrap();
                (digest(number), ReplicaFile { path, bytes: 6 })
            })
            .collect();
        let directory = tempfile::tempdir().unwrap();
        let kept = |number: u8| directory.path().join(format!("standby/{}", digest(number)));
        std::fs::create_dir(directory.path().join("standby")).unwrap();
        std::fs::write(kept(1), "kept!!").unwrap();
        std::fs::write(kept(2), "half").unwrap();
        // It cannot be read as a file.
        std::fs::create_dir(kept(3)).unwrap();
        let disk: Arc<dyn Disk> = wald_storage::RealDisk::open(directory.path()).unwrap();
        let replica = BucketDisk::of_replica(remote, &files, Some(disk));
        for (number, content) in [(0, "bucket"), (1, "kept!!"), (2, "bucket"), (3, "bucket")] {
            let file = replica.open(&content_path(digest(number))).unwrap();
            let mut read = [0; 6];
            assert_eq!(file.read_full_at(&mut read, 0).unwrap(), 6, "{number}");
            assert_eq!(read, content.as_bytes(), "{number}");
        }
    }
}

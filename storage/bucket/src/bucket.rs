//! A bucket and the prefix in it. All paths are relative to the prefix.
//!
//! A conditional write whose answer is unclear is settled by a read: the object is mine if it has the bytes that I wrote.
//! Therefore the bytes of two writers always differ; records have a nonce.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{
    Error, GetOptions, GetResult, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions,
    PutPayload, UpdateVersion,
};

use crate::client;
use crate::error::{BucketError, BucketErrorKind};
use crate::observe::{Observed, RequestObserver};
use crate::renew::Renewed;
use crate::settings::BucketSettings;
use crate::url::BucketUrl;

/// Attempts of a conditional write that the store could not decide (409 of S3).
const ATTEMPTS: usize = 5;
/// Maximum number of objects in one list.
const MOST_OBJECTS: usize = 1_000_000;
/// Maximum bytes of a name in a list. Wald's own have at most 80; others are of someone else.
const LONGEST_NAME: usize = 100;

/// A version of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tag(UpdateVersion);

/// The condition of a write.
#[derive(Debug, Clone, Copy)]
pub enum WriteCondition<'a> {
    /// The object does not exist.
    Absent,
    /// The object has this version.
    Is(&'a Tag),
}

/// The result of a conditional write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Put {
    /// The object has the bytes of this writer, in this version.
    Done(Tag),
    /// The condition did not hold. Nothing was written.
    Lost,
}

/// The answer to one conditional write.
pub(crate) enum PutOnce {
    /// The object has the bytes of this writer, in this version.
    Done(Tag),
    /// The condition did not hold, or the store did not decide (409 of S3).
    Refused(BucketError),
    /// No answer: the object may have the bytes of this writer.
    Failed(BucketError),
}

/// An object in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketEntry {
    /// Its name below the directory.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Time of its last write by the clock of the bucket, in microseconds since 1970.
    pub written_us: i64,
}

/// A bucket and a prefix.
#[derive(Clone)]
pub struct Bucket {
    store: Arc<dyn ObjectStore>,
    place: Arc<str>,
    /// `None`: the credentials have no file.
    renewed: Option<Renewed>,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bucket").field(&self.place).finish()
    }
}

impl Bucket {
    /// Makes a client. Sends nothing, so that a missing bucket shows with the first request.
    ///
    /// # Errors
    /// If the settings cannot be used.
    pub fn open(
        url: &BucketUrl,
        settings: &BucketSettings,
        observer: Arc<dyn RequestObserver>,
    ) -> Result<Self, BucketError> {
        if settings.credentials_file.is_none() {
            return Ok(Self::over(client::open(url, settings)?, url, observer));
        }
        let (place, settings) = (url.clone(), settings.clone());
        let renewed = Renewed::open(move || client::open(&place, &settings))?;
        Ok(Self {
            renewed: Some(renewed.clone()),
            ..Self::over(Arc::new(renewed), url, observer)
        })
    }

    /// Reads the file of credentials again, as each refusal of the store does, at most once in 5 s. Returns whether there is
    /// a file. Requests that have begun keep the earlier credentials.
    ///
    /// # Errors
    /// If the file cannot be used. The earlier credentials stay.
    pub fn renew_credentials(&self) -> Result<bool, BucketError> {
        match &self.renewed {
            None => Ok(false),
            Some(renewed) => renewed.renew().map(|()| true),
        }
    }

    /// A bucket over any store, at the prefix of the URL.
    pub fn over(
        store: Arc<dyn ObjectStore>,
        url: &BucketUrl,
        observer: Arc<dyn RequestObserver>,
    ) -> Self {
        let observed = Observed::new(store, observer);
        Self {
            store: Arc::new(PrefixStore::new(observed, url.prefix.as_str())),
            place: url.to_string().into(),
            renewed: None,
        }
    }

    /// An empty bucket in the memory of this process, for tests of other crates.
    pub fn in_memory(url: &BucketUrl, observer: Arc<dyn RequestObserver>) -> Self {
        Self::over(Arc::new(InMemory::new()), url, observer)
    }

    /// The URL, for messages.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The store below the prefix, whose requests are counted.
    pub fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    pub(crate) fn failed(&self, action: &str, error: &Error) -> BucketError {
        BucketError::of(&self.place, action, error)
    }

    fn damaged(&self, what: String) -> BucketError {
        BucketError::new(BucketErrorKind::Damaged, &self.place, what)
    }

    /// The objects directly in a directory, sorted by name. An absent directory is empty. Names of more than 100 bytes
    /// are left out.
    ///
    /// # Errors
    /// If the bucket is missing, the store fails, or the directory has more than 1,000,000 objects.
    pub async fn list(&self, directory: &str) -> Result<Vec<BucketEntry>, BucketError> {
        self.list_at(directory, 1, MOST_OBJECTS).await
    }

    /// The objects in the directories of a directory: a name is `SUBDIRECTORY/NAME`. Otherwise as [`Bucket::list`].
    ///
    /// # Errors
    /// As [`Bucket::list`].
    pub async fn list_below(&self, directory: &str) -> Result<Vec<BucketEntry>, BucketError> {
        self.list_at(directory, 2, MOST_OBJECTS).await
    }

    /// The objects whose names have `depth` parts below a directory.
    async fn list_at(
        &self,
        directory: &str,
        depth: usize,
        most: usize,
    ) -> Result<Vec<BucketEntry>, BucketError> {
        let prefix = Path::from(directory);
        let mut found: Vec<BucketEntry> = Vec::new();
        let mut objects = 0;
        let mut names = self.store.list(Some(&prefix));
        while let Some(object) = names
            .try_next()
            .await
            .map_err(|error| self.failed(&format!("list {directory}/"), &error))?
        {
            objects += 1;
            if objects > most {
                return Err(self.damaged(format!(
                    "{directory}/ has more than {most} objects; use a prefix for each store"
                )));
            }
            let Some(parts) = object.location.prefix_match(&prefix) else {
                continue;
            };
            let parts: Vec<_> = parts.collect();
            let name = parts
                .iter()
                .map(AsRef::as_ref)
                .collect::<Vec<&str>>()
                .join("/");
            // Objects elsewhere below the directory are of someone else.
            if parts.len() == depth && name.len() <= LONGEST_NAME {
                found.push(BucketEntry {
                    name,
                    bytes: object.size,
                    written_us: object.last_modified.timestamp_micros(),
                });
            }
        }
        found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Size of an object in bytes; `None` if it does not exist.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn size(&self, path: &str) -> Result<Option<u64>, BucketError> {
        match self.store.head(&Path::from(path)).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(&format!("read {path}"), &error)),
        }
    }

    /// The version of an object; `None` if it does not exist.
    ///
    /// # Errors
    /// If the store fails.
    pub(crate) async fn tag(&self, path: &str) -> Result<Option<Tag>, BucketError> {
        match self.store.head(&Path::from(path)).await {
            Ok(meta) => Ok(Some(Tag(UpdateVersion {
                e_tag: meta.e_tag,
                version: meta.version,
            }))),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(&format!("read {path}"), &error)),
        }
    }

    /// Reads an object of at most `most` bytes, with its version; `None` if it does not exist.
    ///
    /// # Errors
    /// `Damaged` if it is larger; others if the store fails.
    pub async fn read(&self, path: &str, most: u64) -> Result<Option<(Bytes, Tag)>, BucketError> {
        let Some(found) = self.get(path, GetOptions::default()).await? else {
            return Ok(None);
        };
        let size = found.meta.size;
        if size > most {
            return Err(self.damaged(format!("{path} has {size} bytes, above {most}")));
        }
        let tag = tag_of(&found);
        Ok(Some((self.body(path, found, size).await?, tag)))
    }

    /// Reads a range of an object, which must lie within it.
    ///
    /// # Errors
    /// `NotFound` if the object does not exist; others if the store fails or sends another range.
    pub async fn read_range(&self, path: &str, range: Range<u64>) -> Result<Bytes, BucketError> {
        let options = GetOptions {
            range: Some(range.clone().into()),
            ..GetOptions::default()
        };
        let Some(found) = self.get(path, options).await? else {
            let what = format!("{path}: there is no such object");
            return Err(BucketError::new(
                BucketErrorKind::NotFound,
                &self.place,
                what,
            ));
        };
        if found.range != range {
            let what = format!("{path}: bytes {:?} came instead of {range:?}", found.range);
            return Err(self.damaged(what));
        }
        self.body(path, found, range.end - range.start).await
    }

    /// Begins to read an object; `None` if it does not exist.
    async fn get(&self, path: &str, options: GetOptions) -> Result<Option<GetResult>, BucketError> {
        match self.store.get_opts(&Path::from(path), options).await {
            Ok(found) => Ok(Some(found)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed(&format!("read {path}"), &error)),
        }
    }

    /// The bytes of an answer. Keeps no more than the expected number of them, whatever the store sends.
    async fn body(&self, path: &str, found: GetResult, bytes: u64) -> Result<Bytes, BucketError> {
        let mut pieces: Vec<Bytes> = Vec::new();
        let (mut received, mut stream) = (0, found.into_stream());
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(|error| self.failed(&format!("read {path}"), &error))?;
            received += piece.len() as u64;
            if received > bytes {
                break;
            }
            pieces.push(piece);
        }
        if received != bytes {
            let what = format!("{path}: {received} bytes came instead of {bytes}");
            return Err(self.damaged(what));
        }
        Ok(match pieces.len() {
            1 => pieces.remove(0),
            _ => pieces.concat().into(),
        })
    }

    /// The version of an object, and whether it has these bytes; `None` if it does not exist.
    async fn compare(&self, path: &str, bytes: &Bytes) -> Result<Option<(bool, Tag)>, BucketError> {
        let Some(found) = self.get(path, GetOptions::default()).await? else {
            return Ok(None);
        };
        let (tag, size) = (tag_of(&found), found.meta.size);
        let same = size == bytes.len() as u64 && self.body(path, found, size).await? == *bytes;
        Ok(Some((same, tag)))
    }

    /// Writes an object under a condition, and does not look further.
    pub(crate) async fn put_once(
        &self,
        path: &str,
        bytes: Bytes,
        condition: WriteCondition<'_>,
    ) -> PutOnce {
        let mode = match condition {
            WriteCondition::Absent => PutMode::Create,
            WriteCondition::Is(tag) => PutMode::Update(tag.0.clone()),
        };
        let options = PutOptions::from(mode);
        let payload = PutPayload::from(bytes);
        let put = self
            .store
            .put_opts(&Path::from(path), payload, options)
            .await;
        match put {
            Ok(put) => PutOnce::Done(Tag(UpdateVersion {
                e_tag: put.e_tag,
                version: put.version,
            })),
            Err(error) => {
                let failed = self.failed(&format!("write {path}"), &error);
                match error {
                    Error::AlreadyExists { .. } | Error::Precondition { .. } => {
                        PutOnce::Refused(failed)
                    }
                    _ => PutOnce::Failed(failed),
                }
            }
        }
    }

    /// Writes an object under a condition. An unclear answer is settled by a read.
    ///
    /// # Errors
    /// If the store fails, and a read did not show the bytes of this writer. Then the write may still happen later.
    pub async fn put_if(
        &self,
        path: &str,
        bytes: Bytes,
        condition: WriteCondition<'_>,
    ) -> Result<Put, BucketError> {
        let mut attempt = 1;
        loop {
            let (refused, failed) = match self.put_once(path, bytes.clone(), condition).await {
                PutOnce::Done(tag) => return Ok(Put::Done(tag)),
                PutOnce::Refused(error) => (true, error),
                PutOnce::Failed(error) if error.kind() != BucketErrorKind::Unavailable => {
                    return Err(error);
                }
                PutOnce::Failed(error) => (false, error),
            };
            let found = self.compare(path, &bytes).await?;
            match (found, condition) {
                (Some((true, tag)), _) => return Ok(Put::Done(tag)),
                _ if !refused => return Err(failed),
                // 409 of S3: two requests met, and this one was not decided.
                (None, WriteCondition::Absent) if attempt < ATTEMPTS => {}
                (Some((_, now)), WriteCondition::Is(tag)) if now == *tag && attempt < ATTEMPTS => {}
                (None, WriteCondition::Absent) => return Err(failed),
                (Some((_, now)), WriteCondition::Is(tag)) if now == *tag => return Err(failed),
                _ => return Ok(Put::Lost),
            }
            attempt += 1;
        }
    }

    /// Writes an object, and replaces an existing one.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn put(&self, path: &str, bytes: Bytes) -> Result<(), BucketError> {
        let put = self
            .store
            .put(&Path::from(path), PutPayload::from(bytes))
            .await;
        put.map(drop)
            .map_err(|error| self.failed(&format!("write {path}"), &error))
    }

    /// Removes objects. Absent ones are no error.
    ///
    /// # Errors
    /// If the store fails. Some of the objects may be removed then.
    pub async fn remove(&self, paths: &[String]) -> Result<(), BucketError> {
        let paths: Vec<_> = paths
            .iter()
            .map(|path| Ok(Path::from(path.as_str())))
            .collect();
        let mut removed = self.store.delete_stream(stream::iter(paths).boxed());
        while let Some(removed) = removed.next().await {
            match removed {
                Ok(_) | Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(self.failed("remove objects", &error)),
            }
        }
        Ok(())
    }
}

fn tag_of(found: &GetResult) -> Tag {
    Tag(UpdateVersion {
        e_tag: found.meta.e_tag.clone(),
        version: found.meta.version.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::{StoreFault, StoreFaults, Weather, faulty, faulty_with};
    use crate::observe::Direction;

    #[tokio::test]
    async fn a_lost_answer_of_a_conditional_write_is_settled_by_a_read() {
        let (bucket, faults, _) = faulty();
        faults.next_puts([StoreFault::AnswerLost]);
        let Put::Done(first) = create(&bucket, "x", "mine").await.unwrap() else {
            panic!("it was written");
        };
        assert_eq!(create(&bucket, "x", "other").await.unwrap(), Put::Lost);
        faults.next_puts([StoreFault::AnswerLost]);
        let swapped = bucket
            .put_if("x", "next".into(), WriteCondition::Is(&first))
            .await;
        let Put::Done(second) = swapped.unwrap() else {
            panic!("it was swapped");
        };
        let stale = bucket
            .put_if("x", "late".into(), WriteCondition::Is(&first))
            .await;
        assert_eq!(stale.unwrap(), Put::Lost);
        let (bytes, tag) = bucket.read("x", 100).await.unwrap().unwrap();
        assert_eq!((&bytes[..], tag), (&b"next"[..], second));
    }

    #[tokio::test]
    async fn a_refusal_without_an_object_is_tried_again() {
        let (bucket, faults, _) = faulty();
        faults.next_puts([StoreFault::Conflict, StoreFault::Conflict]);
        let put = create(&bucket, "x", "mine").await.unwrap();
        assert!(matches!(put, Put::Done(_)));
        faults.next_puts([StoreFault::Conflict; ATTEMPTS]);
        let refused = create(&bucket, "y", "mine").await.unwrap_err();
        assert_eq!(refused.kind(), BucketErrorKind::Unavailable);
    }

    #[tokio::test]
    async fn a_write_is_repeated_until_it_is_decided() {
        for seed in 0..50 {
            println!("seed {seed}");
            let (bucket, faults, _) = faulty();
            *faults.weather.lock().unwrap() = Some(Weather::new(seed, 0.5, 0.5));
            let put = loop {
                if let Ok(put) = create(&bucket, "x", "mine").await {
                    break put;
                }
            };
            assert!(matches!(put, Put::Done(_)), "nobody else writes");
        }
    }

    #[tokio::test]
    async fn a_write_that_fails_is_reported_and_leaves_nothing() {
        let (bucket, faults, _) = faulty();
        for fault in [StoreFault::Unavailable, StoreFault::OutOfSpace] {
            faults.next_puts([fault]);
            assert!(create(&bucket, "x", "mine").await.is_err());
            assert_eq!(bucket.size("x").await.unwrap(), None);
        }
    }

    #[tokio::test]
    async fn lists_have_only_their_own_directory() {
        let (bucket, _, tally) = faulty();
        for path in ["files/b", "files/a", "files/c/d", "filesx/e", "f"] {
            bucket.put(path, "12345".into()).await.unwrap();
        }
        let names = bucket.list("files").await.unwrap();
        let names: Vec<_> = names
            .iter()
            .map(|entry| (&*entry.name, entry.bytes))
            .collect();
        assert_eq!(names, [("a", 5), ("b", 5)]);
        let below = bucket.list_below("files").await.unwrap();
        let below: Vec<_> = below.iter().map(|entry| &*entry.name).collect();
        assert_eq!(below, ["c/d"]);
        let gone = ["files/a".to_owned(), "files/never".to_owned()];
        bucket.remove(&gone).await.unwrap();
        assert_eq!(bucket.list("files").await.unwrap().len(), 1);
        assert_eq!(&bucket.read_range("f", 1..3).await.unwrap()[..], b"23");
        assert!(bucket.read("f", 4).await.is_err());
        assert_eq!(tally.bytes(Direction::Sent), 25);
        assert_eq!(tally.bytes(Direction::Received), 2);
    }

    #[tokio::test]
    async fn a_list_beyond_its_bound_is_refused() {
        let (bucket, _, _) = faulty();
        for path in ["files/a", "files/b", "files/c/d"] {
            bucket.put(path, "x".into()).await.unwrap();
        }
        assert_eq!(bucket.list_at("files", 1, 3).await.unwrap().len(), 2);
        let refused = bucket.list_at("files", 1, 2).await.unwrap_err();
        assert_eq!(refused.kind(), BucketErrorKind::Damaged);
        assert!(
            refused.to_string().contains("more than 2 objects"),
            "{refused}"
        );
    }

    #[tokio::test]
    async fn an_answer_longer_than_announced_is_damage() {
        let (bucket, _, _) = faulty_with(StoreFaults {
            longer_answers: true,
            ..StoreFaults::default()
        });
        bucket.put("x", "12345".into()).await.unwrap();
        let whole = bucket.read("x", 100).await.unwrap_err();
        let part = bucket.read_range("x", 1..3).await.unwrap_err();
        for refused in [whole, part] {
            assert_eq!(refused.kind(), BucketErrorKind::Damaged, "{refused}");
        }
    }

    async fn create(bucket: &Bucket, path: &str, text: &'static str) -> Result<Put, BucketError> {
        bucket
            .put_if(path, text.into(), WriteCondition::Absent)
            .await
    }
}

//! Files named by their digest, on their way into a bucket.
//!
//! A file becomes visible as a whole, and only after its bytes were compared with its digest: small files with one write,
//! larger ones with the end of an upload in parts. At most [`SLOTS`] requests run at a time. Memory: one piece of
//! [`PART_BYTES`] for each of them and one that is being filled, 40 MiB; and 32 bytes for each file. Only a file of
//! more than 80 GB has larger parts, because stores take 10,000 parts of one object.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use object_store::path::Path;
use object_store::{Error, MultipartUpload, ObjectStore, PutPayload};
use tokio::sync::Semaphore;
use tokio::task::{JoinError, JoinSet};

use crate::bucket::Bucket;
use crate::error::{BucketError, BucketErrorKind};

/// Bytes of one part. Smaller files are one write.
pub const PART_BYTES: usize = 8 << 20;
/// Requests at the same time.
pub const SLOTS: usize = 4;
/// Maximum number of parts of one object at every provider.
const MOST_PARTS: u64 = 10_000;

/// The uploads of one run.
pub struct Uploads {
    bucket: Bucket,
    slots: Arc<Semaphore>,
    /// Writes of whole small files. Each returns the digest of its file.
    running: JoinSet<Result<[u8; 32], BucketError>>,
    /// Digests of the files that are in the bucket.
    whole: Vec<[u8; 32]>,
}

/// One file on its way.
pub struct Upload {
    path: String,
    bytes: u64,
    digest: [u8; 32],
    running: Box<blake3::Hasher>,
    received: u64,
    piece: BytesMut,
    part_bytes: usize,
    parts: Option<Parts>,
}

struct Parts {
    upload: Box<dyn MultipartUpload>,
    running: JoinSet<Result<(), Error>>,
}

impl Uploads {
    /// Begins a run.
    pub fn new(bucket: Bucket) -> Self {
        Self {
            bucket,
            slots: Arc::new(Semaphore::new(SLOTS)),
            running: JoinSet::new(),
            whole: Vec::new(),
        }
    }

    /// Begins a file of `bytes` bytes with this BLAKE3 digest.
    pub fn begin(&self, path: String, bytes: u64, digest: [u8; 32]) -> Upload {
        let part_bytes = part_bytes(bytes);
        Upload {
            path,
            bytes,
            digest,
            running: Box::default(),
            received: 0,
            piece: BytesMut::with_capacity(
                usize::try_from(bytes).map_or(part_bytes, |all| all.min(part_bytes)),
            ),
            part_bytes,
            parts: None,
        }
    }

    /// Takes the next bytes of the file. Waits for a slot when a part is full.
    ///
    /// # Errors
    /// If a request failed. The parts that were sent are removed.
    pub async fn push(&mut self, file: &mut Upload, mut data: &[u8]) -> Result<(), BucketError> {
        file.running.update(data);
        file.received += data.len() as u64;
        while !data.is_empty() {
            let room = file.part_bytes - file.piece.len();
            let (now, later) = data.split_at(data.len().min(room));
            file.piece.extend_from_slice(now);
            data = later;
            // The last part goes with the end of the file.
            if file.piece.len() == file.part_bytes
                && file.bytes > file.part_bytes as u64
                && let Err(error) = self.send_part(file).await
            {
                return Err(self.give_up(file, &error).await);
            }
        }
        Ok(())
    }

    /// Ends the file. A small one may still be on its way: [`Uploads::finish`] waits for it.
    ///
    /// # Errors
    /// `Damaged` if the bytes do not match the digest: then the file does not become visible. Others if the store fails.
    pub async fn end(&mut self, mut file: Upload) -> Result<(), BucketError> {
        let same = *file.running.finalize().as_bytes() == file.digest;
        if file.received != file.bytes || !same {
            self.abort(&mut file).await;
            let what = format!("the bytes for {} do not match their digest", file.path);
            return Err(BucketError::new(
                BucketErrorKind::Damaged,
                self.bucket.place(),
                what,
            ));
        }
        if file.parts.is_none() {
            return self.send_whole(file).await;
        }
        let ended = match file.piece.is_empty() {
            true => Ok(()),
            false => self.send_part(&mut file).await,
        };
        let ended = match (ended, &mut file.parts) {
            (Ok(()), Some(parts)) => match all(&mut parts.running).await {
                Ok(()) => parts.upload.complete().await.map(drop),
                Err(error) => Err(error),
            },
            (ended, _) => ended,
        };
        match ended {
            Ok(()) => {
                self.whole.push(file.digest);
                Ok(())
            }
            Err(error) => Err(self.give_up(&mut file, &error).await),
        }
    }

    /// Gives a file up, and removes the parts that were sent.
    pub async fn cancel(&self, mut file: Upload) {
        self.abort(&mut file).await;
    }

    /// Waits for all files, also after a failure.
    ///
    /// # Errors
    /// If the store failed for one of them.
    pub async fn finish(&mut self) -> Result<(), BucketError> {
        let mut done = Ok(());
        while let Some(ended) = self.running.join_next().await {
            done = done.and(self.joined(ended));
        }
        done
    }

    /// Digests of the files that are in the bucket since the last call.
    pub fn take_whole(&mut self) -> Vec<[u8; 32]> {
        std::mem::take(&mut self.whole)
    }

    fn joined(
        &mut self,
        ended: Result<Result<[u8; 32], BucketError>, JoinError>,
    ) -> Result<(), BucketError> {
        let digest = ended.unwrap_or_else(|error| {
            let what = format!("a write did not end: {error}");
            let kind = BucketErrorKind::Unavailable;
            Err(BucketError::new(kind, self.bucket.place(), what))
        })?;
        self.whole.push(digest);
        Ok(())
    }

    /// Writes a small file with one request, while the next ones arrive.
    async fn send_whole(&mut self, file: Upload) -> Result<(), BucketError> {
        let slot = Arc::clone(&self.slots).acquire_owned().await;
        // Ended writes of earlier files report their failure here.
        while let Some(ended) = self.running.try_join_next() {
            self.joined(ended)?;
        }
        let bucket = self.bucket.clone();
        self.running.spawn(async move {
            let _slot = slot;
            bucket.put(&file.path, file.piece.freeze()).await?;
            Ok(file.digest)
        });
        Ok(())
    }

    async fn send_part(&self, file: &mut Upload) -> Result<(), Error> {
        let slot = Arc::clone(&self.slots).acquire_owned().await;
        let parts = match &mut file.parts {
            Some(parts) => parts,
            none => {
                let location = Path::from(file.path.as_str());
                let options = object_store::PutMultipartOptions::default();
                let upload = self
                    .bucket
                    .store()
                    .put_multipart_opts(&location, options)
                    .await?;
                none.insert(Parts {
                    upload,
                    running: JoinSet::new(),
                })
            }
        };
        while let Some(ended) = parts.running.try_join_next() {
            ended.map_err(Error::from)??;
        }
        let piece: Bytes = file.piece.split().freeze();
        let part = parts.upload.put_part(PutPayload::from(piece));
        parts.running.spawn(async move {
            let _slot = slot;
            part.await
        });
        Ok(())
    }

    async fn give_up(&self, file: &mut Upload, error: &Error) -> BucketError {
        self.abort(file).await;
        self.bucket.failed(&format!("write {}", file.path), error)
    }

    /// Removes the parts that were sent. If that fails, a rule of the bucket must remove them.
    async fn abort(&self, file: &mut Upload) {
        if let Some(mut parts) = file.parts.take() {
            parts.running.shutdown().await;
            let _ = parts.upload.abort().await;
        }
    }
}

/// Bytes of each part of a file: 8 MiB, or more where 10,000 of these are not enough.
fn part_bytes(bytes: u64) -> usize {
    let needed = bytes.div_ceil(MOST_PARTS).next_multiple_of(1 << 20);
    usize::try_from(needed).map_or(PART_BYTES, |needed| needed.max(PART_BYTES))
}

async fn all(running: &mut JoinSet<Result<(), Error>>) -> Result<(), Error> {
    while let Some(ended) = running.join_next().await {
        ended.map_err(Error::from)??;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::{StoreFault, faulty};
    use crate::observe::Direction;

    fn digest(data: &[u8]) -> [u8; 32] {
        blake3::hash(data).into()
    }

    fn bytes(length: usize) -> Vec<u8> {
        (0..length)
            .map(|at| ((at * 31) >> 7).to_le_bytes()[0])
            .collect()
    }

    async fn send(
        uploads: &mut Uploads,
        path: &str,
        data: &[u8],
        digest: [u8; 32],
    ) -> Result<(), BucketError> {
        let mut file = uploads.begin(path.to_owned(), data.len() as u64, digest);
        for piece in data.chunks(700_001) {
            uploads.push(&mut file, piece).await?;
        }
        uploads.end(file).await
    }

    #[tokio::test]
    async fn files_of_all_sizes_arrive_whole() {
        let (bucket, faults, tally) = faulty();
        let mut uploads = Uploads::new(bucket.clone());
        let sizes = [
            0,
            1,
            PART_BYTES - 1,
            PART_BYTES,
            PART_BYTES + 1,
            6 * PART_BYTES + 5,
        ];
        for size in sizes {
            let data = bytes(size);
            send(&mut uploads, &format!("files/{size}"), &data, digest(&data))
                .await
                .unwrap();
        }
        uploads.finish().await.unwrap();
        for size in sizes {
            let (there, _) = bucket
                .read(&format!("files/{size}"), u64::MAX)
                .await
                .unwrap()
                .unwrap();
            assert_eq!(there, bytes(size), "{size}");
        }
        assert_eq!(
            tally.bytes(Direction::Sent),
            sizes.iter().sum::<usize>() as u64
        );
        let most = faults.parts.lock().unwrap().1;
        assert!((2..=SLOTS).contains(&most), "{most} parts at a time");
    }

    #[tokio::test]
    async fn other_bytes_than_the_digest_s_never_become_visible() {
        let (bucket, _, _) = faulty();
        let mut uploads = Uploads::new(bucket.clone());
        for size in [10, 2 * PART_BYTES] {
            let data = bytes(size);
            let refused = send(&mut uploads, "files/x", &data, digest(b"other"))
                .await
                .unwrap_err();
            assert_eq!(refused.kind(), BucketErrorKind::Damaged);
        }
        uploads.finish().await.unwrap();
        assert_eq!(bucket.size("files/x").await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_failed_request_fails_the_file_and_shows_nothing() {
        // Request 1 of a large file begins it, then come its parts.
        for (size, good) in [
            (10, 0),
            (3 * PART_BYTES, 0),
            (3 * PART_BYTES, 2),
            (3 * PART_BYTES, 4),
        ] {
            let (bucket, faults, _) = faulty();
            let mut uploads = Uploads::new(bucket.clone());
            faults.good_puts(good);
            faults.next_puts([StoreFault::OutOfSpace]);
            let data = bytes(size);
            let sent = send(&mut uploads, "files/x", &data, digest(&data)).await;
            assert!(sent.and(uploads.finish().await).is_err(), "{size} {good}");
            assert_eq!(bucket.size("files/x").await.unwrap(), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_store_bounds_the_bytes_in_memory() {
        let (bucket, faults, tally) = faulty();
        faults.next_puts([StoreFault::Slow; 40]);
        let mut uploads = Uploads::new(bucket.clone());
        let data = bytes(PART_BYTES);
        let sending = async {
            for number in 0..20 {
                send(
                    &mut uploads,
                    &format!("files/{number}"),
                    &data,
                    digest(&data),
                )
                .await
                .unwrap();
            }
        };
        let waited = tokio::time::timeout(std::time::Duration::from_secs(60), sending).await;
        assert!(waited.is_err(), "it waits for slots");
        assert_eq!(bucket.list("files").await.unwrap(), []);
        drop(uploads);
        tokio::task::yield_now().await;
        let begun: u64 = tally.requests().iter().map(|(.., count)| count).sum();
        assert!(begun <= SLOTS as u64 + 1, "{begun} requests");
    }

    #[test]
    fn the_largest_file_has_no_more_parts_than_stores_take() {
        for bytes in [1_u64, 80 << 30, (80 << 30) + 1, 1 << 40] {
            let parts = bytes.div_ceil(part_bytes(bytes) as u64);
            assert!(parts <= MOST_PARTS, "{bytes}: {parts}");
        }
        assert_eq!(part_bytes(3 << 30), PART_BYTES);
    }
}

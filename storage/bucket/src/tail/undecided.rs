//! A store whose undecided writes are not refusals, and whose rows have a time limit of their own.
//!
//! S3 answers 409 if two writes of one object meet and neither is decided. `object_store` reports that as an object that
//! exists, and SlateDB takes it for another owner's. This layer looks: if there is no object, the write is repeated.
//!
//! An object that exists is never called absent: the objects that stop an old owner are not removed.
//!
//! A store that goes away can swallow requests on connections that stay open. Rows wait for each other, so a row must not
//! wait as long as the upload of a file may take. After the limit SlateDB sends the object again, and recognises its own
//! object if both arrive.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt as _, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult,
};
use tokio::time::timeout;

use crate::client::SLOWEST;

/// Whether the object is one of the write-ahead log: a row.
fn is_row(location: &Path) -> bool {
    location.parts().any(|part| part.as_ref() == "wal")
}

/// Maximum time until a row without bytes is answered.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// The largest number of times that it is doubled: beyond the 60 s after which the client gives a request up. The client gives
/// a row of more than 8 MiB more time, too.
const MOST_DOUBLED: u32 = 3;

/// Maximum time until a row of this size is answered. It grows while rows are late: the store may only be slow.
fn answer_time(bytes: usize, late: u32) -> Duration {
    let answer = ANSWER_TIME * 2_u32.pow(late.min(MOST_DOUBLED));
    answer + Duration::from_millis(bytes as u64 * 1000 / SLOWEST)
}

#[derive(Debug)]
pub(super) struct Undecided {
    store: Arc<dyn ObjectStore>,
    /// Number of rows in turn that were not answered in time.
    late: AtomicU32,
}

impl Undecided {
    pub(super) fn new(store: Arc<dyn ObjectStore>) -> Self {
        Self {
            store,
            late: AtomicU32::new(0),
        }
    }
}

impl fmt::Display for Undecided {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Undecided {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult, Error> {
        let creates = opts.mode == PutMode::Create;
        let bytes = payload.content_length();
        let put = async {
            let done = self.store.put_opts(location, payload, opts).await;
            if !creates || !matches!(done, Err(Error::AlreadyExists { .. })) {
                return done;
            }
            match self.store.head(location).await {
                Err(Error::NotFound { .. }) => Err(Error::Generic {
                    store: "bucket",
                    source: "the store did not decide a conditional write".into(),
                }),
                _ => done,
            }
        };
        if !is_row(location) {
            return put.await;
        }
        let limit = answer_time(bytes, self.late.load(Ordering::Relaxed));
        match timeout(limit, put).await {
            Ok(done) => {
                self.late.store(0, Ordering::Relaxed);
                done
            }
            Err(_) => {
                self.late.fetch_add(1, Ordering::Relaxed);
                Err(Error::Generic {
                    store: "bucket",
                    source: format!("the store gave no answer within {limit:?}").into(),
                })
            }
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>, Error> {
        self.store.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult, Error> {
        self.store.get_opts(location, options).await
    }

    async fn get_ranges(
        &self,
        location: &Path,
        ranges: &[std::ops::Range<u64>],
    ) -> Result<Vec<Bytes>, Error> {
        self.store.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path, Error>>,
    ) -> BoxStream<'static, Result<Path, Error>> {
        self.store.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta, Error>> {
        self.store.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta, Error>> {
        self.store.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult, Error> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<(), Error> {
        self.store.copy_opts(from, to, options).await
    }
}

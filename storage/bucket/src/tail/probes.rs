//! A store for a reader of the write-ahead log that asks for one object instead of eight.
//!
//! The reader finds the newest object by asking for the next numbers at distances 1, 2, 4 to 128, all at once and once a
//! second. The numbers have no holes: without the next one there is none behind it. So the questions are asked in turn here, and
//! the first answer that an object is missing answers the rest.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::log::number;

/// Time for which a missing object answers for those behind it. The questions of one round come within it, and the next round
/// later.
const ROUND: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct FewProbes {
    store: Arc<dyn ObjectStore>,
    /// The object that was missing last, and the time of the answer.
    missing: Mutex<Option<(u64, Instant)>>,
}

impl FewProbes {
    pub(super) fn new(store: Arc<dyn ObjectStore>) -> Self {
        Self {
            store,
            missing: Mutex::new(None),
        }
    }
}

impl fmt::Display for FewProbes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for FewProbes {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult, Error> {
        self.store.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>, Error> {
        self.store.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult, Error> {
        let Some(asked) = number(location).filter(|_| options.head) else {
            return self.store.get_opts(location, options).await;
        };
        let mut missing = self.missing.lock().await;
        if let Some((first, at)) = *missing
            && first < asked
            && at.elapsed() < ROUND
        {
            return Err(Error::NotFound {
                path: location.to_string(),
                source: "an earlier object is missing".into(),
            });
        }
        let found = self.store.get_opts(location, options).await;
        if let Err(Error::NotFound { .. }) = found {
            *missing = Some((asked, Instant::now()));
        }
        found
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

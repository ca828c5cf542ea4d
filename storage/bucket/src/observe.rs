//! Counts, seconds and bytes of each request: a wrapper around the store, and a tally for programs without a registry.
//!
//! A request is one call of the client. Its retries count as one, and their pauses are part of its seconds.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    UploadPart,
};

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Op {
    /// A write without a condition.
    Put,
    /// A write that requires that the object does not exist.
    Create,
    /// A write that requires a version of the object.
    Swap,
    /// One part of a large object, or the begin, end or abort of its upload.
    Part,
    /// A read of an object or of a range.
    Get,
    /// A read of the size and the tag.
    Head,
    /// A list of names.
    List,
    /// A removal.
    Delete,
    /// A copy within the bucket.
    Copy,
}

impl Op {
    /// Name in metrics and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Create => "create",
            Self::Swap => "swap",
            Self::Part => "part",
            Self::Get => "get",
            Self::Head => "head",
            Self::List => "list",
            Self::Delete => "delete",
            Self::Copy => "copy",
        }
    }
}

/// The direction of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// To the bucket.
    Sent,
    /// From the bucket.
    Received,
}

/// A request that has ended.
#[derive(Debug, Clone)]
pub struct BucketRequest {
    /// The kind.
    pub op: Op,
    /// `ok`, `condition` (the store refused it by its condition), `not_found`, `denied`, `failed`, or `dropped` (the
    /// caller gave up).
    pub result: &'static str,
    /// Time until the last byte of the answer.
    pub took: Duration,
    /// Bytes of objects that were sent.
    pub sent: u64,
    /// Bytes of objects that were received.
    pub received: u64,
}

/// Receives each request that has ended.
pub trait RequestObserver: fmt::Debug + Send + Sync {
    /// Called once for each request, on the thread that ended it.
    fn ended(&self, request: &BucketRequest);
}

/// Sums of requests, for programs without a registry of metrics.
#[derive(Debug, Default)]
pub struct Tally {
    counts: Mutex<BTreeMap<(Op, &'static str), u64>>,
    bytes: Mutex<(u64, u64)>,
}

impl Tally {
    /// Number of requests by kind and result.
    pub fn requests(&self) -> Vec<(Op, &'static str, u64)> {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let all = counts.iter();
        all.map(|((op, result), count)| (*op, *result, *count))
            .collect()
    }

    /// Bytes of objects that passed in this direction.
    pub fn bytes(&self, direction: Direction) -> u64 {
        let (sent, received) = *self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        match direction {
            Direction::Sent => sent,
            Direction::Received => received,
        }
    }
}

impl RequestObserver for Tally {
    fn ended(&self, request: &BucketRequest) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry((request.op, request.result)).or_default() += 1;
        drop(counts);
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        bytes.0 += request.sent;
        bytes.1 += request.received;
    }
}

/// One request on its way. If it is dropped before its end, it counts as `dropped`.
struct OnItsWay {
    observer: Arc<dyn RequestObserver>,
    began: Instant,
    request: BucketRequest,
}

impl OnItsWay {
    fn begin(observer: &Arc<dyn RequestObserver>, op: Op, sent: u64) -> Self {
        Self {
            observer: Arc::clone(observer),
            began: Instant::now(),
            request: BucketRequest {
                op,
                result: "dropped",
                took: Duration::ZERO,
                sent,
                received: 0,
            },
        }
    }

    fn end<T>(mut self, result: Result<T, Error>) -> Result<T, Error> {
        self.request.result = name(result.as_ref().err());
        result
    }
}

impl Drop for OnItsWay {
    fn drop(&mut self) {
        self.request.took = self.began.elapsed();
        self.observer.ended(&self.request);
    }
}

/// Passes a stream on. Its request ends with its last item, or is dropped with it.
fn counted<T: Send + 'static>(
    stream: BoxStream<'static, Result<T, Error>>,
    request: OnItsWay,
    bytes: fn(&T) -> u64,
) -> BoxStream<'static, Result<T, Error>> {
    let parts = (stream, request, false);
    stream::unfold(
        parts,
        move |(mut stream, mut request, mut failed)| async move {
            let item = stream.next().await;
            match &item {
                Some(Ok(item)) => request.request.received += bytes(item),
                Some(Err(error)) => {
                    failed = true;
                    request.request.result = name(Some(error));
                }
                None if !failed => request.request.result = "ok",
                None => {}
            }
            Some((item?, (stream, request, failed)))
        },
    )
    .boxed()
}

fn name(error: Option<&Error>) -> &'static str {
    match error {
        None => "ok",
        Some(
            Error::AlreadyExists { .. } | Error::Precondition { .. } | Error::NotModified { .. },
        ) => "condition",
        Some(Error::NotFound { .. }) => "not_found",
        Some(Error::PermissionDenied { .. } | Error::Unauthenticated { .. }) => "denied",
        Some(_) => "failed",
    }
}

/// A store whose requests are counted.
#[derive(Debug)]
pub(crate) struct Observed {
    inner: Arc<dyn ObjectStore>,
    observer: Arc<dyn RequestObserver>,
}

impl Observed {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>, observer: Arc<dyn RequestObserver>) -> Self {
        Self { inner, observer }
    }

    fn begin(&self, op: Op, sent: u64) -> OnItsWay {
        OnItsWay::begin(&self.observer, op, sent)
    }
}

impl fmt::Display for Observed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Observed {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult, Error> {
        let op = match &opts.mode {
            PutMode::Overwrite => Op::Put,
            PutMode::Create => Op::Create,
            PutMode::Update(_) => Op::Swap,
        };
        let request = self.begin(op, payload.content_length() as u64);
        request.end(self.inner.put_opts(location, payload, opts).await)
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>, Error> {
        let request = self.begin(Op::Part, 0);
        let upload = request.end(self.inner.put_multipart_opts(location, opts).await)?;
        Ok(Box::new(ObservedUpload {
            inner: upload,
            observer: Arc::clone(&self.observer),
        }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult, Error> {
        let op = if options.head { Op::Head } else { Op::Get };
        let request = self.begin(op, 0);
        let mut found = match self.inner.get_opts(location, options).await {
            Ok(found) => found,
            Err(error) => return request.end(Err(error)),
        };
        if op == Op::Head {
            return request.end(Ok(found));
        }
        let extensions = std::mem::take(&mut found.extensions);
        let (meta, range) = (found.meta.clone(), found.range.clone());
        let attributes = found.attributes.clone();
        let counted = counted(found.into_stream(), request, |bytes| bytes.len() as u64);
        Ok(GetResult {
            payload: GetResultPayload::Stream(counted),
            meta,
            range,
            attributes,
            extensions,
        })
    }

    async fn get_ranges(
        &self,
        location: &Path,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Bytes>, Error> {
        let mut request = self.begin(Op::Get, 0);
        let found = self.inner.get_ranges(location, ranges).await;
        let pieces = found.iter().flatten();
        request.request.received = pieces.fold(0, |sum, piece| sum + piece.len() as u64);
        request.end(found)
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path, Error>>,
    ) -> BoxStream<'static, Result<Path, Error>> {
        let observer = Arc::clone(&self.observer);
        let removed = self.inner.delete_stream(locations);
        removed
            .map(move |removed| OnItsWay::begin(&observer, Op::Delete, 0).end(removed))
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta, Error>> {
        counted(self.inner.list(prefix), self.begin(Op::List, 0), |_| 0)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta, Error>> {
        let request = self.begin(Op::List, 0);
        counted(self.inner.list_with_offset(prefix, offset), request, |_| 0)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult, Error> {
        let request = self.begin(Op::List, 0);
        request.end(self.inner.list_with_delimiter(prefix).await)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<(), Error> {
        let request = self.begin(Op::Copy, 0);
        request.end(self.inner.copy_opts(from, to, options).await)
    }
}

/// An upload in parts whose requests are counted.
#[derive(Debug)]
struct ObservedUpload {
    inner: Box<dyn MultipartUpload>,
    observer: Arc<dyn RequestObserver>,
}

#[async_trait]
impl MultipartUpload for ObservedUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let request = OnItsWay::begin(&self.observer, Op::Part, data.content_length() as u64);
        let part = self.inner.put_part(data);
        Box::pin(async move { request.end(part.await) })
    }

    async fn complete(&mut self) -> Result<PutResult, Error> {
        let request = OnItsWay::begin(&self.observer, Op::Part, 0);
        request.end(self.inner.complete().await)
    }

    async fn abort(&mut self) -> Result<(), Error> {
        let request = OnItsWay::begin(&self.observer, Op::Part, 0);
        request.end(self.inner.abort().await)
    }
}

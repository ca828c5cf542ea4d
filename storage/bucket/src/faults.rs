//! A store in memory that fails on request: 503, answers lost after success, slow answers, no space.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt as _, TryStreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, UploadPart,
};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::bucket::Bucket;
use crate::client::request_timeout;
use crate::observe::Tally;

/// A fault of one write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreFault {
    /// 503 after all retries; nothing was written.
    Unavailable,
    /// No space; nothing was written.
    OutOfSpace,
    /// The write happened, and its answer is lost.
    AnswerLost,
    /// 409: the store did not decide.
    Conflict,
    /// The answer takes an hour.
    Slow,
    /// The write happens after 20 s.
    #[cfg(feature = "replica")]
    Late,
}

/// The answer of S3 to a key that has expired.
const REFUSED: &str = "Server returned non-2xx status code: 400 Bad Request: <Error><Code>ExpiredToken</Code>\
                       <Message>The provided token has expired.</Message></Error>";

/// The faults of the next writes, in order. Writes after them succeed.
#[derive(Debug, Default)]
pub(crate) struct StoreFaults {
    pub(crate) puts: Mutex<VecDeque<Option<StoreFault>>>,
    /// Whether conditions are ignored, as some servers do.
    pub(crate) ignores_conditions: bool,
    /// Whether each answer has a byte more than it announces.
    pub(crate) longer_answers: bool,
    /// Whether the metadata of objects are lost, as some servers do.
    pub(crate) drops_metadata: bool,
    /// Whether each removal takes an hour.
    pub(crate) slow_removals: bool,
    /// Largest number of uploads of parts at the same time.
    pub(crate) parts: Mutex<(usize, usize)>,
    /// Only writes of paths that contain this have the next faults.
    pub(crate) only_in: Mutex<&'static str>,
    /// Requests of paths that contain this wait; `None` = no request.
    pub(crate) hangs_in: Mutex<Option<&'static str>>,
    /// Every request is refused: its temporary key has expired.
    pub(crate) denied: AtomicBool,
    /// Every request fails with 503.
    pub(crate) down: AtomicBool,
    /// Bytes a second of the way to the store; 0 = no limit. The client gives requests up as the real one does.
    pub(crate) slow_way: AtomicU64,
    /// Requests that fail by chance.
    pub(crate) weather: Mutex<Option<Weather>>,
    /// Number of objects that lists have named, by directory.
    pub(crate) listed: Mutex<BTreeMap<String, u64>>,
    /// Number of reads of objects, by directory.
    pub(crate) read: Mutex<BTreeMap<String, u64>>,
}

/// Requests fail by chance: 503, and writes whose answers are lost.
#[derive(Debug)]
pub(crate) struct Weather {
    random: StdRng,
    lost: f64,
    unavailable: f64,
}

impl Weather {
    pub(crate) fn new(seed: u64, lost: f64, unavailable: f64) -> Self {
        Self {
            random: StdRng::seed_from_u64(seed),
            lost,
            unavailable,
        }
    }
}

impl StoreFaults {
    pub(crate) fn next_puts(&self, faults: impl IntoIterator<Item = StoreFault>) {
        self.puts
            .lock()
            .unwrap()
            .extend(faults.into_iter().map(Some));
    }

    /// Lets the next writes succeed.
    pub(crate) fn good_puts(&self, count: usize) {
        self.puts
            .lock()
            .unwrap()
            .extend(std::iter::repeat_n(None, count));
    }

    fn part_begins(&self) {
        let mut running = self.parts.lock().unwrap();
        running.0 += 1;
        running.1 = running.1.max(running.0);
    }

    fn next(&self) -> Option<StoreFault> {
        self.puts.lock().unwrap().pop_front().flatten()
    }

    /// The fault of a write of this path.
    fn next_at(&self, path: &Path) -> Option<StoreFault> {
        if path.as_ref().contains(*self.only_in.lock().unwrap())
            && let Some(fault) = self.next()
        {
            return Some(fault);
        }
        let mut weather = self.weather.lock().unwrap();
        let weather = weather.as_mut()?;
        let lost = weather.random.random_bool(weather.lost);
        lost.then_some(StoreFault::AnswerLost)
    }

    /// Waits until a body has reached the store.
    async fn travels(&self, bytes: u64) -> Result<(), Error> {
        let Some(time) = (bytes * 1000).checked_div(self.slow_way.load(Ordering::Relaxed)) else {
            return Ok(());
        };
        let travels = tokio::time::sleep(Duration::from_millis(time));
        let travels = tokio::time::timeout(request_timeout(bytes), travels).await;
        travels.map_err(|_| generic("operation timed out"))
    }

    /// Waits or fails before a request reaches the store.
    async fn begin(&self, path: &Path) -> Result<(), Error> {
        loop {
            let hangs = *self.hangs_in.lock().unwrap();
            if !hangs.is_some_and(|part| path.as_ref().contains(part)) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if self.denied.load(Ordering::Relaxed) {
            return Err(generic(REFUSED));
        }
        let mut weather = self.weather.lock().unwrap();
        let fails = weather.as_mut().is_some_and(|weather| {
            let unavailable = weather.unavailable;
            weather.random.random_bool(unavailable)
        });
        if fails || self.down.load(Ordering::Relaxed) {
            return Err(generic("503 Service Unavailable: SlowDown"));
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) struct Faulty {
    pub(crate) inner: Arc<InMemory>,
    pub(crate) faults: Arc<StoreFaults>,
}

/// A bucket over a store in memory, its faults, and the tally of its requests.
pub(crate) fn faulty() -> (Bucket, Arc<StoreFaults>, Arc<Tally>) {
    faulty_with(StoreFaults::default())
}

pub(crate) fn faulty_with(faults: StoreFaults) -> (Bucket, Arc<StoreFaults>, Arc<Tally>) {
    faulty_over(Arc::new(InMemory::new()), faults)
}

/// One node's way to a store that other nodes use, too.
pub(crate) fn faulty_over(
    inner: Arc<InMemory>,
    faults: StoreFaults,
) -> (Bucket, Arc<StoreFaults>, Arc<Tally>) {
    let faults = Arc::new(faults);
    let tally = Arc::new(Tally::default());
    let store = Faulty {
        inner,
        faults: Arc::clone(&faults),
    };
    let url = "s3://memory/pre/fix".parse().unwrap();
    let bucket = Bucket::over(Arc::new(store), &url, Arc::clone(&tally) as _);
    (bucket, faults, tally)
}

fn generic(what: &'static str) -> Error {
    Error::Generic {
        store: "memory",
        source: what.into(),
    }
}

/// Runs a write with a fault.
async fn with<T>(
    fault: Option<StoreFault>,
    write: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    match fault {
        None => write.await,
        Some(StoreFault::Unavailable) => Err(generic("503 Service Unavailable: SlowDown")),
        Some(StoreFault::OutOfSpace) => Err(generic("507 Insufficient Storage")),
        Some(StoreFault::Conflict) => Err(Error::AlreadyExists {
            path: "x".to_owned(),
            source: "409 ConditionalRequestConflict".into(),
        }),
        Some(StoreFault::AnswerLost) => {
            write.await?;
            Err(generic("connection reset"))
        }
        #[cfg(feature = "replica")]
        Some(StoreFault::Late) => {
            tokio::time::sleep(Duration::from_secs(20)).await;
            write.await
        }
        Some(StoreFault::Slow) => {
            tokio::time::sleep(Duration::from_secs(3600)).await;
            write.await
        }
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("faulty")
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        mut opts: PutOptions,
    ) -> Result<PutResult, Error> {
        if self.faults.ignores_conditions {
            opts.mode = object_store::PutMode::Overwrite;
        }
        if self.faults.drops_metadata {
            opts.attributes = Attributes::default();
        }
        self.faults.begin(location).await?;
        (self.faults.travels(payload.content_length() as u64)).await?;
        with(
            self.faults.next_at(location),
            self.inner.put_opts(location, payload, opts),
        )
        .await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>, Error> {
        self.faults.begin(location).await?;
        let inner = with(
            self.faults.next_at(location),
            self.inner.put_multipart_opts(location, opts),
        )
        .await?;
        let faults = Arc::clone(&self.faults);
        Ok(Box::new(FaultyUpload { inner, faults }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult, Error> {
        self.faults.begin(location).await?;
        if !options.head {
            let (directory, _) = location.as_ref().rsplit_once('/').unwrap_or_default();
            let mut read = self.faults.read.lock().unwrap();
            *read.entry(directory.to_owned()).or_default() += 1;
        }
        let found = self.inner.get_opts(location, options).await?;
        if !self.faults.longer_answers {
            return Ok(found);
        }
        let (meta, range) = (found.meta.clone(), found.range.clone());
        let (attributes, extensions) = (found.attributes.clone(), found.extensions.clone());
        let more = stream::once(async { Ok("x".into()) });
        Ok(GetResult {
            payload: GetResultPayload::Stream(found.into_stream().chain(more).boxed()),
            meta,
            range,
            attributes,
            extensions,
        })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path, Error>>,
    ) -> BoxStream<'static, Result<Path, Error>> {
        if self.faults.denied.load(Ordering::Relaxed) {
            let denied = |path: Result<Path, Error>| path.and_then(|_| Err(generic(REFUSED)));
            return locations.map(denied).boxed();
        }
        let removed = self.inner.delete_stream(locations);
        match self.faults.slow_removals {
            true => removed
                .then(|removed| async {
                    tokio::time::sleep(Duration::from_secs(3600)).await;
                    removed
                })
                .boxed(),
            false => removed,
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta, Error>> {
        // No name is below the empty one.
        self.list_with_offset(prefix, &Path::default())
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta, Error>> {
        let (inner, faults) = (Arc::clone(&self.inner), Arc::clone(&self.faults));
        let (prefix, offset) = (prefix.cloned().unwrap_or_default(), offset.clone());
        stream::once(async move {
            faults.begin(&prefix).await?;
            let names = inner.list_with_offset(Some(&prefix), &offset);
            Ok::<_, Error>(names.inspect_ok(move |_| {
                let mut listed = faults.listed.lock().unwrap();
                *listed.entry(prefix.to_string()).or_default() += 1;
            }))
        })
        .try_flatten()
        .boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult, Error> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<(), Error> {
        self.inner.copy_opts(from, to, options).await
    }
}

/// The clock of a test whose time is paused. Call it first before any time passes.
pub(crate) fn paused_clock() -> Duration {
    static BASE: OnceLock<Instant> = OnceLock::new();
    let base = *BASE.get_or_init(Instant::now);
    Duration::from_secs(1_000) + tokio::time::Instant::now().into_std().duration_since(base)
}

#[derive(Debug)]
struct FaultyUpload {
    inner: Box<dyn MultipartUpload>,
    faults: Arc<StoreFaults>,
}

#[async_trait]
impl MultipartUpload for FaultyUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (fault, faults) = (self.faults.next(), Arc::clone(&self.faults));
        let part = self.inner.put_part(data);
        Box::pin(async move {
            faults.part_begins();
            tokio::task::yield_now().await;
            let done = with(fault, part).await;
            faults.parts.lock().unwrap().0 -= 1;
            done
        })
    }

    async fn complete(&mut self) -> Result<PutResult, Error> {
        with(self.faults.next(), self.inner.complete()).await
    }

    async fn abort(&mut self) -> Result<(), Error> {
        self.inner.abort().await
    }
}

//! A store that another node writes, as this node has copied it. Readers of replicated records see it; nobody changes it.
//!
//! ```text
//! files, tail ─▶ StoreCopy ─▶ CopyReader::show ─▶ readers go on in the newer copy
//! ```
//!
//! Each [`StoreCopy`] is the store as of one moment. The stand-by shows a newer one as soon as the owner has stored more. A reader
//! that has begun goes on in the newer copy by its cursor: the older one may lose its files.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::api::config::StorageConfig;
use crate::api::engine::{
    BoxFuture, LogStat, LogTarget, Page, ReadLogs, ReadRequest, Room, Scan, ScanChunk, ScanRequest,
    ScanStart,
};
use crate::api::error::{OpenError, ReadError};
use crate::api::record::Visibility;
use crate::api::watch::{Until, Watch, Watched};
use crate::base::bounds;
use crate::base::clock::Clock;
use crate::base::ids::{Lsn, Position, RecoveryEpoch};
use crate::base::metrics::{NoObserver, Observer};
use crate::base::sync::Mutex;
use crate::base::sync::atomic::AtomicU64;
use crate::base::threads::Workers;
use crate::disk::Disk;
use crate::disk::directory::{self, StoreIdentity};
use crate::disk::held_files::Backups;
use crate::index::queue::{IndexProgress, IndexQueue};
use crate::read;
use crate::read::OpenSegments;
use crate::read::held_back::Unusable;
use crate::read::scan;
use crate::read::store::Store;
use crate::recovery::{self, Purpose};
use crate::tools::backup::BackupView;

/// A store as of one moment.
pub struct StoreCopy {
    store: Arc<Store>,
    view: Arc<BackupView>,
}

impl StoreCopy {
    /// Reads the store that the view shows. All of it counts as replicated.
    ///
    /// # Errors
    /// If it cannot be read, or has no segment.
    pub fn open(
        view: BackupView,
        config: StorageConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, OpenError> {
        config.check()?;
        let view = Arc::new(view);
        let disk = Arc::clone(&view) as Arc<dyn Disk>;
        let identity = StoreIdentity {
            id: directory::read_format(&*disk)?,
            created: false,
        };
        bounds::allow_body(config.largest_body());
        let observer: Arc<dyn Observer> = Arc::new(NoObserver);
        let seams = (&*clock, &*observer);
        let recovered = recovery::recover(&disk, identity, &config, seams, Purpose::Show)?;
        let shown = recovered.show(&config, clock, observer)?;
        let open_segments = OpenSegments::new(
            Arc::clone(&disk),
            config.read_strategy,
            config.max_open_segments,
        );
        let store = Arc::new(Store {
            config,
            journal: shown.journal,
            logs: shown.logs,
            damages: shown.damages,
            held_back: Vec::new(),
            open_segments,
            indexes: shown.indexes,
            store_id: identity.id,
            history: shown.history,
            followers: AtomicU64::new(0),
            indexing: Arc::new(IndexQueue::new(IndexProgress::default(), true)),
            held_files: Backups::new(Arc::clone(&disk)),
            made: Mutex::new(HashMap::new()),
            unusable: Unusable::default(),
            disk,
        });
        Ok(Self { store, view })
    }

    /// End of the journal.
    pub fn position(&self) -> Position {
        self.store.journal.settled()
    }

    fn epoch(&self) -> RecoveryEpoch {
        self.store.journal.recovery_epoch
    }

    /// Sends readers on to the next copy. The files may be removed then.
    fn outdate(&self) {
        self.view.outdate();
        self.store.journal.stopping.drain();
    }
}

/// The newest copy, and the time at which the bucket had nothing newer.
struct ShownCopy {
    copy: Arc<StoreCopy>,
    seen: Instant,
}

/// Reads the newest copy of a store.
pub struct CopyReader {
    shown: Mutex<Option<ShownCopy>>,
    watch: Watch,
    workers: Arc<Workers>,
    clock: Arc<dyn Clock>,
    /// Maximum age of a copy that is read.
    oldest: Duration,
}

impl Watched for CopyReader {
    fn watch(&self) -> &Watch {
        &self.watch
    }
}

impl Drop for CopyReader {
    fn drop(&mut self) {
        self.workers.stop();
    }
}

impl CopyReader {
    /// A reader without a copy, with this number of threads. A copy that is older than `oldest` is not read.
    ///
    /// # Errors
    /// If the system has no room for another thread.
    pub fn new(threads: usize, oldest: Duration, clock: Arc<dyn Clock>) -> io::Result<Arc<Self>> {
        let workers: Arc<Workers> = Arc::default();
        workers.start(threads, &(Arc::new(NoObserver) as Arc<dyn Observer>))?;
        Ok(Arc::new(Self {
            shown: Mutex::new(None),
            watch: Watch::default(),
            workers,
            clock,
            oldest,
        }))
    }

    /// Shows a copy instead of the one before, whose files may be removed when this has returned.
    pub fn show(&self, copy: StoreCopy) {
        let shown = ShownCopy {
            copy: Arc::new(copy),
            seen: self.clock.monotonic(),
        };
        self.replace(Some(shown));
    }

    /// Notes that the bucket has nothing newer.
    pub fn note_newest(&self) {
        if let Some(shown) = &mut *self.shown.lock() {
            shown.seen = self.clock.monotonic();
        }
    }

    /// Shows no copy any more: this node takes the store over, or begins its copy again.
    pub fn hide(&self) {
        self.replace(None);
    }

    fn replace(&self, next: Option<ShownCopy>) {
        let before = std::mem::replace(&mut *self.shown.lock(), next);
        self.watch.wake();
        if let Some(before) = before {
            before.copy.outdate();
        }
    }

    /// Recovery epoch of the newest copy.
    ///
    /// # Errors
    /// As of each read: `LeaseLost` if this node has no copy, or cannot know whether there is anything newer.
    pub fn epoch(&self) -> Result<RecoveryEpoch, ReadError> {
        self.copy().map(|copy| copy.epoch())
    }

    /// Age of the copy: no record that was replicated before is missing. `None` without a copy.
    pub fn age(&self) -> Option<Duration> {
        let shown = self.shown.lock();
        let seen = shown.as_ref()?.seen;
        Some(self.clock.monotonic().saturating_duration_since(seen))
    }

    fn copy(&self) -> Result<Arc<StoreCopy>, ReadError> {
        let now = self.clock.monotonic();
        let shown = self.shown.lock();
        let is_new = |shown: &&ShownCopy| now.saturating_duration_since(shown.seen) <= self.oldest;
        let found = shown.as_ref().filter(is_new);
        found
            .map(|shown| Arc::clone(&shown.copy))
            .ok_or(ReadError::LeaseLost)
    }

    /// Whether a copy is not the one that is shown.
    fn is_outdated(&self, copy: &Arc<StoreCopy>) -> bool {
        let shown = self.shown.lock();
        !(shown.as_ref()).is_some_and(|shown| Arc::ptr_eq(&shown.copy, copy))
    }

    /// Reads in the newest copy. Reads again if the copy has lost its files meanwhile.
    async fn read_newest<T: Send + 'static>(
        &self,
        read: impl Fn(&Arc<Store>, read::Reach) -> Result<T, ReadError> + Clone + Send + 'static,
    ) -> Result<T, ReadError> {
        loop {
            let copy = self.copy()?;
            let (store, each) = (Arc::clone(&copy.store), read.clone());
            let found = read::near_or_far(&self.workers, read::Reach::Memory, move |reach| {
                each(&store, reach)
            });
            match found.await {
                Err(ReadError::Io(_)) if self.is_outdated(&copy) => {}
                found => return found,
            }
        }
    }
}

/// Everything in a copy is replicated.
fn replicated(visibility: Option<Visibility>) -> Result<Visibility, ReadError> {
    match visibility {
        None | Some(Visibility::Replicated) => Ok(Visibility::Replicated),
        Some(lower) => Err(ReadError::NotSupported(lower)),
    }
}

/// Reads of another visibility than `Replicated` are `NotSupported`.
impl ReadLogs for Arc<CopyReader> {
    fn read(&self, request: ReadRequest) -> BoxFuture<'_, Result<Page, ReadError>> {
        Box::pin(async move {
            let visibility = Some(replicated(request.visibility)?);
            let request = ReadRequest {
                visibility,
                ..request
            };
            self.read_newest(move |store, reach| read::page(store, &request, reach))
                .await
        })
    }

    fn tail_beyond(
        &self,
        log: LogTarget,
        lsn: Lsn,
        visibility: Option<Visibility>,
    ) -> BoxFuture<'_, Result<(), ReadError>> {
        let visibility = match replicated(visibility) {
            Ok(visibility) => visibility,
            Err(error) => return Box::pin(async move { Err(error) }),
        };
        let reader = Arc::clone(self);
        let watched: Vec<Arc<dyn Watched>> = vec![Arc::clone(self) as _];
        Box::pin(Until::new(watched, visibility, move || {
            let copy = match reader.copy() {
                Ok(copy) => copy,
                Err(error) => return Some(Err(error)),
            };
            match copy.store.resolve(&log, visibility) {
                Ok(found) => read::tail_is_beyond(&copy.store, &found, lsn, visibility),
                Err(error) => Some(Err(error.into())),
            }
        }))
    }

    fn scan(&self, request: ScanRequest) -> BoxFuture<'_, Result<Box<dyn Scan>, ReadError>> {
        Box::pin(async move {
            let visibility = Some(replicated(request.visibility)?);
            let request = ScanRequest {
                visibility,
                ..request
            };
            let scan = CopyScan::begin(self, request).await?;
            Ok(Box::new(scan) as _)
        })
    }

    fn stat(
        &self,
        log: LogTarget,
        visibility: Option<Visibility>,
        of_epoch: Option<RecoveryEpoch>,
    ) -> BoxFuture<'_, Result<LogStat, ReadError>> {
        Box::pin(async move {
            let visibility = Some(replicated(visibility)?);
            self.copy()?.store.stat(&log, visibility, of_epoch)
        })
    }
}

/// A scan that goes on from copy to copy.
struct CopyScan {
    reader: Arc<CopyReader>,
    copy: Arc<StoreCopy>,
    scan: Box<dyn Scan>,
    /// The rest of the request.
    request: ScanRequest,
    room: Option<Arc<dyn Room>>,
    /// Whether the last chunk reached the end.
    caught_up: bool,
    /// Whether the scan has given as many records as it may.
    is_full: bool,
}

impl CopyScan {
    async fn begin(reader: &Arc<CopyReader>, request: ScanRequest) -> Result<Self, ReadError> {
        let copy = reader.copy()?;
        let scan =
            scan::begin_without_blocking(&copy.store, &reader.workers, request.clone()).await?;
        Ok(Self {
            reader: Arc::clone(reader),
            copy,
            scan,
            request,
            room: None,
            caught_up: false,
            is_full: false,
        })
    }

    /// Goes on in the newest copy.
    ///
    /// # Errors
    /// `LeaseLost` if there is none.
    async fn go_on(&mut self) -> Result<(), ReadError> {
        let cursor = self.scan.cursor();
        if !cursor.is_empty() {
            self.request.start = ScanStart::Cursor(cursor);
        }
        let copy = self.reader.copy()?;
        let request = self.request.clone();
        let mut scan =
            scan::begin_without_blocking(&copy.store, &self.reader.workers, request).await?;
        if let Some(room) = &self.room {
            scan.read_in(Arc::clone(room));
        }
        (self.copy, self.scan) = (copy, scan);
        Ok(())
    }

    async fn advance(&mut self) -> Result<Option<ScanChunk>, ReadError> {
        loop {
            if self.is_full {
                return Ok(None);
            }
            let next = self.scan.next().await;
            let is_outdated = self.reader.is_outdated(&self.copy);
            let chunk = match next {
                // The copy drains, or its files are gone.
                Ok(None) if self.request.follow && is_outdated => {
                    self.go_on().await?;
                    continue;
                }
                Err(ReadError::Io(_)) if is_outdated => {
                    self.go_on().await?;
                    continue;
                }
                Ok(Some(chunk)) => chunk,
                ended => return ended,
            };
            let is_empty = chunk.batches.is_empty() && chunk.gaps.is_empty();
            // A scan that goes on reports the end once more.
            if is_empty && chunk.caught_up && std::mem::replace(&mut self.caught_up, true) {
                continue;
            }
            self.caught_up = chunk.caught_up;
            if self.request.max_records > 0 {
                let given = chunk.batches.iter().map(|batch| u64::from(batch.count));
                let given = given.sum::<u64>();
                self.request.max_records = self.request.max_records.saturating_sub(given);
                self.is_full = self.request.max_records == 0;
            }
            if !self.request.follow {
                // A plain scan ends at the tail of the moment it began.
                self.request.until_lsn = self.request.until_lsn.or(chunk.tail_lsn);
            }
            return Ok(Some(chunk));
        }
    }
}

impl Scan for CopyScan {
    fn next(&mut self) -> BoxFuture<'_, Result<Option<ScanChunk>, ReadError>> {
        Box::pin(self.advance())
    }

    fn read_in(&mut self, room: Arc<dyn Room>) {
        self.scan.read_in(Arc::clone(&room));
        self.room = Some(room);
    }

    fn cursor(&self) -> Bytes {
        self.scan.cursor()
    }

    fn followers(&self) -> usize {
        self.scan.followers()
    }
}

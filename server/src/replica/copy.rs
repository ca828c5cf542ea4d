//! The copy of a stand-by: content and rows of the bucket as they come, and their readers.
//!
//! ```text
//! manifest's row ─ new ─▶ content: standby/<digest> ─┐
//! rows, once a second ──▶ standby/tail-<segment> ────┴▶ StoreCopy ─▶ CopyReader ─▶ reads of any node
//! ```
//!
//! One thread does all of it. After an error it tries again; after a hole between rows it begins again with the newest files.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use wald_bucket::{KeyRingVersion, ShipError, TailErrorKind, TailFollower, TailPart};
use wald_storage::{
    BackupManifest, BackupView, CopyReader, CopyTail, Disk, JournalPart, KeptContent, Position,
    RealDisk, SegmentId, StoreCopy, SystemClock, refuse_if_used,
};

use super::fetch::{Fetch, FetchError};
use crate::backups::bucket::Remote;
use crate::config::Config;
use crate::encryption::{self, KeyRing};

/// Pause between two looks at the rows. The reader of the bucket asks for newer ones once a second.
const LOOK_PAUSE: Duration = Duration::from_millis(200);
/// Pause after an error. It doubles up to the longest one while the copy must begin again, since each begin reads all rows.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A copy is opened again after this many times the time that it took: it takes a tenth of one processor at most.
const REST: u32 = 9;

/// The message for a panic.
const PANICKED: &str = "the thread that keeps the copy panicked";

/// The stand-by's work for its copy, on a thread of its own.
pub(super) struct Copying {
    shared: Arc<SharedCopy>,
    runs: Option<JoinHandle<()>>,
}

/// State of the copy.
struct SharedCopy {
    /// Ends the thread soon.
    stop: AtomicBool,
    state: Mutex<CopyState>,
    /// End of the rows in the copy that readers see.
    shown: AtomicU64,
    /// Generation of the key ring that the owner has announced.
    announced_keys: AtomicU64,
    reader: Arc<CopyReader>,
}

#[derive(Default)]
struct CopyState {
    kept: KeptContent,
    /// Time at which the copy had everything that the bucket showed.
    seen: Option<Instant>,
    /// Whether content of a newer manifest is on its way. It may take long, and a take-over fetches the rest of it anyway.
    is_coming: bool,
    /// Whether attempts have failed, not because of the bucket's answers alone, and none has succeeded since: the volume may be
    /// full, or content damaged. A take-over would fail, too.
    is_failing: bool,
    /// Whether content of the newest manifest is missing.
    is_short: bool,
    /// The last error, which is reported once.
    error: String,
}

impl CopyState {
    /// Content of a newer manifest begins to come.
    fn begins(&mut self) {
        (self.is_coming, self.is_short) = (!self.is_failing, true);
    }

    /// Bytes of it have come. An error that follows a long fetch does not end the stand-by at once.
    fn moves(&mut self) {
        if let Some(seen) = self.seen.as_mut().filter(|_| !self.is_failing) {
            *seen = Instant::now();
        }
    }

    /// An attempt has failed. The bucket may answer the same question later.
    fn fails(&mut self, is_unreachable: bool) {
        self.is_coming = false;
        self.is_failing |= !is_unreachable;
    }

    /// The copy has everything. Returns whether it is the first time.
    fn has_all(&mut self) -> bool {
        (self.is_coming, self.is_failing, self.is_short) = (false, false, false);
        self.error.clear();
        self.seen.replace(Instant::now()).is_none()
    }

    fn is_caught_up(&self, within: Duration) -> bool {
        let is_recent = |seen: Instant| self.is_coming || seen.elapsed() < within;
        self.seen.is_some_and(is_recent)
    }
}

impl Copying {
    /// A copy that has not begun.
    pub(super) fn new(reader: Arc<CopyReader>) -> Self {
        Self {
            shared: Arc::new(SharedCopy {
                stop: AtomicBool::new(false),
                state: Mutex::default(),
                shown: AtomicU64::new(0),
                announced_keys: AtomicU64::new(0),
                reader,
            }),
            runs: None,
        }
    }

    /// Begins the copy of the bucket in this empty directory, unless it runs.
    pub(super) fn begin(
        &mut self,
        remote: &Arc<Remote>,
        config: &Config,
        directory: &Path,
        keys: Option<&Arc<KeyRing>>,
    ) {
        if self.runs.as_ref().is_some_and(|runs| !runs.is_finished()) {
            return;
        }
        if let Some(runs) = self.runs.take()
            && runs.join().is_err()
        {
            self.shared.report(PANICKED);
        }
        self.shared.stop.store(false, Ordering::SeqCst);
        self.shared.state.lock().is_coming = false;
        let work = CopyWork {
            shared: Arc::clone(&self.shared),
            remote: Arc::clone(remote),
            config: config.clone(),
            directory: directory.to_owned(),
            keys: keys.cloned(),
        };
        let named = std::thread::Builder::new().name("wald-stand-by".to_owned());
        match named.spawn(move || work.run()) {
            Ok(runs) => self.runs = Some(runs),
            Err(error) => self
                .shared
                .report(&format!("cannot start a thread: {error}")),
        }
    }

    /// Ends the copy, and its readers. Returns whether it keeps everything that the bucket has shown.
    pub(super) fn end(&mut self) -> bool {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(runs) = self.runs.take() {
            runs.thread().unpark();
            if runs.join().is_err() {
                self.shared.report(PANICKED);
            }
        }
        self.shared.reader.hide();
        let state = self.shared.state.lock();
        state.seen.is_some() && !state.is_short
    }

    /// Whether the copy has had everything within this time, or once, and fetches the next content since then without a
    /// failure. Nobody would follow an owner that dies during a long fetch otherwise.
    pub(super) fn is_caught_up(&self, within: Duration) -> bool {
        self.shared.state.lock().is_caught_up(within)
    }

    /// Notes the generation of the key ring that the owner has announced.
    pub(super) fn note_keys(&self, generation: u64) {
        (self.shared.announced_keys).store(generation, Ordering::SeqCst);
    }

    /// Notes a position up to which the bucket has everything. Readers learn that their copy is a new one.
    pub(super) fn note_position(&self, replicated: u64) {
        let shown = self.shared.shown.load(Ordering::SeqCst);
        if replicated > 0 && shown >= replicated {
            self.shared.reader.note_newest();
        }
    }
}

impl SharedCopy {
    fn report(&self, error: &str) {
        super::standby::report(&mut self.state.lock().error, error);
    }

    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::SeqCst)
    }
}

/// The input of the thread.
struct CopyWork {
    shared: Arc<SharedCopy>,
    remote: Arc<Remote>,
    config: Config,
    directory: PathBuf,
    /// `None`: the records are plain.
    keys: Option<Arc<KeyRing>>,
}

/// A copy under way.
struct CopyInProgress {
    tail: TailFollower,
    rows: CopyTail,
    /// Name of the newest manifest whose content is kept.
    name: Option<String>,
    manifest: Option<BackupManifest>,
    files: Option<Arc<BackupView>>,
    /// The key ring that is open, and its generation as the owner had announced it.
    ring: Option<(KeyRingVersion, u64)>,
    /// Whether something has come since the copy was opened.
    is_new: bool,
    /// Time before which the copy is not opened again.
    due: Instant,
}

impl CopyWork {
    fn run(self) {
        let (mut followed, mut retry_pause) = (None, RETRY_PAUSE);
        while self.shared.goes_on() {
            let pause = match self.step(&mut followed) {
                Ok(()) => {
                    retry_pause = RETRY_PAUSE;
                    LOOK_PAUSE
                }
                // The owner has stored nothing yet.
                Err(FetchError::Empty { .. }) => RETRY_PAUSE,
                Err(error) => {
                    self.shared.report(&error.to_string());
                    self.shared.state.lock().fails(is_unreachable(&error));
                    let pause = retry_pause;
                    if !is_unreachable(&error) {
                        followed = None;
                        retry_pause = (retry_pause * 2).min(LONGEST_PAUSE);
                    }
                    let is_old = |age: Duration| age > self.config.lease_ttl;
                    if followed.is_none() || self.shared.reader.age().is_some_and(is_old) {
                        self.shared.reader.hide();
                    }
                    pause
                }
            };
            // A take-over does not wait for it.
            std::thread::park_timeout(pause);
        }
    }

    /// Takes everything that is new.
    fn step(&self, followed: &mut Option<CopyInProgress>) -> Result<(), FetchError> {
        let runtime = &self.remote.runtime;
        let followed = match followed {
            Some(followed) => followed,
            None => followed.insert(self.begin()?),
        };
        // Destroyed keys go before files are fetched, which may take long.
        if followed.ring.is_some() {
            self.open_keys(&mut followed.ring, false)?;
        }
        let newest = runtime.block_on(followed.tail.manifest());
        let newest = newest.map_err(ShipError::Tail)?.map(|row| row.name);
        if newest != followed.name {
            self.shared.state.lock().begins();
            self.keep(followed)?;
            followed.name = newest;
            followed.is_new = true;
        }
        while self.shared.goes_on()
            && let Some(part) = (runtime.block_on(followed.tail.next())).map_err(ShipError::Tail)?
        {
            followed
                .rows
                .add(&journal_part(part), followed.files.as_deref())?;
            followed.is_new = true;
        }
        if !self.shared.goes_on() {
            return Ok(());
        }
        let shows = followed.is_new && Instant::now() >= followed.due;
        // After the rows: the bucket had their keys before.
        self.open_keys(&mut followed.ring, shows)?;
        if shows {
            self.show(followed)?;
        }
        let mut state = self.shared.state.lock();
        if state.has_all() {
            tracing::info!(
                fetched = state.kept.fetched,
                bytes = state.kept.bytes,
                "this stand-by has the files of the store, and may take it over"
            );
        }
        Ok(())
    }

    fn begin(&self) -> Result<CopyInProgress, FetchError> {
        self.shared.reader.hide();
        let disk = RealDisk::open(&self.directory)?;
        // A take-over would find a leftover file only after it has ended the owner.
        refuse_if_used(&*disk)?;
        let fetch = Fetch::begin_with_kept(&self.remote, &self.config, &self.directory, None)?;
        let opened = (self.remote.runtime).block_on(TailFollower::open(&self.remote.bucket));
        let tail = opened.map_err(ShipError::Tail)?;
        let tail = tail.ok_or_else(|| FetchError::Empty {
            place: self.remote.bucket.place().to_owned(),
        })?;
        Ok(CopyInProgress {
            tail,
            rows: CopyTail::new(disk, fetch.store_id())?,
            name: None,
            manifest: None,
            files: None,
            ring: None,
            is_new: true,
            due: Instant::now(),
        })
    }

    /// Fetches the content of the newest manifest that the directory does not keep.
    fn keep(&self, followed: &mut CopyInProgress) -> Result<(), FetchError> {
        let fetch = Fetch::begin_with_kept(&self.remote, &self.config, &self.directory, None)?;
        let CopyInProgress { rows, ring, .. } = followed;
        let mut goes_on = |bytes: u64| {
            if bytes > 0 {
                self.shared.state.lock().moves();
            }
            // Keys that are destroyed meanwhile go at once. If that fails, the next step repeats it, and reports the error.
            if ring.is_some() {
                let _ = self.open_keys(ring, false);
            }
            self.shared.goes_on()
        };
        let kept = match fetch.keep(rows, &mut goes_on) {
            // Old and new content do not fit together.
            Err(error) if error.is_out_of_space() => {
                self.shared.reader.hide();
                fetch.forget_others(&self.directory)?;
                fetch.keep(rows, &mut goes_on)?
            }
            kept => kept?,
        };
        self.shared.state.lock().kept = kept;
        followed.manifest = fetch.manifest().cloned();
        followed.files = fetch.into_files();
        Ok(())
    }

    /// Opens the newest key ring of the bucket, if the owner announces another one, or if records come that may need it. Keys
    /// that were destroyed are gone then.
    fn open_keys(
        &self,
        ring: &mut Option<(KeyRingVersion, u64)>,
        are_new: bool,
    ) -> Result<(), FetchError> {
        let Some(keys) = &self.keys else {
            return Ok(());
        };
        let announced = self.shared.announced_keys.load(Ordering::SeqCst);
        let is_known = |ring: &(KeyRingVersion, u64)| ring.1 == announced;
        if !are_new && ring.as_ref().is_some_and(is_known) {
            return Ok(());
        }
        let version = (self.remote.runtime).block_on(KeyRingVersion::now(&self.remote.bucket));
        let version = version.map_err(ShipError::Bucket)?;
        if ring.as_ref().is_none_or(|ring| ring.0 != version) {
            super::keys::show(&self.remote, &self.config, keys)?;
            tracing::debug!(keys = keys.len(), "the key ring of the bucket is open");
        }
        *ring = Some((version, announced));
        Ok(())
    }

    /// Shows readers the newest copy, and removes the files of the one before.
    fn show(&self, followed: &mut CopyInProgress) -> Result<(), FetchError> {
        let begun = Instant::now();
        let disk: Arc<dyn Disk> = RealDisk::open(&self.directory)?;
        let mut config = self.config.storage();
        config.cipher = self.keys.as_ref().map(encryption::cipher);
        let manifest = followed.manifest.as_ref();
        let view = BackupView::of_copy(Arc::clone(&disk), manifest, &followed.rows, &config)?;
        match StoreCopy::open(view, config, Arc::new(SystemClock)) {
            Ok(copy) => {
                let position = copy.position().get();
                self.shared.reader.show(copy);
                self.shared.shown.store(position, Ordering::SeqCst);
            }
            // Nobody reads here then. The node may still take the store over.
            Err(error) => {
                self.shared.reader.hide();
                self.shared.report(&error.to_string());
            }
        }
        if let (Some(files), Some(manifest)) = (&followed.files, &followed.manifest) {
            files.forget_others(&*disk)?;
            followed.rows.forget_below(manifest.position)?;
        }
        followed.is_new = false;
        let now = Instant::now();
        followed.due = now + now.duration_since(begun) * REST;
        Ok(())
    }
}

fn journal_part(row: TailPart) -> JournalPart {
    let position = Position::new(row.position);
    JournalPart {
        segment: SegmentId::new(row.segment),
        position,
        end: position.advance(row.bytes.len() as u64),
        bytes: row.bytes,
    }
}

/// Whether the bucket may answer the same question later.
fn is_unreachable(error: &FetchError) -> bool {
    match error {
        FetchError::Ship(ShipError::Tail(error)) => error.kind() == TailErrorKind::Unreachable,
        FetchError::Ship(ShipError::Bucket(_)) => !error.is_damage(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WITHIN: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn copy_whose_fetches_fail_is_not_caught_up_until_one_succeeds() {
        let mut state = CopyState::default();
        state.begins();
        state.moves();
        assert!(!state.is_caught_up(WITHIN), "it never had everything");
        assert!(state.has_all());
        // A long fetch, and an error of the bucket.
        for _ in 0..2 {
            state.begins();
            for _ in 0..100 {
                tokio::time::advance(WITHIN).await;
                assert!(state.is_caught_up(WITHIN));
                state.moves();
            }
            state.fails(true);
            assert!(state.is_caught_up(WITHIN));
        }
        // The volume is full: the first bytes of a file come again with each attempt.
        state.begins();
        state.moves();
        state.fails(false);
        tokio::time::advance(WITHIN).await;
        for _ in 0..100 {
            state.begins();
            state.moves();
            assert!(!state.is_caught_up(WITHIN));
            state.fails(false);
            state.begins();
            state.fails(true);
            assert!(!state.is_caught_up(WITHIN));
            tokio::time::advance(LONGEST_PAUSE).await;
        }
        state.begins();
        assert!(!state.has_all());
        assert!(state.is_caught_up(WITHIN));
    }
}

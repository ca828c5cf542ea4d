//! The whole engine with its threads, under a scheduler that chooses the next thread at each step:
//! submitters, followers, a shipper, a drain, and a flush that fails.
//!
//! `WALD_SCHEDULES` sets the number of schedules, `WALD_SEED` repeats one. Two of three are drawn at random;
//! the rest by PCT (Burckhardt et al., ASPLOS 2010), which finds faults that take few switches at the right
//! places. In three of four no timer rings, so that a missing wake-up is a deadlock and not a delay.

use std::collections::{HashMap, HashSet};
use std::io;

use shuttle::rand::Rng;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};

use super::*;
use crate::api::engine::{Append as _, Operate as _, ReadLogs as _, SyncTarget};
use crate::api::error::SyncError;
use crate::api::record::SyncMode;
use crate::api::replica::{Replica as _, ReplicaBounds, Unreplicated};
use crate::base::ids::Position;
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::base::sync::{block_on, scheduled};
use crate::disk::{Disk, DiskFile, DiskLock, FileSystem, Unreadable};
use crate::engine::LocalEngine;

/// Time as the schedule lets it pass.
struct ScheduledClock(Instant);

impl Clock for ScheduledClock {
    fn now(&self) -> Timestamp {
        let passed = i64::try_from(scheduled::passed().as_micros()).unwrap();
        Timestamp::from_micros(1_700_000_000_000_000 + passed)
    }

    fn monotonic(&self) -> Instant {
        self.0 + scheduled::passed()
    }
}

/// Progress of records, from the writes and flushes that the device sees.
#[derive(Default)]
struct Seen {
    /// Grows with each event.
    now: u64,
    /// By record: its file, and the time when its write returned.
    written: HashMap<u64, (String, u64)>,
    /// By file: the beginning of the last flush that returned.
    flushed: HashMap<String, u64>,
    /// Records that the replica has.
    shipped: HashSet<u64>,
}

impl Seen {
    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    fn is_written(&self, record: u64) -> bool {
        self.written.contains_key(&record)
    }

    /// Whether a flush that began after the record's write returned has returned.
    fn is_durable(&self, record: u64) -> bool {
        self.written.get(&record).is_some_and(|(file, at)| {
            let flushed = self.flushed.get(file);
            flushed.is_some_and(|begun| begun > at)
        })
    }
}

/// Maximum steps of a flush. Meanwhile the other driver can write a group, and a client can act on the
/// answer.
const FLUSH_STEPS: u32 = 60;

/// A simulated disk that yields around writes and flushes, and watches them.
#[derive(Clone)]
struct WatchedDisk {
    disk: SimDisk,
    seen: Arc<Mutex<Seen>>,
    steps: Arc<AtomicU64>,
}

struct WatchedFile {
    path: String,
    file: Arc<dyn DiskFile>,
    on: WatchedDisk,
}

impl WatchedDisk {
    fn new() -> Self {
        Self {
            disk: SimDisk::new(),
            seen: Arc::default(),
            steps: Arc::new(AtomicU64::new(0)),
        }
    }

    /// Yields to other threads for at most `most` steps: the device takes its time.
    fn give_way(&self, most: u32) {
        for _ in 0..shuttle::rand::thread_rng().gen_range(1..=most) {
            self.steps.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn watch(&self, path: &str, file: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(WatchedFile {
            // The final name: segments are renamed before they are written.
            path: path.rsplit('/').next().unwrap().to_owned(),
            file,
            on: self.clone(),
        })
    }
}

impl Disk for WatchedDisk {
    fn location(&self) -> String {
        self.disk.location()
    }

    fn lock(&self, path: &str, holder: &str) -> io::Result<Result<Box<dyn DiskLock>, String>> {
        self.disk.lock(path, holder)
    }

    fn lock_shared(&self, path: &str) -> io::Result<Result<Option<Box<dyn DiskLock>>, String>> {
        self.disk.lock_shared(path)
    }

    fn create_directory(&self, path: &str) -> io::Result<()> {
        self.disk.create_directory(path)
    }

    fn visit(&self, directory: &str, each: &mut dyn FnMut(&str)) -> io::Result<()> {
        self.disk.visit(directory, each)
    }

    fn create(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(self.watch(path, self.disk.create(path)?))
    }

    fn open(&self, path: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(self.watch(path, self.disk.open(path)?))
    }

    fn read_direct(&self, path: &str, from: u64, bytes: u64) -> io::Result<Option<Bytes>> {
        self.disk.read_direct(path, from, bytes)
    }

    fn unreadable(&self) -> &Unreadable {
        self.disk.unreadable()
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(from, to)
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        self.disk.remove(path)
    }

    fn sync_directory(&self, directory: &str) -> io::Result<()> {
        self.disk.sync_directory(directory)
    }

    fn draw(&self, bytes: &mut [u8]) -> io::Result<()> {
        self.disk.draw(bytes)
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        self.disk.free_bytes()
    }

    fn file_system(&self) -> FileSystem {
        self.disk.file_system()
    }
}

/// Marks a record in written bytes; its number follows.
const MARK: &[u8; 8] = b"\xF5record\xF5";

fn data_of(record: u64) -> Vec<u8> {
    [&MARK[..], &record.to_le_bytes()].concat()
}

fn record_of(data: &[u8]) -> u64 {
    u64::from_le_bytes(data.strip_prefix(&MARK[..]).unwrap().try_into().unwrap())
}

impl DiskFile for WatchedFile {
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        self.on.give_way(8);
        let written = self.file.write_at(bytes, offset)?;
        {
            let mut seen = self.on.seen.lock();
            let at = seen.tick();
            for record in records_in(bytes) {
                seen.written.insert(record, (self.path.clone(), at));
            }
        }
        self.on.give_way(8);
        Ok(written)
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.file.set_size(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        let begun = self.on.seen.lock().tick();
        self.on.give_way(FLUSH_STEPS);
        // This flush may or may not cover later writes.
        let result = self.file.sync();
        self.on.give_way(FLUSH_STEPS);
        if result.is_ok() {
            let mut seen = self.on.seen.lock();
            let path = self.path.clone();
            let last = seen.flushed.entry(path).or_default();
            *last = begun.max(*last);
        }
        result
    }
}

/// Records lie anywhere in written bytes.
fn records_in(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    memchr(bytes, MARK[0]).filter_map(|from| {
        let data = bytes[from..].get(..16)?;
        data.starts_with(MARK).then(|| record_of(data))
    })
}

fn memchr(bytes: &[u8], wanted: u8) -> impl Iterator<Item = usize> + '_ {
    let found = move |(at, byte): (usize, &u8)| (*byte == wanted).then_some(at);
    bytes.iter().enumerate().filter_map(found)
}

/// One run of the engine.
struct Run {
    engine: Arc<LocalEngine>,
    disk: WatchedDisk,
    /// Records acked as durable.
    acked: Mutex<Vec<u64>>,
    fails: bool,
    replicates: bool,
}

const LOGS: [&str; 2] = ["a", "b"];

impl Run {
    /// Checks that published positions only rise, and stores them in `before`.
    fn look(&self, before: &mut (u64, u64)) {
        let journal = &self.engine.core.journal;
        // Durable first: written has passed it by then.
        let durable = journal.durable().get();
        let written = journal.written().get();
        assert!(durable <= written, "durable {durable}, written {written}");
        assert!(
            before.0 <= durable && before.1 <= written,
            "published goes up"
        );
        *before = (durable, written);
    }

    fn submit(&self, record: u64, level: Durability) -> (AtAnswer, bool) {
        let log = LOGS[usize::try_from(record % 2).unwrap()];
        let failed = self.engine.core.journal.failure().is_some();
        let batch = batch(&[(log, &[&data_of(record)])]);
        let ticket = self.engine.submit(None, batch, Some(level));
        let mut answer = AtAnswer {
            ticket,
            seen: Arc::clone(&self.disk.seen),
            record,
            judge: None,
            early: None,
        };
        // From here on the waker sees the moment of the answer.
        let mut context = Context::from_waker(Waker::noop());
        if let Poll::Ready(settled) = Pin::new(&mut answer).poll(&mut context) {
            answer.early = Some(settled);
        }
        (answer, failed)
    }

    fn check(&self, answer: AtAnswer, level: Durability, failed_before: bool) {
        let record = answer.record;
        match block_on(answer) {
            Ok(appended) => {
                assert!(!failed_before, "an ack after the journal failed");
                assert!(appended.durability >= level);
                if appended.durability >= Durability::Durable {
                    self.acked.lock().push(record);
                }
            }
            Err(AppendError::Draining) => {}
            Err(AppendError::JournalFailed(error) | AppendError::Unknown(error)) => {
                assert!(self.fails, "nothing was to fail: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Sends several records, and waits for each answer or for all of them at the end.
    fn submit_all(&self, records: std::ops::Range<u64>) {
        let mut random = shuttle::rand::thread_rng();
        let mut open = Vec::new();
        let mut before = (0, 0);
        // This thread takes in several records before it writes, or writes each at once.
        let gathers = random.gen_bool(0.5);
        for record in records {
            // Half of the records do not wait for a flush: the engine writes them while one runs, with the
            // records that wait for the next flush.
            let level = match random.gen_bool(0.5) {
                true => Durability::Written,
                false if self.replicates && random.gen_bool(0.5) => Durability::Replicated,
                false => Durability::Durable,
            };
            let (answer, failed) = self.submit(record, level);
            let waits = random.gen_bool(0.3);
            if waits || !gathers {
                self.engine.write_gathered();
            }
            if waits {
                self.check(answer, level, failed);
            } else {
                open.push((answer, level, failed));
            }
            self.look(&mut before);
        }
        self.engine.write_gathered();
        for (answer, level, failed) in open {
            self.check(answer, level, failed);
            self.look(&mut before);
        }
    }

    /// Ships all durable bytes, in small parts.
    fn ship(&self, from: &mut Position) {
        while let Some(part) = block_on(self.engine.read_part(*from, 300)).unwrap() {
            self.disk.give_way(8);
            let records = records_in(&part.bytes);
            self.disk.seen.lock().shipped.extend(records);
            self.disk.give_way(8);
            *from = part.end;
            self.engine.publish(part.end);
        }
    }

    /// Ships until the engine ends or fails.
    fn ship_all(&self, mut from: Position) {
        let journal = &self.engine.core.journal;
        loop {
            let before = self.engine.progress();
            self.ship(&mut from);
            if journal.failure().is_some() || journal.refusal().is_some_and(is_moved) {
                return;
            }
            block_on(self.engine.changed(before.durable, before.waiting > 0));
        }
    }

    /// Reads a log as it grows, up to its announced end.
    fn follow(&self, follower: &Follower) {
        let Follower {
            log, visibility, ..
        } = *follower;
        let mut next = Lsn::ZERO;
        let mut before = (0, 0);
        while !follower.is_at_end(next) {
            let beyond = self.engine.tail_beyond(target(log), next, Some(visibility));
            let grown = block_on(follower.unless_at_end(next, beyond));
            self.look(&mut before);
            let mut request = read_request(log, ReadStart::Lsn(next));
            request.visibility = Some(visibility);
            match block_on(self.engine.read(request)) {
                Ok(page) => {
                    assert!(page.tail_lsn >= next, "nothing goes away");
                    for batch in &page.batches {
                        assert_eq!(batch.first_lsn, next, "dense");
                        next = batch.next_lsn();
                        let seen = self.disk.seen.lock();
                        for record in payloads(batch).iter().skip(1) {
                            let record = record_of(record);
                            match visibility {
                                Visibility::Replicated => assert!(seen.shipped.contains(&record)),
                                Visibility::Durable => assert!(seen.is_durable(record)),
                                _ => assert!(seen.is_written(record)),
                            }
                        }
                    }
                }
                Err(ReadError::JournalFailed(_)) => assert!(self.fails),
                Err(ReadError::BeyondTail { .. }) => assert!(self.fails, "nothing goes away"),
                Err(error) => panic!("{error}"),
            }
            match grown {
                None | Some(Ok(())) => {}
                Some(Err(ReadError::JournalFailed(_))) => return assert!(self.fails),
                Some(Err(error)) => panic!("{error}"),
            }
        }
    }
}

fn is_moved(refusal: AppendError) -> bool {
    matches!(refusal, AppendError::Moved { .. })
}

/// A reader that waits at the tail, and the lsn where it ends.
struct Follower {
    log: &'static str,
    visibility: Visibility,
    state: Mutex<Following>,
}

#[derive(Default)]
struct Following {
    end: Option<Lsn>,
    waits_at: Option<(Lsn, Waker)>,
}

impl Follower {
    fn is_at_end(&self, next: Lsn) -> bool {
        self.state.lock().end.is_some_and(|end| next >= end)
    }

    /// The result of `grown`, or `None` at the end of the log.
    async fn unless_at_end<T>(&self, next: Lsn, grown: impl Future<Output = T>) -> Option<T> {
        let mut grown = std::pin::pin!(grown);
        std::future::poll_fn(|context| {
            if self.is_at_end(next) {
                return Poll::Ready(None);
            }
            self.state.lock().waits_at = Some((next, context.waker().clone()));
            grown.as_mut().poll(context).map(Some)
        })
        .await
    }

    /// Sets the end of the log. Wakes the follower only if it is already there: otherwise the engine must
    /// wake it.
    fn end_at(&self, end: Lsn) {
        let waker = {
            let mut state = self.state.lock();
            state.end = Some(end);
            state.waits_at.take().filter(|(next, _)| *next >= end)
        };
        if let Some((_, waker)) = waker {
            waker.wake();
        }
    }
}

/// A ticket that judges the very moment of its answer: when its waker is woken, on the thread that answers.
struct AtAnswer {
    ticket: Ticket,
    seen: Arc<Mutex<Seen>>,
    record: u64,
    judge: Option<Arc<Judge>>,
    early: Option<Result<Appended, AppendError>>,
}

struct Judge {
    inner: Waker,
    seen: Arc<Mutex<Seen>>,
    record: u64,
    /// Whether the record was written, flushed and shipped at the last wake-up.
    was: Mutex<Option<(bool, bool, bool)>>,
}

impl Judge {
    fn state(&self) -> (bool, bool, bool) {
        let (seen, record) = (self.seen.lock(), self.record);
        let shipped = seen.shipped.contains(&record);
        (seen.is_written(record), seen.is_durable(record), shipped)
    }
}

impl std::task::Wake for Judge {
    fn wake(self: Arc<Self>) {
        *self.was.lock() = Some(self.state());
        self.inner.wake_by_ref();
    }
}

impl Future for AtAnswer {
    type Output = Result<Appended, AppendError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Some(settled) = this.early.take() {
            return Poll::Ready(settled);
        }
        let judge = Arc::new(Judge {
            inner: context.waker().clone(),
            seen: Arc::clone(&this.seen),
            record: this.record,
            was: Mutex::new(None),
        });
        let before = this.judge.replace(Arc::clone(&judge));
        let waker = Waker::from(Arc::clone(&judge));
        let polled = Pin::new(&mut this.ticket).poll(&mut Context::from_waker(&waker));
        if let Poll::Ready(Ok(appended)) = &polled {
            let was = before.and_then(|before| *before.was.lock());
            let (written, durable, shipped) = was.unwrap_or_else(|| judge.state());
            let record = this.record;
            assert!(written, "record {record} acked before its write");
            let claims = appended.durability >= Durability::Durable;
            assert!(durable || !claims, "record {record} acked before its flush");
            let claims = appended.durability == Durability::Replicated;
            assert!(
                shipped || !claims,
                "record {record} acked before it was shipped"
            );
        }
        polled
    }
}

fn config_of(timed: bool, replicates: bool) -> StorageConfig {
    let never = Duration::from_secs(365 * 24 * 3600);
    let delay = |millis| match timed {
        true => Duration::from_millis(millis),
        false => never,
    };
    StorageConfig {
        sync_mode: SyncMode::Strict,
        sync_interval: delay(100),
        marker_delay: delay(50),
        reserve_segments: 1,
        reader_threads: 1,
        replica: replicates.then_some(ReplicaBounds { max_lag: 1 << 20 }),
        ..small_config()
    }
}

/// Runs one schedule, which also draws the work.
fn schedule(beginning: Instant) {
    scheduled::begin();
    let timers = shuttle::thread::spawn(scheduled::run_timers);
    let mut random = shuttle::rand::thread_rng();
    let timed = random.gen_range(0..4) == 0;
    let fails = random.gen_range(0..4) == 0;
    let early_drain = random.gen_range(0..4) == 0;
    let replicates = random.gen_bool(0.5);
    let disk = WatchedDisk::new();
    let clock = Arc::new(ScheduledClock(beginning));
    let (on, at) = (Arc::new(disk.clone()), Arc::clone(&clock) as Arc<dyn Clock>);
    let opened = LocalEngine::open(on, config_of(timed, replicates), at, Arc::new(NoObserver));
    let (engine, _) = opened.unwrap();
    for log in LOGS {
        let made = engine.submit(None, batch(&[(log, &[b"first"])]), None);
        block_on(made).unwrap();
    }
    let run = Arc::new(Run {
        engine,
        disk: disk.clone(),
        acked: Mutex::default(),
        fails,
        replicates,
    });
    let shipping = replicates.then(|| {
        let mut from = Position::ZERO;
        run.ship(&mut from);
        let run = Arc::clone(&run);
        shuttle::thread::spawn(move || run.ship_all(from))
    });
    if fails {
        disk.disk.fail_sync(random.gen_range(1..4));
    }
    let follower = |log, visibility| Follower {
        log,
        visibility,
        state: Mutex::default(),
    };
    let mut followers = vec![
        Arc::new(follower("a", Visibility::Durable)),
        Arc::new(follower("b", Visibility::Written)),
    ];
    if replicates {
        followers.push(Arc::new(follower("a", Visibility::Replicated)));
    }
    let following: Vec<_> = followers
        .iter()
        .map(|follower| {
            let (run, follower) = (Arc::clone(&run), Arc::clone(follower));
            shuttle::thread::spawn(move || run.follow(&follower))
        })
        .collect();
    let submitting: Vec<_> = (0..random.gen_range(2..=3u64))
        .map(|number| {
            let run = Arc::clone(&run);
            let records = number * 10..number * 10 + random.gen_range(1..=3);
            shuttle::thread::spawn(move || run.submit_all(records))
        })
        .collect();
    let ends = |safe: bool| {
        for follower in followers.iter().filter(|_| safe) {
            let stat = run
                .engine
                .stat(target(follower.log), Some(Visibility::Durable), None);
            follower.end_at(block_on(stat).unwrap().info.tail_lsn);
        }
    };
    let is_safe = |done: Result<(), SyncError>| match done {
        Ok(()) => true,
        Err(error) => {
            assert!(fails, "{error}");
            false
        }
    };
    if early_drain {
        let safe = is_safe(block_on(run.engine.drain()));
        submitting
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        ends(safe);
        following
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    } else {
        submitting
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        // Followers reach the end before a drain wakes everyone, so that a missed wake-up shows.
        let synced = block_on(run.engine.sync(SyncTarget::Device, None));
        ends(is_safe(synced.map(drop)));
        following
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        is_safe(block_on(run.engine.drain()));
    }
    if let Some(shipping) = shipping {
        run.engine.stop(Unreplicated::Moved {
            owner: String::new(),
            term: 2,
        });
        shipping.join().unwrap();
    }
    let acked = std::mem::take(&mut *run.acked.lock());
    // Every answered request has given its bytes back.
    assert_eq!(run.engine.core.journal.inflight.load(Ordering::SeqCst), 0);
    drop(run);
    scheduled::stop_timers();
    timers.join().unwrap();

    // Acknowledged records survive a power cut. The copy has no planned failure.
    let disk = disk.disk.copy_with_unflushed();
    disk.crash(0);
    let at = Arc::clone(&clock) as Arc<dyn Clock>;
    let (core, _) = Core::open(
        Arc::new(disk),
        config_of(false, false),
        at,
        Arc::new(NoObserver),
    )
    .unwrap();
    let mut found = Vec::new();
    for log in LOGS {
        found.extend(contents(&core, log, Visibility::Durable).unwrap());
    }
    for record in acked {
        assert!(found.contains(&data_of(record)), "record {record} is lost");
    }
}

#[test]
fn no_schedule_acks_early_loses_an_answer_or_shows_lost_records() {
    let number = |name| -> Option<u64> { std::env::var(name).ok()?.parse().ok() };
    let count = number("WALD_SCHEDULES").unwrap_or(300);
    let seeds = number("WALD_SEED").map_or(0..count, |seed| seed..seed + 1);
    #[allow(clippy::disallowed_methods, reason = "an arbitrary beginning")]
    let beginning = Instant::now();
    let began = beginning;
    let mut done = 0u64;
    for seed in seeds {
        let depth = 2 + usize::try_from(seed / 3 % 4).unwrap();
        let scheduler: Box<dyn Scheduler + Send> = match seed % 3 {
            2 => Box::new(PctScheduler::new_from_seed(seed, depth, 1)),
            _ => Box::new(RandomScheduler::new_from_seed(seed, 1)),
        };
        let mut config = Config::new();
        config.stack_size = 256 << 10;
        config.failure_persistence = FailurePersistence::None;
        config.max_steps = MaxSteps::FailAfter(200_000);
        config.silence_warnings = true;
        let runner = Runner::new(scheduler, config);
        let run = std::panic::AssertUnwindSafe(|| runner.run(move || schedule(beginning)));
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("repeat it with WALD_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
        done += 1;
    }
    println!("{done} schedules in {:.1} s", began.elapsed().as_secs_f64());
}

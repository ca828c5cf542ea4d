//! The shipper with a real engine in a temporary directory, and a store in memory whose answers are lost, late or 503.
//! Time is paused, so that each wait ends at once. Threads of the engine run as usual meanwhile.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Mutex;

use object_store::memory::InMemory;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use wald_storage::{
    Append as _, AppendError, BackupDamage, BackupFile, BackupView, Batch, ContentDigest,
    Durability, Guard, LocalEngine, LogName, LogRecords, LogTarget, Lsn, NoObserver, ReadLogs as _,
    ReadRequest, ReadStart, RealDisk, Record, RecoveryEpoch, ReplicaBounds, ReplicaContent,
    RestoredAs, SimDisk, StorageConfig, SystemClock, Timestamp, block_on, content_path,
};

mod ends;
mod keys;
mod takeover;

use super::*;
use crate::faults::{StoreFault, StoreFaults, Weather, faulty_over};
use crate::takeover::TakeOver;

const SEGMENT_BYTES: u64 = 64 << 10;

fn config(replica: bool) -> StorageConfig {
    StorageConfig {
        segment_bytes: SEGMENT_BYTES,
        sorter_step_bytes: 512 << 10,
        replica: replica.then_some(ReplicaBounds { max_lag: 1 << 28 }),
        ..StorageConfig::default()
    }
}

fn open(directory: &Path, config: StorageConfig) -> Arc<LocalEngine> {
    open_on(RealDisk::open(directory).unwrap(), config)
}

fn open_on(disk: Arc<dyn wald_storage::Disk>, config: StorageConfig) -> Arc<LocalEngine> {
    let opened = LocalEngine::open(disk, config, Arc::new(SystemClock), Arc::new(NoObserver));
    opened.unwrap().0
}

/// Lines of numbers and paths.
struct Lines;

impl ManifestFormat for Lines {
    fn encode(&self, manifest: &BackupManifest) -> Vec<u8> {
        assert_eq!(manifest.damage, []);
        let mut text = format!(
            "{} {} {} {}\n",
            manifest.store_id,
            manifest.recovery_epoch.get(),
            manifest.position,
            manifest.created.micros()
        );
        for file in &manifest.files {
            text += &format!("{} {} {}\n", file.bytes, file.digest, file.path);
        }
        text.into_bytes()
    }

    fn decode(&self, bytes: &[u8]) -> Result<BackupManifest, String> {
        let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
        let mut lines = text.lines().map(|line| line.split(' '));
        let mut head = lines.next().ok_or("it is empty")?;
        let mut number = || head.next().unwrap().parse::<u128>().unwrap();
        Ok(BackupManifest {
            store_id: number(),
            recovery_epoch: RecoveryEpoch::new(number().try_into().unwrap()),
            position: Position::new(number().try_into().unwrap()),
            created: Timestamp::from_micros(number().try_into().unwrap()),
            files: lines
                .map(|mut line| BackupFile {
                    bytes: line.next().unwrap().parse().unwrap(),
                    digest: ContentDigest::from_name(line.next().unwrap()).unwrap(),
                    path: line.next().unwrap().to_owned(),
                    known: false,
                })
                .collect(),
            damage: Vec::new(),
            signed_by: None,
        })
    }
}

/// As [`Lines`], with a line for each damaged place.
struct WithDamage;

impl ManifestFormat for WithDamage {
    fn encode(&self, manifest: &BackupManifest) -> Vec<u8> {
        let mut whole = manifest.clone();
        let damage = std::mem::take(&mut whole.damage);
        let mut bytes = Lines.encode(&whole);
        for place in damage {
            bytes.extend(format!("damage {}\n", place.from).bytes());
        }
        bytes
    }

    fn decode(&self, bytes: &[u8]) -> Result<BackupManifest, String> {
        let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
        let (whole, damage) = text.split_at(text.find("damage").unwrap_or(text.len()));
        let place = |line: &str| BackupDamage {
            segment: None,
            from: Position::new(line.strip_prefix("damage ").unwrap().parse().unwrap()),
            to: None,
            records: None,
        };
        let mut manifest = Lines.decode(whole.as_bytes())?;
        manifest.damage = damage.lines().map(place).collect();
        Ok(manifest)
    }
}

/// Manifests of this many bytes.
struct Padded(usize);

impl ManifestFormat for Padded {
    fn encode(&self, manifest: &BackupManifest) -> Vec<u8> {
        let mut bytes = Lines.encode(manifest);
        assert!(bytes.len() < self.0);
        bytes.resize(self.0, b'#');
        bytes
    }

    fn decode(&self, bytes: &[u8]) -> Result<BackupManifest, String> {
        let end = bytes.iter().position(|byte| *byte == b'#');
        Lines.decode(&bytes[..end.unwrap()])
    }
}

/// Texts of the events.
#[derive(Default)]
struct Events(Mutex<Vec<String>>);

impl ShipObserver for Events {
    fn event(&self, event: &ShipEvent<'_>) {
        self.0.lock().unwrap().push(format!("{event:?}"));
    }
}

impl Events {
    /// The text of the first event with this name.
    fn text(&self, name: &str) -> String {
        let events = self.0.lock().unwrap();
        let named = events.iter().find(|event| event.starts_with(name));
        named.cloned().unwrap_or_default()
    }

    fn count(&self, name: &str) -> usize {
        let events = self.0.lock().unwrap();
        events
            .iter()
            .filter(|event| event.starts_with(name))
            .count()
    }
}

/// One bucket, as one node reaches it.
struct Remote {
    bucket: Bucket,
    faults: Arc<StoreFaults>,
    events: Arc<Events>,
    settings: ShipSettings,
    format: Arc<dyn ManifestFormat>,
}

fn remote() -> Remote {
    remote_over(Arc::default())
}

/// A bucket that other nodes use, too.
fn remote_over(inner: Arc<InMemory>) -> Remote {
    let (bucket, faults, _) = faulty_over(inner, StoreFaults::default());
    Remote {
        bucket,
        faults,
        events: Arc::default(),
        settings: ShipSettings {
            gap: ShipGap::Fixed(Duration::from_millis(50)),
            interval: Duration::from_secs(1),
            max_lag: 1 << 28,
            keep: Duration::from_secs(24 * 3600),
        },
        format: Arc::new(Lines),
    }
}

/// An engine and its shipper.
struct Node {
    engine: Arc<LocalEngine>,
    tail: Arc<ReplicaTail>,
    stop: watch::Sender<bool>,
    runs: JoinHandle<ShipEnd>,
}

impl Remote {
    async fn own(&self) -> Arc<ReplicaTail> {
        loop {
            let newest = ReplicaTail::newest_term(&self.bucket).await;
            if let Ok(newest) = newest
                && let Ok(tail) = ReplicaTail::open(&self.bucket, newest).await
            {
                return Arc::new(tail);
            }
        }
    }

    async fn begin(
        &self,
        engine: &Arc<LocalEngine>,
        tail: &Arc<ReplicaTail>,
    ) -> Result<Shipper, ShipError> {
        let mut parts = parts(self, Arc::clone(engine), None);
        parts.format = Arc::clone(&self.format);
        Shipper::begin(&parts, Arc::clone(tail), None).await
    }

    async fn start(&self, engine: Arc<LocalEngine>) -> Node {
        let tail = self.own().await;
        let mut shipper = self.begin(&engine, &tail).await.unwrap();
        let (stop, stopped) = watch::channel(false);
        let runs = tokio::spawn(async move { shipper.run(stopped).await });
        Node {
            engine,
            tail,
            stop,
            runs,
        }
    }

    /// A node with 30 records, whose uploads fail.
    async fn with_failing_uploads(&self, directory: &Path) -> Node {
        let node = self.start(open(directory, config(true))).await;
        *self.faults.only_in.lock().unwrap() = "/content/";
        self.faults.next_puts([StoreFault::Unavailable; 1_000]);
        for number in 0..30 {
            node.replicate(number, 10 << 10).await;
        }
        until("an upload fails", || self.events.count("Failed") > 0).await;
        node
    }

    /// Makes a store of the bucket, opens it, and returns the records of the log "a".
    async fn restored(&self) -> Vec<Vec<u8>> {
        self.restored_with(config(false)).await
    }

    async fn restored_with(&self, config: StorageConfig) -> Vec<Vec<u8>> {
        self.restored_as_of(config, None).await
    }

    /// The records as of a position.
    async fn restored_as_of(&self, config: StorageConfig, at: Option<Position>) -> Vec<Vec<u8>> {
        let target = self.fetched(&config, RestoredAs::Copy, at).await;
        records(&open(target.path(), config))
    }

    /// A directory with the store of the bucket.
    async fn fetched(
        &self,
        config: &StorageConfig,
        restored_as: RestoredAs,
        at: Option<Position>,
    ) -> TempDir {
        let copy = ReplicaCopy::open(&self.bucket, &*self.format, at).await;
        self.made(copy.unwrap().unwrap(), config, restored_as, at)
            .await
    }

    /// A directory with the store of a copy.
    async fn made(
        &self,
        mut copy: ReplicaCopy,
        config: &StorageConfig,
        restored_as: RestoredAs,
        at: Option<Position>,
    ) -> TempDir {
        let mut parts = Vec::new();
        while let Some(part) = copy.next().await.unwrap() {
            parts.push(Ok(part));
        }
        let content = tempfile::tempdir().unwrap();
        std::fs::create_dir(content.path().join("files")).unwrap();
        for (digest, file) in copy.files() {
            let (bytes, _) = self
                .bucket
                .read(&file.path, u64::MAX)
                .await
                .unwrap()
                .unwrap();
            std::fs::write(content.path().join(content_path(*digest)), bytes).unwrap();
        }
        let early = |manifest: &&BackupManifest| at.is_some_and(|at| at <= manifest.position);
        let early = copy.manifest().is_some_and(|manifest| early(&manifest));
        let view = copy.manifest().map(|manifest| {
            let content = RealDisk::open(content.path()).unwrap();
            BackupView::open(content, manifest, at.filter(|_| early)).unwrap()
        });
        let target = tempfile::tempdir().unwrap();
        let disk: Arc<dyn wald_storage::Disk> = RealDisk::open(target.path()).unwrap();
        let restored = ReplicaContent {
            store_id: copy.store_id(),
            files: view.as_ref(),
            parts: &mut parts.into_iter(),
            until: at.filter(|_| !early),
        }
        .restore(&disk, config, restored_as, &mut |_| {})
        .unwrap();
        assert_eq!(restored.report.damage, []);
        target
    }
}

fn batch(records: impl IntoIterator<Item = Vec<u8>>) -> Batch {
    let record = |data: Vec<u8>| Record {
        data: data.into(),
        ..Record::default()
    };
    Batch::from(vec![LogRecords {
        log: LogName::new("a").unwrap(),
        records: records.into_iter().map(record).collect::<Vec<_>>().into(),
        guard: Guard::default(),
        producer: None,
    }])
}

/// Record number `number`, of this size.
fn data(number: usize, bytes: usize) -> Vec<u8> {
    let mut data = number.to_string().into_bytes();
    data.resize(bytes.max(data.len()), b'.');
    data
}

fn numbered(count: usize, bytes: usize) -> Vec<Vec<u8>> {
    (0..count).map(|number| data(number, bytes)).collect()
}

async fn append(
    engine: &LocalEngine,
    data: Vec<u8>,
    level: Durability,
) -> Result<Durability, AppendError> {
    let appended = engine.submit(None, batch([data]), Some(level)).await?;
    Ok(appended.durability)
}

/// The records of the log "a".
fn records(engine: &LocalEngine) -> Vec<Vec<u8>> {
    let (mut next, mut found) = (Lsn::ZERO, Vec::new());
    loop {
        let page = block_on(engine.read(ReadRequest {
            log: LogTarget {
                name: LogName::new("a").unwrap(),
                log_id: None,
            },
            start: ReadStart::Lsn(next),
            max_records: 1000,
            max_bytes: 1 << 20,
            visibility: Some(wald_storage::Visibility::Durable),
        }))
        .unwrap();
        for batch in &page.batches {
            let records = fields(&batch.body).into_iter();
            found.extend(records.map(|(_, record)| {
                let fields = fields(record).into_iter();
                let mut data = fields.filter(|(number, _)| *number == 1);
                data.next().unwrap().1.to_vec()
            }));
        }
        next = page.next_lsn;
        if next == page.tail_lsn {
            return found;
        }
    }
}

/// The fields of a protobuf message that have a length: number and content.
fn fields(mut message: &[u8]) -> Vec<(u64, &[u8])> {
    fn varint(message: &mut &[u8]) -> u64 {
        let mut number = 0;
        for shift in (0..).step_by(7) {
            let (first, rest) = message.split_first().unwrap();
            *message = rest;
            number |= u64::from(first & 0x7f) << shift;
            if *first < 0x80 {
                break;
            }
        }
        number
    }
    let mut found = Vec::new();
    while !message.is_empty() {
        let tag = varint(&mut message);
        let length = match tag & 7 {
            0 => {
                varint(&mut message);
                continue;
            }
            1 => 8,
            5 => 4,
            _ => usize::try_from(varint(&mut message)).unwrap(),
        };
        let (content, rest) = message.split_at(length);
        message = rest;
        if tag & 7 == 2 {
            found.push((tag >> 3, content));
        }
    }
    found
}

impl Node {
    /// Appends record number `number` as REPLICATED.
    async fn replicate(&self, number: usize, bytes: usize) {
        let reached = append(&self.engine, data(number, bytes), Durability::Replicated).await;
        assert_eq!(reached.unwrap(), Durability::Replicated);
    }

    /// Ends as after a SIGTERM.
    async fn end(self) {
        self.stop.send(true).unwrap();
        assert!(matches!(self.runs.await.unwrap(), ShipEnd::Shipped));
        self.tail.close().await.unwrap();
        self.engine.drain().await.unwrap();
    }

    /// Ends as after a kill.
    async fn kill(self) {
        self.runs.abort();
        let _ = self.runs.await;
    }
}

/// Waits until this holds. Fails after a minute of the machine's time.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn acknowledged_records_survive_the_machine() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let node = remote.start(open(machine.path(), config(true))).await;
    for number in 0..40 {
        node.replicate(number, 700).await;
    }
    node.kill().await;
    drop(machine);
    assert_eq!(remote.restored().await, numbered(40, 700));
}

#[tokio::test(start_paused = true)]
async fn durable_bytes_are_shipped_within_the_interval_for_nobody() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let node = remote.start(open(machine.path(), config(true))).await;
    let begun = remote.events.count("Stored");
    append(&node.engine, data(0, 9), Durability::Durable)
        .await
        .unwrap();
    let engine = Arc::clone(&node.engine);
    let durable = engine.progress().durable;
    until("it is shipped", || engine.progress().replicated >= durable).await;
    assert!(remote.events.count("Stored") > begun);
    node.kill().await;
    assert_eq!(remote.restored().await, numbered(1, 9));
}

#[tokio::test(start_paused = true)]
async fn files_take_the_place_of_rows_and_release_their_segments() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let node = remote.start(open(machine.path(), config(true))).await;
    // More segments than may wait.
    for number in 0..160 {
        node.replicate(number, 10 << 10).await;
        if number % 40 == 39 {
            let before = remote.events.count("Named");
            let engine = Arc::clone(&node.engine);
            until("segments are released", || engine.progress().unreleased < 4).await;
            assert!(number < 40 || before > 0);
        }
    }
    assert!(node.engine.progress().released > Position::ZERO);
    node.end().await;
    assert_eq!(remote.events.count("Failed"), 0, "{:?}", remote.events.0);
    let copy = ReplicaCopy::open(&remote.bucket, &Lines, None)
        .await
        .unwrap()
        .unwrap();
    assert!(!copy.files().is_empty());
    assert_eq!(remote.restored().await, numbered(160, 10 << 10));
}

#[tokio::test(start_paused = true)]
async fn a_copy_is_of_any_position_within_files_and_rows() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let mut places = Vec::new();
    for _ in 0..2 {
        let node = remote.start(open(machine.path(), config(true))).await;
        for _ in 0..60 {
            let record = batch([data(places.len(), 10 << 10)]);
            let appended = node
                .engine
                .submit(None, record, Some(Durability::Replicated));
            let begin = appended.await.unwrap().position.unwrap();
            places.push((begin, node.engine.progress().replicated));
            let engine = Arc::clone(&node.engine);
            until("segments are released", || engine.progress().unreleased < 4).await;
        }
        node.kill().await;
    }
    let mut manifests = HashSet::new();
    for (number, (begin, end)) in places.iter().enumerate().skip(1).step_by(7) {
        let copy = ReplicaCopy::open(&remote.bucket, &Lines, Some(*end)).await;
        let copy = copy.unwrap().unwrap();
        manifests.extend(copy.manifest().map(|manifest| manifest.position));
        // A position within a record leaves it out.
        for (at, count) in [
            (*begin, number),
            (begin.advance(1), number),
            (*end, number + 1),
        ] {
            let restored = remote.restored_as_of(config(false), Some(at)).await;
            assert!(
                restored == numbered(count, 10 << 10),
                "{} of {count} records at {at}",
                restored.len()
            );
        }
    }
    assert!(manifests.len() > 2, "{manifests:?}");
}

#[tokio::test(start_paused = true)]
async fn a_restart_goes_on_behind_the_last_row() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    for (term, clean) in [(0, true), (1, false), (2, true), (3, false)] {
        let node = remote.start(open(machine.path(), config(true))).await;
        assert_eq!(node.tail.term(), term + 1);
        for number in 0..30 {
            let number = usize::try_from(term).unwrap() * 30 + number;
            node.replicate(number, 5_000).await;
        }
        match clean {
            true => node.end().await,
            false => node.kill().await,
        }
    }
    assert_eq!(remote.restored().await, numbered(120, 5_000));
}

#[tokio::test(start_paused = true)]
async fn a_directory_that_lacks_rows_of_the_bucket_is_refused() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let node = remote.start(open(machine.path(), config(true))).await;
    node.replicate(0, 100).await;
    node.end().await;
    let older = copied(machine.path());
    let node = remote.start(open(machine.path(), config(true))).await;
    node.replicate(1, 100).await;
    node.end().await;
    // The old directory goes on, and has other bytes at the same positions.
    let engine = open(older.path(), config(false));
    append(&engine, data(9, 100), Durability::Durable)
        .await
        .unwrap();
    drop(engine);
    let engine = open(older.path(), config(true));
    let tail = remote.own().await;
    let refused = remote.begin(&engine, &tail).await.err().unwrap();
    assert!(matches!(refused, ShipError::Diverged { .. }), "{refused}");
    drop(engine);
    assert_eq!(remote.restored().await, numbered(2, 100));
}

fn copied(from: &Path) -> TempDir {
    let to = tempfile::tempdir().unwrap();
    let mut left = vec![from.to_path_buf()];
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let target = to.path().join(path.strip_prefix(from).unwrap());
            if path.is_dir() {
                std::fs::create_dir(&target).unwrap();
                left.push(path);
            } else {
                std::fs::copy(&path, &target).unwrap();
            }
        }
    }
    to
}

#[tokio::test(start_paused = true)]
async fn the_bucket_of_another_store_is_refused() {
    let remote = remote();
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    remote
        .start(open(first.path(), config(true)))
        .await
        .end()
        .await;
    let engine = open(second.path(), config(true));
    let tail = remote.own().await;
    let refused = remote.begin(&engine, &tail).await.err().unwrap();
    assert!(matches!(refused, ShipError::OtherStore { .. }), "{refused}");
}

/// Makes a store without a replica that has sorted a part of its journal. Returns the number of its records.
async fn sorted_store(directory: &Path) -> usize {
    sort(&open(directory, config(false))).await
}

/// Appends records until some are sorted, and ends the engine. Returns their number.
async fn sort(engine: &LocalEngine) -> usize {
    let mut count = 0;
    let sorted = |engine: &LocalEngine| {
        let segments = engine.segments();
        segments.iter().any(|segment| segment.sorted.is_some())
    };
    while !sorted(engine) {
        append(engine, data(count, 20 << 10), Durability::Durable)
            .await
            .unwrap();
        count += 1;
        // The sorter rests for up to a second between its steps, and a fast disk takes thousands of records meanwhile.
        assert!(count < 16_000, "nothing is sorted");
    }
    engine.drain().await.unwrap();
    count
}

#[tokio::test(start_paused = true)]
async fn a_store_that_was_sorted_sends_its_files_first() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let count = sorted_store(machine.path()).await;
    let node = remote.start(open(machine.path(), config(true))).await;
    node.replicate(count, 20 << 10).await;
    node.kill().await;
    assert_eq!(remote.restored().await, numbered(count + 1, 20 << 10));
}

/// A disk that is full for new segments, until there is space again.
#[tokio::test(start_paused = true)]
async fn files_come_first_whole_although_the_disk_is_full() {
    let (remote, disk) = (remote(), SimDisk::new());
    let count = sort(&open_on(Arc::new(disk.clone()), config(false))).await;
    disk.set_full(true);
    let engine = open_on(Arc::new(disk.clone()), config(true));
    let node = remote.start(engine).await;
    disk.set_full(false);
    node.replicate(count, 20 << 10).await;
    node.kill().await;
    assert_eq!(remote.restored().await, numbered(count + 1, 20 << 10));
}

/// A bucket with rows and without a manifest, as the first owner of a sorted store leaves it if it ends in its first upload.
#[tokio::test(start_paused = true)]
async fn sorted_store_that_lacks_rows_of_the_bucket_is_refused() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    sorted_store(machine.path()).await;
    let engine = open(machine.path(), config(true));
    let tail = remote.own().await;
    let row = TailPart {
        segment: u64::MAX,
        position: engine.progress().durable.get() + SEGMENT_BYTES,
        bytes: Bytes::from_static(b"of another copy"),
    };
    tail.put(&row).await.unwrap();
    let compared = resume::compare(&*engine, &remote.bucket, &Lines).await;
    let begun = remote.begin(&engine, &tail).await.err();
    for refused in [compared.err(), begun] {
        let refused = refused.unwrap();
        assert!(matches!(refused, ShipError::Diverged { .. }), "{refused}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_is_fenced_names_the_next_one() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let node = remote.start(open(machine.path(), config(true))).await;
    node.replicate(0, 100).await;
    let next = OwnerRecord {
        term: 2,
        process: String::new(),
        stand_bys: Vec::new(),
        successor: None,
        ends: false,
        keys: 0,
        starts: 0,
        node: "second".to_owned(),
        incarnation: "x".to_owned(),
        endpoint: "second:7070".to_owned(),
        state: OwnerState::Serving,
        taken: None,
    };
    next.write(&remote.bucket, None).await.unwrap().unwrap();
    let tail = remote.own().await;
    assert_eq!(tail.term(), 2);
    // The old owner may be in the middle of anything: a request that waits gets no ack.
    let late = append(&node.engine, data(1, 100), Durability::Replicated).await;
    assert!(
        matches!(
            late,
            Err(AppendError::ReplicationUnknown | AppendError::Moved { .. })
        ),
        "{late:?}"
    );
    let end = node.runs.await.unwrap();
    let ShipEnd::Fenced { owner: Some(owner) } = end else {
        panic!("{end:?}");
    };
    assert_eq!((&*owner.node, owner.term), ("second", 2));
    let refused = append(&node.engine, data(2, 100), Durability::Durable).await;
    let Err(AppendError::Moved { owner, term }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!((&*owner, term), ("second:7070", 2));
}

#[tokio::test(start_paused = true)]
async fn a_silent_bucket_is_reported_and_nothing_is_lost_when_it_is_back() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let node = remote.start(open(machine.path(), config(true))).await;
    node.replicate(0, 100).await;
    *remote.faults.hangs_in.lock().unwrap() = Some("/db/");
    let begun = Instant::now();
    let unknown = append(&node.engine, data(1, 100), Durability::Replicated).await;
    assert!(
        matches!(unknown, Err(AppendError::ReplicationUnknown)),
        "{unknown:?}"
    );
    assert!(begun.elapsed() >= DOWN_AFTER);
    let refused = append(&node.engine, data(9, 100), Durability::Replicated).await;
    assert!(
        matches!(refused, Err(AppendError::BucketDown)),
        "{refused:?}"
    );
    append(&node.engine, data(2, 100), Durability::Durable)
        .await
        .unwrap();
    // Longer than one attempt: the same row is stored again.
    let stored = remote.events.count("Stored");
    sleep(Duration::from_secs(100)).await;
    let progress = node.engine.progress();
    assert!(progress.replicated < progress.durable && remote.events.count("Stored") == stored);
    *remote.faults.hangs_in.lock().unwrap() = None;
    until("the bucket is back", || remote.events.count("Up") == 1).await;
    node.replicate(3, 100).await;
    assert_eq!(remote.events.count("Down"), 1);
    node.kill().await;
    assert_eq!(remote.restored().await, numbered(4, 100));
}

#[tokio::test(start_paused = true)]
async fn acknowledged_records_survive_lost_answers_and_503s() {
    for seed in seeds() {
        println!("seed {seed}");
        let remote = remote();
        let machine = tempfile::tempdir().unwrap();
        let node = remote.start(open(machine.path(), config(true))).await;
        *remote.faults.weather.lock().unwrap() = Some(Weather::new(seed, 0.2, 0.3));
        let mut acked = 0;
        for number in 0..60 {
            let level = match number % 3 {
                0 => Durability::Durable,
                _ => Durability::Replicated,
            };
            match append(&node.engine, data(number, 6_000), level).await {
                Ok(Durability::Replicated) => acked = number + 1,
                Ok(_) | Err(AppendError::ReplicationUnknown) => {}
                // It leaves a number out.
                Err(AppendError::BucketDown) => break,
                Err(error) => panic!("{error}"),
            }
        }
        node.kill().await;
        drop(machine);
        *remote.faults.weather.lock().unwrap() = None;
        let restored = remote.restored().await;
        assert!(
            restored.len() >= acked && acked > 0,
            "{} of {acked}",
            restored.len()
        );
        assert_eq!(restored, numbered(restored.len(), 6_000));
    }
}

fn seeds() -> Vec<u64> {
    match std::env::var("WALD_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (0..3).map(|_| rand::random()).collect(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_group_larger_than_a_row_goes_on_where_the_last_owner_stopped() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let config = StorageConfig {
        segment_bytes: 64 << 20,
        sorter_step_bytes: 1 << 30,
        max_batch_bytes: 24 << 20,
        ..config(true)
    };
    let engine = open(machine.path(), config.clone());
    let records = numbered(20, 1 << 20);
    let group = engine.submit(None, batch(records.clone()), Some(Durability::Durable));
    group.await.unwrap();
    let tail = remote.own().await;
    // The owner before dies after the first row of the group.
    let mut from = Position::ZERO;
    loop {
        let part = engine.read_part(from, PART_BYTES).await.unwrap().unwrap();
        let large = part.bytes.len() > LARGEST_PART;
        let row = TailPart {
            segment: part.segment.get(),
            position: part.position.get(),
            bytes: part.bytes.slice(..part.bytes.len().min(LARGEST_PART)),
        };
        tail.put(&row).await.unwrap();
        if large {
            break;
        }
        from = part.end;
    }
    tail.close().await.unwrap();
    let node = remote.start(engine).await;
    node.kill().await;
    let alone = StorageConfig {
        replica: None,
        ..config
    };
    assert!(remote.restored_with(alone).await == records);
}

#[tokio::test(start_paused = true)]
async fn a_large_group_reaches_the_bucket_over_a_slow_link() {
    let config = StorageConfig {
        segment_bytes: 64 << 20,
        max_batch_bytes: 24 << 20,
        ..config(true)
    };
    let (remote, machine) = (remote(), tempfile::tempdir().unwrap());
    let node = remote.start(open(machine.path(), config)).await;
    // The group takes 80 s.
    remote.faults.slow_way.store(300 << 10, Ordering::Relaxed);
    let group = batch(numbered(23, 1 << 20));
    let group = node.engine.submit(None, group, Some(Durability::Durable));
    group.await.unwrap();
    let durable = node.engine.progress().durable;
    let stored = until("it is shipped", || {
        node.engine.progress().replicated >= durable
    });
    timeout(Duration::from_secs(300), stored).await.unwrap();
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn the_tail_has_a_large_group_wholly_or_not_at_all() {
    let config = StorageConfig {
        segment_bytes: 64 << 20,
        sorter_step_bytes: 1 << 30,
        max_batch_bytes: 24 << 20,
        ..config(true)
    };
    let records = numbered(21, 1 << 20);
    for good in [0, 1] {
        let remote = remote();
        let machine = tempfile::tempdir().unwrap();
        let node = remote.start(open(machine.path(), config.clone())).await;
        node.replicate(0, 1 << 20).await;
        // The owner dies while it stores the group: after no PUT, or after one.
        *remote.faults.only_in.lock().unwrap() = "/wal/";
        remote.faults.good_puts(good);
        remote.faults.next_puts([StoreFault::Unavailable; 1_000]);
        let group = batch(records[1..].to_vec());
        let group = node.engine.submit(None, group, Some(Durability::Durable));
        group.await.unwrap();
        until("the PUTs are decided", || {
            remote.faults.puts.lock().unwrap().len() < 1_000 + good.min(1)
        })
        .await;
        sleep(Duration::from_secs(1)).await;
        node.kill().await;
        remote.faults.puts.lock().unwrap().clear();
        let alone = StorageConfig {
            replica: None,
            ..config.clone()
        };
        // A PUT that is repeated may still arrive, and the row of a manifest may have had the good PUT.
        let restored = remote.restored_with(alone).await;
        assert!(
            restored == records || restored == records[..1],
            "{good} good: {} records",
            restored.len()
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_fails_again_and_again_leaves_no_segment() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let node = remote.with_failing_uploads(machine.path()).await;
    let sealed = node.engine.progress().unreleased;
    assert!(sealed >= 4);
    until("uploads fail", || remote.events.count("Failed") > 20).await;
    assert_eq!(node.engine.progress().unreleased, sealed);
    node.replicate(30, 100).await;
    remote.faults.puts.lock().unwrap().clear();
    until("a manifest counts", || remote.events.count("Named") > 0).await;
    node.kill().await;
    let restored = remote.restored().await;
    assert_eq!(restored[..30], numbered(30, 10 << 10));
    assert_eq!(restored[30..], [data(30, 100)]);
}

#[tokio::test(start_paused = true)]
async fn an_upload_after_a_failed_one_sends_only_what_is_missing() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let node = remote.with_failing_uploads(machine.path()).await;
    remote.faults.puts.lock().unwrap().clear();
    remote.faults.good_puts(3);
    remote.faults.next_puts([StoreFault::Unavailable; 1_000]);
    let failed = remote.events.count("Failed");
    until("the next ones fail", || {
        remote.events.count("Failed") > failed + 2
    })
    .await;
    let content = async || {
        let files = remote.bucket.list_below(files::CONTENT).await.unwrap();
        let bytes = files.iter().map(|file| file.bytes);
        (files.len(), bytes.sum::<u64>())
    };
    let (arrived, before) = content().await;
    assert_eq!(arrived, 3);
    remote.faults.puts.lock().unwrap().clear();
    until("a manifest counts", || remote.events.count("Named") > 0).await;
    let (_, after) = content().await;
    let named = remote.events.text("Named");
    let sent = format!("sent_bytes: {},", after - before);
    assert!(named.contains(&sent), "{sent} {named}");
    node.end().await;
}

#[tokio::test(start_paused = true)]
async fn content_that_no_recent_manifest_names_is_removed() {
    let mut remote = remote();
    remote.settings.keep = Duration::from_secs(7200);
    let machine = tempfile::tempdir().unwrap();
    let node = remote.start(open(machine.path(), config(true))).await;
    // Files of someone else, of an owner before, and of a later one.
    let old = files::content_path(0, ContentDigest::of(b"7"));
    let later = files::content_path(9, ContentDigest::of(b"7"));
    for path in [&old, &later] {
        remote.bucket.put(path, "content".into()).await.unwrap();
    }
    node.end().await;
    let begun = Instant::now();
    let node = remote.start(open(machine.path(), config(true))).await;
    for number in 0..60 {
        node.replicate(number, 10 << 10).await;
    }
    until("a manifest counts", || remote.events.count("Named") > 0).await;
    assert!(remote.bucket.size(&old).await.unwrap().is_some());
    while remote.bucket.size(&old).await.unwrap().is_some() {
        sleep(Duration::from_secs(60)).await;
        assert!(begun.elapsed() < 4 * remote.settings.keep);
    }
    assert!(begun.elapsed() >= remote.settings.keep);
    // Two more passes: content that the newest manifest names stays, whatever its age is.
    sleep(Duration::from_secs(1300)).await;
    assert!(remote.bucket.size(&later).await.unwrap().is_some());
    node.end().await;
    assert_eq!(remote.restored().await, numbered(60, 10 << 10));
}

/// Changes a byte in the middle of the first segment of a store.
fn rot(directory: &Path) {
    let segments = std::fs::read_dir(directory.join("journal")).unwrap();
    let paths = segments.map(|entry| entry.unwrap().path());
    let number = |path: &Path| path.file_stem()?.to_str()?.parse::<u64>().ok();
    let first = paths.filter_map(|path| Some((number(&path)?, path))).min();
    let path = first.unwrap().1;
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = usize::try_from(SEGMENT_BYTES / 2).unwrap();
    bytes[middle] ^= 1;
    std::fs::write(&path, bytes).unwrap();
}

/// A configuration with which nothing is sorted.
fn unsorted() -> StorageConfig {
    StorageConfig {
        sorter_step_bytes: 1 << 30,
        ..config(true)
    }
}

#[tokio::test(start_paused = true)]
async fn content_of_a_segment_that_rots_later_stays() {
    let mut remote = remote();
    remote.settings.keep = Duration::from_secs(900);
    let machine = tempfile::tempdir().unwrap();
    let node = remote.start(open(machine.path(), unsorted())).await;
    for number in 0..40 {
        node.replicate(number, 10 << 10).await;
    }
    until("a manifest counts", || remote.events.count("Named") > 0).await;
    node.end().await;
    rot(machine.path());
    let named = remote.events.count("Named");
    let node = remote.start(open(machine.path(), unsorted())).await;
    for number in 40..80 {
        node.replicate(number, 10 << 10).await;
    }
    until("a manifest counts", || remote.events.count("Named") > named).await;
    sleep(3 * remote.settings.keep).await;
    node.kill().await;
    assert_eq!(remote.events.count("Damaged"), 0);
    assert_eq!(remote.restored().await, numbered(80, 10 << 10));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_removed_while_the_newest_manifest_has_damage() {
    let mut remote = remote();
    remote.settings.keep = Duration::from_secs(900);
    remote.format = Arc::new(WithDamage);
    let machine = tempfile::tempdir().unwrap();
    // Content that nothing names.
    let old = files::content_path(0, ContentDigest::of(b"7"));
    remote.bucket.put(&old, "content".into()).await.unwrap();
    let node = remote.start(open(machine.path(), unsorted())).await;
    // The segment rots before the bucket has it as a file.
    *remote.faults.hangs_in.lock().unwrap() = Some("/content/");
    for number in 0..40 {
        node.replicate(number, 10 << 10).await;
    }
    node.kill().await;
    rot(machine.path());
    *remote.faults.hangs_in.lock().unwrap() = None;
    let node = remote.start(open(machine.path(), unsorted())).await;
    until("damage is reported", || remote.events.count("Damaged") > 0).await;
    for number in 40..80 {
        node.replicate(number, 10 << 10).await;
    }
    sleep(3 * remote.settings.keep).await;
    node.kill().await;
    // The next owner knows it from the manifest.
    let node = remote.start(open(machine.path(), unsorted())).await;
    assert_eq!(remote.events.count("Damaged"), 1);
    sleep(3 * remote.settings.keep).await;
    assert!(remote.bucket.size(&old).await.unwrap().is_some());
    node.kill().await;
}

fn parts(remote: &Remote, engine: Arc<LocalEngine>, kept_term: Option<u64>) -> ReplicaParts {
    ReplicaParts {
        source: engine,
        bucket: remote.bucket.clone(),
        settings: remote.settings,
        format: Arc::new(Lines),
        observer: Arc::clone(&remote.events) as _,
        claim: OwnerClaim {
            node: "a".to_owned(),
            endpoint: "a:6925".to_owned(),
            kept_term,
            take_over: None,
            inherits: None,
            process: String::new(),
        },
        keys: None,
        membership: None,
        keep_term: Arc::new(|_| Ok(())),
    }
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_ends_releases_the_store_with_all_its_records() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let engine = open(machine.path(), config(true));
    let owner = ReplicaOwner::begin(parts(&remote, Arc::clone(&engine), None), None).await;
    let (stop, stopped) = watch::channel(false);
    let runs = tokio::spawn(owner.unwrap().run(stopped, watch::channel(false).1));
    for number in 0..20 {
        append(&engine, data(number, 3_000), Durability::Durable)
            .await
            .unwrap();
    }
    stop.send(true).unwrap();
    assert!(matches!(runs.await.unwrap(), ShipEnd::Shipped));
    let record = OwnerRecord::read(&remote.bucket)
        .await
        .unwrap()
        .unwrap()
        .value;
    assert_eq!((record.term, record.state), (1, OwnerState::Released));
    assert_eq!(remote.restored().await, numbered(20, 3_000));
}

#[tokio::test(start_paused = true)]
async fn a_directory_of_another_or_an_older_store_takes_it_from_nobody() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let owned = async |directory: &Path, kept_term, take_over| {
        let engine = open(directory, config(true));
        let mut parts = parts(&remote, Arc::clone(&engine), kept_term);
        parts.claim.take_over = take_over;
        let owner = ReplicaOwner::begin(parts, None).await?;
        let (stop, stopped) = watch::channel(false);
        let runs = tokio::spawn(owner.run(stopped, watch::channel(false).1));
        let appended = append(&engine, data(1, 100), Durability::Replicated).await;
        appended.unwrap();
        stop.send(true).unwrap();
        runs.await.unwrap();
        Ok::<_, OwnerError>(())
    };
    let released = async || {
        let record = OwnerRecord::read(&remote.bucket).await.unwrap();
        let record = record.unwrap().value;
        (record.state == OwnerState::Released).then_some(record.term)
    };
    owned(machine.path(), None, None).await.unwrap();
    assert_eq!(released().await, Some(1));
    let other = tempfile::tempdir().unwrap();
    let refused = owned(other.path(), None, None).await.err().unwrap();
    assert!(
        matches!(refused, OwnerError::Ship(ShipError::OtherStore { .. })),
        "{refused}"
    );
    assert_eq!(released().await, Some(1), "another store claims nothing");
    let old = tempfile::tempdir().unwrap();
    copy_store(machine.path(), old.path());
    owned(machine.path(), Some(1), None).await.unwrap();
    for take_over in [None, Some(TakeOver::Any)] {
        let refused = owned(old.path(), Some(1), take_over).await.err().unwrap();
        assert!(
            matches!(&refused, OwnerError::Superseded { owner, .. } if owner.term == 2),
            "{refused}"
        );
        assert_eq!(released().await, Some(2));
    }
    // Without its term only the rows show that it is old.
    let refused = owned(old.path(), None, None).await.err().unwrap();
    assert!(
        matches!(refused, OwnerError::Ship(ShipError::Diverged { .. })),
        "{refused}"
    );
    assert_eq!(released().await, Some(2), "it claims nothing");
    owned(machine.path(), Some(2), None).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_take_over_that_is_refused_leaves_the_healthy_owner_alone() {
    // Only rows show that a directory is old, or also files.
    for records in [2, 60] {
        let remote = remote();
        let machine = tempfile::tempdir().unwrap();
        remote
            .start(open(machine.path(), config(true)))
            .await
            .end()
            .await;
        let old = copied(machine.path());
        let engine = open(machine.path(), config(true));
        let owner = ReplicaOwner::begin(parts(&remote, Arc::clone(&engine), Some(1)), None).await;
        let (_stop, stopped) = watch::channel(false);
        let runs = tokio::spawn(owner.unwrap().run(stopped, watch::channel(false).1));
        let replicate = async |number| {
            let appended = append(&engine, data(number, 10 << 10), Durability::Replicated);
            assert_eq!(appended.await.unwrap(), Durability::Replicated);
        };
        for number in 0..records {
            replicate(number).await;
        }
        if records > 2 {
            until("a manifest counts", || remote.events.count("Named") > 0).await;
        }
        let late = open(old.path(), config(true));
        // A person takes over without the term, or the name and the term of the owner were copied.
        for (node, kept_term, take_over) in [("b", None, Some(TakeOver::Any)), ("a", Some(2), None)]
        {
            let mut parts = parts(&remote, Arc::clone(&late), kept_term);
            parts.claim.node = node.to_owned();
            parts.claim.take_over = take_over;
            let refused = ReplicaOwner::begin(parts, None).await.err().unwrap();
            assert!(
                matches!(refused, OwnerError::Ship(ShipError::Diverged { .. })),
                "{refused}"
            );
            assert_eq!(ReplicaTail::newest_term(&remote.bucket).await.unwrap(), 2);
        }
        replicate(records).await;
        let record = OwnerRecord::read(&remote.bucket).await.unwrap().unwrap();
        let record = record.value;
        assert_eq!((&*record.node, record.term), ("a", 2));
        assert_eq!(record.state, OwnerState::Serving);
        runs.abort();
        let _ = runs.await;
        assert_eq!(remote.restored().await, numbered(records + 1, 10 << 10));
    }
}

/// Copies a data directory whose daemon has ended.
fn copy_store(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => {
                std::fs::create_dir(&to).unwrap();
                copy_store(&entry.path(), &to);
            }
            false => drop(std::fs::copy(entry.path(), to).unwrap()),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_manifest_beyond_its_bound_is_neither_written_nor_read() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let largest = usize::try_from(files::LARGEST_MANIFEST).unwrap();
    for (bytes, event) in [(largest + 1, "Failed"), (largest, "Named")] {
        let engine = open(machine.path(), config(true));
        let tail = remote.own().await;
        let mut shipper = remote.begin(&engine, &tail).await.unwrap();
        shipper.files.format = Arc::new(Padded(bytes));
        let (_stop, stopped) = watch::channel(false);
        let runs = tokio::spawn(async move { shipper.run(stopped).await });
        for number in 0..30 {
            let appended = append(&engine, data(number, 10 << 10), Durability::Replicated);
            appended.await.unwrap();
        }
        until("the manifest is written or refused", || {
            remote.events.count(event) > 0
        })
        .await;
        assert_eq!(remote.events.count("Named") > 0, event == "Named");
        runs.abort();
        let _ = runs.await;
    }
    let events = remote.events.0.lock().unwrap().clone();
    let failed = events.iter().find(|event| event.starts_with("Failed"));
    assert!(failed.unwrap().contains("sorter_step_bytes"), "{failed:?}");
    let padded = Padded(largest);
    let copy = ReplicaCopy::open(&remote.bucket, &padded, None).await;
    assert!(copy.unwrap().unwrap().manifest().is_some());
    let name = remote.bucket.list(files::MANIFESTS).await.unwrap();
    let path = format!("{}/{}", files::MANIFESTS, name.last().unwrap().name);
    let (bytes, _) = remote.bucket.read(&path, u64::MAX).await.unwrap().unwrap();
    let larger = [&bytes[..], &b"#"[..]].concat();
    remote.bucket.put(&path, larger.into()).await.unwrap();
    let refused = ReplicaCopy::open(&remote.bucket, &padded, None).await;
    let refused = refused.err().unwrap().to_string();
    assert!(
        refused.contains("the manifest") && refused.contains("above 67108864"),
        "{refused}"
    );
}

#[tokio::test(start_paused = true)]
async fn an_owner_ends_with_its_journal() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    let engine = open(machine.path(), config(true));
    let owner = ReplicaOwner::begin(parts(&remote, Arc::clone(&engine), None), None).await;
    let (_stop, stopped) = watch::channel(false);
    let runs = tokio::spawn(owner.unwrap().run(stopped, watch::channel(false).1));
    engine.stop(Unreplicated::Moved {
        owner: "b".to_owned(),
        term: 2,
    });
    assert!(matches!(runs.await.unwrap(), ShipEnd::Journal));
}

#[tokio::test(start_paused = true)]
async fn a_manifest_counts_once_the_tail_has_all_that_is_durable_at_its_end() {
    let mut remote = remote();
    // Only requests for REPLICATED make the owner store rows before this time.
    remote.settings.interval = Duration::from_secs(60);
    let machine = tempfile::tempdir().unwrap();
    let node = remote.start(open(machine.path(), config(true))).await;
    *remote.faults.hangs_in.lock().unwrap() = Some("/content/");
    for number in 0..30 {
        node.replicate(number, 10 << 10).await;
    }
    sleep(Duration::from_secs(10)).await;
    // A run that is built now rests on this record, as it would on a trim.
    let appended = append(&node.engine, data(30, 10 << 10), Durability::Durable);
    appended.await.unwrap();
    assert_eq!(remote.events.count("Named"), 0);
    *remote.faults.hangs_in.lock().unwrap() = None;
    until("a manifest counts", || remote.events.count("Named") > 0).await;
    node.kill().await;
    assert_eq!(remote.restored().await, numbered(31, 10 << 10));
}

#[tokio::test(start_paused = true)]
async fn an_owner_does_not_count_on_unnamed_content_of_another() {
    let remote = remote();
    let machine = tempfile::tempdir().unwrap();
    // The first owner dies after it has sent content, and before it names it.
    let tail = remote.own().await;
    let engine = open(machine.path(), config(true));
    let mut shipper = remote.begin(&engine, &tail).await.unwrap();
    *remote.faults.hangs_in.lock().unwrap() = Some("0/manifests/");
    let (_stop, stopped) = watch::channel(false);
    let runs = tokio::spawn(async move { shipper.run(stopped).await });
    for number in 0..30 {
        append(&engine, data(number, 10 << 10), Durability::Replicated)
            .await
            .unwrap();
    }
    while remote
        .bucket
        .list_below(files::CONTENT)
        .await
        .unwrap()
        .len()
        < 2
    {
        sleep(Duration::from_secs(1)).await;
    }
    sleep(Duration::from_secs(60)).await;
    runs.abort();
    let _ = runs.await;
    drop((engine, tail));
    *remote.faults.hangs_in.lock().unwrap() = None;
    let node = remote.start(open(machine.path(), config(true))).await;
    until("a manifest counts", || remote.events.count("Named") > 0).await;
    node.kill().await;
    let copy = ReplicaCopy::open(&remote.bucket, &Lines, None)
        .await
        .unwrap()
        .unwrap();
    let own = format!("{}/2/", files::CONTENT);
    assert!(
        copy.files()
            .values()
            .all(|file| file.path.starts_with(&own))
    );
    assert_eq!(remote.restored().await, numbered(30, 10 << 10));
}

/// Size of record number `number`.
fn size_of(number: usize) -> usize {
    1 + number * 7919 % 12_000
}

/// Machines are lost with their disks, one after the other, at random moments: while the bucket answers 503 or loses
/// answers, and while one kind of request hangs. Nothing that was REPLICATED is lost, and no record is out of its order.
#[tokio::test(start_paused = true)]
async fn machines_lost_at_any_moment_lose_nothing_acknowledged() {
    let seeds = match std::env::var("WALD_MACHINES") {
        Ok(count) => (0..count.parse().unwrap()).collect(),
        Err(_) => seeds(),
    };
    for seed in seeds {
        println!("seed {seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let mut remote = remote();
        remote.settings.interval = Duration::from_millis(random.random_range(10..5_000));
        let mut machine = tempfile::tempdir().unwrap();
        let mut next = 0;
        for _ in 0..3 {
            let node = remote.start(open(machine.path(), config(true))).await;
            *remote.faults.weather.lock().unwrap() = Some(Weather::new(seed, 0.1, 0.2));
            for _ in 0..random.random_range(0..30) {
                let level = match random.random_bool(0.5) {
                    true => Durability::Durable,
                    false => Durability::Replicated,
                };
                match append(&node.engine, data(next, size_of(next)), level).await {
                    Ok(_) | Err(AppendError::ReplicationUnknown) => next += 1,
                    // The record was not appended.
                    Err(AppendError::BucketDown | AppendError::ReplicaBehind { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            *remote.faults.weather.lock().unwrap() = None;
            // The bucket answers again. This ack is for all records before, too.
            let mut acked = loop {
                let record = data(next, size_of(next));
                match append(&node.engine, record, Durability::Replicated).await {
                    Ok(_) => {
                        next += 1;
                        break next;
                    }
                    Err(AppendError::ReplicationUnknown) => next += 1,
                    Err(AppendError::BucketDown | AppendError::ReplicaBehind { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
                sleep(Duration::from_secs(1)).await;
            };
            let hangs = [None, Some("/content/"), Some("/manifests/"), Some("/db/")];
            let hangs = hangs[random.random_range(0..hangs.len())];
            *remote.faults.hangs_in.lock().unwrap() = hangs;
            let mut waiting = Vec::new();
            for _ in 0..random.random_range(0..30) {
                let level = match random.random_bool(0.3) {
                    true => Durability::Replicated,
                    false => Durability::Durable,
                };
                let record = batch([data(next, size_of(next))]);
                let appended = node.engine.submit(None, record, Some(level));
                if hangs == Some("/db/") {
                    waiting.push((next, tokio::spawn(appended)));
                } else {
                    match appended.await {
                        Ok(appended) if appended.durability == Durability::Replicated => {
                            acked = next + 1;
                        }
                        Ok(_) => {}
                        // 16 sealed segments wait for their upload, which hangs.
                        Err(AppendError::ReplicaBehind { .. }) => break,
                        Err(error) => panic!("{error}"),
                    }
                }
                next += 1;
            }
            if hangs == Some("/db/") {
                // A row or two are stored, and then nothing again.
                sleep(Duration::from_millis(random.random_range(0..9_000))).await;
                *remote.faults.hangs_in.lock().unwrap() = None;
                sleep(Duration::from_millis(random.random_range(0..80))).await;
                *remote.faults.hangs_in.lock().unwrap() = hangs;
            }
            // Rows of a drained segment leave within this time.
            sleep(Duration::from_secs(random.random_range(0..40))).await;
            node.kill().await;
            for (number, appended) in waiting {
                if appended.is_finished()
                    && let Ok(appended) = appended.await.unwrap()
                    && appended.durability == Durability::Replicated
                {
                    acked = acked.max(number + 1);
                }
            }
            *remote.faults.hangs_in.lock().unwrap() = None;
            machine = remote.fetched(&config(true), RestoredAs::Store, None).await;
            let copy = copied(machine.path());
            let found = records(&open(copy.path(), config(false)));
            assert!(
                found.len() >= acked,
                "{} of {acked} acknowledged",
                found.len()
            );
            for (number, record) in found.iter().enumerate() {
                assert!(*record == data(number, size_of(number)), "record {number}");
            }
            next = found.len();
        }
    }
}

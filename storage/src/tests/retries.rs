//! Producers and writers that retry over kills, power cuts, failed flushes and full disks: every record is
//! there exactly once and in order. Behind an answered fence there is no record of an older writer.
//!
//! `WALD_RETRIES` sets the number of runs, `WALD_SEED` runs one seed only.

use std::collections::BTreeMap;
use std::collections::VecDeque;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::api::engine::Fenced;
use crate::api::error::FenceError;
use crate::api::record::Producer;
use crate::base::ids::Name;
use crate::base::promise::Awaited;

const LOGS: [&str; 3] = ["a", "b", "c"];

/// One producer: its requests under way, and its acknowledged records.
struct Sender {
    id: &'static str,
    logs: Vec<&'static str>,
    epoch: u64,
    /// Records acknowledged, in all epochs.
    acked: u64,
    /// Records ever sent, answered or not.
    ever_sent: u64,
    /// The number of the first record of this epoch.
    base: u64,
    /// Sent and not answered: number of the record.
    sent: VecDeque<(u64, Ticket)>,
}

impl Sender {
    fn batch(&self, number: u64) -> Batch {
        let data = format!("{} {number}", self.id);
        let parts: Vec<LogRecords> = self
            .logs
            .iter()
            .map(|log| LogRecords {
                log: LogName::new(log).unwrap(),
                records: vec![record(data.as_bytes())].into(),
                guard: Guard::default(),
                producer: Some(Producer {
                    id: Name::new(self.id).unwrap(),
                    epoch: self.epoch,
                    sequence: number - self.base,
                }),
            })
            .collect();
        Batch {
            logs: parts,
            ..Batch::default()
        }
    }
}

/// A writer that fences the log `f` and then appends to it, until another writer fences it.
struct Writer {
    id: u8,
    epoch: Option<u64>,
    fence: Option<Awaited<Result<Fenced, FenceError>>>,
    appends: Vec<Ticket>,
}

struct Run {
    random: StdRng,
    disk: SimDisk,
    clock: Arc<TestClock>,
    config: StorageConfig,
    senders: Vec<Sender>,
    writers: Vec<Writer>,
    /// Answered fences: epoch, and the tail that no older epoch may pass.
    fences: Vec<(u64, u64)>,
    counts: Counts,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    starts: u64,
    records: u64,
    repeats: u64,
    fences: u64,
    refused: u64,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let config = StorageConfig {
            max_batch_bytes: 20_000,
            producer_window: random.random_range(40..200),
            ..small_config()
        };
        let sender = |id, logs: &[&'static str]| Sender {
            id,
            logs: logs.to_vec(),
            epoch: 0,
            acked: 0,
            ever_sent: 0,
            base: 0,
            sent: VecDeque::new(),
        };
        let writer = |id| Writer {
            id,
            epoch: None,
            fence: None,
            appends: Vec::new(),
        };
        Self {
            random,
            disk: SimDisk::new(),
            clock: TestClock::new(),
            config,
            senders: vec![
                sender("one", &["a"]),
                sender("two", &["a"]),
                sender("both", &["a", "b"]),
                sender("three", &["c", "b", "a"]),
            ],
            writers: vec![writer(0), writer(1)],
            fences: Vec::new(),
            counts: Counts::default(),
        }
    }

    fn chance(&mut self, of_100: u32) -> bool {
        self.random.random_range(0..100) < of_100
    }

    fn run(&mut self) {
        for _ in 0..self.random.random_range(2..7u32) {
            let core = self.start(20);
            self.work(&core);
            if self.chance(30) {
                let _cut = core.close();
            }
            self.forget_what_was_under_way();
            drop(core);
            if self.chance(60) || self.disk.is_crashed() {
                self.disk.crash(self.random.random());
            }
            self.disk = self.disk.copy();
        }
        // The last start runs until everything is answered.
        let core = self.start(0);
        self.send_rest(&core);
        self.check(&core);
    }

    /// Starts; in `cuts` of 100 cases a power cut comes meanwhile, or soon after.
    fn start(&mut self, cuts: u32) -> Arc<Core> {
        loop {
            self.counts.starts += 1;
            if self.chance(cuts) {
                self.disk.crash_after(self.random.random_range(1..60));
            }
            match open(&self.disk, &self.config, &self.clock) {
                Ok((core, report)) => {
                    assert_eq!(report.findings, Vec::<String>::new());
                    return core;
                }
                Err(error) => assert!(self.disk.is_crashed(), "{error}"),
            }
            self.disk.crash(self.random.random());
            self.disk = self.disk.copy();
        }
    }

    /// The connection is gone, so the outcome of these requests is unknown.
    fn forget_what_was_under_way(&mut self) {
        for sender in &mut self.senders {
            sender.sent.clear();
        }
        for writer in &mut self.writers {
            writer.fence = None;
            writer.appends.clear();
        }
    }

    fn work(&mut self, core: &Arc<Core>) {
        if self.chance(40) {
            self.disk.crash_after(self.random.random_range(1..300));
        }
        for _ in 0..self.random.random_range(1..60u32) {
            for _ in 0..self.random.random_range(1..10u32) {
                match self.random.random_range(0..10) {
                    0..7 => self.send(core),
                    _ => self.write(core),
                }
            }
            match self.random.random_range(0..100) {
                0..4 => {
                    let part = [0, 8, 512, 4000][self.random.random_range(0..4)];
                    let full = std::io::ErrorKind::StorageFull;
                    self.disk.fail_write(1, full, part);
                }
                4 => self.disk.fail_sync(1),
                _ => {}
            }
            if self.chance(30) {
                // Batches that are written and not flushed are repeated too.
                core.write_in_turn();
            } else {
                core.turn();
            }
            self.clock.advance(self.random.random_range(0..3000));
            self.take_answers();
            if core.journal.failure().is_some() {
                return;
            }
        }
    }

    /// One producer sends its next record, or repeats one.
    fn send(&mut self, core: &Arc<Core>) {
        let level = [Durability::Written, Durability::Durable][self.random.random_range(0..2)];
        let new_epoch = self.chance(3);
        let again = self.chance(15);
        let index = self.random.random_range(0..self.senders.len());
        let sender = &mut self.senders[index];
        if sender.sent.len() > 30 {
            return;
        }
        if new_epoch && sender.acked == sender.ever_sent {
            // Only a producer that knows all outcomes can begin a new epoch.
            sender.epoch += 1;
            sender.base = sender.acked;
        }
        let number = match sender.sent.back() {
            Some((number, _)) if again => *number,
            Some((number, _)) => number + 1,
            None => sender.acked,
        };
        sender.ever_sent = sender.ever_sent.max(number + 1);
        let batch = sender.batch(number);
        // WRITTEN is no promise over a power cut: it is not counted as acknowledged.
        sender.sent.push_back((number, core.enqueue(batch, level)));
        if !again {
            let filler = vec![7; self.random.random_range(0..2000)];
            drop(core.enqueue(batch_of("filler", &filler), Durability::Written));
        }
    }

    fn write(&mut self, core: &Arc<Core>) {
        let fence = self.chance(15);
        let index = self.random.random_range(0..self.writers.len());
        let writer = &mut self.writers[index];
        match writer.epoch {
            Some(epoch) if !fence => {
                let mut batch = batch_of("f", &epoch.to_le_bytes());
                batch.logs[0].guard.writer_epoch = Some(epoch);
                writer
                    .appends
                    .push(core.enqueue(batch, Durability::Durable));
            }
            _ if writer.fence.is_none() => writer.fence = Some(core.fence(target("f"), None)),
            _ => {}
        }
    }

    fn take_answers(&mut self) {
        for sender in &mut self.senders {
            let mut failed = false;
            for (number, mut ticket) in std::mem::take(&mut sender.sent) {
                if failed {
                    // Sent again later, in order.
                    continue;
                }
                match settled(&mut ticket) {
                    None => sender.sent.push_back((number, ticket)),
                    Some(Ok(appended)) => {
                        self.counts.repeats += u64::from(appended.appends[0].deduplicated);
                        if appended.durability == Durability::Durable {
                            assert!(number <= sender.acked, "acks come in order");
                            sender.acked = sender.acked.max(number + 1);
                        } else {
                            // Sent again later, for a durable answer.
                            failed = true;
                        }
                    }
                    Some(Err(error)) => {
                        let passes = matches!(
                            error,
                            AppendError::DiskFull(_)
                                | AppendError::Unknown(_)
                                | AppendError::JournalFailed(_)
                                | AppendError::ProducerGap { .. }
                        );
                        assert!(passes, "{error}");
                        self.counts.refused += 1;
                        failed = true;
                    }
                }
            }
        }
        for writer in &mut self.writers {
            writer
                .appends
                .retain_mut(|ticket| settled(ticket).is_none());
            let Some(fence) = &mut writer.fence else {
                continue;
            };
            let mut context = Context::from_waker(Waker::noop());
            if let Poll::Ready(answer) = Future::poll(Pin::new(fence), &mut context) {
                writer.fence = None;
                if let Ok(fenced) = answer {
                    assert!(
                        self.fences
                            .iter()
                            .all(|(epoch, _)| *epoch != fenced.writer_epoch)
                    );
                    self.fences
                        .push((fenced.writer_epoch, fenced.tail_lsn.get()));
                    writer.epoch = Some(fenced.writer_epoch);
                    self.counts.fences += u64::from(writer.id < 2);
                }
            }
        }
    }

    fn send_rest(&mut self, core: &Arc<Core>) {
        for index in 0..self.senders.len() {
            let end = self.senders[index].acked + 40;
            while self.senders[index].acked < end {
                let sender = &mut self.senders[index];
                let batch = sender.batch(sender.acked);
                let mut ticket = core.enqueue(batch, Durability::Durable);
                core.turn();
                let appended = settled(&mut ticket).unwrap().unwrap();
                self.counts.repeats += u64::from(appended.appends[0].deduplicated);
                sender.acked += 1;
            }
        }
    }

    fn check(&mut self, core: &Arc<Core>) {
        for log in LOGS {
            let mut numbers: BTreeMap<String, u64> = BTreeMap::new();
            for data in contents(core, log, Visibility::Durable).unwrap() {
                let text = String::from_utf8(data).unwrap();
                let (id, number) = text.split_once(' ').unwrap();
                let next = numbers.entry(id.to_owned()).or_default();
                assert_eq!(number.parse::<u64>().unwrap(), *next, "{id} in {log}");
                *next += 1;
                self.counts.records += 1;
            }
            for sender in self.senders.iter().filter(|s| s.logs.contains(&log)) {
                assert_eq!(
                    numbers.get(sender.id),
                    Some(&sender.acked),
                    "{} in {log}",
                    sender.id
                );
            }
        }
        let Ok(records) = contents(core, "f", Visibility::Durable) else {
            return;
        };
        for (lsn, data) in (0..).zip(records) {
            let epoch = u64::from_le_bytes(data.try_into().unwrap());
            for (fence, tail) in &self.fences {
                assert!(
                    epoch >= *fence || lsn < *tail,
                    "epoch {epoch} at {lsn} behind {fence}"
                );
            }
        }
    }
}

fn batch_of(log: &str, data: &[u8]) -> Batch {
    batch(&[(log, &[data])])
}

#[test]
fn retries_until_an_answer_store_each_record_once_and_pass_no_fence() {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let seeds = match number("WALD_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("WALD_RETRIES").unwrap_or(150),
    };
    let mut all = Counts::default();
    for seed in seeds {
        let outcome = std::panic::catch_unwind(|| {
            let mut run = Run::new(seed);
            run.run();
            run.counts
        });
        match outcome {
            Ok(counts) => {
                all.starts += counts.starts;
                all.records += counts.records;
                all.repeats += counts.repeats;
                all.fences += counts.fences;
                all.refused += counts.refused;
            }
            Err(panic) => {
                eprintln!("repeat with: WALD_SEED={seed} cargo test -p wald-storage retries");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{all:?}");
    assert!(all.repeats > 0 && all.records > 0);
}

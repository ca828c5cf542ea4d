//! SIGKILL under load, again and again on one directory. A ledger outside of the daemon
//! knows every attempt and every ack; after each kill, everything is read back and held
//! against it.
//!
//! `WALD_KILLS` (5) kills with at least `WALD_ACKS` (100) acks before each; `WALD_SEED`
//! repeats the choices of a run, though not how its threads met.
//!
//! At least a fifth of the kills are aimed at a roll: the journal's files are watched, and
//! the daemon is killed when the seal of a segment is seen. How many died before the next
//! segment had its first frame is counted and printed.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod journal;
mod ledger;
#[path = "../support/mod.rs"]
mod support;
mod writer;

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use support::{Daemon, payload, wald};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use wald_proto::v1;
use wald_proto::v1::wal_service_client::WalServiceClient;

use journal::Journal;
use ledger::{Contents, Ledger};
use writer::Writer;

const WRITERS: usize = 16;
/// Small, so that a roll comes with every few hundred appends.
const SEGMENT: [&str; 4] = ["--segment-bytes", "64KiB", "--pool-segments", "1"];

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// One life of the daemon, from start to kill.
struct Life {
    daemon: Daemon,
    acks: Arc<Semaphore>,
    writers: Vec<JoinHandle<()>>,
    reader: JoinHandle<Vec<(String, u64, String)>>,
}

impl Life {
    async fn start(daemon: Daemon, ledger: &Arc<Mutex<Ledger>>, random: &mut StdRng) -> Self {
        let acks = Arc::new(Semaphore::new(0));
        let reader = tokio::spawn(follow(daemon.wal().await));
        let mut writers = Vec::new();
        for number in 0..WRITERS {
            let writer = Writer {
                number,
                wal: daemon.wal().await,
                ledger: Arc::clone(ledger),
                acks: Arc::clone(&acks),
                random: StdRng::seed_from_u64(random.random()),
            };
            writers.push(tokio::spawn(writer.run()));
        }
        Self {
            daemon,
            acks,
            writers,
            reader,
        }
    }

    /// Waits for so many acks, and kills: at a moment drawn, or in the middle of a roll.
    /// Gives back what a reader had been shown.
    async fn kill(
        self,
        acks: u64,
        roll: Option<Journal>,
        random: &mut StdRng,
    ) -> Vec<(String, u64, String)> {
        let acks = u32::try_from(acks).unwrap();
        self.acks.acquire_many(acks).await.unwrap().forget();
        match roll {
            None => tokio::time::sleep(Duration::from_micros(random.random_range(0..3_000))).await,
            // On this thread to the last step: between seal and link there is one flush.
            Some(mut journal) => tokio::task::block_in_place(|| {
                journal.wait_for_seal();
                self.daemon.signal(Signal::KILL);
            }),
        }
        self.daemon.signal(Signal::KILL);
        self.daemon.ended().await;
        for writer in self.writers {
            writer.await.unwrap();
        }
        self.reader.await.unwrap()
    }
}

/// What a reader who follows everything is shown until the connection ends.
async fn follow(mut wal: WalServiceClient<Channel>) -> Vec<(String, u64, String)> {
    let request = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::All(v1::AllLogs {})),
        start: Some(v1::scan_request::Start::TailOffset(0)),
        follow: true,
        ..v1::ScanRequest::default()
    };
    let mut seen = Vec::new();
    let Ok(answer) = wal.scan(request).await else {
        return seen;
    };
    let mut messages = answer.into_inner();
    while let Ok(Some(message)) = messages.message().await {
        assert_eq!(message.gaps, [], "nothing is missing");
        seen.extend(support::records(&message.batches));
    }
    seen
}

/// Everything that is there, read as any client would; dense from 0, and up to the tail.
async fn contents(daemon: &Daemon) -> Contents {
    let request = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::All(v1::AllLogs {})),
        ..v1::ScanRequest::default()
    };
    let mut messages = daemon.wal().await.scan(request).await.unwrap().into_inner();
    let mut found: Contents = BTreeMap::new();
    while let Some(message) = messages.message().await.unwrap() {
        assert_eq!(message.gaps, [], "nothing is missing");
        for batch in message.batches {
            let log = found.entry(batch.log.clone()).or_default();
            let next = u64::try_from(log.len()).unwrap();
            assert_eq!(
                batch.first_lsn,
                Some(next),
                "lsns of {} are dense",
                batch.log
            );
            log.extend(batch.records.iter().map(payload));
        }
    }
    let request = v1::ListLogsRequest {
        page_size: 1_000,
        ..v1::ListLogsRequest::default()
    };
    let logs = daemon.logs().await.list_logs(request).await.unwrap();
    for log in logs.into_inner().logs {
        let read = found.get(&log.name).map_or(0, Vec::len);
        let read = Some(u64::try_from(read).unwrap());
        assert_eq!(log.tail_lsn, read, "{} is read up to its tail", log.name);
        assert_eq!(
            log.durable_lsn, read,
            "what a start shows of {} is durable",
            log.name
        );
    }
    found
}

/// Starts a daemon and kills it while it recovers, or soon after.
fn kill_while_starting(directory: &Path, after: Duration) {
    let mut command = wald();
    command.arg("--data-dir").arg(directory).args(SEGMENT);
    command.args([
        "--listen",
        ":0",
        "--http-listen",
        ":0",
        "--log-format",
        "json",
    ]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while started.elapsed() < after {
        std::hint::spin_loop();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        let line = line.unwrap();
        assert!(!line.contains("panicked"), "{line}");
    }
}

/// Counts that the test closes with.
#[derive(Debug, Default)]
struct Counts {
    kills: u64,
    /// Sent when the seal of a segment was seen.
    aimed: u64,
    /// Of all, those after which the journal ended with a seal.
    in_roll: u64,
    while_starting: u64,
}

async fn run(seed: u64, kills: u64, acks: u64) {
    let directory = tempfile::tempdir().unwrap();
    let mut random = StdRng::seed_from_u64(seed);
    let ledger = Arc::new(Mutex::new(Ledger::default()));
    let mut counts = Counts::default();
    let mut epoch = 0;
    while counts.kills < kills {
        let daemon = Daemon::start_in(directory.path(), &SEGMENT);
        let now = daemon.start["recovery_epoch"].as_u64().unwrap();
        assert!(
            now > epoch,
            "the recovery epoch rises with every unclean start"
        );
        epoch = now;
        let found = contents(&daemon).await;
        ledger.lock().check(&found);

        // One in four is aimed at a roll, and more while too few of them have hit: the
        // window is one flush, so on a fast device an aimed kill may come just after it.
        let aimed = counts.in_roll * 4 <= counts.kills;
        counts.aimed += u64::from(aimed);
        let roll = aimed.then(|| Journal::open(directory.path()));
        let wanted = random.random_range(acks..acks + acks / 2 + 1);
        let life = Life::start(daemon, &ledger, &mut random).await;
        let seen = life.kill(wanted, roll, &mut random).await;
        ledger.lock().shown(seen);
        counts.kills += 1;
        counts.in_roll += u64::from(Journal::open(directory.path()).ends_with_seal());
        if random.random_bool(0.2) {
            let after = Duration::from_micros(random.random_range(0..20_000));
            kill_while_starting(directory.path(), after);
            counts.while_starting += 1;
        }
    }
    let daemon = Daemon::start_in(directory.path(), &SEGMENT);
    let found = contents(&daemon).await;
    let mut ledger = ledger.lock();
    ledger.check(&found);
    assert!(counts.aimed * 5 >= counts.kills, "{counts:?}");
    println!(
        "{} kills, {} of them aimed at a roll and {} dead between seal and link, {} more while starting; {} segments; {}",
        counts.kills,
        counts.aimed,
        counts.in_roll,
        counts.while_starting,
        journal::segments(directory.path()),
        ledger.summary()
    );
}

#[test]
fn kills_under_load_lose_nothing_acked_and_leave_nothing_half() {
    let kills = setting("WALD_KILLS", 5);
    let acks = setting("WALD_ACKS", 100);
    let seed = setting("WALD_SEED", RandomState::new().build_hasher().finish());
    let outcome = std::panic::catch_unwind(|| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(Box::pin(run(seed, kills, acks)));
    });
    if let Err(panic) = outcome {
        eprintln!(
            "repeat with: WALD_SEED={seed} WALD_KILLS={kills} WALD_ACKS={acks} \
             cargo test -p wald-server --test kill"
        );
        std::panic::resume_unwind(panic);
    }
}

//! SIGKILL under load, again and again on one directory. A ledger outside of the daemon
//! knows every attempt and every ack; after each kill, everything is read back and held
//! against it.
//!
//! `WALD_KILLS` (5) kills with at least `WALD_ACKS` (100) acks before each; `WALD_SEED`
//! repeats the choices of a run, though not how its threads met.
//!
//! At least a fifth of the kills are aimed at a roll: the test watches the journal's files, and
//! kills the daemon when it sees the seal of a segment. It counts and prints the lives that
//! ended before the next segment had its first frame. Most lives sort. Most of their other
//! kills come while a run is being written or the segments it replaces are being removed.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

#[path = "../crash/mod.rs"]
mod crash;
#[path = "../support/mod.rs"]
mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use support::{Daemon, start_arguments, wald};

use crash::journal::{self, Journal};
use crash::ledger::Crash;
use crash::life::{Users, wait_for};
use crash::{seed, setting, sorter};

/// Small, so that a roll comes with every few hundred appends.
const SEGMENT: [&str; 4] = ["--segment-bytes", "64KiB", "--pool-segments", "1"];

/// How a life begins, that sorts or does not.
fn flags(sorts: bool) -> Vec<&'static str> {
    [&SEGMENT, sorter(sorts)].concat()
}

/// Starts a daemon and kills it while it recovers, or soon after.
fn kill_while_starting(directory: &Path, sorts: bool, after: Duration) {
    let mut command = wald();
    let flags = flags(sorts);
    command.arg("--data-dir").arg(directory).args(&flags);
    command.args(start_arguments(&flags));
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
    /// Kills after which the journal ended with a seal.
    in_roll: u64,
    while_starting: u64,
    /// Sent when a run was seen being written.
    sorting: u64,
}

async fn run(seed: u64, kills: u64, acks: u64) {
    let directory = tempfile::tempdir().unwrap();
    let mut random = StdRng::seed_from_u64(seed);
    let mut users = Users::new(&mut random);
    let mut counts = Counts::default();
    while counts.kills < kills {
        let sorts = random.random_bool(0.7);
        let daemon = Daemon::start_in(directory.path(), &flags(sorts));
        users.check(&daemon, Crash::Kill).await;

        // One in four is aimed at a roll, and more while too few of them have hit: the
        // window is one flush, so on a fast device an aimed kill may come just after it.
        let aimed = counts.in_roll * 4 <= counts.kills;
        counts.aimed += u64::from(aimed);
        let roll = aimed.then(|| Journal::open(directory.path()));
        let sorting = sorts && !aimed && random.random_bool(0.8);
        counts.sorting += u64::from(sorting);
        let wanted = random.random_range(acks..acks + acks / 2 + 1);
        let life = users.begin(daemon).await;
        wait_for(&life.load.acks, wanted).await;
        if sorting {
            tokio::task::block_in_place(|| journal::wait_for_sorting(directory.path()));
        }
        match roll {
            None => tokio::time::sleep(Duration::from_micros(random.random_range(0..3_000))).await,
            // On this thread to the last step: between seal and link there is one flush.
            Some(mut journal) => tokio::task::block_in_place(|| {
                journal.wait_for_seal();
                life.daemon.signal(Signal::KILL);
            }),
        }
        life.daemon.signal(Signal::KILL);
        users.end(life).await;
        counts.kills += 1;
        counts.in_roll += u64::from(journal::ends_with_seal(directory.path()));
        if random.random_bool(0.2) {
            let after = Duration::from_micros(random.random_range(0..20_000));
            kill_while_starting(directory.path(), random.random_bool(0.5), after);
            counts.while_starting += 1;
        }
    }
    let daemon = Daemon::start_in(directory.path(), &flags(true));
    users.check(&daemon, Crash::Kill).await;
    // On a slow device kills that are not aimed hit it too, and then fewer are aimed.
    let at_a_roll = counts.aimed.max(counts.in_roll);
    assert!(at_a_roll * 5 >= counts.kills, "{counts:?}");
    let (shown, lost) = users.shown();
    let runs = journal::runs(directory.path());
    assert!(counts.sorting < 2 || runs > 0, "{counts:?}");
    println!(
        "{} kills, {} of them aimed at a roll and {} dead between seal and link, {} aimed at \
         sorting, {} more while starting; {} segments, {runs} sorted runs\n{}\n{shown} records \
         shown to readers, {lost} of them lost",
        counts.kills,
        counts.aimed,
        counts.in_roll,
        counts.sorting,
        counts.while_starting,
        journal::segments(directory.path()),
        users.counts().summary()
    );
}

#[test]
fn kills_under_load_lose_nothing_acked_and_leave_nothing_half() {
    let kills = setting("WALD_KILLS", 5);
    let acks = setting("WALD_ACKS", 100);
    let seed = seed();
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

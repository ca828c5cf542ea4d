//! Power cuts under load, of the file systems that data directories are on. A ledger
//! outside of the daemon knows every attempt and every ack, and at which level; after each
//! cut, everything is read back and held against it:
//!
//! - no record that was acked DURABLE is lost, nor a record that a reader saw at that
//!   visibility, nor a Sync's records, nor a trim, nor a fence;
//! - of weaker acks only the last ones are lost, of each log and in the order of the journal,
//!   and `survived_position` reports exactly which;
//! - no record is there that was refused or never tried, twice, in part, or with other bytes;
//!   no position is given out twice.
//!
//! `WALD_CUTS` (20) cuts of each file system with at least `WALD_ACKS` (100) DURABLE acks
//! before each; `WALD_SEED` repeats the choices of a run, though not how its threads met.
//! `WALD_KEEP` names a directory where a run that fails leaves its image.
//!
//! The daemon is stopped just before, so that no answer comes after a cut. All answers before
//! it count, up to the bytes that clients find in their sockets. In some cuts the device stalls
//! first: a flush is then under way, and loses its data. Other cuts are aimed at a roll or at
//! the sorter, or come when no client has asked for a flush for a while, or on a full disk.
//! After some the power fails again while the daemon starts.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

#[path = "../crash/mod.rs"]
mod crash;
mod frozen;
mod machine;
#[path = "../support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rustix::process::Pid;
use support::{Daemon, start_arguments, wald};

use crash::journal::{self, Journal};
use crash::ledger::{Counts, Crash};
use crash::life::{Life, Users, wait_for};
use crash::{seed, setting, sorter};
use frozen::Call;
use machine::{Cut, FileSystem, Machine, write_back_some};

/// Maximum number of cuts for one store: trimmed segments are not given back yet.
const CUTS_OF_A_STORE: u64 = 50;

/// How a life goes, and how it ends.
#[derive(Debug, Clone)]
struct Plan {
    flags: Vec<String>,
    /// DURABLE acks first.
    acks: u64,
    /// Number of further acks for which no client asks for a flush.
    weak: u64,
    /// Leaves this number of bytes of the disk free: at least the MiB that the pool leaves.
    full: Option<u64>,
    /// When the sorter has begun to write a run.
    at_sorting: bool,
    /// At the seal of a segment; or in a flush of a device that stalls; else after a moment.
    at_a_roll: bool,
    at_a_flush: bool,
    after: Duration,
    write_back: bool,
    cut: Cut,
    /// Starts that are cut in turn, each after this time.
    while_starting: Vec<Duration>,
}

impl Plan {
    fn draw(acks: u64, random: &mut StdRng) -> Self {
        let segment = *["64KiB", "64KiB", "256KiB", "1MiB"].choose(random).unwrap();
        let interval = *["5ms", "100ms", "10s"].choose(random).unwrap();
        let mut flags = vec![
            "--segment-bytes",
            segment,
            "--pool-segments",
            "1",
            "--sync-interval",
            interval,
        ];
        let micros =
            |most: u64, random: &mut StdRng| Duration::from_micros(random.random_range(0..=most));
        // Others roll too seldom to wait for it.
        let roll = segment == "64KiB" && random.random_bool(0.5);
        let full = random
            .random_bool(0.05)
            .then(|| random.random_range(1 << 20..2 << 20));
        let weak = if random.random_bool(0.4) && full.is_none() {
            random.random_range(1..200)
        } else {
            0
        };
        let flushes = full.is_none() && weak == 0;
        let at_a_flush = flushes && !roll && random.random_bool(0.9);
        // Not on a full disk: sorting would give its space back.
        let sorts = full.is_none() && random.random_bool(0.5);
        flags.extend(sorter(sorts));
        Self {
            flags: flags.into_iter().map(str::to_owned).collect(),
            acks: random.random_range(acks..=acks + acks / 2),
            weak,
            full,
            // Larger segments are sorted too seldom.
            at_sorting: sorts && segment == "64KiB" && weak == 0 && random.random_bool(0.6),
            at_a_roll: flushes && roll,
            at_a_flush,
            after: micros(3_000, random),
            write_back: random.random_bool(0.4),
            cut: if at_a_flush {
                Cut::Device
            } else {
                *[Cut::Nothing, Cut::Journal, Cut::Device]
                    .choose(random)
                    .unwrap()
            },
            while_starting: (0..random.random_range(0..8u32).saturating_sub(5))
                .map(|_| micros(15_000, random))
                .collect(),
        }
    }
}

/// Summary at the end of a run.
#[derive(Debug, Default)]
struct Tally {
    cuts: u64,
    weak: u64,
    rolls: u64,
    ended_sealed: u64,
    written_back: u64,
    journal_flushed: u64,
    device: u64,
    full: u64,
    sorting: u64,
    runs: u64,
    while_starting: u64,
    /// Cuts in the middle of a flush, and of a write.
    flushing: u64,
    writing: u64,
    /// Acks that were sent before the daemon was stopped, and read after that.
    on_their_way: usize,
    stores: u64,
    counts: Counts,
    shown: u64,
    shown_lost: u64,
    last: Option<Plan>,
    now: Option<Plan>,
}

impl Tally {
    fn add(&mut self, users: &Users) {
        self.stores += 1;
        self.counts.add(&users.counts());
        let (shown, lost) = users.shown();
        self.shown += shown;
        self.shown_lost += lost;
    }
}

/// Starts the daemon, and cuts the power while it recovers or soon after.
fn cut_while_starting(machine: &mut Machine, data: &Path, plan: &Plan, after: Duration) {
    let mut command = wald();
    command.arg("--data-dir").arg(data).args(&plan.flags);
    let own: Vec<&str> = plan.flags.iter().map(|flag| &**flag).collect();
    command.args(start_arguments(&own));
    command.args(["--listen", ":0", "--http-listen", ":0"]);
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(after);
    machine.cut(plan.cut, Pid::from_child(&child), None).kill();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!said.contains("panicked"), "{said}");
    machine.off();
    machine.on();
}

/// The load of a life, and the cut: returns the interrupted work of the daemon, and the number
/// of acks that had been received.
async fn live_and_die(
    machine: &mut Machine,
    life: &Life,
    data: &Path,
    plan: &Plan,
    random: &mut StdRng,
) -> (Vec<Call>, usize) {
    let load = &life.load;
    wait_for(&load.durable_acks, plan.acks).await;
    if let Some(leave) = plan.full {
        tokio::task::block_in_place(|| machine.fill(leave));
        wait_for(&load.full, 20).await;
    } else if plan.weak > 0 {
        load.weak_only.store(true, Ordering::Relaxed);
        load.acks.forget_permits(usize::MAX >> 4);
        wait_for(&load.acks, plan.weak).await;
    }
    if plan.at_sorting {
        tokio::task::block_in_place(|| journal::wait_for_sorting(data));
    }
    let journal = plan.at_a_roll.then(|| Journal::open(data));
    if !plan.at_a_roll && !plan.at_a_flush {
        tokio::time::sleep(plan.after).await;
    }
    // On this thread to the last step: between seal and link there is one flush.
    tokio::task::block_in_place(|| {
        if plan.write_back {
            write_back_some(data, random);
        }
        if let Some(mut journal) = journal {
            journal.wait_for_seal();
        }
        let stall = plan.at_a_flush.then(|| machine.stall());
        if stall.is_some() {
            frozen::wait_for_flush(life.daemon.pid());
            // Who tells of a flush before it has succeeded does so now.
            std::thread::sleep(plan.after);
        }
        let heard = load.acks.available_permits();
        let frozen = machine.cut(plan.cut, life.daemon.pid(), stall);
        frozen.is_heard(life.daemon.port());
        (frozen.kill(), heard)
    })
}

async fn run(machine: &mut Machine, seed: u64, cuts: u64, acks: u64, tally: &mut Tally) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut store: Option<(PathBuf, Users, u64)> = None;
    let mut plan = Plan::draw(acks, &mut random);
    loop {
        let (data, mut users, left) = store.take().unwrap_or_else(|| {
            let data = machine.disk().join(format!("data-{}", tally.stores));
            let lives = random.random_range(1..=CUTS_OF_A_STORE);
            (data, Users::new(&mut random), lives)
        });
        let flags: Vec<&str> = plan.flags.iter().map(String::as_str).collect();
        let daemon = Daemon::start_in(&data, &flags);
        users.check(&daemon, Crash::PowerCut).await;
        machine.empty();
        if tally.cuts == cuts || left == 0 {
            drop(daemon);
            tally.add(&users);
            if tally.cuts == cuts {
                return;
            }
            std::fs::remove_dir_all(&data).unwrap();
            continue;
        }

        tally.now = Some(plan.clone());
        let life = users.begin(daemon).await;
        let load = Arc::clone(&life.load);
        let (calls, heard) = live_and_die(machine, &life, &data, &plan, &mut random).await;
        users.end(life).await;
        tally.on_their_way += load.acks.available_permits() - heard;
        tally.flushing += u64::from(calls.contains(&Call::Flush));
        tally.writing += u64::from(calls.contains(&Call::Write));
        machine.off();
        machine.on();
        tally.cuts += 1;
        tally.weak += u64::from(plan.weak > 0);
        tally.rolls += u64::from(plan.at_a_roll);
        tally.ended_sealed += u64::from(journal::ends_with_seal(&data));
        tally.written_back += u64::from(plan.write_back);
        tally.journal_flushed += u64::from(plan.cut == Cut::Journal);
        tally.device += u64::from(plan.cut == Cut::Device);
        tally.full += u64::from(plan.full.is_some());
        tally.sorting += u64::from(plan.at_sorting);
        tally.runs += u64::from(journal::runs(&data) > 0);
        for after in &plan.while_starting {
            cut_while_starting(machine, &data, &plan, *after);
            tally.while_starting += 1;
        }
        tally.last = Some(std::mem::replace(&mut plan, Plan::draw(acks, &mut random)));
        store = Some((data, users, left - 1));
    }
}

fn cut_the_power(kind: FileSystem) {
    machine::enter_name_space();
    let cuts = setting("WALD_CUTS", 20);
    let acks = setting("WALD_ACKS", 100);
    let seed = seed();
    let mut tally = Tally::default();
    let mut machine = Machine::new(kind);
    let began = Instant::now();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(Box::pin(run(&mut machine, seed, cuts, acks, &mut tally)));
    }));
    if let Err(panic) = outcome {
        if let Some(keep) = std::env::var_os("WALD_KEEP") {
            machine.keep(Path::new(&keep));
        }
        eprintln!(
            "{kind:?}: failed after {} cuts, the last of which was {:?}; the \
             last that began was {:?}. Repeat with: WALD_SEED={seed} WALD_CUTS={cuts} \
             WALD_ACKS={acks} cargo test -p wald-server --test power_cut {} -- --ignored",
            tally.cuts,
            tally.last,
            tally.now,
            format!("{kind:?}").to_lowercase(),
        );
        std::panic::resume_unwind(panic);
    }
    assert!(tally.sorting < 3 || tally.runs > 0, "{tally:?}");
    let each = began.elapsed() / u32::try_from(cuts).unwrap();
    println!(
        "{kind:?}: {} cuts of the power under load, {each:.0?} each, of {} stores; seed {seed}. {} \
         when no flush was asked for, {} aimed at a roll ({} left a journal that ends with a \
         seal), {} after pages were written back out of order, {} with the file system's journal \
         flushed first, {} of the device with its cache, {} on a full disk, {} while a run was written ({} of stores \
         with runs); {} more while starting. {} cuts while a flush was \
         under way, {} while a write was; {} acks were heard after the daemon was stopped",
        tally.cuts,
        tally.stores,
        tally.weak,
        tally.rolls,
        tally.ended_sealed,
        tally.written_back,
        tally.journal_flushed,
        tally.device,
        tally.full,
        tally.sorting,
        tally.runs,
        tally.while_starting,
        tally.flushing,
        tally.writing,
        tally.on_their_way,
    );
    println!("{}", tally.counts.summary());
    println!(
        "{} records shown to readers, {} of them lost, none that was shown as durable. No failure \
         in {cuts} cuts: with 95 % confidence fewer than {:.4} in one",
        tally.shown,
        tally.shown_lost,
        3.0 / f64::from(u32::try_from(cuts).unwrap()),
    );
}

#[test]
#[ignore = "mounts loop devices, so it needs root: .ci/run does it"]
fn ext4_loses_nothing_durable_when_the_power_is_cut() {
    cut_the_power(FileSystem::Ext4);
}

#[test]
#[ignore = "mounts loop devices, so it needs root: .ci/run does it"]
fn xfs_loses_nothing_durable_when_the_power_is_cut() {
    cut_the_power(FileSystem::Xfs);
}

//! One fixed history, short enough to run once for each of its calls. It has appends, batches, repeats,
//! conditions, records in memory only, rolls, trims, a deletion, a log that comes back, cursors and fences.
//! It ends with a full pool, a clean end with its checkpoint, and a start that goes on.

use super::requests::Asked;
use super::*;
use crate::api::record::{LogConfig, Producer, SyncMode};
use crate::disk::DiskCall;

/// Fault of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// The `nth` call of any kind fails with EIO.
    Error {
        nth: u64,
    },
    /// The `nth` call that may take space finds none.
    NoSpace {
        nth: u64,
    },
    /// The power goes in the `nth` changing call, and in the `then`-th changing call of the next start.
    /// 0 = not again.
    Cut {
        nth: u64,
        then: u64,
    },
}

/// How the last run of the process ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Kill,
    PowerCut,
}

const NO_SPACE: i32 = 28;

impl Run {
    /// Runs the script with one fault. Returns whether the fault came.
    pub(crate) fn scripted(&mut self, fault: Fault, ending: Ending) -> bool {
        match fault {
            Fault::None => {}
            Fault::Error { nth } => self.disk.fail_call(|_| true, nth, EIO),
            Fault::NoSpace { nth } => {
                let takes_space = |call: &DiskCall<'_>| call.kind.takes_space();
                self.disk.fail_call(takes_space, nth, NO_SPACE);
            }
            Fault::Cut { nth, .. } => self.disk.crash_after(nth),
        }
        // After an error the cache may hold data that the device does not have.
        self.distrusted = fault != Fault::None;
        let mut came = fault == Fault::None;
        let mut then = match fault {
            Fault::Cut { then, .. } => then,
            _ => 0,
        };
        for clean in [true, false] {
            let core = loop {
                self.counts.starts += 1;
                match open(&self.disk, &self.config, &self.clock) {
                    Ok((core, report)) => {
                        // Only the engine's own calls may fail.
                        self.disk.hold_failures(true);
                        self.found_by(&core, &report);
                        self.disk.hold_failures(false);
                        break core;
                    }
                    Err(error) => {
                        assert!(fault != Fault::None, "{error}");
                        came = true;
                        self.again(&mut then);
                    }
                }
            };
            self.life(&core);
            let failed = core.journal.failure();
            if let Some(error) = failed {
                assert!(fault != Fault::None, "{error}");
                came = true;
            } else if clean && core.close().is_ok() {
                match fault {
                    // Records in memory that find no space at the end had no promise.
                    Fault::NoSpace { .. } => self.ledger.all_written_durable(),
                    _ => self.all_forced(),
                }
            }
            came |= self.disk.is_crashed();
            drop(core);
            match self.disk.is_crashed() {
                true => self.again(&mut then),
                false if !clean && ending == Ending::PowerCut => {
                    self.disk.crash(self.random.random());
                    self.distrusted = true;
                }
                false => {}
            }
        }
        came |= self.disk.faults_left() == 0;
        // All faults are over, and everything promised is there, now and later.
        self.disk.forget_faults();
        for _ in 0..2 {
            let core = self.start(0);
            let acknowledged = self.append(&core, &[("a", 1, 10), ("d", 2, 10)]);
            assert!(acknowledged, "an append after the fault");
            drop(core);
            self.disk.crash(self.random.random());
            self.distrusted = true;
        }
        came
    }

    /// The power comes back, and may go again in the next start.
    fn again(&mut self, then: &mut u64) {
        if self.disk.is_crashed() {
            self.disk.crash(self.random.random());
            self.distrusted = true;
            if *then > 0 {
                self.disk.crash_after(std::mem::take(then));
            }
        }
    }

    fn life(&mut self, core: &Arc<Core>) {
        let manual = LogConfig {
            sync_mode: Some(SyncMode::Manual),
            ..LogConfig::default()
        };
        let large = ("a", 1, 9000);
        self.append(core, &[("a", 2, 10)]);
        self.append(core, &[("a", 1, 600), ("b", 2, 30)]);
        let (mut batch, mut parts) = self.batch(&[("c/1", 1, 20)]);
        let live = self.ledger.live.get("c/1").cloned().unwrap_or_default();
        let sequence = live.producers.get("p").map_or(0, |(_, next)| *next);
        batch.logs[0].producer = Some(Producer {
            id: crate::base::ids::Name::new("p").unwrap(),
            epoch: 0,
            sequence,
        });
        parts[0].2 = Some(("p", 0, sequence));
        for _ in 0..2 {
            let told = (parts.clone(), Vec::new());
            let asked = self.enqueue(core, batch.clone(), told, Some(Durability::Durable));
            self.answer(core, [asked]);
        }
        let asked = self.create(core, "manual", manual);
        self.answer(core, [asked]);
        let buffered = self.batch(&[("manual", 2, 40)]);
        let asked = self.enqueue(core, buffered.0, (buffered.1, Vec::new()), None);
        let moved = self.cursor(core, "a", "x", Some(1));
        self.answer(core, [asked, moved]);
        let fence = self.fence(core, "b");
        self.answer(core, [fence]);
        for _ in 0..2 {
            // More than half a segment: one of them rolls.
            self.append(core, &[large, ("d", 1, 9000)]);
            self.append(core, &[large, ("c/2", 1, 9000)]);
        }
        let keep = self.ledger.live.get("a").map_or(0, |state| state.first + 2);
        let trimmed = self.trim(core, "a", keep);
        self.answer(core, [trimmed]);
        let deleted = self.delete(core, "d");
        self.answer(core, [deleted]);
        let (mut wrong, parts) = self.batch(&[("a", 1, 5)]);
        wrong.logs[0].guard.expected_lsn = Some(Lsn::new(1 << 40));
        let wrong = self.enqueue(core, wrong, (parts, Vec::new()), Some(Durability::Durable));
        let written = self.batch(&[("d", 3, 5)]);
        let told = (written.1, Vec::new());
        let written = self.enqueue(core, written.0, told, Some(Durability::Written));
        self.answer(core, [wrong, written]);
        if core.journal.failure().is_none()
            && let Err(error) = core.pool_in_turn()
            && !crate::disk::is_out_of_space(&error)
        {
            core.journal.fail("filling the pool", &error);
        }
        // After this time the engine tries again to find space.
        self.clock.advance(2_000_000);
        self.idle(core);
        if core.journal.failure().is_none() && !self.disk.is_crashed() {
            // The fault may come only now, and then it is over.
            let resumed = (0..2).any(|_| {
                self.clock.advance(2_000_000);
                self.append(core, &[("a", 1, 10)])
            });
            let failed = core.journal.failure().is_some();
            assert!(resumed || failed, "appends go on by themselves");
        }
    }

    /// Appends durably. Returns whether the append was acknowledged.
    fn append(&mut self, core: &Arc<Core>, logs: &[(&'static str, usize, usize)]) -> bool {
        let (mut batch, parts) = self.batch(logs);
        for part in &mut batch.logs {
            let live = self.ledger.live.get(part.log.as_str());
            part.guard.writer_epoch = Some(live.map_or(0, |state| state.epoch));
        }
        let asked = self.enqueue(core, batch, (parts, Vec::new()), Some(Durability::Durable));
        let before = self.ledger.units.iter().filter(|unit| unit.durable).count();
        self.answer(core, [asked]);
        self.ledger.units.iter().filter(|unit| unit.durable).count() > before
    }

    fn answer<const N: usize>(&mut self, core: &Arc<Core>, asked: [Asked; N]) {
        core.turn();
        for asked in asked {
            self.settle(asked);
        }
    }
}

fn trial(fault: Fault, ending: Ending) -> bool {
    let mut run = Run::new(7, Faults::default());
    let outcome =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run.scripted(fault, ending)));
    match outcome {
        Ok(came) => came,
        Err(panic) => {
            eprintln!("with {fault:?}, ended by {ending:?}:");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Distance between tested calls: 1 if `WALD_EVERY` is set.
fn step(default: u64) -> usize {
    let all = std::env::var("WALD_EVERY").is_ok();
    usize::try_from(if all { 1 } else { default }).unwrap()
}

#[test]
fn no_failing_call_loses_acknowledged_records_or_acknowledges_wrongly() {
    let mut came = 0;
    for nth in 1.. {
        let fault = Fault::Error { nth };
        let endings = match (step(2), nth % 2) {
            (1, _) => &[Ending::Kill, Ending::PowerCut][..],
            (_, 0) => &[Ending::Kill],
            _ => &[Ending::PowerCut],
        };
        let through = endings.iter().all(|ending| trial(fault, *ending));
        if !through {
            break;
        }
        came += 1;
    }
    println!("EIO at each of {came} calls");
    assert!(came > 200, "{came}");
}

#[test]
fn wherever_there_is_no_space_appends_are_refused_and_go_on_by_themselves() {
    let mut came = 0;
    for nth in 1.. {
        let ending = match nth % 2 {
            0 => Ending::Kill,
            _ => Ending::PowerCut,
        };
        if !trial(Fault::NoSpace { nth }, ending) {
            break;
        }
        came += 1;
    }
    println!("ENOSPC at each of {came} calls");
    assert!(came > 50, "{came}");
}

#[test]
fn a_crash_at_any_call_and_in_the_next_start_loses_nothing_durable() {
    let (mut points, mut trials) = (0, 0);
    for nth in 1.. {
        if !trial(Fault::Cut { nth, then: 0 }, Ending::Kill) {
            break;
        }
        points += 1;
        trials += 1;
        // A start makes fewer changing calls than this.
        let first = 1 + nth % step(12) as u64;
        for then in (first..60).step_by(step(12)) {
            trial(Fault::Cut { nth, then }, Ending::Kill);
            trials += 1;
        }
    }
    println!("the power goes at each of {points} calls, {trials} runs");
    assert!(points > 100, "{points}");
}

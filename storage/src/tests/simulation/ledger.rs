//! The ledger: requests to the engine and its answers, kept outside of it.
//!
//! Units stand in commit order. Each has its effects on logs, and the promise that it was given. A unit is
//! *acknowledged* (at a level), or *maybe* there (UNKNOWN); refused requests are in no unit. After a start
//! the logs must be exactly as some prefix of the units leaves them. That prefix must contain the last unit
//! that was promised to survive.
//!
//! Records of sync mode `manual` are accepted at once and get their place in the journal later. Behind the
//! last unit that forces them out, any prefix of them may be there.

use std::collections::BTreeMap;

use crate::api::record::{Durability, LogConfig, LogConfigChange};

/// Effect of one unit on one log.
#[derive(Debug, Clone)]
pub(crate) enum Effect {
    Append {
        log: &'static str,
        /// `None` if no answer named it.
        id: Option<u64>,
        first: u64,
        records: Vec<u64>,
        producer: Option<(&'static str, u64, u64)>,
        buffered: bool,
    },
    Create(&'static str, LogConfig),
    Configure(&'static str, LogConfigChange),
    Delete(&'static str),
    Trim(&'static str, u64),
    Expire(&'static str, u64),
    Fence(&'static str, u64),
    Cursor(&'static str, &'static str, Option<u64>),
    /// All accepted records have their place in the journal.
    Force,
}

impl Effect {
    fn log(&self) -> Option<&'static str> {
        match self {
            Self::Append { log, .. }
            | Self::Create(log, _)
            | Self::Configure(log, _)
            | Self::Delete(log)
            | Self::Trim(log, _)
            | Self::Expire(log, _)
            | Self::Fence(log, _)
            | Self::Cursor(log, ..) => Some(log),
            Self::Force => None,
        }
    }
}

/// Effects that survive together or not at all.
#[derive(Debug, Clone)]
pub(crate) struct Unit {
    pub(crate) effects: Vec<Effect>,
    /// Promised to survive the end of the process.
    pub(crate) written: bool,
    /// Promised to survive a power cut.
    pub(crate) durable: bool,
    /// Promised to survive the loss of the machine.
    pub(crate) replicated: bool,
}

impl Unit {
    /// A unit that was promised to be as safe as `level`; `None`: nothing was promised.
    pub(crate) fn promised(effects: Vec<Effect>, level: Option<Durability>) -> Self {
        Self {
            effects,
            written: level >= Some(Durability::Written),
            durable: level >= Some(Durability::Durable),
            replicated: level >= Some(Durability::Replicated),
        }
    }
}

/// What took the process before a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    Process,
    Power,
    Machine,
}

/// State of one log. Records are their digests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LogState {
    pub(crate) id: Option<u64>,
    pub(crate) first: u64,
    /// Number of records directly below `first` that retention expired.
    pub(crate) expired: u64,
    pub(crate) records: Vec<u64>,
    pub(crate) epoch: u64,
    pub(crate) cursors: BTreeMap<String, u64>,
    /// Epoch and next sequence of each producer.
    pub(crate) producers: BTreeMap<String, (u64, u64)>,
    pub(crate) config: LogConfig,
    /// Accepted records that may be in memory only, by request.
    pub(crate) pending: Vec<Vec<u64>>,
}

pub(crate) type Logs = BTreeMap<String, LogState>;

impl LogState {
    /// The tail without records that may be in memory only.
    fn end(&self) -> u64 {
        self.first + self.records.len() as u64
    }

    /// The tail.
    pub(crate) fn next(&self) -> u64 {
        self.end() + self.pending.iter().map(|p| p.len() as u64).sum::<u64>()
    }

    /// The record at an lsn; `None` if there is none or it was trimmed.
    pub(crate) fn record(&self, lsn: u64) -> Option<u64> {
        let index = usize::try_from(lsn.checked_sub(self.first)?).ok()?;
        let all = self.records.iter().chain(self.pending.iter().flatten());
        all.copied().nth(index)
    }

    fn force(&mut self) {
        for records in std::mem::take(&mut self.pending) {
            self.records.extend(records);
        }
    }

    fn trim(&mut self, before: u64) {
        if before > self.end() {
            self.force();
        }
        if before > self.first {
            let gone = usize::try_from(before - self.first).unwrap();
            self.records.drain(..gone);
            self.first = before;
            self.expired = 0;
        }
    }

    fn expire(&mut self, before: u64) {
        let expired = self.expired + before - self.first;
        self.trim(before);
        self.expired = expired;
    }

    /// Whether `found` is this log, with some of the pending records.
    fn is(&self, found: &Self) -> bool {
        let begins = (self.first, self.expired) == (found.first, found.expired);
        if !begins || !found.records.starts_with(&self.records) {
            return false;
        }
        let mut rest = &found.records[self.records.len()..];
        for records in &self.pending {
            if rest.is_empty() {
                break;
            }
            let Some(after) = rest.strip_prefix(records.as_slice()) else {
                return false;
            };
            rest = after;
        }
        rest.is_empty()
            && self.id.is_none_or(|id| found.id == Some(id))
            && (self.epoch, &self.cursors, &self.producers, &self.config)
                == (found.epoch, &found.cursors, &found.producers, &found.config)
    }
}

fn apply(effect: &Effect, logs: &mut Logs) {
    let of = |log: &&'static str| (*log).to_owned();
    match effect {
        Effect::Append {
            log,
            id,
            first,
            records,
            producer,
            buffered,
        } => {
            let state = logs.entry(of(log)).or_default();
            state.id = state.id.or(*id);
            if *buffered {
                state.pending.push(records.clone());
                return;
            }
            state.force();
            assert_eq!(state.next(), *first, "lsns of {log} are dense");
            state.records.extend(records);
            if let Some((id, epoch, sequence)) = producer {
                let next = (*epoch, sequence + 1);
                state.producers.insert((*id).to_owned(), next);
            }
        }
        Effect::Create(log, config) => {
            let state = LogState {
                config: config.clone(),
                ..LogState::default()
            };
            logs.insert(of(log), state);
        }
        Effect::Configure(log, change) => {
            let state = logs.entry(of(log)).or_default();
            state.config = change.apply(&state.config);
        }
        Effect::Delete(log) => drop(logs.remove(*log)),
        Effect::Trim(log, before) => logs.entry(of(log)).or_default().trim(*before),
        Effect::Expire(log, before) => logs.entry(of(log)).or_default().expire(*before),
        Effect::Fence(log, epoch) => logs.entry(of(log)).or_default().epoch = *epoch,
        Effect::Cursor(log, cursor, lsn) => {
            let cursors = &mut logs.entry(of(log)).or_default().cursors;
            match lsn {
                Some(lsn) => drop(cursors.insert((*cursor).to_owned(), *lsn)),
                None => drop(cursors.remove(*cursor)),
            }
        }
        Effect::Force => logs.values_mut().for_each(LogState::force),
    }
}

/// Mistakes of a start. All must be 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// Promised to survive, and not there.
    pub(crate) lost: u64,
    /// There, and never appended, refused, trimmed, or lost before.
    pub(crate) phantom: u64,
    /// There twice.
    pub(crate) duplicate: u64,
    /// Neither served nor trimmed.
    pub(crate) gap: u64,
    /// Missing parts of units that are there otherwise.
    pub(crate) partial: u64,
    /// Other bytes than were appended.
    pub(crate) wrong: u64,
    /// Fences, cursors, producers or settings that no prefix explains.
    pub(crate) state: u64,
}

impl Verdict {
    pub(crate) fn add(&mut self, other: &Self) {
        self.lost += other.lost;
        self.phantom += other.phantom;
        self.duplicate += other.duplicate;
        self.gap += other.gap;
        self.partial += other.partial;
        self.wrong += other.wrong;
        self.state += other.state;
    }
}

#[derive(Default)]
pub(crate) struct Ledger {
    /// The logs as the last start found them.
    base: Logs,
    /// Units since then, in commit order.
    pub(crate) units: Vec<Unit>,
    /// The logs as all of these units leave them.
    pub(crate) live: Logs,
}

impl Ledger {
    pub(crate) fn add(&mut self, unit: Unit) {
        for effect in &unit.effects {
            apply(effect, &mut self.live);
        }
        self.units.push(unit);
    }

    /// Promises all units to survive a power cut.
    pub(crate) fn all_durable(&mut self) {
        for unit in &mut self.units {
            unit.durable = true;
        }
    }

    /// Promises all units to survive the loss of the machine.
    pub(crate) fn all_replicated(&mut self) {
        self.all_durable();
        for unit in &mut self.units {
            unit.replicated = true;
        }
    }

    /// Marks all written units as durable. Units that are only accepted may not be.
    pub(crate) fn all_written_durable(&mut self) {
        for unit in &mut self.units {
            let accepted =
                |effect: &Effect| matches!(effect, Effect::Append { buffered: true, .. });
            unit.durable |= !unit.effects.iter().any(accepted);
        }
    }

    /// Marks a log as safe up to `tail`, which a client that asked for `level` was shown.
    pub(crate) fn revealed(&mut self, log: &str, tail: u64, level: Durability) {
        for unit in &mut self.units {
            let shown = unit.effects.iter().any(|effect| match effect {
                Effect::Append {
                    log: this,
                    first,
                    records,
                    buffered,
                    ..
                } => *this == log && !buffered && first + records.len() as u64 <= tail,
                _ => false,
            });
            unit.durable |= shown;
            unit.replicated |= shown && level == Durability::Replicated;
        }
    }

    /// Number of units that must have survived.
    fn least(&self, loss: Loss) -> usize {
        let must = |unit: &Unit| match loss {
            Loss::Process => unit.durable || unit.written,
            Loss::Power => unit.durable,
            Loss::Machine => unit.replicated,
        };
        self.units.iter().rposition(must).map_or(0, |last| last + 1)
    }

    /// Compares with the logs that a start found, and goes on from these. After a power cut,
    /// unflushed units may be lost; after the loss of the machine, units that were not replicated.
    ///
    /// # Errors
    /// The mistakes, also in words.
    pub(crate) fn judge(&mut self, found: &Logs, loss: Loss) -> Result<(), (Verdict, String)> {
        let least = self.least(loss);
        let mut logs = self.base.clone();
        let is = |logs: &Logs, log: &str| match (logs.get(log), found.get(log)) {
            (Some(expected), Some(found)) => expected.is(found),
            (None, None) => true,
            _ => false,
        };
        let mut differ: Vec<String> = logs
            .keys()
            .chain(found.keys())
            .filter(|log| !is(&logs, log))
            .cloned()
            .collect();
        differ.sort_unstable();
        differ.dedup();
        let mut fits = (differ.is_empty() && least == 0).then_some(0);
        let mut nearest = (differ.len(), 0);
        for (index, unit) in self.units.iter().enumerate() {
            for effect in &unit.effects {
                apply(effect, &mut logs);
                match effect.log() {
                    Some(log) if is(&logs, log) => differ.retain(|other| other != log),
                    Some(log) if !differ.iter().any(|other| other == log) => {
                        differ.push(log.to_owned());
                    }
                    Some(_) => {}
                    None => {
                        let all = logs.keys().chain(found.keys());
                        differ = all.filter(|log| !is(&logs, log)).cloned().collect();
                        differ.sort_unstable();
                        differ.dedup();
                    }
                }
            }
            if differ.is_empty() && index + 1 >= least {
                fits = Some(index + 1);
            }
            if differ.len() <= nearest.0 {
                nearest = (differ.len(), index + 1);
            }
        }
        match fits {
            Some(_) => {
                self.base.clone_from(found);
                self.units.clear();
                self.live.clone_from(found);
                Ok(())
            }
            None => Err(self.explain(found, nearest.1, least)),
        }
    }

    /// The mistakes, measured by the nearest prefix.
    fn explain(&self, found: &Logs, prefix: usize, least: usize) -> (Verdict, String) {
        let mut verdict = Verdict::default();
        let mut logs = self.base.clone();
        for effect in self.units[..prefix].iter().flat_map(|unit| &unit.effects) {
            apply(effect, &mut logs);
        }
        let missing = self.units[prefix..least.max(prefix)].iter();
        verdict.lost += missing.filter(|unit| unit.durable || unit.written).count() as u64;
        let nothing = LogState::default();
        let mut words = format!("{prefix} units fit best, {least} must be there");
        for unit in &self.units[prefix..least.max(prefix)] {
            words += &format!("\n{unit:?}");
        }
        let names: std::collections::BTreeSet<_> = logs.keys().chain(found.keys()).collect();
        for name in names {
            let expected = logs.get(name).unwrap_or(&nothing);
            let there = found.get(name).unwrap_or(&nothing);
            if logs.contains_key(name) == found.contains_key(name) && expected.is(there) {
                continue;
            }
            let end = expected.next().max(there.next());
            for lsn in expected.first.min(there.first)..end {
                match (expected.record(lsn), there.record(lsn)) {
                    (Some(one), Some(other)) if one == other => {}
                    (Some(_), Some(other)) if expected.records.contains(&other) => {
                        verdict.duplicate += 1;
                    }
                    (Some(_), Some(_)) => verdict.wrong += 1,
                    (Some(_), None) if lsn >= there.end() => verdict.partial += 1,
                    (Some(_), None) => verdict.gap += 1,
                    (None, Some(_)) => verdict.phantom += 1,
                    (None, None) => {}
                }
            }
            if verdict == Verdict::default() {
                verdict.state += 1;
            }
            words += &format!("\n{name}: expected {expected:?}\n{name}: found {there:?}");
        }
        if verdict == Verdict::default() {
            verdict.lost += 1;
        }
        (verdict, words)
    }
}

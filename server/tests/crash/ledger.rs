//! Attempts and answers, kept where no crash of the daemon reaches.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;

use wald_proto::v1::Durability;

use super::contents::Found;

/// Records of an attempt for one log.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) log: String,
    pub(crate) payloads: Vec<String>,
}

impl Part {
    fn len(&self) -> u64 {
        u64::try_from(self.payloads.len()).unwrap()
    }

    /// How many of its records are kept, in a log that begins at `first` now.
    fn kept(&self, at: u64, first: u64) -> u64 {
        self.len() - first.saturating_sub(at).min(self.len())
    }
}

/// The end of the daemon.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Crash {
    /// It was killed: data in the operating system is there.
    Kill,
    /// The power was cut: flushed data is there.
    PowerCut,
}

impl Crash {
    /// Acks of this level and above must not be lost.
    fn spares(self) -> Durability {
        match self {
            Self::Kill => Durability::Written,
            Self::PowerCut => Durability::Durable,
        }
    }
}

/// Knowledge about an attempt.
#[derive(Debug, Clone, PartialEq)]
enum Fate {
    /// No answer came: it is there, whole and once, or it is not.
    Unknown,
    /// It is there, each part from this lsn on.
    Present { firsts: Vec<u64> },
}

#[derive(Debug)]
struct Attempt {
    parts: Vec<Part>,
    fate: Fate,
    /// The promised level. A start only shows records that are on the device.
    level: Durability,
    position: Option<u64>,
    /// Number of its ack; 0 once it has survived a crash.
    ack: u64,
}

/// An answer to an attempt.
#[derive(Debug)]
pub(crate) struct Ack {
    pub(crate) firsts: Vec<u64>,
    /// For each part, the log's durable lsn.
    pub(crate) durable: Vec<u64>,
    pub(crate) level: Durability,
    pub(crate) position: Option<u64>,
    pub(crate) recovery_epoch: u64,
    pub(crate) repeated: bool,
}

/// The visible part of a batch: index and lsn of its first record, and the number of records
/// from there on without a hole.
type Run = Option<(u64, u64, u64)>;

/// Knowledge about a log in addition to its records.
#[derive(Debug, Default)]
struct Log {
    tail: u64,
    /// Every lsn below was reported as durable, and by which answer.
    durable: u64,
    by: String,
    /// Trimmed up to here, by answers; and by attempts.
    first: u64,
    first_tried: u64,
    /// The writer epoch, by answers; and by attempts.
    epoch: u64,
    epoch_tried: u64,
}

/// Every attempt that may be seen, and every promise.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    next: usize,
    /// Attempts by number. A record of any other attempt must not be seen.
    attempts: BTreeMap<usize, Attempt>,
    /// Applied, and all of it trimmed.
    trimmed: HashSet<usize>,
    logs: BTreeMap<String, Log>,
    recovery_epoch: u64,
    /// End of the survivors of each epoch.
    survived: BTreeMap<u64, u64>,
    /// Positions given out since the last start.
    positions: HashSet<u64>,
    /// The highest position given out before the last start.
    highest_before: u64,
    acks: u64,
    counts: Counts,
}

/// Summary at the end of a test.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Counts {
    attempts: u64,
    /// By level, from ACCEPTED on.
    acks: [u64; 3],
    lost: [u64; 3],
    most_lost: u64,
    crashes_with_loss: u64,
    synced: u64,
    repeated: u64,
    refused: u64,
    unknown_kept: u64,
    unknown_lost: u64,
    trims: u64,
    fences: u64,
}

fn slot(level: Durability) -> usize {
    match level {
        Durability::Durable => 2,
        Durability::Written => 1,
        Durability::Accepted => 0,
        other => panic!("no answer has level {other:?}"),
    }
}

impl Log {
    fn told_durable(&mut self, lsn: u64, by: impl FnOnce() -> String) {
        if lsn > self.durable {
            self.durable = lsn;
            self.by = by();
        }
    }
}

impl Ledger {
    /// A new run of the daemon.
    pub(crate) fn begins(&mut self, recovery_epoch: u64) {
        assert!(
            recovery_epoch > self.recovery_epoch,
            "the recovery epoch rises with every unclean start: {recovery_epoch} after {}",
            self.recovery_epoch
        );
        self.recovery_epoch = recovery_epoch;
    }

    /// The recovery epochs to ask about after a start: the one that ended, and the first.
    pub(crate) fn ended_epochs(&self) -> Vec<u64> {
        let mut epochs = vec![self.recovery_epoch];
        epochs.extend(self.survived.keys().next());
        epochs
    }

    /// Notes an attempt before it is sent: for each log, the sizes of its records. Every
    /// record says which one it is.
    pub(crate) fn attempt(&mut self, logs: &[(String, Vec<usize>)]) -> (usize, Vec<Part>) {
        let number = self.next;
        self.next += 1;
        let mut parts = Vec::new();
        for (part, (log, sizes)) in logs.iter().enumerate() {
            let payload = |(index, size): (usize, &usize)| {
                let fill = char::from(b'a' + u8::try_from((number + index) % 26).unwrap());
                let fill: String = std::iter::repeat_n(fill, *size).collect();
                format!("{number}.{part}.{index}.{fill}")
            };
            parts.push(Part {
                log: log.clone(),
                payloads: sizes.iter().enumerate().map(payload).collect(),
            });
        }
        self.counts.attempts += 1;
        self.again(number, &parts);
        (number, parts)
    }

    /// Notes that an attempt is sent again: if it was not there, it may be from now on.
    pub(crate) fn again(&mut self, number: usize, parts: &[Part]) {
        self.attempts.entry(number).or_insert_with(|| Attempt {
            parts: parts.to_vec(),
            fate: Fate::Unknown,
            level: Durability::Unspecified,
            position: None,
            ack: 0,
        });
    }

    /// Whether it is known to have been applied, and not to be lost.
    pub(crate) fn is_applied(&self, number: usize) -> bool {
        self.trimmed.contains(&number) || self.is_there(number)
    }

    /// Whether it is known to be there.
    pub(crate) fn is_there(&self, number: usize) -> bool {
        let attempt = self.attempts.get(&number);
        attempt.is_some_and(|attempt| attempt.fate != Fate::Unknown)
    }

    /// Notes an ack. Positions only go up over all starts, and none is given out twice.
    pub(crate) fn acked(&mut self, number: usize, ack: Ack) {
        assert_eq!(ack.recovery_epoch, self.recovery_epoch, "{ack:?}");
        let attempt = self.attempts.get_mut(&number).unwrap();
        assert_eq!(attempt.parts.len(), ack.firsts.len());
        if let Fate::Present { firsts } = &attempt.fate {
            assert!(ack.repeated, "applied twice: {ack:?}, {attempt:?}");
            assert_eq!(*firsts, ack.firsts, "the original's answer: {attempt:?}");
            self.counts.repeated += 1;
        } else {
            assert!(!ack.repeated, "a repeat of nothing: {ack:?}, {attempt:?}");
            if let Some(position) = ack.position {
                let highest = self.highest_before;
                assert!(
                    position > highest,
                    "position {position} was passed before: {highest} was given out before the crash"
                );
                assert!(
                    self.positions.insert(position),
                    "position {position} was given out twice"
                );
            }
            self.acks += 1;
            attempt.ack = self.acks;
            attempt.position = ack.position;
            self.counts.acks[slot(ack.level)] += 1;
        }
        for ((part, first), durable) in attempt.parts.iter().zip(&ack.firsts).zip(&ack.durable) {
            let next = first + part.len();
            let log = self.logs.entry(part.log.clone()).or_default();
            log.tail = next.max(log.tail);
            log.told_durable(*durable, || format!("the ack {ack:?} of attempt {number}"));
            assert!(
                ack.level < Durability::Durable || *durable >= next,
                "DURABLE below its own durable lsn: {ack:?}"
            );
        }
        attempt.fate = Fate::Present { firsts: ack.firsts };
        attempt.level = attempt.level.max(ack.level);
    }

    /// Notes a refusal. That of a repeat says nothing about the first.
    pub(crate) fn refused(&mut self, number: usize) {
        if !self.is_there(number) {
            self.attempts.remove(&number).unwrap();
            self.counts.refused += 1;
        }
    }

    /// Notes that every record of a log below an lsn was reported to be on the device.
    pub(crate) fn told_durable(&mut self, log: &str, lsn: u64, by: &str) {
        let log = self.logs.entry(log.to_owned()).or_default();
        log.told_durable(lsn, || by.to_owned());
    }

    /// Number of acks that a Sync that is sent now covers.
    pub(crate) fn acks(&self) -> u64 {
        self.acks
    }

    /// Notes that a Sync was answered: the acks before it are of this level now.
    pub(crate) fn synced(&mut self, acks: u64, log: &str, level: Durability) {
        for attempt in self.attempts.values_mut() {
            let meant = log.is_empty() || attempt.parts.iter().any(|part| part.log == log);
            if meant && (1..=acks).contains(&attempt.ack) && attempt.level < level {
                attempt.level = level;
                self.counts.synced += 1;
            }
        }
    }

    /// Notes a trim before it is sent, and when it was answered.
    pub(crate) fn trim(&mut self, log: &str, before: u64, answered: bool) {
        let known = self.logs.get_mut(log).unwrap();
        known.first_tried = known.first_tried.max(before);
        if answered {
            known.first = known.first.max(before);
            known.told_durable(before, || "a trim".to_owned());
            self.counts.trims += 1;
        }
    }

    /// Notes a fence before it is sent.
    pub(crate) fn fence(&mut self, log: &str, epoch: u64) {
        self.logs.entry(log.to_owned()).or_default().epoch_tried = epoch;
    }

    /// Notes that a log is fenced: whatever was below its tail stays there.
    pub(crate) fn fenced(&mut self, log: &str, epoch: u64, tail: u64) {
        let known = self.logs.get_mut(log).unwrap();
        known.epoch = epoch;
        known.told_durable(tail, || "a fence".to_owned());
        self.counts.fences += 1;
    }

    /// The writer epoch of a log, once a start has reported it.
    pub(crate) fn writer_epoch(&self, log: &str) -> u64 {
        self.logs.get(log).map_or(0, |log| log.epoch)
    }

    /// The next lsn of a log, as far as acks and starts tell.
    pub(crate) fn tail(&self, log: &str) -> u64 {
        self.logs.get(log).map_or(0, |log| log.tail)
    }

    /// The log that keeps most records, and how many.
    pub(crate) fn longest(&self) -> Option<(String, u64)> {
        let kept = |log: &Log| log.tail.saturating_sub(log.first_tried);
        let (name, log) = self.logs.iter().max_by_key(|(_, log)| kept(log))?;
        Some((name.clone(), kept(log)))
    }

    /// Compares the state after a crash with all knowledge. Outcomes that were unknown are
    /// known from then on.
    pub(crate) fn check(&mut self, found: &Found, crash: Crash) {
        let survived = self.check_survived(found);
        let mut places = self.places(found);
        let mut lost = 0;
        let mut kept = BTreeMap::new();
        for (number, mut attempt) in std::mem::take(&mut self.attempts) {
            let places = places.remove(&number);
            let there = places.is_some();
            let firsts = places.map(|runs| self.firsts(number, &attempt, &runs, found));
            let known = match &attempt.fate {
                Fate::Present { firsts } => Some(firsts.clone()),
                Fate::Unknown => None,
            };
            // Trimmed records leave no trace.
            let visible = known.as_ref().is_none_or(|firsts| {
                let mut parts = attempt.parts.iter().zip(firsts);
                parts.any(|(part, first)| part.kept(*first, found.first(&part.log)) > 0)
            });
            match (&known, &firsts) {
                (Some(known), Some(firsts)) => assert_eq!(
                    known, firsts,
                    "attempt {number} was acked or seen at these lsns: {attempt:?}"
                ),
                (Some(known), None) if visible => {
                    assert!(
                        attempt.level < crash.spares(),
                        "attempt {number} is lost: {attempt:?}"
                    );
                    for (part, first) in attempt.parts.iter().zip(known) {
                        assert!(
                            *first >= found.tail(&part.log),
                            "attempt {number} is lost, and {} goes on to {}: {attempt:?}",
                            part.log,
                            found.tail(&part.log)
                        );
                    }
                    lost += 1;
                    self.counts.lost[slot(attempt.level)] += 1;
                }
                (Some(_), None) => {
                    self.trimmed.insert(number);
                }
                (None, Some(_)) => self.counts.unknown_kept += 1,
                (None, None) => self.counts.unknown_lost += 1,
            }
            if let (Some(position), 1.., Some(survived)) = (attempt.position, attempt.ack, survived)
            {
                assert_eq!(
                    there || !visible,
                    position < survived,
                    "survived is what lies below {survived}: attempt {number}, {attempt:?}"
                );
            }
            if let Some(firsts) = firsts {
                attempt.fate = Fate::Present { firsts };
                attempt.level = Durability::Durable;
                attempt.ack = 0;
                kept.insert(number, attempt);
            }
        }
        self.attempts = kept;
        self.counts.most_lost = self.counts.most_lost.max(lost);
        self.counts.crashes_with_loss += u64::from(lost > 0);
        self.check_logs(found);
        self.check_positions();
        let highest = self.positions.drain().max().unwrap_or(0);
        self.highest_before = self.highest_before.max(highest);
    }

    /// Compares tails, trims and fences with the answers about them.
    fn check_logs(&mut self, found: &Found) {
        for (name, log) in &mut self.logs {
            let (first, tail) = (found.first(name), found.tail(name));
            assert!(
                tail >= log.durable,
                "{name} ends at {tail}, and was told to be durable up to {} by {}",
                log.durable,
                log.by
            );
            assert!(
                (log.first..=log.first_tried.max(log.first)).contains(&first),
                "{name} begins at {first}: {log:?}"
            );
            let epoch = found.logs.get(name).map_or(0, |kept| kept.writer_epoch);
            assert!(
                (log.epoch..=log.epoch_tried.max(log.epoch)).contains(&epoch),
                "{name} has writer epoch {epoch}: {log:?}"
            );
            *log = Log {
                tail,
                durable: tail,
                by: String::new(),
                first,
                first_tried: first,
                epoch,
                epoch_tried: epoch,
            };
        }
        for (name, kept) in &found.logs {
            let log = self.logs.entry(name.clone()).or_default();
            log.tail = kept.tail();
            log.durable = kept.tail();
        }
    }

    /// End of the last epoch's survivors; the ends of older epochs stay as reported.
    fn check_survived(&mut self, found: &Found) -> Option<u64> {
        for (epoch, survived) in &found.survived {
            let before = *self.survived.entry(*epoch).or_insert(*survived);
            assert_eq!(*survived, before, "what survived of epoch {epoch}");
        }
        self.survived.get(&self.recovery_epoch).copied()
    }

    /// Where the records of each attempt are, by part.
    fn places(&self, found: &Found) -> BTreeMap<usize, Vec<Run>> {
        let mut places: BTreeMap<usize, Vec<Run>> = BTreeMap::new();
        for (log, kept) in &found.logs {
            for (lsn, payload) in (kept.first..).zip(&kept.payloads) {
                let mut numbers = payload.splitn(4, '.').map(str::parse::<usize>);
                let mut number = || numbers.next().and_then(Result::ok);
                let tried = (|| {
                    let (number, part, index) = (number()?, number()?, number()?);
                    let attempt = self.attempts.get(&number)?;
                    let tried = attempt.parts.get(part)?;
                    let same = tried.log == *log && tried.payloads.get(index)? == payload;
                    same.then_some((number, attempt.parts.len(), part, index))
                })();
                let Some((number, parts, part, index)) = tried else {
                    panic!("{log} {lsn} was never tried, refused, or lost before: {payload:?}");
                };
                let index = u64::try_from(index).unwrap();
                let runs = places.entry(number).or_insert_with(|| vec![None; parts]);
                let (first_index, first_lsn, count) = runs[part].get_or_insert((index, lsn, 0));
                assert!(
                    index == *first_index + *count && lsn == *first_lsn + *count,
                    "{log} {lsn} is out of order or twice: {payload:?}"
                );
                *count += 1;
            }
        }
        places
    }

    /// The first lsns of an attempt's parts, if any part is visible: then all of it must be,
    /// except for trimmed records.
    fn firsts(&self, number: usize, attempt: &Attempt, runs: &[Run], found: &Found) -> Vec<u64> {
        let part_first = |(part, run): (&Part, &Run)| {
            let begin = found.first(&part.log);
            let first = match run {
                Some((index, lsn, _)) => lsn.checked_sub(*index),
                // All of it was trimmed: at the latest just before the first record kept.
                None => begin.checked_sub(part.len()),
            };
            let count = run.map_or(0, |(_, _, count)| count);
            let whole = first.is_some_and(|first| part.kept(first, begin) == count);
            assert!(
                whole,
                "attempt {number} is half there: {runs:?} of {attempt:?}, {} begins at {begin}",
                part.log
            );
            first.unwrap()
        };
        let firsts: Vec<u64> = attempt.parts.iter().zip(runs).map(part_first).collect();
        match &attempt.fate {
            // It is known where the trimmed parts were.
            Fate::Present { firsts: known } => known
                .iter()
                .zip(runs)
                .zip(&firsts)
                .map(|((known, run), first)| if run.is_none() { *known } else { *first })
                .collect(),
            Fate::Unknown => firsts,
        }
    }

    /// Within a log, positions go up as lsns do.
    fn check_positions(&self) {
        let mut by_log: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
        for attempt in self.attempts.values() {
            if let (Some(position), Fate::Present { firsts }) = (attempt.position, &attempt.fate) {
                for (part, first) in attempt.parts.iter().zip(firsts) {
                    by_log
                        .entry(&part.log)
                        .or_default()
                        .push((*first, position));
                }
            }
        }
        for (log, mut places) in by_log {
            places.sort_unstable();
            let up = places
                .windows(2)
                .all(|p| p[0].0 < p[1].0 && p[0].1 < p[1].1);
            assert!(up, "positions of {log} do not follow its lsns");
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }
}

impl Counts {
    /// Adds the counts of another ledger.
    pub(crate) fn add(&mut self, other: &Self) {
        let Self {
            attempts,
            acks,
            lost,
            most_lost,
            crashes_with_loss,
            synced,
            repeated,
            refused,
            unknown_kept,
            unknown_lost,
            trims,
            fences,
        } = other;
        for level in 0..3 {
            self.acks[level] += acks[level];
            self.lost[level] += lost[level];
        }
        self.most_lost = self.most_lost.max(*most_lost);
        self.attempts += attempts;
        self.crashes_with_loss += crashes_with_loss;
        self.synced += synced;
        self.repeated += repeated;
        self.refused += refused;
        self.unknown_kept += unknown_kept;
        self.unknown_lost += unknown_lost;
        self.trims += trims;
        self.fences += fences;
    }

    /// In a few lines.
    pub(crate) fn summary(&self) -> String {
        let [accepted, written, durable] = self.acks;
        let [accepted_lost, written_lost, durable_lost] = self.lost;
        let mut text = String::new();
        writeln!(
            text,
            "{} attempts. Acks: {durable} DURABLE ({durable_lost} lost), {written} WRITTEN \
             ({written_lost} lost), {accepted} ACCEPTED ({accepted_lost} lost); at most {} lost at \
             once, some in {} crashes, always the last ones",
            self.attempts, self.most_lost, self.crashes_with_loss
        )
        .unwrap();
        write!(
            text,
            "{} acks raised by Sync; {} repeats answered as the first; {} trims, {} fences kept; {} \
             refused and never seen; {} unknown ({} kept whole, {} absent). Phantoms, duplicates, \
             gaps, halves, wrong bytes, positions given twice: 0",
            self.synced,
            self.repeated,
            self.trims,
            self.fences,
            self.refused,
            self.unknown_kept + self.unknown_lost,
            self.unknown_kept,
            self.unknown_lost
        )
        .unwrap();
        text
    }
}

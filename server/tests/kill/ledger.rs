//! What was tried and what was answered, kept where no crash of the daemon reaches.

use std::collections::{BTreeMap, HashSet};

/// Payloads of every log, by lsn.
pub(crate) type Contents = BTreeMap<String, Vec<String>>;

/// Records of an attempt for one log.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) log: String,
    pub(crate) payloads: Vec<String>,
}

/// What is known of an attempt.
#[derive(Debug, PartialEq)]
enum Fate {
    /// No answer came: it is there, whole and once, or it is not.
    Unknown,
    /// Refused, or not there after the kill: must not be seen any more.
    Absent,
    /// It is there, each part from this lsn on, and must stay.
    Present { firsts: Vec<u64> },
}

#[derive(Debug)]
struct Attempt {
    parts: Vec<Part>,
    fate: Fate,
    position: Option<u64>,
}

/// Every attempt, by number.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    attempts: Vec<Attempt>,
    tails: BTreeMap<String, u64>,
    /// Positions given out since the last start.
    positions: HashSet<u64>,
    /// The highest position given out before the last start.
    highest_before: u64,
    /// What a reader was shown since.
    shown: Vec<(String, u64, String)>,
    acks: u64,
    refusals: u64,
    unknown_kept: u64,
    unknown_lost: u64,
    read_along: u64,
}

impl Ledger {
    /// Notes an attempt before it is sent: for each log, the sizes of its records. Every
    /// record says which one it is.
    pub(crate) fn attempt(&mut self, logs: &[(String, Vec<usize>)]) -> (usize, Vec<Part>) {
        let number = self.attempts.len();
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
        self.attempts.push(Attempt {
            parts: parts.clone(),
            fate: Fate::Unknown,
            position: None,
        });
        (number, parts)
    }

    /// Notes an ack. Positions only go up over all starts, and none is given out twice.
    pub(crate) fn acked(&mut self, attempt: usize, firsts: Vec<u64>, position: u64) {
        let highest = self.highest_before;
        assert!(
            position > highest,
            "position {position} was passed before: {highest} was given out before the kill"
        );
        assert!(
            self.positions.insert(position),
            "position {position} was given out twice"
        );
        let attempt = &mut self.attempts[attempt];
        for (part, first) in attempt.parts.iter().zip(&firsts) {
            let next = first + u64::try_from(part.payloads.len()).unwrap();
            let tail = self.tails.entry(part.log.clone()).or_default();
            *tail = next.max(*tail);
        }
        assert_eq!(attempt.parts.len(), firsts.len());
        attempt.fate = Fate::Present { firsts };
        attempt.position = Some(position);
        self.acks += 1;
    }

    /// Notes a refusal.
    pub(crate) fn refused(&mut self, attempt: usize) {
        self.attempts[attempt].fate = Fate::Absent;
        self.refusals += 1;
    }

    /// Notes what a reader was shown before the kill: it must be there after it.
    pub(crate) fn shown(&mut self, records: Vec<(String, u64, String)>) {
        self.read_along += u64::try_from(records.len()).unwrap();
        self.shown = records;
    }

    /// The next lsn of a log, as far as acks and starts tell.
    pub(crate) fn tail(&self, log: &str) -> u64 {
        self.tails.get(log).copied().unwrap_or(0)
    }

    /// Holds what is there after a kill against everything that is known; what was unknown
    /// is known from then on.
    pub(crate) fn check(&mut self, found: &Contents) {
        let places = self.places(found);
        for (log, lsn, payload) in std::mem::take(&mut self.shown) {
            let there = found
                .get(&log)
                .and_then(|l| l.get(usize::try_from(lsn).unwrap()));
            assert_eq!(there, Some(&payload), "{log} {lsn} was shown to a reader");
        }
        for (number, (attempt, places)) in self.attempts.iter_mut().zip(places).enumerate() {
            let seen: usize = places.iter().map(Vec::len).sum();
            let whole: usize = attempt.parts.iter().map(|part| part.payloads.len()).sum();
            assert!(
                seen == 0 || seen == whole,
                "attempt {number} is half there, {seen} of {whole} records: {attempt:?}"
            );
            for lsns in &places {
                let follow = lsns.windows(2).all(|pair| pair[0] + 1 == pair[1]);
                assert!(follow, "attempt {number} is torn apart: {places:?}");
            }
            let present = (seen > 0).then(|| places.iter().map(|lsns| lsns[0]).collect());
            match (&attempt.fate, present) {
                (Fate::Present { firsts }, present) => assert_eq!(
                    Some(firsts),
                    present.as_ref(),
                    "attempt {number} was acked or seen at these lsns: {attempt:?}"
                ),
                (Fate::Absent, present) => {
                    assert_eq!(
                        present, None,
                        "attempt {number} was never applied: {attempt:?}"
                    );
                }
                (Fate::Unknown, Some(firsts)) => {
                    attempt.fate = Fate::Present { firsts };
                    self.unknown_kept += 1;
                }
                (Fate::Unknown, None) => {
                    attempt.fate = Fate::Absent;
                    self.unknown_lost += 1;
                }
            }
        }
        self.check_positions();
        self.tails = found
            .iter()
            .map(|(log, records)| (log.clone(), u64::try_from(records.len()).unwrap()))
            .collect();
        let highest = self.positions.drain().max().unwrap_or(0);
        self.highest_before = self.highest_before.max(highest);
    }

    /// Where the records of each attempt are: lsns by part, in the order of the records.
    fn places(&self, found: &Contents) -> Vec<Vec<Vec<u64>>> {
        let parts = |attempt: &Attempt| vec![Vec::new(); attempt.parts.len()];
        let mut places: Vec<Vec<Vec<u64>>> = self.attempts.iter().map(parts).collect();
        for (log, records) in found {
            for (lsn, payload) in (0u64..).zip(records) {
                let mut numbers = payload.splitn(4, '.').map(str::parse::<usize>);
                let mut number = || numbers.next().and_then(Result::ok);
                let tried = (|| {
                    let (attempt, part, index) = (number()?, number()?, number()?);
                    let tried = self.attempts.get(attempt)?.parts.get(part)?;
                    let same = tried.log == *log && tried.payloads.get(index)? == payload;
                    same.then_some((attempt, part, index))
                })();
                let Some((attempt, part, index)) = tried else {
                    panic!("{log} {lsn} was never tried: {payload:?}");
                };
                let lsns = &mut places[attempt][part];
                assert_eq!(
                    lsns.len(),
                    index,
                    "{log} {lsn} is out of order or twice: {payload:?}"
                );
                lsns.push(lsn);
            }
        }
        places
    }

    /// Within a log, positions go up as lsns do.
    fn check_positions(&self) {
        let mut by_log: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
        for attempt in &self.attempts {
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

    /// What the ledger holds, in a line.
    pub(crate) fn summary(&self) -> String {
        format!(
            "{} attempts: {} acked and all kept, {} refused and never seen, {} unknown ({} kept \
             whole, {} absent); {} records shown to a reader and kept",
            self.attempts.len(),
            self.acks,
            self.refusals,
            self.unknown_kept + self.unknown_lost,
            self.unknown_kept,
            self.unknown_lost,
            self.read_along
        )
    }
}

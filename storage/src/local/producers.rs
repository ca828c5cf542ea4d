//! Producers of a log: what is remembered of their newest batches, so that a repeat is
//! recognised and gets the answer that the first got.
//!
//! Every remembered batch takes 23 to 30 bytes, 16 of them for its digest, and some 40 in memory.
//! Batches are kept as differences from one to the next, in chunks that images of the log share
//! with it. The same bytes go into indexes and checkpoints.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::digest::{Digest, Sent};
use crate::engine::LogAppended;
use crate::ids::{LogId, Lsn, Name, Position, Timestamp};
use crate::wire::{self, Value};

/// How far an epoch may rise at a time. Without a bound one caller could take the last epoch
/// there is, and shut the owner out for ever.
pub(crate) const MAX_EPOCH_RISE: u64 = 1 << 32;

/// Fields of a producer that hold a chunk: digests of 8 bytes, or keyed ones of 16.
const PLAIN_CHUNK: u32 = 4;
const KEYED_CHUNK: u32 = 5;

/// Batches in a chunk, at most.
const CHUNK: u32 = 64;

/// What is remembered of one batch: its content, and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Remembered {
    pub(crate) digest: Digest,
    pub(crate) first_lsn: Lsn,
    pub(crate) count: u32,
    pub(crate) arrival: Timestamp,
    /// Stored time of its first record.
    pub(crate) timestamp: Timestamp,
    /// Of the request that it was part of.
    pub(crate) position: Position,
}

impl Remembered {
    /// The answer again.
    pub(crate) fn answer(&self, log_id: LogId) -> LogAppended {
        LogAppended {
            log_id,
            first_lsn: self.first_lsn,
            next_lsn: self.next_lsn(),
            timestamp: self.timestamp,
            arrival: self.arrival,
            deduplicated: true,
        }
    }

    fn next_lsn(&self) -> Lsn {
        Lsn::new(self.first_lsn.get().wrapping_add(u64::from(self.count)))
    }

    /// Writes what differs from the batch before.
    fn put(&self, before: &Self, out: &mut Vec<u8>) {
        let lsns = self.first_lsn.get().wrapping_sub(before.next_lsn().get());
        let waited =
            |to: Timestamp, from: Timestamp| zigzag(to.micros().wrapping_sub(from.micros()));
        wire::put_varint(out, lsns);
        wire::put_varint(out, u64::from(self.count));
        wire::put_varint(out, waited(self.arrival, before.arrival));
        wire::put_varint(out, waited(self.timestamp, self.arrival));
        let apart = self.position.get().wrapping_sub(before.position.get());
        wire::put_varint(out, apart);
        match self.digest {
            Digest::Plain(digest) => out.extend_from_slice(&digest.to_le_bytes()),
            Digest::Keyed(digest) => out.extend_from_slice(&digest.to_le_bytes()),
        }
    }

    /// The reverse of [`Remembered::put`].
    fn take(before: &Self, keyed: bool, input: &mut &[u8]) -> Option<Self> {
        let later = |from: Timestamp, by: u64| {
            Timestamp::from_micros(from.micros().wrapping_add(unzigzag(by)))
        };
        let lsns = wire::take_varint(input)?;
        let count = u32::try_from(wire::take_varint(input)?).ok()?;
        let arrival = later(before.arrival, wire::take_varint(input)?);
        let timestamp = later(arrival, wire::take_varint(input)?);
        let apart = wire::take_varint(input)?;
        let digest = if keyed {
            let digest = wire::take_bytes(input, 16)?.try_into().ok()?;
            Digest::Keyed(u128::from_le_bytes(digest))
        } else {
            let digest = wire::take_bytes(input, 8)?.try_into().ok()?;
            Digest::Plain(u64::from_le_bytes(digest))
        };
        Some(Self {
            digest,
            first_lsn: Lsn::new(before.next_lsn().get().wrapping_add(lsns)),
            count,
            arrival,
            timestamp,
            position: Position::new(before.position.get().wrapping_add(apart)),
        })
    }
}

fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)).cast_unsigned()
}

fn unzigzag(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ -(value & 1).cast_signed()
}

/// Consecutive batches.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Chunk {
    /// Sequence of the first.
    first: u64,
    count: u32,
    /// Whether their digests are keyed: either all of them or none.
    keyed: bool,
    /// The newest, which the next is told from.
    newest: Remembered,
    bytes: Vec<u8>,
}

impl Chunk {
    fn new(first: u64, keyed: bool) -> Self {
        Self {
            first,
            count: 0,
            keyed,
            newest: Remembered::default(),
            bytes: Vec::new(),
        }
    }

    fn push(&mut self, batch: Remembered) {
        batch.put(&self.newest, &mut self.bytes);
        self.newest = batch;
        self.count += 1;
    }

    /// The batch at an index.
    fn get(&self, index: u64) -> Option<Remembered> {
        let mut input = self.bytes.as_slice();
        let mut batch = Remembered::default();
        for _ in 0..=index {
            batch = Remembered::take(&batch, self.keyed, &mut input)?;
        }
        Some(batch)
    }

    fn next(&self) -> u64 {
        self.first + u64::from(self.count)
    }
}

/// One producer, in its newest epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    epoch: u64,
    /// The sequence that comes next.
    next: u64,
    chunks: VecDeque<Arc<Chunk>>,
}

/// What a batch of a producer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recall {
    /// One that comes next.
    New,
    /// One that was applied.
    Repeat(Remembered),
    /// Something else was applied under its sequence.
    Conflict,
    /// Batches before it are missing.
    Gap { expected: u64 },
    /// A newer epoch took over.
    Fenced { current: u64 },
    /// Its epoch is more than [`MAX_EPOCH_RISE`] above the current one.
    EpochJump { current: u64 },
    /// It is not known any more.
    Expired { oldest: u64 },
}

impl Source {
    fn new(epoch: u64) -> Self {
        Self {
            epoch,
            next: 0,
            chunks: VecDeque::new(),
        }
    }

    fn recall(&self, epoch: u64, sequence: u64, sent: Sent<'_>, window: u64) -> Recall {
        if epoch < self.epoch {
            return Recall::Fenced {
                current: self.epoch,
            };
        }
        if epoch - self.epoch > MAX_EPOCH_RISE {
            return Recall::EpochJump {
                current: self.epoch,
            };
        }
        let expected = if epoch > self.epoch { 0 } else { self.next };
        if sequence >= expected {
            return match sequence - expected {
                0 => Recall::New,
                _ => Recall::Gap { expected },
            };
        }
        let oldest = self.next.saturating_sub(window);
        match self.find(sequence).filter(|_| sequence >= oldest) {
            Some(batch) if sent.is(batch.digest) => Recall::Repeat(batch),
            Some(_) => Recall::Conflict,
            None => {
                let known = self.chunks.front().map_or(self.next, |chunk| chunk.first);
                Recall::Expired {
                    oldest: oldest.max(known),
                }
            }
        }
    }

    fn find(&self, sequence: u64) -> Option<Remembered> {
        let index = self
            .chunks
            .partition_point(|chunk| chunk.next() <= sequence);
        let chunk = self.chunks.get(index)?;
        chunk.get(sequence.checked_sub(chunk.first)?)
    }

    /// Notes a batch; what is older than `window` batches is forgotten, a chunk at a time.
    /// Returns what that is.
    fn push(&mut self, sequence: u64, batch: Remembered, window: u64) -> Vec<Arc<Chunk>> {
        let keyed = matches!(batch.digest, Digest::Keyed(_));
        let joins = self.chunks.back().is_some_and(|chunk| {
            chunk.count < CHUNK && chunk.next() == sequence && chunk.keyed == keyed
        });
        if !joins {
            self.chunks.push_back(Arc::new(Chunk::new(sequence, keyed)));
        }
        if let Some(chunk) = self.chunks.back_mut() {
            Arc::make_mut(chunk).push(batch);
        }
        self.next = sequence + 1;
        let oldest = self.next.saturating_sub(window);
        let old = self.chunks.partition_point(|chunk| chunk.next() <= oldest);
        self.chunks.drain(..old).collect()
    }

    /// Takes back the newest batch, for which `forgotten` was forgotten.
    fn pop(&mut self, forgotten: Vec<Arc<Chunk>>) {
        for chunk in forgotten.into_iter().rev() {
            self.chunks.push_front(chunk);
        }
        self.next = self.next.saturating_sub(1);
        let Some(last) = self.chunks.pop_back() else {
            return;
        };
        let mut shorter = Chunk::new(last.first, last.keyed);
        for index in 0..u64::from(last.count).saturating_sub(1) {
            if let Some(batch) = last.get(index) {
                shorter.push(batch);
            }
        }
        if shorter.count > 0 {
            self.chunks.push_back(Arc::new(shorter));
        }
    }

    /// Fields: 1 id, 2 epoch, 3 next sequence, 4 a chunk: first sequence, count, batches; 5 the
    /// same with keyed digests.
    fn encode(&self, id: &str, out: &mut Vec<u8>) {
        wire::put_bytes(out, 1, id.as_bytes());
        wire::put_uint(out, 2, self.epoch);
        wire::put_uint(out, 3, self.next);
        let mut part = Vec::new();
        for chunk in &self.chunks {
            part.clear();
            wire::put_varint(&mut part, chunk.first);
            wire::put_varint(&mut part, u64::from(chunk.count));
            part.extend_from_slice(&chunk.bytes);
            let field = if chunk.keyed {
                KEYED_CHUNK
            } else {
                PLAIN_CHUNK
            };
            wire::put_bytes(out, field, &part);
        }
    }

    fn decode(input: &[u8]) -> Option<(Name, Self)> {
        let mut id = None;
        let mut source = Self::new(0);
        for field in wire::fields(input) {
            match field? {
                (1, Value::Bytes(name)) => {
                    id = Some(Name::new(std::str::from_utf8(name).ok()?).ok()?);
                }
                (2, Value::Varint(epoch)) => source.epoch = epoch,
                (3, Value::Varint(next)) => source.next = next,
                (field @ (PLAIN_CHUNK | KEYED_CHUNK), Value::Bytes(mut part)) => {
                    let keyed = field == KEYED_CHUNK;
                    let mut chunk = Chunk::new(wire::take_varint(&mut part)?, keyed);
                    for _ in 0..wire::take_varint(&mut part)? {
                        chunk.push(Remembered::take(&chunk.newest, keyed, &mut part)?);
                    }
                    source.chunks.push_back(Arc::new(chunk));
                }
                _ => {}
            }
        }
        Some((id?, source))
    }
}

/// The producers of one log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Producers(HashMap<Name, Source>);

/// How to take a batch back.
#[derive(Debug)]
pub(crate) struct Before {
    id: Name,
    then: Then,
}

#[derive(Debug)]
enum Then {
    /// It was the first of its epoch: what there was before.
    Was(Option<Source>),
    /// It goes on: what was forgotten for it.
    Forgot(Vec<Arc<Chunk>>),
}

impl Before {
    /// The producer, if it was not known before.
    pub(crate) fn added(&self) -> Option<&Name> {
        matches!(self.then, Then::Was(None)).then_some(&self.id)
    }
}

impl Producers {
    /// What a batch is.
    pub(crate) fn recall(
        &self,
        producer: &crate::record::Producer,
        sent: Sent<'_>,
        window: u64,
    ) -> Recall {
        match self.0.get(&producer.id) {
            Some(source) => source.recall(producer.epoch, producer.sequence, sent, window),
            None => Self::recall_new(producer),
        }
    }

    /// What a batch of a producer is that is not known. Its epoch counts from 0.
    pub(crate) fn recall_new(producer: &crate::record::Producer) -> Recall {
        match producer.sequence {
            _ if producer.epoch > MAX_EPOCH_RISE => Recall::EpochJump { current: 0 },
            0 => Recall::New,
            _ => Recall::Gap { expected: 0 },
        }
    }

    /// Whether it is known.
    pub(crate) fn knows(&self, id: &Name) -> bool {
        self.0.contains_key(id)
    }

    pub(crate) fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// Bytes of all ids.
    pub(crate) fn id_bytes(&self) -> u64 {
        self.0.keys().map(|id| id.as_str().len() as u64).sum()
    }

    /// Notes a batch. Of a start after damage it may be one that leaves some out.
    pub(crate) fn remember(
        &mut self,
        producer: &crate::record::Producer,
        batch: Remembered,
        window: u64,
    ) -> Before {
        let goes_on = self
            .0
            .get(&producer.id)
            .is_some_and(|source| source.epoch == producer.epoch && !source.chunks.is_empty());
        let was = (!goes_on).then(|| self.0.remove(&producer.id));
        let source = self
            .0
            .entry(producer.id.clone())
            .or_insert_with(|| Source::new(producer.epoch));
        let forgotten = source.push(producer.sequence, batch, window);
        Before {
            id: producer.id.clone(),
            then: was.map_or(Then::Forgot(forgotten), Then::Was),
        }
    }

    /// Takes back the newest batch of a producer.
    pub(crate) fn take_back(&mut self, before: Before) {
        match before.then {
            Then::Was(Some(source)) => {
                self.0.insert(before.id, source);
            }
            Then::Was(None) => {
                self.0.remove(&before.id);
            }
            Then::Forgot(forgotten) => {
                if let Some(source) = self.0.get_mut(&before.id) {
                    source.pop(forgotten);
                }
            }
        }
    }

    /// One message for each producer.
    pub(crate) fn encode(&self, mut put: impl FnMut(&[u8])) {
        let mut part = Vec::new();
        // In order, so that the same producers always give the same bytes.
        let mut sources: Vec<_> = self.0.iter().collect();
        sources.sort_unstable_by_key(|(id, _)| *id);
        for (id, source) in sources {
            part.clear();
            source.encode(id.as_str(), &mut part);
            put(&part);
        }
    }

    /// Each producer, its epoch, what comes next, and what its newest batches are answered.
    #[cfg(test)]
    pub(crate) fn told(&self, window: u64) -> Vec<(Name, u64, u64, Vec<Remembered>)> {
        let newest = |source: &Source| {
            let from = source.next.saturating_sub(window);
            (from..source.next)
                .filter_map(|sequence| source.find(sequence))
                .collect()
        };
        let mut told: Vec<_> = self
            .0
            .iter()
            .map(|(id, source)| (id.clone(), source.epoch, source.next, newest(source)))
            .collect();
        told.sort_unstable_by(|one, other| one.0.cmp(&other.0));
        told
    }

    /// Adds what [`Producers::encode`] put.
    pub(crate) fn decode(&mut self, input: &[u8]) -> Option<()> {
        let (id, source) = Source::decode(input)?;
        self.0.insert(id, source);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Producer;
    use crate::records::Records;
    use proptest::prelude::*;

    const WINDOW: u64 = 100;

    fn producer(epoch: u64, sequence: u64) -> Producer {
        Producer {
            id: Name::new("p").unwrap(),
            epoch,
            sequence,
        }
    }

    fn batch(number: u64) -> Remembered {
        Remembered {
            digest: Digest::Keyed(u128::from(number) * 0x9E37_79B9_7F4A_7C15_F39C_C060),
            first_lsn: Lsn::new(number * 3),
            count: 1 + u32::try_from(number % 3).unwrap(),
            arrival: Timestamp::from_micros(1_700_000_000_000_000 + number.cast_signed() * 170),
            timestamp: Timestamp::from_micros(1_700_000_000_000_000 - number.cast_signed()),
            position: Position::new(8192 + number * 200),
        }
    }

    /// A batch with this digest.
    fn sent(records: &Records, digest: Digest) -> Sent<'_> {
        let keyed = match digest {
            Digest::Keyed(keyed) => keyed,
            Digest::Plain(_) => panic!("only old batches have such"),
        };
        Sent { records, keyed }
    }

    fn filled(count: u64) -> Producers {
        let mut producers = Producers::default();
        for number in 0..count {
            let this = producer(3, number);
            assert_eq!(
                producers.recall(&this, sent(&Records::default(), Digest::Keyed(0)), WINDOW),
                Recall::New
            );
            producers.remember(&this, batch(number), WINDOW);
        }
        producers
    }

    #[test]
    fn exactly_the_newest_batches_are_recalled_and_older_ones_have_expired() {
        let producers = filled(250);
        for number in 0..250 {
            let told = producers.recall(
                &producer(3, number),
                sent(&Records::default(), batch(number).digest),
                WINDOW,
            );
            match number {
                0..150 => assert_eq!(told, Recall::Expired { oldest: 150 }),
                _ => assert_eq!(told, Recall::Repeat(batch(number))),
            }
        }
        let recall = |epoch, sequence, digest| {
            let records = Records::default();
            let sent = sent(&records, Digest::Keyed(digest));
            producers.recall(&producer(epoch, sequence), sent, WINDOW)
        };
        assert_eq!(recall(3, 249, 1), Recall::Conflict);
        assert_eq!(recall(3, 250, 1), Recall::New);
        assert_eq!(recall(3, 251, 1), Recall::Gap { expected: 250 });
        assert_eq!(recall(2, 250, 1), Recall::Fenced { current: 3 });
        assert_eq!(recall(4, 250, 1), Recall::Gap { expected: 0 });
        assert_eq!(recall(4, 0, 1), Recall::New);
    }

    #[test]
    fn what_is_remembered_reads_back_and_costs_few_bytes() {
        let producers = filled(250);
        let mut bytes = Vec::new();
        let mut read = Producers::default();
        producers.encode(|part| {
            bytes = part.to_vec();
            read.decode(part).unwrap();
        });
        assert_eq!(read, producers);
        assert!(bytes.len() < 150 * 28, "{}", bytes.len());
        for end in 0..bytes.len() {
            // Cut anywhere it is refused or read as less, and never panics.
            let _less = Producers::default().decode(&bytes[..end]);
        }
    }

    #[test]
    fn what_is_taken_back_was_never_there() {
        let mut producers = filled(130);
        let mut states = Vec::new();
        let rest = (130..200).map(|sequence| (3, sequence));
        for (epoch, sequence) in rest.chain([(5, 0), (5, 1), (7, 0)]) {
            states.push(producers.clone());
            let before = producers.remember(&producer(epoch, sequence), batch(sequence), WINDOW);
            states.push(producers.clone());
            producers.take_back(before);
            let (with, without) = (states.pop().unwrap(), states.pop().unwrap());
            assert_eq!(producers, without);
            producers = with;
        }
    }

    proptest! {
        #[test]
        fn any_batch_reads_back(keyed: bool, parts: Vec<(u128, u64, u32, i64, i64, u64)>) {
            let batches: Vec<Remembered> = parts
                .iter()
                .map(|(digest, lsn, count, arrival, time, position)| Remembered {
                    digest: match keyed {
                        true => Digest::Keyed(*digest),
                        false => Digest::Plain(u64::try_from(*digest >> 64).unwrap()),
                    },
                    first_lsn: Lsn::new(*lsn),
                    count: *count,
                    arrival: Timestamp::from_micros(*arrival),
                    timestamp: Timestamp::from_micros(*time),
                    position: Position::new(*position),
                })
                .collect();
            let mut chunk = Chunk::new(0, keyed);
            for batch in &batches {
                chunk.push(*batch);
            }
            for (index, batch) in (0..).zip(&batches) {
                prop_assert_eq!(chunk.get(index), Some(*batch));
            }
        }
    }
}

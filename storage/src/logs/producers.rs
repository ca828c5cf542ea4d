//! Producers of a log. The log remembers their newest batches, so that a repeat is recognised and gets the
//! first answer again.
//!
//! Every remembered batch takes 23 to 30 bytes, 16 of them for its digest, and some 40 in memory.
//! Batches are kept as differences from one to the next, in chunks that images of the log share
//! with it. The same bytes go into indexes and checkpoints.
//!
//! A checkpoint holds all of a log's producers. The index of a segment and the image in a sorted
//! run hold the changes since that segment or run began, so an idle producer costs nothing
//! there. A start applies these changes in journal order ([`Producers::apply`]).
//!
//! A forgotten producer leaves a [`ForgottenProducer`] behind: a hash of its id, and its epoch. A late retry of
//! one of its batches is refused by that, also of its first batch. When a log has too many of
//! these, one number replaces them: producers that the log does not know must begin at that epoch.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::api::engine::LogAppended;
use crate::api::error::MAX_EPOCH_RISE;
use crate::api::record::ProducerInfo;
use crate::base::ids::{LogId, Lsn, Name, Position, Timestamp};
use crate::base::wire;
use crate::base::wire::Value;
use crate::format::digest::{ArrivedBatch, Digest};

/// Fields of a producer that hold a chunk: digests of 8 bytes, or keyed ones of 16.
const PLAIN_CHUNK: u32 = 4;
const KEYED_CHUNK: u32 = 5;

/// Maximum number of batches in a chunk.
const CHUNK: u32 = 64;

/// Maximum number of forgotten producers of one log whose ids are remembered. Each takes about 40 bytes in
/// memory and up to 18 on disk.
pub(crate) const MAX_GONE: u64 = 1 << 16;

/// Fields of an image for forgotten producers: the epoch that new producers begin at, and the
/// remembered ones.
pub(crate) const FIRST_EPOCH: u32 = 22;
pub(crate) const GONE: u32 = 23;

/// One remembered batch: its content, and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Remembered {
    pub(crate) digest: Digest,
    pub(crate) first_lsn: Lsn,
    pub(crate) count: u32,
    pub(crate) arrival: Timestamp,
    /// Stored time of its first record.
    pub(crate) timestamp: Timestamp,
    /// Position of the request that it was part of.
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

    /// Writes the differences from the batch before.
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
    /// Sequence of the first batch.
    first: u64,
    count: u32,
    /// Whether their digests are keyed: either all of them or none.
    keyed: bool,
    /// The newest batch: the next one is written as the differences from it.
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

    /// Its batches with their sequences.
    fn batches(&self) -> impl Iterator<Item = (u64, Remembered)> + '_ {
        let mut input = self.bytes.as_slice();
        let mut before = Remembered::default();
        (self.first..self.next()).map_while(move |sequence| {
            before = Remembered::take(&before, self.keyed, &mut input)?;
            Some((sequence, before))
        })
    }

    /// Its batches from a position on: this chunk, a shorter one, or `None` if there is no such batch.
    fn since(this: &Arc<Self>, position: Position) -> Option<Arc<Self>> {
        if this.newest.position < position {
            return None;
        }
        let (first, oldest) = this.batches().next()?;
        if oldest.position >= position {
            return Some(Arc::clone(this));
        }
        let mut shorter = Self::new(first, this.keyed);
        for (sequence, batch) in this.batches() {
            if batch.position >= position {
                if shorter.count == 0 {
                    shorter.first = sequence;
                }
                shorter.push(batch);
            }
        }
        Some(Arc::new(shorter))
    }
}

/// One producer, in its newest epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProducerState {
    epoch: u64,
    /// The sequence that comes next.
    next: u64,
    chunks: VecDeque<Arc<Chunk>>,
}

/// Verdict on a batch of a producer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Recall {
    /// The batch comes next.
    New,
    /// The batch was applied before.
    Repeat(Remembered),
    /// Another batch was applied under its sequence.
    Conflict,
    /// Batches before it are missing.
    Gap { expected: u64 },
    /// A newer epoch took over.
    Fenced { current: u64 },
    /// Its epoch is more than [`MAX_EPOCH_RISE`] above the current one.
    EpochJump { current: u64 },
    /// The batch is not remembered any more.
    Expired { oldest: u64 },
    /// The producer was forgotten, or its epoch is too low for a producer that is not known.
    Forgotten { first_epoch: u64 },
}

impl ProducerState {
    fn new(epoch: u64) -> Self {
        Self {
            epoch,
            next: 0,
            chunks: VecDeque::new(),
        }
    }

    fn recall(&self, epoch: u64, sequence: u64, sent: ArrivedBatch<'_>, window: u64) -> Recall {
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

    /// Notes a batch. Forgets batches older than `window` batches, a chunk at a time, and returns the
    /// forgotten chunks.
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
        self.forget_old(window)
    }

    /// Takes back the newest batch, which had displaced the chunks `forgotten`.
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

    /// Its newest batch.
    fn newest(&self) -> Option<&Remembered> {
        self.chunks.back().map(|chunk| &chunk.newest)
    }

    /// This producer with only the batches from a position on; `None` if there are none.
    fn since(&self, position: Position) -> Option<Self> {
        self.newest().filter(|newest| newest.position >= position)?;
        let from = self
            .chunks
            .partition_point(|chunk| chunk.newest.position < position);
        let chunks = self.chunks.range(from..);
        Some(Self {
            epoch: self.epoch,
            next: self.next,
            chunks: chunks
                .filter_map(|chunk| Chunk::since(chunk, position))
                .collect(),
        })
    }

    /// Applies later batches of the same producer.
    fn apply(&mut self, later: Self, window: u64) {
        if later.epoch != self.epoch || self.chunks.is_empty() {
            if later.epoch >= self.epoch {
                *self = later;
            }
            return;
        }
        for chunk in later.chunks {
            if chunk.first >= self.next && chunk.count == CHUNK {
                // All of the chunk is new: it is shared.
                self.next = chunk.next();
                self.chunks.push_back(chunk);
                continue;
            }
            for (sequence, batch) in chunk.batches() {
                if sequence >= self.next {
                    self.push(sequence, batch, window);
                }
            }
        }
        self.next = self.next.max(later.next);
        self.forget_old(window);
    }

    /// Forgets chunks that are older than `window` batches, and returns them.
    fn forget_old(&mut self, window: u64) -> Vec<Arc<Chunk>> {
        let oldest = self.next.saturating_sub(window);
        let old = self.chunks.partition_point(|chunk| chunk.next() <= oldest);
        self.chunks.drain(..old).collect()
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

/// A producer that was forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ForgottenProducer {
    /// Its batches of this epoch and of lower ones are refused.
    epoch: u64,
    /// Position at which it was forgotten; 0 if it comes from an image.
    position: Position,
}

/// Hash that stands for the id of a forgotten producer.
fn hash_of(id: &Name) -> u64 {
    xxh3_64(id.as_str().as_bytes())
}

/// The producers of one log, or their changes from some position on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Producers {
    known: HashMap<Name, ProducerState>,
    /// Producers that are neither known nor in `gone` begin at this epoch or a higher one.
    first_epoch: u64,
    /// Forgotten producers, by the hash of their ids.
    gone: HashMap<u64, ForgottenProducer>,
    /// Entries of `gone` that `first_epoch` has replaced and that no index lists yet. A start that goes by indexes knows
    /// these producers from an earlier one, and must learn that they are over.
    unlisted: HashMap<u64, ForgottenProducer>,
}

/// How to take a batch back.
#[derive(Debug)]
pub(crate) struct ProducerUndo {
    id: Name,
    then: UndoStep,
}

#[derive(Debug)]
enum UndoStep {
    /// The batch was the first of its epoch: the producer's state before it.
    Was(Option<ProducerState>),
    /// The batch continued its epoch: the chunks that were forgotten for it.
    Forgot(Vec<Arc<Chunk>>),
}

impl ProducerUndo {
    /// The producer, if it was not known before.
    pub(crate) fn added(&self) -> Option<&Name> {
        matches!(self.then, UndoStep::Was(None)).then_some(&self.id)
    }
}

/// State that takes back the forgetting of producers.
#[derive(Debug)]
pub(crate) struct BeforeForgotten {
    known: Vec<(Name, ProducerState)>,
    /// Entries that these hashes had before.
    gone: Vec<(u64, Option<ForgottenProducer>)>,
    /// The former number and all entries, if one number replaced the entries.
    replaced: Option<BeforeReplaced>,
}

#[derive(Debug)]
struct BeforeReplaced {
    first_epoch: u64,
    gone: HashMap<u64, ForgottenProducer>,
    unlisted: HashMap<u64, ForgottenProducer>,
}

impl BeforeForgotten {
    /// The producers that are not known any more.
    pub(crate) fn ids(&self) -> impl Iterator<Item = &Name> {
        self.known.iter().map(|(id, _)| id)
    }
}

/// Producers to forget.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Forgotten {
    /// Each producer with the epoch that is over.
    pub(crate) producers: Vec<(Name, u64)>,
    /// Producers that the log does not know begin at this epoch; 0 changes nothing.
    pub(crate) first_epoch: u64,
}

impl Forgotten {
    /// Maximum bytes that a producer of this id takes.
    pub(crate) fn bytes_of(id: &Name) -> usize {
        id.as_str().len() + 3 + 11 + 3
    }

    /// Maximum bytes without producers.
    pub(crate) const REST_BYTES: usize = 11;

    /// Fields: 1, repeated: 1 id, 2 the epoch that is over; 2 the epoch at which producers begin that the log
    /// does not know.
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        let mut part = Vec::new();
        for (id, epoch) in &self.producers {
            part.clear();
            wire::put_bytes(&mut part, 1, id.as_str().as_bytes());
            wire::put_uint(&mut part, 2, *epoch);
            wire::put_bytes(out, 1, &part);
        }
        wire::put_uint(out, 2, self.first_epoch);
    }

    pub(crate) fn decode(input: &[u8]) -> Option<Self> {
        let mut forgotten = Self::default();
        for field in wire::fields(input) {
            match field? {
                (1, Value::Bytes(part)) => {
                    let (mut id, mut epoch) = (None, 0);
                    for field in wire::fields(part) {
                        match field? {
                            (1, Value::Bytes(name)) => {
                                id = Some(Name::new(std::str::from_utf8(name).ok()?).ok()?);
                            }
                            (2, Value::Varint(over)) => epoch = over,
                            _ => {}
                        }
                    }
                    forgotten.producers.push((id?, epoch));
                }
                (2, Value::Varint(epoch)) => forgotten.first_epoch = epoch,
                _ => {}
            }
        }
        Some(forgotten)
    }
}

impl Producers {
    /// The verdict on a batch.
    pub(crate) fn recall(
        &self,
        producer: &crate::api::record::Producer,
        sent: ArrivedBatch<'_>,
        window: u64,
    ) -> Recall {
        if let Some(source) = self.known.get(&producer.id) {
            return source.recall(producer.epoch, producer.sequence, sent, window);
        }
        let gone = match self.gone.is_empty() {
            true => None,
            false => self.gone.get(&hash_of(&producer.id)),
        };
        let over = gone.map_or(0, |gone| gone.epoch.saturating_add(1));
        let first_epoch = over.max(self.first_epoch);
        if producer.epoch < first_epoch {
            return Recall::Forgotten { first_epoch };
        }
        if producer.epoch - first_epoch > MAX_EPOCH_RISE {
            return Recall::EpochJump {
                current: first_epoch,
            };
        }
        match producer.sequence {
            0 => Recall::New,
            _ => Recall::Gap { expected: 0 },
        }
    }

    /// The verdict on a batch of an unknown producer in a new log. Its epoch counts from 0.
    pub(crate) fn recall_new(producer: &crate::api::record::Producer) -> Recall {
        match producer.sequence {
            _ if producer.epoch > MAX_EPOCH_RISE => Recall::EpochJump { current: 0 },
            0 => Recall::New,
            _ => Recall::Gap { expected: 0 },
        }
    }

    /// Whether the producer is known.
    pub(crate) fn knows(&self, id: &Name) -> bool {
        self.known.contains_key(id)
    }

    pub(crate) fn len(&self) -> u64 {
        self.known.len() as u64
    }

    /// The epoch that a producer with an unknown id begins at.
    pub(crate) fn first_epoch(&self) -> u64 {
        self.first_epoch
    }

    /// Number of forgotten producers that are remembered.
    pub(crate) fn gone(&self) -> u64 {
        self.gone.len() as u64
    }

    /// Bytes of all ids.
    pub(crate) fn id_bytes(&self) -> u64 {
        self.known.keys().map(|id| id.as_str().len() as u64).sum()
    }

    /// The epoch of a producer, and the arrival of its newest batch.
    pub(crate) fn newest_of(&self, id: &Name) -> Option<(u64, Timestamp)> {
        let source = self.known.get(id)?;
        Some((source.epoch, source.newest()?.arrival))
    }

    /// Each producer, its epoch, and its newest batch.
    pub(crate) fn newest(&self) -> impl Iterator<Item = (&Name, u64, &Remembered)> {
        let known = self.known.iter();
        known.filter_map(|(id, source)| Some((id, source.epoch, source.newest()?)))
    }

    /// At most `limit` producers after `after`, in the order of their ids.
    pub(crate) fn page(&self, after: Option<&str>, limit: usize) -> Vec<ProducerInfo> {
        let later = |id: &Name| after.is_none_or(|after| id.as_str() > after);
        let known = self.known.iter().filter(|(id, _)| later(id));
        let mut page: Vec<_> = known
            .filter_map(|(id, source)| Some((id, source, source.newest()?.arrival)))
            .collect();
        if page.len() > limit {
            page.select_nth_unstable_by_key(limit, |(id, ..)| *id);
            page.truncate(limit);
        }
        page.sort_unstable_by_key(|(id, ..)| *id);
        let info = |(id, source, last_append): (&Name, &ProducerState, Timestamp)| ProducerInfo {
            id: id.clone(),
            epoch: source.epoch,
            next_sequence: source.next,
            last_append,
        };
        page.into_iter().map(info).collect()
    }

    /// Notes a batch. During a start after damage, earlier batches of the producer may be missing.
    pub(crate) fn remember(
        &mut self,
        producer: &crate::api::record::Producer,
        batch: Remembered,
        window: u64,
    ) -> ProducerUndo {
        let goes_on = self
            .known
            .get(&producer.id)
            .is_some_and(|source| source.epoch == producer.epoch && !source.chunks.is_empty());
        let was = (!goes_on).then(|| self.known.remove(&producer.id));
        let source = self
            .known
            .entry(producer.id.clone())
            .or_insert_with(|| ProducerState::new(producer.epoch));
        let forgotten = source.push(producer.sequence, batch, window);
        ProducerUndo {
            id: producer.id.clone(),
            then: was.map_or(UndoStep::Forgot(forgotten), UndoStep::Was),
        }
    }

    /// Takes back the newest batch of a producer.
    pub(crate) fn take_back(&mut self, before: ProducerUndo) {
        match before.then {
            UndoStep::Was(Some(source)) => {
                self.known.insert(before.id, source);
            }
            UndoStep::Was(None) => {
                self.known.remove(&before.id);
            }
            UndoStep::Forgot(forgotten) => {
                if let Some(source) = self.known.get_mut(&before.id) {
                    source.pop(forgotten);
                }
            }
        }
    }

    /// The epoch that could replace the entries of all forgotten producers: it exceeds their epochs and the
    /// epochs of `more`.
    pub(crate) fn epoch_beyond(&self, more: &[(Name, u64)]) -> u64 {
        let gone = self.gone.values().map(|gone| gone.epoch);
        let highest = gone.chain(more.iter().map(|(_, epoch)| *epoch)).max();
        let beyond = highest.map_or(0, |epoch| epoch.saturating_add(1));
        beyond.max(self.first_epoch)
    }

    /// Forgets producers, in the frame at `position`.
    pub(crate) fn forget(&mut self, forgotten: &Forgotten, position: Position) -> BeforeForgotten {
        let mut before = BeforeForgotten {
            known: Vec::new(),
            gone: Vec::new(),
            replaced: None,
        };
        for (id, epoch) in &forgotten.producers {
            let over = |source: &ProducerState| source.epoch <= *epoch;
            if self.known.get(id).is_some_and(over)
                && let Some(entry) = self.known.remove_entry(id)
            {
                before.known.push(entry);
            }
            let gone = ForgottenProducer {
                epoch: *epoch,
                position,
            };
            let hash = hash_of(id);
            before.gone.push((hash, self.gone.insert(hash, gone)));
        }
        if forgotten.first_epoch > self.first_epoch {
            before.replaced = Some(BeforeReplaced {
                first_epoch: self.first_epoch,
                gone: self.gone.clone(),
                unlisted: self.unlisted.clone(),
            });
            self.first_epoch = forgotten.first_epoch;
            let replaced = (self.gone).extract_if(|_, gone| gone.epoch < forgotten.first_epoch);
            // An image lists the others already.
            self.unlisted
                .extend(replaced.filter(|(_, gone)| gone.position > Position::ZERO));
        }
        before
    }

    /// Takes back the forgetting of producers.
    pub(crate) fn take_back_forgotten(&mut self, before: BeforeForgotten) {
        if let Some(replaced) = before.replaced {
            self.first_epoch = replaced.first_epoch;
            self.gone = replaced.gone;
            self.unlisted = replaced.unlisted;
        }
        for (hash, gone) in before.gone.into_iter().rev() {
            match gone {
                Some(gone) => self.gone.insert(hash, gone),
                None => self.gone.remove(&hash),
            };
        }
        self.known.extend(before.known);
    }

    /// The changes from a position on.
    pub(crate) fn since(&self, position: Position) -> Self {
        let known = self.known.iter();
        let known = known.filter_map(|(id, source)| Some((id.clone(), source.since(position)?)));
        // A producer in both was forgotten again in a higher epoch.
        let gone = self.unlisted.iter().chain(&self.gone);
        let gone = gone.filter(|(_, gone)| gone.position >= position);
        Self {
            known: known.collect(),
            first_epoch: self.first_epoch,
            gone: gone.map(|(hash, gone)| (*hash, *gone)).collect(),
            unlisted: HashMap::new(),
        }
    }

    /// Indexes list everything below `limit` now.
    pub(crate) fn listed(&mut self, limit: Position) {
        self.unlisted.retain(|_, gone| gone.position >= limit);
    }

    /// Applies later changes. A repeated entry changes nothing: an image of an older version holds
    /// all producers.
    pub(crate) fn apply(&mut self, later: Self, window: u64) {
        self.merge(later, window);
        let first_epoch = self.first_epoch;
        self.gone.retain(|_, gone| gone.epoch >= first_epoch);
    }

    /// Adds later changes to changes whose beginning is not known. Producers from before may end in any of them, so all
    /// forgotten ones stay.
    pub(crate) fn merge(&mut self, later: Self, window: u64) {
        if later.first_epoch > self.first_epoch {
            self.first_epoch = later.first_epoch;
        }
        if !later.gone.is_empty() {
            let over = |id: &Name, source: &ProducerState| {
                let gone = later.gone.get(&hash_of(id));
                gone.is_some_and(|gone| gone.epoch >= source.epoch)
            };
            self.known.retain(|id, source| !over(id, source));
            for (hash, gone) in later.gone {
                let there = self.gone.entry(hash).or_insert(gone);
                if gone.epoch > there.epoch {
                    *there = gone;
                }
            }
        }
        for (id, source) in later.known {
            match self.known.entry(id) {
                Entry::Vacant(entry) => {
                    entry.insert(source);
                }
                Entry::Occupied(mut entry) => entry.get_mut().apply(source, window),
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.known.is_empty() && self.gone.is_empty() && self.first_epoch == 0
    }

    /// One message for each producer.
    pub(crate) fn encode(&self, mut put: impl FnMut(&[u8])) {
        let mut part = Vec::new();
        // In order, so that the same producers always give the same bytes.
        let mut sources: Vec<_> = self.known.iter().collect();
        sources.sort_unstable_by_key(|(id, _)| *id);
        for (id, source) in sources {
            part.clear();
            source.encode(id.as_str(), &mut part);
            put(&part);
        }
    }

    /// Fields of an image for forgotten producers: the hash (8 bytes) and the epoch (varint) of each
    /// producer, by hash.
    pub(crate) fn encode_gone(&self, out: &mut Vec<u8>) {
        wire::put_uint(out, FIRST_EPOCH, self.first_epoch);
        if self.gone.is_empty() {
            return;
        }
        let mut gone: Vec<_> = self.gone.iter().collect();
        gone.sort_unstable_by_key(|(hash, _)| *hash);
        let mut part = Vec::with_capacity(gone.len() * 10);
        for (hash, gone) in gone {
            part.extend_from_slice(&hash.to_le_bytes());
            wire::put_varint(&mut part, gone.epoch);
        }
        wire::put_bytes(out, GONE, &part);
    }

    /// Each producer, its epoch, its next sequence, and the answers of its newest batches.
    #[cfg(test)]
    pub(crate) fn told(&self, window: u64) -> Vec<(Name, u64, u64, Vec<Remembered>)> {
        let newest = |source: &ProducerState| {
            let from = source.next.saturating_sub(window);
            (from..source.next)
                .filter_map(|sequence| source.find(sequence))
                .collect()
        };
        let mut told: Vec<_> = self
            .known
            .iter()
            .map(|(id, source)| (id.clone(), source.epoch, source.next, newest(source)))
            .collect();
        told.sort_unstable_by(|one, other| one.0.cmp(&other.0));
        told
    }

    /// Forgotten producers: the epoch that new producers begin at, and each hash with its epoch.
    #[cfg(test)]
    pub(crate) fn told_gone(&self) -> (u64, Vec<(u64, u64)>) {
        let mut gone: Vec<_> = self.gone.iter().map(|(h, gone)| (*h, gone.epoch)).collect();
        gone.sort_unstable();
        (self.first_epoch, gone)
    }

    /// Adds a producer that [`Producers::encode`] wrote.
    pub(crate) fn decode(&mut self, input: &[u8]) -> Option<()> {
        let (id, source) = ProducerState::decode(input)?;
        self.known.insert(id, source);
        Some(())
    }

    /// Adds a field that [`Producers::encode_gone`] wrote.
    pub(crate) fn decode_gone(&mut self, field: u32, value: Value<'_>) -> Option<()> {
        match (field, value) {
            (FIRST_EPOCH, Value::Varint(epoch)) => self.first_epoch = epoch,
            (GONE, Value::Bytes(mut part)) => {
                while !part.is_empty() {
                    let hash = wire::take_bytes(&mut part, 8)?.try_into().ok()?;
                    let gone = ForgottenProducer {
                        epoch: wire::take_varint(&mut part)?,
                        position: Position::ZERO,
                    };
                    self.gone.insert(u64::from_le_bytes(hash), gone);
                }
            }
            _ => {}
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::record::Producer;
    use crate::api::records::Records;
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
    fn sent(records: &Records, digest: Digest) -> ArrivedBatch<'_> {
        let keyed = match digest {
            Digest::Keyed(keyed) => keyed,
            Digest::Plain(_) => panic!("only old batches have such"),
        };
        ArrivedBatch { records, keyed }
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
    fn remembered_batches_read_back_and_cost_few_bytes() {
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
            // Bytes that are cut anywhere are refused or read as less, and never panic.
            let _less = Producers::default().decode(&bytes[..end]);
        }
    }

    #[test]
    fn a_batch_taken_back_leaves_no_trace() {
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

    #[test]
    fn changes_say_which_producers_one_epoch_stands_for() {
        let mut producers = filled(1);
        let mut forgetting = producers.clone();
        let forgotten = Forgotten {
            producers: vec![(producer(3, 0).id, 3)],
            first_epoch: 4,
        };
        let position = Position::new(9000);
        let before = forgetting.forget(&forgotten, position);
        let mut merged = Producers::default();
        merged.merge(forgetting.since(position), WINDOW);
        merged.merge(Producers::default(), WINDOW);
        producers.apply(merged, WINDOW);
        assert_eq!(producers.told_gone(), (4, Vec::new()));
        assert_eq!(producers.len(), 0);
        forgetting.take_back_forgotten(before);
        assert_eq!(forgetting, filled(1));
        drop(forgetting.forget(&forgotten, position));
        forgetting.listed(position.advance(1));
        assert_eq!(forgetting, producers);
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

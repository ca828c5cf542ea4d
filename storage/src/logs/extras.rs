//! State that few logs have: a writer epoch, producers, cursors.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::producers::{FIRST_EPOCH, GONE, Producers};
use super::versions::Versions;
use crate::api::record::{GapReason, LogConfig};
use crate::base::bounds;
use crate::base::ids::{Lsn, Name, Position, Timestamp};
use crate::base::wire;
use crate::base::wire::Value;
use crate::logs::TrimBy;
use crate::logs::quotas::LogUsage;

/// The lsn of a cursor, and the time at which it was committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) lsn: Lsn,
    pub(crate) time: Timestamp,
}

/// Records between others that this store has never had: the log was restored from an
/// archive that does not hold them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MissingRecords {
    pub(crate) from: Lsn,
    pub(crate) to: Lsn,
    /// The cause of their removal.
    pub(crate) by: TrimBy,
}

impl MissingRecords {
    pub(crate) fn reason(&self) -> GapReason {
        match self.by {
            TrimBy::Somebody => GapReason::Trimmed,
            TrimBy::Retention => GapReason::Expired,
        }
    }
}

/// Kept apart, so that a log without any of these fields takes one word for all of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Extras {
    /// 0 until the first fence.
    pub(crate) writer_epoch: Versions<u64>,
    pub(crate) producers: Producers,
    /// The producers as of the newest segment that has an index; `None` if nothing has changed
    /// since. A checkpoint needs them.
    pub(crate) indexed: Option<Box<Producers>>,
    /// Position of the newest change of the producers.
    producers_changed: Position,
    /// The value `None`: the cursor is forgotten.
    pub(crate) cursors: BTreeMap<Name, Versions<Option<Mark>>>,
    /// Number of cursors that are not forgotten: each new one is checked against a bound.
    cursor_count: u64,
    /// Ends of the frames that forgot cursors, in order, for those that may not be on the device yet.
    forgotten: VecDeque<(Position, Name)>,
    /// Number of cursors that were looked up to drop them.
    #[cfg(test)]
    looked_up: usize,
    /// In order.
    pub(crate) missing: Vec<MissingRecords>,
    /// The settings as readers see them, if they changed since the start. The committer goes by the newest ones.
    settings: Option<Box<Versions<Settings>>>,
}

/// Settings of a log, and the time of their last change.
pub(crate) type Settings = (Arc<LogConfig>, Timestamp);

impl Extras {
    /// Changes the settings, which were `before`, in the frame that ends at `end`.
    pub(crate) fn configure(
        &mut self,
        end: Position,
        (before, settings): (Settings, Settings),
        durable: Position,
    ) {
        let versions = (self.settings).get_or_insert_with(|| Box::new(Versions::settled(before)));
        versions.push(end, settings, durable);
    }

    /// The settings for a reader to whom everything below `published` is visible; `None` if they never changed.
    pub(crate) fn settings_at(&self, published: Position) -> Option<&Settings> {
        Some(self.settings.as_deref()?.at(published))
    }

    /// The producers, to be changed by the frame at `position`.
    pub(crate) fn change_producers(&mut self, position: Position) -> &mut Producers {
        if self.indexed.is_none() {
            self.indexed = Some(Box::new(self.producers.clone()));
        }
        self.producers_changed = position;
        &mut self.producers
    }

    /// The segment below `limit` has an index now, and `producers` is the state at its end.
    pub(crate) fn index_producers(&mut self, limit: Position, producers: Producers) {
        self.producers.listed(limit);
        let changed = self.producers_changed >= limit;
        self.indexed = changed.then(|| Box::new(producers));
    }

    /// The producers as of the newest segment that has an index.
    pub(crate) fn indexed_producers(&self) -> &Producers {
        self.indexed.as_deref().unwrap_or(&self.producers)
    }

    /// Moves a cursor, or forgets it, in the frame that ends at `end`. Returns whether there was
    /// one before.
    pub(crate) fn move_cursor(
        &mut self,
        end: Position,
        cursor: &Name,
        mark: Option<Mark>,
        durable: Position,
    ) -> bool {
        if mark.is_none() {
            self.drop_forgotten(durable);
            self.forgotten.push_back((end, cursor.clone()));
        }
        let versions = self
            .cursors
            .entry(cursor.clone())
            .or_insert_with(|| Versions::settled(None));
        let was_there = versions.newest().is_some();
        versions.push(end, mark, durable);
        self.cursor_count += u64::from(mark.is_some());
        self.cursor_count -= u64::from(was_there);
        was_there
    }

    /// Drops cursors whose removal is on the device. A later call drops the others.
    fn drop_forgotten(&mut self, durable: Position) {
        let is_safe = |forgotten: &(Position, Name)| forgotten.0 <= durable;
        while self.forgotten.front().is_some_and(is_safe)
            && let Some((_, name)) = self.forgotten.pop_front()
        {
            #[cfg(test)]
            {
                self.looked_up += 1;
            }
            let Some(versions) = self.cursors.get_mut(&name) else {
                continue;
            };
            versions.settle(durable);
            if *versions == Versions::settled(None) {
                self.cursors.remove(&name);
            }
        }
    }

    /// The log's cursors, as counted in the load of the whole store.
    pub(crate) fn cursor_load(&self) -> LogUsage {
        let there = self.cursors.iter();
        let there = there.filter(|(_, mark)| mark.newest().is_some());
        there.fold(LogUsage::default(), |mut load, (name, _)| {
            load.add(LogUsage::cursor(name));
            load
        })
    }

    /// Number of cursors.
    pub(crate) fn cursor_count(&self) -> u64 {
        self.cursor_count
    }

    /// Takes back changes from `start` on. Changes of producers are not among them: they are taken back one
    /// by one.
    pub(crate) fn cut(&mut self, start: Position) {
        self.writer_epoch.cut(start);
        self.cursors.values_mut().for_each(|mark| mark.cut(start));
        // A cursor that was made again after it was forgotten is forgotten again, and may not be listed any more.
        let all = self.cursors.iter();
        let forgotten = all.filter(|(_, mark)| mark.newest().is_none());
        self.forgotten = forgotten.map(|(name, _)| (start, name.clone())).collect();
        self.cursor_count = (self.cursors.len() - self.forgotten.len()) as u64;
        if let Some(settings) = &mut self.settings {
            settings.cut(start);
        }
    }
}

/// The extras as an image of a log stores them: with all changes so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ExtrasImage {
    pub(crate) writer_epoch: u64,
    pub(crate) producers: Producers,
    pub(crate) cursors: BTreeMap<Name, Mark>,
    pub(crate) missing: Vec<MissingRecords>,
}

/// Fields of an image of a log.
const WRITER_EPOCH: u32 = 16;
const CURSOR: u32 = 17;
const PRODUCER: u32 = 18;
const MISSING: u32 = 20;

impl ExtrasImage {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        wire::put_uint(out, WRITER_EPOCH, self.writer_epoch);
        let mut part = Vec::new();
        for (name, mark) in &self.cursors {
            part.clear();
            wire::put_bytes(&mut part, 1, name.as_str().as_bytes());
            wire::put_uint(&mut part, 2, mark.lsn.get());
            wire::put_fixed64(&mut part, 3, mark.time.micros().cast_unsigned());
            wire::put_bytes(out, CURSOR, &part);
        }
        self.producers
            .encode(|producer| wire::put_bytes(out, PRODUCER, producer));
        self.producers.encode_gone(out);
        for missing in &self.missing {
            part.clear();
            wire::put_varint(&mut part, missing.from.get());
            wire::put_varint(&mut part, missing.to.get());
            wire::put_varint(&mut part, u64::from(missing.by.number()));
            wire::put_bytes(out, MISSING, &part);
        }
    }

    /// Takes in a field of an image, if it is one of these. `None` if it is malformed.
    pub(crate) fn take(&mut self, field: u32, value: Value<'_>) -> Option<()> {
        match (field, value) {
            (WRITER_EPOCH, Value::Varint(epoch)) => self.writer_epoch = epoch,
            (CURSOR, Value::Bytes(part)) => {
                let (name, mark) = cursor(part)?;
                self.cursors.insert(name, mark);
            }
            (PRODUCER, Value::Bytes(part)) => self.producers.decode(part)?,
            (FIRST_EPOCH | GONE, value) => self.producers.decode_gone(field, value)?,
            (MISSING, Value::Bytes(mut part)) => self.missing.push(MissingRecords {
                from: bounds::lsn(wire::take_varint(&mut part)?)?,
                to: bounds::lsn(wire::take_varint(&mut part)?)?,
                by: TrimBy::of(u32::try_from(wire::take_varint(&mut part)?).ok()?),
            }),
            _ => {}
        }
        Some(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The producers in an image, read without the rest. `None` if they are malformed.
pub(crate) fn producers_in(input: &[u8]) -> Option<Producers> {
    let mut producers = Producers::default();
    for field in wire::fields(input) {
        match field? {
            (PRODUCER, Value::Bytes(part)) => producers.decode(part)?,
            (field @ (FIRST_EPOCH | GONE), value) => producers.decode_gone(field, value)?,
            _ => {}
        }
    }
    Some(producers)
}

fn cursor(input: &[u8]) -> Option<(Name, Mark)> {
    let mut name = None;
    let mut mark = Mark {
        lsn: Lsn::ZERO,
        time: Timestamp::default(),
    };
    for field in wire::fields(input) {
        match field? {
            (1, Value::Bytes(bytes)) => {
                name = Some(Name::new(std::str::from_utf8(bytes).ok()?).ok()?);
            }
            (2, Value::Varint(lsn)) => mark.lsn = bounds::lsn(lsn)?,
            (3, Value::Fixed64(time)) => mark.time = Timestamp::from_micros(time.cast_signed()),
            _ => {}
        }
    }
    Some((name?, mark))
}

impl From<&Extras> for ExtrasImage {
    fn from(extras: &Extras) -> Self {
        let there = |(name, versions): (&Name, &Versions<Option<Mark>>)| {
            versions.newest().map(|mark| (name.clone(), mark))
        };
        Self {
            writer_epoch: *extras.writer_epoch.newest(),
            producers: extras.producers.clone(),
            cursors: extras.cursors.iter().filter_map(there).collect(),
            missing: extras.missing.clone(),
        }
    }
}

impl From<&ExtrasImage> for Extras {
    fn from(image: &ExtrasImage) -> Self {
        let settled = |(name, mark): (&Name, &Mark)| (name.clone(), Versions::settled(Some(*mark)));
        Self {
            writer_epoch: Versions::settled(image.writer_epoch),
            producers: image.producers.clone(),
            indexed: None,
            producers_changed: Position::ZERO,
            cursors: image.cursors.iter().map(settled).collect(),
            cursor_count: image.cursors.len() as u64,
            forgotten: VecDeque::new(),
            #[cfg(test)]
            looked_up: 0,
            missing: image.missing.clone(),
            settings: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    #[test]
    fn cursors_are_counted_and_forgotten_ones_leave() {
        let mut random = StdRng::seed_from_u64(1);
        let names: Vec<Name> = (0..20)
            .map(|n| Name::new(&format!("c{n}")).unwrap())
            .collect();
        let (mut extras, mut end, mut durable) = (Extras::default(), 0, 0);
        for _ in 0..10_000 {
            end += 8;
            let name = &names[random.random_range(0..names.len())];
            let mark = random.random::<bool>().then_some(Mark {
                lsn: Lsn::ZERO,
                time: Timestamp::default(),
            });
            extras.move_cursor(Position::new(end), name, mark, Position::new(durable));
            match random.random_range(0..10) {
                0 => durable = end,
                // A group is taken back.
                1 => extras.cut(Position::new(durable)),
                _ => {}
            }
            let there = extras.cursors.values();
            let there = there.filter(|mark| mark.newest().is_some());
            assert_eq!(extras.cursor_count(), there.count() as u64);
        }
        for name in &names {
            end += 8;
            extras.move_cursor(Position::new(end), name, None, Position::new(end - 8));
        }
        extras.drop_forgotten(Position::new(end));
        assert!(extras.cursors.is_empty() && extras.forgotten.is_empty());
    }

    #[test]
    fn cursors_forgotten_in_one_flush_are_each_looked_up_once() {
        let names: Vec<Name> = (0..3_000)
            .map(|n| Name::new(&format!("c{n}")).unwrap())
            .collect();
        let (mut extras, mut end) = (Extras::default(), 0);
        let mark = Mark {
            lsn: Lsn::ZERO,
            time: Timestamp::default(),
        };
        for mark in [Some(mark), None] {
            for name in &names {
                end += 8;
                extras.move_cursor(Position::new(end), name, mark, Position::ZERO);
            }
        }
        extras.drop_forgotten(Position::new(end));
        assert!(extras.cursors.is_empty());
        assert_eq!(extras.looked_up, names.len());
    }
}

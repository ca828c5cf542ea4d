//! Bodies of the frames that are not records, in protobuf wire format, so that later
//! versions can add fields.

use std::time::Duration;

use crate::api::record::{Compression, LogConfig, Retention, SyncMode};
use crate::base::bounds;
use crate::base::ids::{LogId, Lsn, Name, Position, RecoveryEpoch, SegmentId, Timestamp};
use crate::base::wire;
use crate::base::wire::Value;

fn collect<'a>(input: &'a [u8], mut each: impl FnMut(u32, Value<'a>)) -> Option<()> {
    for field in wire::fields(input) {
        let (number, value) = field?;
        each(number, value);
    }
    Some(())
}

fn text(bytes: &[u8]) -> Option<String> {
    String::from_utf8(bytes.to_vec()).ok()
}

/// Maximum length of an encoded log configuration, in bytes.
pub(crate) const MAX_CONFIG_LEN: usize = 64;

/// The settings of a log, as the fields of `wald.v1.LogConfig`.
pub(crate) fn put_config(out: &mut Vec<u8>, config: &LogConfig) {
    wire::put_uint(out, 1, config.sync_mode.map_or(0, number_of));
    if let Some(retention) = &config.retention {
        let mut part = Vec::new();
        put_retention(&mut part, retention);
        // An empty retention is written too: it means no limits, regardless of the server's defaults.
        wire::put_bytes(out, 2, &part);
    }
    wire::put_uint(out, 3, config.compression.map_or(0, codec_number));
    wire::put_uint(out, 4, u64::from(config.max_record_bytes.unwrap_or(0)));
}

fn put_retention(out: &mut Vec<u8>, retention: &Retention) {
    if let Some(age) = retention.max_age {
        let mut part = Vec::new();
        wire::put_uint(&mut part, 1, age.as_secs());
        wire::put_uint(&mut part, 2, u64::from(age.subsec_nanos()));
        wire::put_bytes(out, 1, &part);
    }
    wire::put_uint(out, 2, retention.max_bytes.unwrap_or(0));
    wire::put_uint(out, 3, retention.max_records.unwrap_or(0));
    wire::put_uint(out, 4, u64::from(retention.respect_cursors));
}

fn retention(input: &[u8]) -> Option<Retention> {
    let mut retention = Retention::default();
    let mut age = Some(None);
    let some = |number: u64| (number != 0).then_some(number);
    collect(input, |number, value| match (number, value) {
        (1, Value::Bytes(bytes)) => age = duration(bytes).map(Some),
        (2, Value::Varint(bytes)) => retention.max_bytes = some(bytes),
        (3, Value::Varint(records)) => retention.max_records = some(records),
        (4, Value::Varint(flag)) => retention.respect_cursors = flag != 0,
        _ => {}
    })?;
    retention.max_age = age?;
    Some(retention)
}

/// A `google.protobuf.Duration` that is not negative.
fn duration(input: &[u8]) -> Option<Duration> {
    let (mut seconds, mut nanos) = (0, 0);
    collect(input, |number, value| match (number, value) {
        (1, Value::Varint(number)) => seconds = number,
        (2, Value::Varint(number)) => nanos = number,
        _ => {}
    })?;
    let nanos = u32::try_from(nanos).ok().filter(|n| *n < 1_000_000_000)?;
    let seconds = i64::try_from(seconds).ok()?;
    Some(Duration::new(seconds.unsigned_abs(), nanos))
}

/// The numbers of `wald.v1.SyncMode`.
fn number_of(mode: SyncMode) -> u64 {
    match mode {
        SyncMode::Strict => 1,
        SyncMode::Batch => 2,
        SyncMode::Interval => 3,
        SyncMode::Async => 4,
        SyncMode::Manual => 5,
        SyncMode::Replicated => 6,
    }
}

fn sync_mode(number: u64) -> Option<SyncMode> {
    use SyncMode::{Async, Batch, Interval, Manual, Replicated, Strict};
    [Strict, Batch, Interval, Async, Manual, Replicated]
        .into_iter()
        .find(|mode| number_of(*mode) == number)
}

/// The numbers of `wald.v1.Compression`.
fn codec_number(compression: Compression) -> u64 {
    match compression {
        Compression::None => 1,
        Compression::Lz4 => 2,
        Compression::Zstd => 3,
    }
}

fn compression(number: u64) -> Option<Compression> {
    use Compression::{Lz4, None, Zstd};
    [None, Lz4, Zstd]
        .into_iter()
        .find(|codec| codec_number(*codec) == number)
}

/// The reverse of [`put_config`].
pub(crate) fn config(input: &[u8]) -> Option<LogConfig> {
    let mut config = LogConfig::default();
    let mut sound = true;
    collect(input, |number, value| match (number, value) {
        (1, Value::Varint(mode)) => config.sync_mode = sync_mode(mode),
        (2, Value::Bytes(bytes)) => {
            config.retention = retention(bytes).map(Box::new);
            sound &= config.retention.is_some();
        }
        (3, Value::Varint(codec)) => config.compression = compression(codec),
        (4, Value::Varint(bytes)) => {
            config.max_record_bytes = u32::try_from(bytes).ok().filter(|bytes| *bytes != 0);
        }
        _ => {}
    })?;
    sound.then_some(config)
}

/// Body of a `Created` frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Created {
    pub(crate) name: String,
    pub(crate) config: LogConfig,
    pub(crate) create_time: Timestamp,
}

impl Created {
    /// Maximum length of an encoded body with this name, in bytes.
    pub(crate) fn max_len(name: &str) -> usize {
        name.len() + 3 + 2 + MAX_CONFIG_LEN + 9
    }

    pub(crate) fn put(out: &mut Vec<u8>, name: &str, config: &LogConfig, time: Timestamp) {
        wire::put_bytes(out, 1, name.as_bytes());
        let mut settings = Vec::new();
        put_config(&mut settings, config);
        if !settings.is_empty() {
            wire::put_bytes(out, 2, &settings);
        }
        // Field 3 is the tenant, once there are any.
        wire::put_fixed64(out, 4, time.micros().cast_unsigned());
    }

    pub(crate) fn decode(input: &[u8]) -> Option<Self> {
        let mut name = None;
        let mut settings = Some(LogConfig::default());
        let mut create_time = Timestamp::default();
        collect(input, |number, value| match (number, value) {
            (1, Value::Bytes(bytes)) => name = text(bytes),
            (2, Value::Bytes(bytes)) => settings = config(bytes),
            (4, Value::Fixed64(time)) => create_time = Timestamp::from_micros(time.cast_signed()),
            _ => {}
        })?;
        Some(Self {
            name: name?,
            config: settings?,
            create_time,
        })
    }
}

/// Body of a `Cursor` frame. The cursor's lsn is the first lsn of the frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CursorBody {
    pub(crate) name: Name,
    /// The cursor was deleted.
    pub(crate) deleted: bool,
}

impl CursorBody {
    /// Maximum length of an encoded body with this name, in bytes.
    pub(crate) fn max_len(name: &Name) -> usize {
        name.as_str().len() + 3 + 2
    }

    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        wire::put_bytes(out, 1, self.name.as_str().as_bytes());
        wire::put_uint(out, 2, u64::from(self.deleted));
    }

    pub(crate) fn decode(input: &[u8]) -> Option<Self> {
        let mut name = None;
        let mut deleted = false;
        collect(input, |number, value| match (number, value) {
            (1, Value::Bytes(bytes)) => name = text(bytes).and_then(|name| Name::new(&name).ok()),
            (2, Value::Varint(flag)) => deleted = flag != 0,
            _ => {}
        })?;
        Some(Self {
            name: name?,
            deleted,
        })
    }
}

/// Body of a `Marker` frame. An empty body only proves that everything before it was flushed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Marker {
    /// Expiry clock when the marker was written.
    pub(crate) expiry: Option<Timestamp>,
}

impl Marker {
    /// Maximum length of an encoded marker, in bytes.
    pub(crate) const MAX_LEN: usize = 9;

    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        put_time(out, 1, self.expiry);
    }

    pub(crate) fn decode(input: &[u8]) -> Option<Self> {
        let mut marker = Self::default();
        collect(input, |number, value| {
            if let (1, Value::Fixed64(bits)) = (number, value) {
                marker.expiry = Some(Timestamp::from_micros(bits.cast_signed()));
            }
        })?;
        Some(marker)
    }
}

/// Body of a `Trim` frame. Frames of versions that did not write it have an empty body, which reads as 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TrimBody {
    /// Bytes of the log's frames before the one that holds the first record kept, trimmed ones included.
    pub(crate) bytes: u64,
}

impl TrimBody {
    /// Maximum length of an encoded body, in bytes.
    pub(crate) const MAX_LEN: usize = 11;

    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        wire::put_uint(out, 1, self.bytes);
    }

    pub(crate) fn decode(input: &[u8]) -> Option<Self> {
        let mut trim = Self::default();
        collect(input, |number, value| {
            if let (1, Value::Varint(bytes)) = (number, value) {
                trim.bytes = bytes;
            }
        })?;
        bounds::records(trim.bytes)?;
        Some(trim)
    }
}

/// Writes a time, if there is one. An absent field means that the time is unknown.
fn put_time(out: &mut Vec<u8>, field: u32, time: Option<Timestamp>) {
    if let Some(time) = time {
        wire::put_fixed64(out, field, time.micros().cast_unsigned());
    }
}

/// State of a log at the end of a segment that touched the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Closing {
    pub(crate) log_id: LogId,
    pub(crate) next_lsn: Lsn,
    /// Name of the log, if that segment created the log.
    pub(crate) name: Option<String>,
    pub(crate) deleted: bool,
    /// The first record kept.
    pub(crate) first_lsn: Lsn,
    /// Number of records directly below `first_lsn` that retention expired.
    pub(crate) expired: u64,
    pub(crate) writer_epoch: u64,
}

impl Closing {
    fn put(&self, out: &mut Vec<u8>) {
        wire::put_uint(out, 1, self.log_id.get());
        wire::put_uint(out, 2, self.next_lsn.get());
        if let Some(name) = &self.name {
            wire::put_bytes(out, 3, name.as_bytes());
        }
        wire::put_uint(out, 4, u64::from(self.deleted));
        wire::put_uint(out, 5, self.first_lsn.get());
        wire::put_uint(out, 6, self.writer_epoch);
        wire::put_uint(out, 7, self.expired);
    }

    fn decode(input: &[u8]) -> Option<Self> {
        let mut closing = Self {
            log_id: LogId::new(0),
            next_lsn: Lsn::ZERO,
            name: None,
            deleted: false,
            first_lsn: Lsn::ZERO,
            expired: 0,
            writer_epoch: 0,
        };
        for field in wire::fields(input) {
            match field? {
                (1, Value::Varint(id)) => closing.log_id = bounds::log(id)?,
                (2, Value::Varint(lsn)) => closing.next_lsn = bounds::lsn(lsn)?,
                (3, Value::Bytes(bytes)) => closing.name = text(bytes),
                (4, Value::Varint(flag)) => closing.deleted = flag != 0,
                (5, Value::Varint(lsn)) => closing.first_lsn = bounds::lsn(lsn)?,
                (6, Value::Varint(epoch)) => closing.writer_epoch = epoch,
                (7, Value::Varint(records)) => closing.expired = bounds::records(records)?,
                _ => {}
            }
        }
        Some(closing)
    }
}

/// Body of a `Link` frame, the first of each segment. Describes the segment before from a place that
/// damage to that segment does not reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Link {
    /// The segment before; `None` in the first segment of a store.
    pub(crate) predecessor: Option<SegmentId>,
    /// The segment before the predecessor. It shows whether a gap is exactly one segment.
    pub(crate) second: Option<SegmentId>,
    /// End of the predecessor: nothing at or beyond this position was ever committed there.
    pub(crate) predecessor_end: Position,
    /// Header checksum of the predecessor's last frame.
    pub(crate) predecessor_chain: u32,
    pub(crate) recovery_epoch: RecoveryEpoch,
    /// Counter of the next log id of this epoch.
    pub(crate) next_log_counter: u64,
    /// Every log that the predecessor touched; `None` if there were too many.
    pub(crate) closings: Option<Vec<Closing>>,
    /// Segments below this position may be lost without another trace. They may have held the newest
    /// records of any log that has no frame beyond it.
    pub(crate) lost_before: Option<Position>,
    /// Losses that an operator has accepted explicitly.
    pub(crate) accepted: Option<AcceptedLosses>,
    /// Expiry clock when the link was written; `None` in links of versions without that clock.
    pub(crate) expiry: Option<Timestamp>,
}

/// Losses that were accepted. Later damage is not covered. Logs whose tails these losses left in doubt
/// continue after the records that were found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AcceptedLosses {
    /// Upper bound: all accepted losses lie below this position.
    pub(crate) before: Position,
    /// The losses were too many to list: every loss below `before` is accepted.
    pub(crate) all: bool,
    /// Start and end of damaged bytes, and of places where data is missing.
    pub(crate) places: Vec<(Position, Position)>,
    /// Lost records: log, first and end. A log whose name is lost has an entry without records.
    pub(crate) lost: Vec<(LogId, Lsn, Lsn)>,
}

impl AcceptedLosses {
    /// Whether damage of these bytes was accepted.
    pub(crate) fn covers(&self, from: Position, to: Position) -> bool {
        let within = |place: &(Position, Position)| place.0 <= from && to <= place.1;
        to <= self.before && (self.all || self.places.iter().any(within))
    }

    /// The listed places between two positions: bytes that did not verify when their loss was accepted.
    pub(crate) fn places_between(
        &self,
        from: Position,
        to: Position,
    ) -> impl Iterator<Item = (Position, Position)> {
        let places = self.places.iter().copied();
        places.filter(move |place| place.0 < to && from < place.1 && place.1 <= self.before)
    }

    /// Whether nothing attributed the damage at this position when its loss was accepted.
    pub(crate) fn lists_doubt(&self, at: Position) -> bool {
        self.places.contains(&(at, at.advance(1)))
    }

    /// Whether the loss of a log's name was accepted. An accepted loss of its records does not say so.
    pub(crate) fn covers_name(&self, log: LogId) -> bool {
        self.all || self.lost.contains(&(log, Lsn::ZERO, Lsn::ZERO))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        wire::put_uint(&mut out, 1, self.before.get());
        wire::put_uint(&mut out, 2, u64::from(self.all));
        let mut part = Vec::new();
        for (from, to) in &self.places {
            part.clear();
            wire::put_uint(&mut part, 1, from.get());
            wire::put_uint(&mut part, 2, to.get());
            wire::put_bytes(&mut out, 3, &part);
        }
        for (log, from, to) in &self.lost {
            part.clear();
            wire::put_uint(&mut part, 1, log.get());
            wire::put_uint(&mut part, 2, from.get());
            wire::put_uint(&mut part, 3, to.get());
            wire::put_bytes(&mut out, 4, &part);
        }
        out
    }

    pub(crate) fn decode(input: &[u8]) -> Option<Self> {
        let mut accepted = Self::default();
        for field in wire::fields(input) {
            match field? {
                (1, Value::Varint(before)) => accepted.before = bounds::place(before)?,
                (2, Value::Varint(flag)) => accepted.all = flag != 0,
                (3, Value::Bytes(bytes)) => {
                    let [from, to, _] = numbers(bytes)?;
                    let place = (bounds::place(from)?, bounds::place(to)?);
                    accepted.places.push(place);
                }
                (4, Value::Bytes(bytes)) => {
                    let [log, from, to] = numbers(bytes)?;
                    let lost = (bounds::log(log)?, bounds::lsn(from)?, bounds::lsn(to)?);
                    accepted.lost.push(lost);
                }
                _ => {}
            }
        }
        Some(accepted)
    }

    /// Replaces the list by `all` if the encoded form exceeds `bytes`.
    pub(crate) fn within(self, bytes: u64) -> Self {
        if self.encode().len() as u64 <= bytes {
            return self;
        }
        let before = self.before;
        Self {
            before,
            all: true,
            ..Self::default()
        }
    }
}

/// The first three fields of a message of numbers.
fn numbers(input: &[u8]) -> Option<[u64; 3]> {
    let mut found = [0; 3];
    collect(input, |number, value| {
        if let (1..=3, Value::Varint(value)) = (number, value) {
            found[number as usize - 1] = value;
        }
    })?;
    Some(found)
}

impl Link {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        wire::put_uint(&mut out, 1, self.predecessor.map_or(0, SegmentId::get));
        wire::put_uint(&mut out, 2, self.predecessor_end.get());
        wire::put_fixed32(&mut out, 3, self.predecessor_chain);
        wire::put_uint(&mut out, 4, self.recovery_epoch.get());
        wire::put_uint(&mut out, 5, self.next_log_counter);
        wire::put_uint(&mut out, 6, u64::from(self.closings.is_some()));
        let mut one = Vec::new();
        for closing in self.closings.iter().flatten() {
            one.clear();
            closing.put(&mut one);
            wire::put_bytes(&mut out, 7, &one);
        }
        wire::put_uint(&mut out, 8, self.second.map_or(0, SegmentId::get));
        wire::put_uint(&mut out, 9, self.lost_before.map_or(0, Position::get));
        if let Some(accepted) = &self.accepted {
            wire::put_bytes(&mut out, 10, &accepted.encode());
        }
        put_time(&mut out, 11, self.expiry);
        out
    }

    pub(crate) fn decode(input: &[u8]) -> Option<Self> {
        let mut link = Self {
            predecessor: None,
            second: None,
            predecessor_end: Position::ZERO,
            predecessor_chain: 0,
            recovery_epoch: RecoveryEpoch::FIRST,
            next_log_counter: 0,
            closings: None,
            lost_before: None,
            accepted: None,
            expiry: None,
        };
        let mut complete = false;
        let mut closings = Vec::new();
        for field in wire::fields(input) {
            match field? {
                (1, Value::Varint(id)) => link.predecessor = Some(bounds::segment(id)?),
                (2, Value::Varint(end)) => link.predecessor_end = bounds::position(end)?,
                (3, Value::Fixed32(chain)) => link.predecessor_chain = chain,
                (4, Value::Varint(epoch)) => link.recovery_epoch = bounds::epoch(epoch)?,
                (5, Value::Varint(counter)) => link.next_log_counter = bounds::counter(counter)?,
                (6, Value::Varint(flag)) => complete = flag != 0,
                (7, Value::Bytes(bytes)) => closings.push(Closing::decode(bytes)?),
                (8, Value::Varint(id)) => link.second = Some(bounds::segment(id)?),
                (9, Value::Varint(position)) => {
                    link.lost_before = Some(bounds::position(position)?);
                }
                (10, Value::Bytes(bytes)) => link.accepted = Some(AcceptedLosses::decode(bytes)?),
                (11, Value::Fixed64(bits)) => {
                    link.expiry = Some(Timestamp::from_micros(bits.cast_signed()));
                }
                _ => {}
            }
        }
        link.closings = complete.then_some(closings);
        Some(link)
    }
}

/// Body of a `Seal` frame, the last of a finished segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seal {
    /// Frames before the seal.
    pub(crate) frames: u64,
    /// Records in them.
    pub(crate) records: u64,
    /// XXH3-128 of the bytes from the first frame up to the seal.
    pub(crate) digest: u128,
    /// Whether the daemon shut down here with nothing left to do.
    pub(crate) clean: bool,
    /// Counter of the next log id, for the start after a clean shutdown.
    pub(crate) next_log_counter: u64,
    /// The segment in which the journal continues. Its file is ready before the seal is written. `None`
    /// at a shutdown.
    pub(crate) successor: Option<SegmentId>,
    /// Expiry clock when the seal was written.
    pub(crate) expiry: Option<Timestamp>,
}

impl Seal {
    /// Maximum length of an encoded seal, in bytes.
    pub(crate) const MAX_LEN: usize = 11 + 11 + 18 + 2 + 11 + 11 + 9;

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        wire::put_uint(&mut out, 1, self.frames);
        wire::put_uint(&mut out, 2, self.records);
        wire::put_bytes(&mut out, 3, &self.digest.to_le_bytes());
        wire::put_uint(&mut out, 4, u64::from(self.clean));
        wire::put_uint(&mut out, 5, self.next_log_counter);
        wire::put_uint(&mut out, 6, self.successor.map_or(0, SegmentId::get));
        put_time(&mut out, 7, self.expiry);
        out
    }

    pub(crate) fn decode(input: &[u8]) -> Option<Self> {
        let mut seal = Self {
            frames: 0,
            records: 0,
            digest: 0,
            clean: false,
            next_log_counter: 0,
            successor: None,
            expiry: None,
        };
        for field in wire::fields(input) {
            match field? {
                (1, Value::Varint(frames)) => seal.frames = frames,
                (2, Value::Varint(records)) => seal.records = bounds::records(records)?,
                (3, Value::Bytes(bytes)) => {
                    seal.digest = bytes.try_into().map_or(0, u128::from_le_bytes);
                }
                (4, Value::Varint(flag)) => seal.clean = flag != 0,
                (5, Value::Varint(counter)) => seal.next_log_counter = bounds::counter(counter)?,
                (6, Value::Varint(id)) => seal.successor = Some(bounds::segment(id)?),
                (7, Value::Fixed64(bits)) => {
                    seal.expiry = Some(Timestamp::from_micros(bits.cast_signed()));
                }
                _ => {}
            }
        }
        Some(seal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::run_head::RunHead;

    #[test]
    fn bodies_read_back_as_they_were_written() {
        let config = LogConfig {
            max_record_bytes: Some(4096),
            sync_mode: Some(SyncMode::Manual),
            compression: Some(Compression::Lz4),
            retention: Some(Box::new(Retention {
                max_age: Some(Duration::new(u64::MAX >> 1, 999_999_999)),
                max_bytes: Some(u64::MAX),
                max_records: Some(u64::MAX),
                respect_cursors: true,
            })),
        };
        let mut out = Vec::new();
        Created::put(&mut out, "airport/ü", &config, Timestamp::from_micros(-5));
        assert!(out.len() <= Created::max_len("airport/ü"));
        let created = Created::decode(&out).unwrap();
        assert_eq!(created.name, "airport/ü");
        assert_eq!(created.config, config);
        assert_eq!(created.create_time, Timestamp::from_micros(-5));

        let link = Link {
            predecessor: Some(SegmentId::new(3)),
            second: Some(SegmentId::new(2)),
            predecessor_end: Position::new(77),
            predecessor_chain: 5,
            recovery_epoch: RecoveryEpoch::new(9),
            next_log_counter: 12,
            closings: Some(vec![Closing {
                log_id: LogId::new(4),
                next_lsn: Lsn::new(17),
                name: Some("x".to_owned()),
                deleted: true,
                first_lsn: Lsn::new(2),
                expired: 2,
                writer_epoch: 6,
            }]),
            lost_before: Some(Position::new(70)),
            accepted: Some(AcceptedLosses {
                before: Position::new(71),
                all: false,
                places: vec![(Position::new(9), Position::new(20))],
                lost: vec![(LogId::new(3), Lsn::new(0), Lsn::new(7))],
            }),
            expiry: Some(Timestamp::from_micros(-3)),
        };
        assert_eq!(Link::decode(&link.encode()), Some(link));

        let cursor = CursorBody {
            name: Name::new("é").unwrap(),
            deleted: true,
        };
        out.clear();
        cursor.put(&mut out);
        assert!(out.len() <= CursorBody::max_len(&cursor.name));
        assert_eq!(CursorBody::decode(&out), Some(cursor));

        for expiry in [None, Some(Timestamp::from_micros(i64::MIN))] {
            out.clear();
            let marker = Marker { expiry };
            marker.put(&mut out);
            assert!(out.len() <= Marker::MAX_LEN);
            assert_eq!(Marker::decode(&out), Some(marker));
        }

        let seal = Seal {
            frames: u64::MAX,
            records: bounds::LSNS - 1,
            digest: u128::MAX - 1,
            clean: true,
            next_log_counter: bounds::COUNTERS - 1,
            successor: Some(SegmentId::new(bounds::SEGMENTS - 1)),
            expiry: Some(Timestamp::from_micros(-1)),
        };
        let encoded = seal.encode();
        assert!(encoded.len() <= Seal::MAX_LEN);
        assert_eq!(Seal::decode(&encoded), Some(seal));
    }

    #[test]
    fn counters_of_a_store_that_begins_at_the_highest_one_read_back() {
        let most = 1 << 39;
        for next_log_counter in [most, most + 1_000_000] {
            let seal = Seal {
                frames: 1,
                records: 1,
                digest: 1,
                clean: true,
                next_log_counter,
                successor: None,
                expiry: None,
            };
            assert_eq!(Seal::decode(&seal.encode()), Some(seal));
            let link = Link {
                predecessor: None,
                second: None,
                predecessor_end: Position::ZERO,
                predecessor_chain: 0,
                recovery_epoch: RecoveryEpoch::FIRST,
                next_log_counter,
                closings: None,
                lost_before: None,
                accepted: None,
                expiry: None,
            };
            assert_eq!(Link::decode(&link.encode()), Some(link));
            let head = RunHead {
                limit: Position::new(1),
                next_log_counter,
                ..RunHead::empty()
            };
            let read = RunHead::decode(&head.encode()).map(|head| head.next_log_counter);
            assert_eq!(read, Some(next_log_counter));
            assert!(LogId::compose(RecoveryEpoch::FIRST, next_log_counter).get() > 0);
        }
    }
}

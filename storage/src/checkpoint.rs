//! Checkpoints: how all logs stood when one segment was left, so that a start reads this
//! and what came after, and not the history.
//!
//! A file of its own per checkpoint, named by the segment it ends with; two are kept.
//! Layout: magic, version, a message in protobuf wire format, CRC-32C of all before.
//!
//! | field | what |
//! |---|---|
//! | 1, 2 | store id, low and high half |
//! | 3, 4 | recovery epoch, counter of the next log id |
//! | 5 | 1 if the run ended cleanly with this |
//! | 6 | latest arrival time |
//! | 7, 8, 9 | last segment, the one before it, header checksum of its last frame |
//! | 10 | an ended epoch: its number, where what survived of it ends |
//! | 11 | a segment: id, size, salt, base, end, bytes of its file |
//! | 12 | a log: its [`Image`] |
//! | 13 | what the expiry clock showed |
//! | 14 | the last segment that a sorted run stands for; 11 tells of those behind it |
//! | 16 | losses that were accepted, as in a link; records that damage took are in the images |

use std::io;
use std::sync::Arc;

use crate::backup::Backups;
use crate::bounds;
use crate::directory;
use crate::disk::{Disk, DiskFile, read_whole};
use crate::ids::{Position, RecoveryEpoch, SegmentId, Timestamp};
use crate::index::Image;
use crate::journal::body::Accepted;
use crate::journal::frame::{RunningCrc, crc32c};
use crate::journal::segment::Life;
use crate::known_bad::{self, Mistake};
use crate::wire::{self, Value};

const DIRECTORY: &str = "checkpoint";
const MAGIC: [u8; 8] = *b"WALDCKP\0";
const VERSION: u32 = 1;
const HEADER: usize = 12;
/// So many are kept: the second serves if the first is damaged.
const KEPT: usize = 2;
/// Written at a time.
const PIECE: usize = 1 << 20;

/// A sealed segment, as a checkpoint tells of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentEntry {
    pub(crate) life: Life,
    pub(crate) base: Position,
    pub(crate) end: Position,
    /// Bytes the file takes.
    pub(crate) bytes: u64,
}

/// All but the logs, which are many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) store_id: u128,
    pub(crate) epoch: RecoveryEpoch,
    pub(crate) next_log_counter: u64,
    /// Whether the run ended with it.
    pub(crate) clean: bool,
    pub(crate) arrival: Timestamp,
    /// What the expiry clock showed; `None` of versions before there was one.
    pub(crate) expiry: Option<Timestamp>,
    pub(crate) last: SegmentId,
    pub(crate) before: Option<SegmentId>,
    /// Header checksum of the last segment's last frame.
    pub(crate) chain: u32,
    pub(crate) history: Vec<(RecoveryEpoch, Position)>,
    /// The last segment that a sorted run stands for.
    pub(crate) sorted: Option<SegmentId>,
    /// Those behind, in journal order; the last is `last`.
    pub(crate) segments: Vec<SegmentEntry>,
    /// Losses that were accepted.
    pub(crate) accepted: Vec<Accepted>,
}

/// A checkpoint that is being written, piece by piece: one of a million logs is large. The file
/// goes if it is not finished.
pub(crate) struct Writer<'a> {
    disk: &'a dyn Disk,
    last: SegmentId,
    file: Arc<dyn DiskFile>,
    /// Bytes written, and their checksum.
    written: u64,
    crc: RunningCrc,
    /// What is to be written next.
    out: Vec<u8>,
    part: Vec<u8>,
    finished: bool,
}

impl<'a> Writer<'a> {
    /// Begins a file under a name that no start looks at.
    pub(crate) fn new(disk: &'a dyn Disk, summary: &Summary) -> io::Result<Self> {
        let file = create_anew(disk, &new_path(summary.last))?;
        let mut out = Vec::new();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        let (low, high) = halves(summary.store_id);
        wire::put_fixed64(&mut out, 1, low);
        wire::put_fixed64(&mut out, 2, high);
        wire::put_uint(&mut out, 3, summary.epoch.get());
        wire::put_uint(&mut out, 4, summary.next_log_counter);
        wire::put_uint(&mut out, 5, u64::from(summary.clean));
        wire::put_fixed64(&mut out, 6, summary.arrival.micros().cast_unsigned());
        wire::put_uint(&mut out, 7, summary.last.get());
        wire::put_uint(&mut out, 8, summary.before.map_or(0, SegmentId::get));
        wire::put_fixed32(&mut out, 9, summary.chain);
        if let Some(expiry) = summary.expiry {
            wire::put_fixed64(&mut out, 13, expiry.micros().cast_unsigned());
        }
        wire::put_uint(&mut out, 14, summary.sorted.map_or(0, SegmentId::get));
        let mut part = Vec::new();
        for (epoch, end) in &summary.history {
            part.clear();
            wire::put_varint(&mut part, epoch.get());
            wire::put_varint(&mut part, end.get());
            wire::put_bytes(&mut out, 10, &part);
        }
        for segment in &summary.segments {
            part.clear();
            for number in [segment.life.id.get(), segment.life.size, segment.bytes] {
                wire::put_varint(&mut part, number);
            }
            wire::put_varint(&mut part, segment.base.get());
            wire::put_varint(&mut part, segment.end.since(segment.base));
            part.extend_from_slice(&segment.life.salt.to_le_bytes());
            wire::put_bytes(&mut out, 11, &part);
        }
        for accepted in &summary.accepted {
            wire::put_bytes(&mut out, 16, &accepted.encode());
        }
        Ok(Self {
            disk,
            last: summary.last,
            file,
            written: 0,
            crc: RunningCrc::default(),
            out,
            part,
            finished: false,
        })
    }

    pub(crate) fn add(&mut self, image: &Image) -> io::Result<()> {
        self.part.clear();
        if known_bad::makes(Mistake::ProducersNotInCheckpoint) {
            let extras = None;
            Image {
                extras,
                ..image.clone()
            }
            .encode(&mut self.part);
        } else {
            image.encode(&mut self.part);
        }
        wire::put_bytes(&mut self.out, 12, &self.part);
        if self.out.len() < PIECE {
            return Ok(());
        }
        self.crc.feed(&self.out);
        self.write_out()
    }

    fn write_out(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.out, self.written)?;
        self.written += self.out.len() as u64;
        self.out.clear();
        Ok(())
    }

    /// Puts the file in place, durably, and removes those that are not kept any longer.
    /// Returns how many bytes it has.
    pub(crate) fn finish(mut self, backups: &Backups) -> io::Result<u64> {
        self.crc.feed(&self.out);
        let crc = self.crc.value();
        self.out.extend_from_slice(&crc.to_le_bytes());
        self.write_out()?;
        self.file.sync()?;
        self.disk.rename(&new_path(self.last), &path(self.last))?;
        self.finished = true;
        self.disk.sync_directory(DIRECTORY)?;
        let mut ids = list(self.disk)?;
        let kept = ids.split_off(ids.len().saturating_sub(KEPT));
        for name in self.disk.list(DIRECTORY)? {
            // A crash may have left one half written. Files of others stay.
            let is_half = bounds::named(&name, ".new").is_some();
            // What they told is in this one.
            let is_old = old_id(&name).is_some();
            if is_half || is_old || id_of(&name).is_some_and(|id| !kept.contains(&id)) {
                backups.remove(&format!("{DIRECTORY}/{name}"))?;
            }
        }
        backups.remove_left();
        Ok(self.written)
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        if !self.finished {
            // Half a file helps nobody; if this fails too, the next one removes it.
            let _gone = self.disk.remove(&new_path(self.last));
        }
    }
}

/// Creates an empty file; one that a crash left there goes.
fn create_anew(disk: &dyn Disk, path: &str) -> io::Result<Arc<dyn DiskFile>> {
    match disk.create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            disk.remove(path)?;
            disk.create(path)
        }
        other => other,
    }
}

/// Writes a file, made of parts, under a name of its own and moves it to its place, both flushed but
/// not the directory.
pub(crate) fn replace(disk: &dyn Disk, new: &str, path: &str, parts: &[&[u8]]) -> io::Result<()> {
    let file = create_anew(disk, new)?;
    let mut at = 0;
    let written = parts.iter().try_for_each(|part| {
        file.write_all_at(part, at)?;
        at += part.len() as u64;
        Ok(())
    });
    let written = written.and_then(|()| file.sync());
    if let Err(error) = written {
        // Half a file helps nobody; if this fails too, the next try removes it.
        let _gone = disk.remove(new);
        return Err(error);
    }
    disk.rename(new, path)
}

/// Name of a checkpoint that is not whole.
fn new_path(last: SegmentId) -> String {
    format!("{DIRECTORY}/{last}.new")
}

/// Name of a checkpoint.
pub(crate) fn path(last: SegmentId) -> String {
    format!("{DIRECTORY}/{last}.ckp")
}

/// The id in a checkpoint's file name.
pub(crate) fn id_of(name: &str) -> Option<SegmentId> {
    bounds::named(name, ".ckp")
}

/// Name of a checkpoint that no start begins with: damage was found in what it covers. It tells facts
/// that damage took.
pub(crate) fn old_path(last: SegmentId) -> String {
    format!("{DIRECTORY}/{last}.old")
}

/// The id in the name of such a file.
pub(crate) fn old_id(name: &str) -> Option<SegmentId> {
    bounds::named(name, ".old")
}

/// No start begins with a checkpoint that is there now. Every start that reads the frames asks the
/// newest ones, until another is written.
pub(crate) fn set_aside(disk: &dyn Disk, backups: &Backups) -> io::Result<()> {
    let ids = list(disk)?;
    if ids.is_empty() {
        return Ok(());
    }
    for id in ids {
        backups.set_aside(&path(id), &old_path(id))?;
    }
    let old = list_old(disk)?;
    for id in &old[..old.len().saturating_sub(KEPT)] {
        backups.remove(&old_path(*id))?;
    }
    disk.sync_directory(DIRECTORY)
}

/// The checkpoints there are, the oldest first.
pub(crate) fn list(disk: &dyn Disk) -> io::Result<Vec<SegmentId>> {
    list_by(disk, id_of)
}

/// The checkpoints that no start begins with, the oldest first.
pub(crate) fn list_old(disk: &dyn Disk) -> io::Result<Vec<SegmentId>> {
    list_by(disk, old_id)
}

fn list_by(disk: &dyn Disk, id: fn(&str) -> Option<SegmentId>) -> io::Result<Vec<SegmentId>> {
    let mut ids: Vec<SegmentId> = directory::list(disk, DIRECTORY)?
        .iter()
        .filter_map(|name| id(name))
        .collect();
    ids.sort_unstable();
    Ok(ids)
}

/// The bytes of a checkpoint, verified; `None` if it is damaged, or of another version.
pub(crate) fn read(disk: &dyn Disk, last: SegmentId) -> io::Result<Option<Vec<u8>>> {
    read_at(disk, &path(last))
}

/// The same of the file at a path.
pub(crate) fn read_at(disk: &dyn Disk, path: &str) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = read_whole(disk, path)?;
    let Some((whole, crc)) = bytes
        .len()
        .checked_sub(4)
        .and_then(|at| bytes.split_at_checked(at))
    else {
        return Ok(None);
    };
    let good = whole.len() >= HEADER
        && whole[..8] == MAGIC
        && whole[8..12] == VERSION.to_le_bytes()
        && crc32c(whole).to_le_bytes() == *crc;
    let length = whole.len();
    bytes.truncate(length);
    Ok(good.then_some(bytes))
}

/// Reads what [`read`] returned; each log is given to `log`.
pub(crate) fn decode(bytes: &[u8], mut log: impl FnMut(Image)) -> Option<Summary> {
    take_apart(bytes, |image| {
        log(Image::decode(image)?);
        Some(())
    })
}

/// The same; each log is given to `log` as it stands there.
pub(crate) fn take_apart<'a>(
    bytes: &'a [u8],
    mut log: impl FnMut(&'a [u8]) -> Option<()>,
) -> Option<Summary> {
    let mut summary = Summary {
        store_id: 0,
        epoch: RecoveryEpoch::FIRST,
        next_log_counter: 1,
        clean: false,
        arrival: Timestamp::default(),
        expiry: None,
        last: SegmentId::FIRST,
        before: None,
        chain: 0,
        history: Vec::new(),
        sorted: None,
        segments: Vec::new(),
        accepted: Vec::new(),
    };
    let (mut low, mut high) = (0, 0);
    for field in wire::fields(bytes.get(HEADER..)?) {
        match field? {
            (1, Value::Fixed64(half)) => low = half,
            (2, Value::Fixed64(half)) => high = half,
            (3, Value::Varint(epoch)) => summary.epoch = bounds::epoch(epoch)?,
            (4, Value::Varint(counter)) => summary.next_log_counter = bounds::counter(counter)?,
            (5, Value::Varint(flag)) => summary.clean = flag != 0,
            (6, Value::Fixed64(time)) => {
                summary.arrival = Timestamp::from_micros(time.cast_signed());
            }
            (13, Value::Fixed64(time)) => {
                summary.expiry = Some(Timestamp::from_micros(time.cast_signed()));
            }
            (7, Value::Varint(id)) => summary.last = bounds::segment(id)?,
            (8, Value::Varint(id)) => summary.before = Some(bounds::segment(id)?),
            (9, Value::Fixed32(chain)) => summary.chain = chain,
            (10, Value::Bytes(mut part)) => {
                let epoch = bounds::epoch(wire::take_varint(&mut part)?)?;
                let end = bounds::position(wire::take_varint(&mut part)?)?;
                summary.history.push((epoch, end));
            }
            (11, Value::Bytes(part)) => summary.segments.push(segment(part)?),
            (12, Value::Bytes(image)) => log(image)?,
            (14, Value::Varint(id)) => summary.sorted = Some(bounds::segment(id)?),
            (16, Value::Bytes(part)) => summary.accepted.push(Accepted::decode(part)?),
            _ => {}
        }
    }
    summary.store_id = u128::from(high) << 64 | u128::from(low);
    for segment in &mut summary.segments {
        segment.life.store_id = summary.store_id;
    }
    Some(summary)
}

fn segment(mut part: &[u8]) -> Option<SegmentEntry> {
    let mut number = || wire::take_varint(&mut part);
    let (id, size, bytes, base, length) = (number()?, number()?, number()?, number()?, number()?);
    let base = bounds::position(base)?;
    Some(SegmentEntry {
        life: Life {
            id: bounds::segment(id)?,
            size: bounds::offset(size)?,
            salt: u64::from_le_bytes(part.try_into().ok()?),
            store_id: 0,
        },
        base,
        end: base.advance(bounds::offset(length)?),
        bytes: bounds::offset(bytes)?,
    })
}

fn halves(id: u128) -> (u64, u64) {
    let bytes = id.to_le_bytes();
    let half = |from: usize| {
        let mut raw = [0; 8];
        raw.copy_from_slice(&bytes[from..from + 8]);
        u64::from_le_bytes(raw)
    };
    (half(0), half(8))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::SimDisk;

    fn summary() -> Summary {
        let segment = |id| SegmentEntry {
            life: Life {
                id: SegmentId::new(id),
                size: 65536,
                salt: u64::MAX - id,
                store_id: 5 << 90 | 3,
            },
            base: Position::new(id << 32),
            end: Position::new((id << 32) + 60_000),
            bytes: 61_440,
        };
        Summary {
            store_id: 5 << 90 | 3,
            epoch: RecoveryEpoch::new(4),
            next_log_counter: 17,
            clean: true,
            arrival: Timestamp::from_micros(-1),
            expiry: Some(Timestamp::from_micros(-2)),
            last: SegmentId::new(9),
            before: Some(SegmentId::new(8)),
            chain: 77,
            history: vec![(RecoveryEpoch::new(2), Position::new(1 << 50))],
            sorted: Some(SegmentId::new(7)),
            segments: vec![segment(8), segment(9)],
            accepted: vec![Accepted {
                before: Position::new(9 << 32),
                ..Accepted::default()
            }],
        }
    }

    fn image(id: u64) -> Image {
        let mut bytes = Vec::new();
        crate::wire::put_uint(&mut bytes, 1, id);
        Image::decode(&bytes).unwrap()
    }

    #[test]
    fn a_checkpoint_reads_back_two_are_kept_and_damage_is_seen() {
        let disk = SimDisk::new();
        disk.create_directory(DIRECTORY).unwrap();
        let backups = Backups::new(std::sync::Arc::new(disk.clone()));
        for last in 7..=9 {
            let summary = Summary {
                last: SegmentId::new(last),
                ..summary()
            };
            let mut writer = Writer::new(&disk, &summary).unwrap();
            writer.add(&image(1)).unwrap();
            writer.add(&image(2)).unwrap();
            writer.finish(&backups).unwrap();
        }
        assert_eq!(list(&disk).unwrap(), [8, 9].map(SegmentId::new));
        let bytes = read(&disk, SegmentId::new(9)).unwrap().unwrap();
        let mut ids = Vec::new();
        let read_back = decode(&bytes, |image| ids.push(image.id.get()));
        assert_eq!((read_back, ids), (Some(summary()), vec![1, 2]));
        let file = disk.open(&path(SegmentId::new(9))).unwrap();
        for at in 0..file.size().unwrap() {
            let mut byte = [0];
            file.read_full_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 4], at).unwrap();
            assert_eq!(read(&disk, SegmentId::new(9)).unwrap(), None, "byte {at}");
            file.write_all_at(&byte, at).unwrap();
        }
    }
}

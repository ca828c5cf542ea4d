//! Checkpoints: the state of all logs at the end of one segment. A start reads the newest checkpoint
//! and the segments after it, instead of the whole history.
//!
//! Each checkpoint is one file, named by its last segment. Two are kept. Layout: magic, version, a
//! message in protobuf wire format, CRC-32C of all before.
//!
//! | field | content |
//! |---|---|
//! | 1, 2 | store id, low and high half |
//! | 3, 4 | recovery epoch, counter of the next log id |
//! | 5 | 1 if the run ended cleanly with this checkpoint |
//! | 6 | latest arrival time |
//! | 7, 8, 9 | last segment, the one before it, header checksum of its last frame |
//! | 10 | an ended epoch: its number, and the end of its surviving frames |
//! | 11 | a segment: id, size, salt, base, end, bytes of its file |
//! | 12 | a log: its [`Image`] |
//! | 13 | expiry clock when the last segment was left |
//! | 14 | the last segment that a sorted run covers; field 11 lists those after it |
//! | 16 | losses that were accepted, as in a link; lost records are in the images |

use std::io;
use std::sync::Arc;

use crate::base::bounds;
use crate::base::crc::crc32c;
use crate::base::ids::{Position, RecoveryEpoch, SegmentId, Timestamp};
use crate::base::wire;
use crate::base::wire::Value;
use crate::disk;
use crate::disk::directory;
use crate::disk::held_files::Backups;
use crate::disk::known_bad;
use crate::disk::known_bad::Mistake;
use crate::disk::{Disk, DiskFile, read_whole};
use crate::format::body::AcceptedLosses;
use crate::format::frame::RunningCrc;
use crate::format::life::Life;
use crate::logs::image::Image;

pub(crate) const DIRECTORY: &str = "checkpoint";
const MAGIC: [u8; 8] = *b"WALDCKP\0";
const VERSION: u32 = 1;
const HEADER: usize = 12;
/// Number of checkpoints kept: the second serves if the first is damaged.
const KEPT: usize = 2;
/// Bytes that are written at a time.
const PIECE: usize = 1 << 20;

/// A sealed segment, as a checkpoint describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentEntry {
    pub(crate) life: Life,
    pub(crate) base: Position,
    pub(crate) end: Position,
    /// Bytes that the file takes.
    pub(crate) bytes: u64,
}

/// A checkpoint without its logs, which may be very many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) store_id: u128,
    pub(crate) epoch: RecoveryEpoch,
    pub(crate) next_log_counter: u64,
    /// Whether the run ended cleanly with this checkpoint.
    pub(crate) clean: bool,
    pub(crate) arrival: Timestamp,
    /// Expiry clock when the last segment was left; `None` in files of versions without that clock.
    pub(crate) expiry: Option<Timestamp>,
    pub(crate) last: SegmentId,
    pub(crate) before: Option<SegmentId>,
    /// Header checksum of the last segment's last frame.
    pub(crate) chain: u32,
    pub(crate) history: Vec<(RecoveryEpoch, Position)>,
    /// The last segment that a sorted run covers.
    pub(crate) sorted: Option<SegmentId>,
    /// The segments after `sorted`, in journal order. The last one is `last`.
    pub(crate) segments: Vec<SegmentEntry>,
    /// Losses that were accepted.
    pub(crate) accepted: Vec<AcceptedLosses>,
}

/// A checkpoint that is being written piece by piece, because a checkpoint of a million logs is large.
/// The file is removed if it is not finished.
pub(crate) struct CheckpointWriter<'a> {
    disk: &'a dyn Disk,
    last: SegmentId,
    file: Arc<dyn DiskFile>,
    /// Number of bytes written, and their checksum.
    written: u64,
    crc: RunningCrc,
    /// Bytes to be written next.
    out: Vec<u8>,
    part: Vec<u8>,
    finished: bool,
}

impl<'a> CheckpointWriter<'a> {
    /// Begins a file under a name that no start reads.
    pub(crate) fn new(disk: &'a dyn Disk, summary: &Summary) -> io::Result<Self> {
        let file = disk::create_anew(disk, &new_path(summary.last))?;
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

    /// Puts the file in its place durably, and removes checkpoints that are no longer kept. Returns the
    /// size of the file in bytes.
    pub(crate) fn finish(mut self, backups: &Backups) -> io::Result<u64> {
        self.crc.feed(&self.out);
        let crc = self.crc.value();
        self.out.extend_from_slice(&crc.to_le_bytes());
        self.write_out()?;
        self.file.sync()?;
        backups.put(&new_path(self.last), &path(self.last))?;
        self.finished = true;
        self.disk.sync_directory(DIRECTORY)?;
        let mut ids = list(self.disk)?;
        let kept = ids.split_off(ids.len().saturating_sub(KEPT));
        for name in self.disk.list(DIRECTORY)? {
            // A crash may have left a half-written file. Foreign files stay.
            let is_half = bounds::named(&name, ".new").is_some();
            // The new checkpoint has the facts of the old files.
            let is_old = old_id(&name).is_some();
            if is_half || is_old || id_of(&name).is_some_and(|id| !kept.contains(&id)) {
                backups.remove(&format!("{DIRECTORY}/{name}"))?;
            }
        }
        backups.remove_left();
        Ok(self.written)
    }
}

impl Drop for CheckpointWriter<'_> {
    fn drop(&mut self) {
        if !self.finished {
            // Half a file is useless. If this removal fails too, the next checkpoint removes it.
            let _gone = self.disk.remove(&new_path(self.last));
        }
    }
}

/// Name of an unfinished checkpoint.
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

/// Name of a checkpoint that was set aside: damage was found in its segments, so no start begins with
/// it. It keeps facts that damage removed.
pub(crate) fn old_path(last: SegmentId) -> String {
    format!("{DIRECTORY}/{last}.old")
}

/// The id in the name of a checkpoint that was set aside.
pub(crate) fn old_id(name: &str) -> Option<SegmentId> {
    bounds::named(name, ".old")
}

/// Sets all checkpoints aside, so that no start begins with them. Starts that read the frames consult
/// the newest of these until another checkpoint is written.
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

/// All checkpoints, oldest first.
pub(crate) fn list(disk: &dyn Disk) -> io::Result<Vec<SegmentId>> {
    list_by(disk, id_of)
}

/// All checkpoints that were set aside, oldest first.
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

/// Reads and verifies a checkpoint. Returns its bytes; `None` if it is damaged, or of another version.
pub(crate) fn read(disk: &dyn Disk, last: SegmentId) -> io::Result<Option<Vec<u8>>> {
    read_at(disk, &path(last))
}

/// Reads and verifies the checkpoint file at a path, as [`read`].
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

/// Decodes the bytes from [`read`], and passes each log to `log`.
pub(crate) fn decode(bytes: &[u8], mut log: impl FnMut(Image)) -> Option<Summary> {
    take_apart(bytes, |image| {
        log(Image::decode(image)?);
        Some(())
    })
}

/// Decodes the bytes from [`read`], and passes the encoded image of each log to `log`.
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
            (16, Value::Bytes(part)) => summary.accepted.push(AcceptedLosses::decode(part)?),
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
    use crate::base::clock::{Clock as _, SystemClock};
    use crate::disk::SimDisk;
    use crate::disk::held_files::PinPurpose;

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
            accepted: vec![AcceptedLosses {
                before: Position::new(9 << 32),
                ..AcceptedLosses::default()
            }],
        }
    }

    fn image(id: u64) -> Image {
        let mut bytes = Vec::new();
        crate::base::wire::put_uint(&mut bytes, 1, id);
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
            let mut writer = CheckpointWriter::new(&disk, &summary).unwrap();
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

    #[test]
    fn checkpoint_stays_when_the_backup_of_its_predecessor_ends() {
        let disk = SimDisk::new();
        disk.create_directory(DIRECTORY).unwrap();
        let backups = Backups::new(std::sync::Arc::new(disk.clone()));
        let write = || {
            CheckpointWriter::new(&disk, &summary())
                .unwrap()
                .finish(&backups)
        };
        write().unwrap();
        let now = SystemClock.monotonic();
        let pin = backups.pin(now, PinPurpose::Backup).unwrap();
        set_aside(&disk, &backups).unwrap();
        write().unwrap();
        drop(pin);
        assert_eq!(list(&disk).unwrap(), [SegmentId::new(9)]);
        // The next checkpoint has the facts of the old file, which the backup still holds. It is set aside itself then.
        let pin = backups.pin(now, PinPurpose::Backup).unwrap();
        set_aside(&disk, &backups).unwrap();
        write().unwrap();
        set_aside(&disk, &backups).unwrap();
        drop(pin);
        assert_eq!(list_old(&disk).unwrap(), [SegmentId::new(9)]);
        assert!(list(&disk).unwrap().is_empty());
    }
}

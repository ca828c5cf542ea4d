//! Reads runs as files: lists them, opens them, and walks their frames.
//!
//! Bytes that do not verify are read again from the device before they count as damaged.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use bytes::Bytes;

use crate::api::pace::Stop;
use crate::base::bounds::LIFE_BYTES;
use crate::base::crc;
use crate::base::ids::{LogId, Lsn, Position, SegmentId};
use crate::disk::directory;
pub(crate) use crate::disk::read_some as some;
use crate::disk::{Disk, DiskFile, read_again};
use crate::format::active::Place;
use crate::format::address::Hole;
use crate::format::address::base_of;
use crate::format::frame;
use crate::format::frame::{FrameHeader, FrameKind};
use crate::format::life;
use crate::format::life::{ARCHIVED, BadLife, Life, SORTED_RUN};
use crate::format::pack::{Piece, entries, pieces};
use crate::format::run_head::RunHead;
use crate::format::stream::ReadBytes;
use crate::format::walk::{Event, Walk};
use crate::index::{NewRow, SealedIndex};
use crate::journal::run::{new_id, path};
use crate::journal::segment::Segment;
use crate::logs::damages::LostInRun;
use crate::logs::image::Images;

/// Length of the last field, in bytes: the offset of the last frame.
pub(crate) const TRAILER_BYTES: u64 = 8;

/// Files in `sorted/`.
#[derive(Debug, Default)]
pub(crate) struct Listed {
    pub(crate) runs: Vec<SegmentId>,
    /// Begun and never published.
    pub(crate) unfinished: Vec<SegmentId>,
    pub(crate) strangers: Vec<String>,
}

/// Lists the runs of a store.
pub(crate) fn list(disk: &dyn Disk) -> io::Result<Listed> {
    let mut listed = Listed::default();
    for name in directory::list(disk, "sorted")? {
        match (life::id_of(&name), new_id(&name)) {
            (Some(id), _) => listed.runs.push(id),
            (None, Some(id)) => listed.unfinished.push(id),
            (None, None) => listed.strangers.push(name),
        }
    }
    listed.runs.sort_unstable();
    listed.unfinished.sort_unstable();
    Ok(listed)
}

/// Why a run cannot be used.
#[derive(Debug)]
pub(crate) enum BadRun {
    Io(io::Error),
    /// The run is newer than this version.
    Newer(String),
    /// A description for the operator.
    Damaged(String),
}

impl From<io::Error> for BadRun {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// The life block of a run and its last frame.
pub(crate) struct OpenedRun {
    pub(crate) life: Life,
    pub(crate) head: RunHead,
    /// Offset at which its frames end.
    pub(crate) end: u64,
    /// Header checksum of its last frame.
    pub(crate) chain: u32,
}

/// Reads the life block and the last frame of a run. Damaged bytes are read again, from the device.
pub(crate) fn open(disk: &dyn Disk, id: SegmentId, store_id: u128) -> Result<OpenedRun, BadRun> {
    let path = path(id);
    or_again(|again| {
        let damaged = |what: &str| BadRun::Damaged(format!("{path} {what}"));
        let source = RunFile::open(disk, &path, again)?;
        let (life, features) = source.life(Life::decode)?;
        if life.store_id != store_id {
            return Err(damaged("belongs to another store"));
        }
        if life.id != id || features & SORTED_RUN == 0 {
            return Err(damaged("is not the run that its name says"));
        }
        source.head(life)
    })
}

/// Reads the life block and the last frame of a file of an archive.
pub(crate) fn open_archived(disk: &dyn Disk, path: &str) -> Result<OpenedRun, BadRun> {
    or_again(|again| {
        let source = RunFile::open(disk, path, again)?;
        let (life, features) = source.life(Life::decode_archived)?;
        if features & ARCHIVED == 0 {
            return Err(BadRun::Damaged(format!("{path} is not of an archive")));
        }
        source.head(life)
    })
}

/// Opens a run. The memory of the first read may be wrong: a second read bypasses the page cache.
fn or_again(open: impl Fn(bool) -> Result<OpenedRun, BadRun>) -> Result<OpenedRun, BadRun> {
    match open(false) {
        Err(BadRun::Damaged(_)) => open(true),
        opened => opened,
    }
}

/// The file of a run.
struct RunFile<'a> {
    disk: &'a dyn Disk,
    path: &'a str,
    file: Arc<dyn DiskFile>,
    /// Whether reads bypass the page cache.
    again: bool,
}

impl<'a> RunFile<'a> {
    fn open(disk: &'a dyn Disk, path: &'a str, again: bool) -> Result<Self, BadRun> {
        Ok(Self {
            disk,
            path,
            file: disk.open(path)?,
            again,
        })
    }

    fn read(&self, from: u64, bytes: u64) -> io::Result<Bytes> {
        match self.again {
            false => Ok(some(&*self.file, from, bytes)?.into()),
            true => read_again(self.disk, self.path, from, bytes),
        }
    }

    fn damaged(&self, what: &str) -> BadRun {
        BadRun::Damaged(format!("{} {what}", self.path))
    }

    /// The life block, and the incompatible features that it names.
    fn life(&self, decode: fn(&[u8]) -> Result<Life, BadLife>) -> Result<(Life, u32), BadRun> {
        let blocks = self.read(0, LIFE_BYTES)?;
        let life = decode(&blocks).map_err(|bad| match (bad, bad.newer()) {
            (BadLife::Damaged, _) | (_, None) => self.damaged("has no good life block"),
            (_, Some(what)) => BadRun::Newer(format!("{} {what}", self.path)),
        })?;
        Ok((life, Life::features(&blocks)))
    }

    fn head(&self, life: Life) -> Result<OpenedRun, BadRun> {
        let size = self.file.size()?;
        if size < life.size || life.size < LIFE_BYTES + TRAILER_BYTES {
            return Err(self.damaged("is shorter than it was"));
        }
        let end = life.size - TRAILER_BYTES;
        let trailer = self.read(end, TRAILER_BYTES)?;
        let at = trailer[..].try_into().map_or(0, u64::from_le_bytes);
        let mut found = None;
        if at >= LIFE_BYTES && at < end {
            found = head_at(&self.read(at, end - at)?, &life, at, self.path)?;
        }
        if found.is_none() {
            // There is another copy before it, at an unknown offset.
            let bytes = self.read(0, size)?;
            let mut at = end / 8 * 8;
            while found.is_none() && at > LIFE_BYTES {
                at -= 8;
                let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..));
                let base = base_of(life.id);
                let claims =
                    |rest: &&[u8]| frame::claimed_position(rest) == Some(base.advance(at).get());
                if let Some(rest) = rest.filter(claims) {
                    found = head_at(rest, &life, at, self.path)?;
                }
            }
        }
        let (chain, head) = found.ok_or_else(|| {
            self.damaged("does not say what it holds: both frames that do are damaged")
        })?;
        Ok(OpenedRun {
            life,
            head,
            end,
            chain,
        })
    }
}

/// The head of the run in the frame at this offset, and the header checksum of the frame.
fn head_at(
    bytes: &[u8],
    life: &Life,
    at: u64,
    path: &str,
) -> Result<Option<(u32, RunHead)>, BadRun> {
    if let Some(newer) = frame::newer(bytes, life.salt) {
        let refused = newer.refused(path, at);
        return Err(BadRun::Newer(refused.to_string()));
    }
    let position = base_of(life.id).advance(at);
    let header = frame::decode_header(bytes, life.salt)
        .filter(|header| header.kind == FrameKind::Run && header.position == position);
    Ok(header.and_then(|header| {
        let head = frame::verified_body(bytes, &header).and_then(RunHead::decode)?;
        Some((header.crc, head))
    }))
}

/// A pack, and its pieces that verify.
pub(crate) struct WalkedPack {
    pub(crate) log: LogId,
    pub(crate) place: Place,
    /// For a damaged pack: each piece, and whether its bytes are good.
    pub(crate) pieces: Vec<(Piece, bool)>,
    /// Positions of the first and of the last piece in the journal.
    pub(crate) positions: (Position, Position),
}

/// The content of a run.
#[derive(Default)]
pub(crate) struct WalkedRun {
    pub(crate) packs: Vec<WalkedPack>,
    pub(crate) images: Vec<Images>,
    pub(crate) frames: u64,
    pub(crate) records: u64,
    /// Bytes that do not verify, as addresses.
    pub(crate) holes: Vec<Hole>,
    /// Whether some images are lost.
    pub(crate) lost_images: bool,
}

/// Reads all frames of a run. If some do not verify, all are read again, from the device: the memory of the
/// first read may be wrong.
pub(crate) fn walk(disk: &dyn Disk, opened: &OpenedRun) -> io::Result<WalkedRun> {
    let path = path(opened.life.id);
    let file = disk.open(&path)?;
    let mut read = |from: u64, bytes: u64| Ok(some(&*file, from, bytes)?.into());
    let walked = walk_with(opened, &mut read).and_then(|walked| {
        if walked.holes.is_empty() {
            return Ok(walked);
        }
        walk_with(opened, &mut |from, bytes| {
            Ok(read_again(disk, &path, from, bytes)?)
        })
    });
    match walked {
        Ok(walked) => Ok(walked),
        Err(Stop::Io(error)) => Err(error),
        Err(Stop::Stopped) => Err(io::ErrorKind::Interrupted.into()),
    }
}

/// Reads all frames of a run with `read`.
pub(crate) fn walk_with(opened: &OpenedRun, read: &mut ReadBytes<'_>) -> Result<WalkedRun, Stop> {
    let base = base_of(opened.life.id);
    let mut walked = WalkedRun::default();
    let end = base.advance(opened.end);
    let mut frames = Walk::stream(&opened.life, base, end, read);
    while frames.next(end, |event| match event {
        Event::Frame {
            header,
            bytes,
            body,
        } => walked.take(header, bytes, body),
        Event::Hole { from, to, .. } => walked.holes.push(Hole { from, to }),
    })? {}
    walked.lost_images = (walked.images.len() as u64) < opened.head.logs;
    Ok(walked)
}

impl WalkedRun {
    fn take(&mut self, header: &FrameHeader, bytes: &[u8], body: Option<&[u8]>) {
        self.frames += 1;
        let hole = Hole {
            from: header.position,
            to: header.end(),
        };
        match (header.kind, body) {
            (FrameKind::Pack, body) => {
                let Some(pieces) = pieces(bytes, header) else {
                    self.holes.push(hole);
                    return;
                };
                let at = header.header_len as usize;
                let position = |piece: Option<&Piece>| piece.map_or(Position::ZERO, |p| p.position);
                let positions = (position(pieces.first()), position(pieces.last()));
                let good = |piece: &Piece| stored(bytes, at, piece).is_some();
                let mut all: Vec<_> = pieces.into_iter().map(|p| (p, good(&p))).collect();
                let whole = body.is_some() && all.iter().all(|(_, good)| *good);
                if whole {
                    all = Vec::new();
                } else {
                    self.holes.push(hole);
                }
                self.records += u64::from(header.count);
                self.packs.push(WalkedPack {
                    log: header.log_id,
                    place: Place {
                        position: header.position,
                        first_lsn: header.first_lsn,
                        count: header.count,
                        frame_len: u32::try_from(header.frame_len()).unwrap_or(u32::MAX),
                    },
                    pieces: all,
                    positions,
                });
            }
            (FrameKind::Images, body) => match body.and_then(Images::decode) {
                Some(images) => self.images.extend(images),
                None => self.holes.push(hole),
            },
            (FrameKind::Order, Some(body)) if entries(body).all(|entry| entry.is_some()) => {}
            (FrameKind::Run, Some(body)) if RunHead::decode(body).is_some() => {}
            (FrameKind::Marker, Some(_)) => {}
            _ => self.holes.push(hole),
        }
    }

    /// Replaces damaged images by the images in the index of the run.
    pub(crate) fn learn_images(&mut self, index: &SealedIndex) {
        let known: BTreeSet<LogId> = self.images.iter().map(|images| images.image.id).collect();
        for row in index.rows().filter(|row| !known.contains(&row.log_id)) {
            let Some(image) = index.image(&row) else {
                return;
            };
            // Records below this lsn are in earlier runs, or trimmed.
            let before = row.first_lsn;
            self.images.push(Images {
                image,
                before,
                archived: None,
            });
        }
        self.images.sort_unstable_by_key(|images| images.image.id);
        self.lost_images = false;
    }

    /// Kept records of a log that cannot be read, as ranges of lsns.
    pub(crate) fn lost_of(&self, images: &Images) -> Vec<(Lsn, Lsn)> {
        let log = images.image.id;
        let mut next = images.before.max(images.image.kept.first);
        let mut lost = Vec::new();
        for (from, to) in self.good_of(log) {
            if to > next {
                if from > next {
                    lost.push((next, from));
                }
                next = to;
            }
        }
        if next < images.image.next && !images.image.deleted {
            lost.push((next, images.image.next));
        }
        let extras = images.image.extras.as_deref();
        let missing = extras.map_or(&[][..], |extras| &extras.missing);
        let missing = missing.iter().map(|missing| (missing.from, missing.to));
        // Damage took these before the run was made.
        let before = images.image.lost.iter().map(|lost| (lost.from, lost.to));
        for (gone, end) in missing.chain(before) {
            lost = lost
                .into_iter()
                .flat_map(|(from, to)| [(from, to.min(gone)), (from.max(end), to)])
                .filter(|(from, to)| from < to)
                .collect();
        }
        lost
    }

    /// The readable records of a log, in order: from, to (exclusive).
    pub(crate) fn good_of(&self, log: LogId) -> Vec<(Lsn, Lsn)> {
        let mut found = Vec::new();
        for pack in self.packs_of(log) {
            match pack.pieces.is_empty() {
                true => found.push((pack.place.first_lsn, pack.place.next_lsn())),
                false => {
                    let good = pack.pieces.iter().filter(|(_, good)| *good);
                    found.extend(good.map(|(p, _)| (p.first_lsn, p.next_lsn())));
                }
            }
        }
        found
    }

    /// Position in the journal of the piece that holds this record. `None` if its pack is whole or unknown.
    pub(crate) fn position_of(&self, log: LogId, lsn: Lsn) -> Option<Position> {
        let pieces = self.packs_of(log).iter().flat_map(|pack| &pack.pieces);
        let mut pieces = pieces.map(|(piece, _)| piece);
        let piece = pieces.find(|p| p.first_lsn <= lsn && lsn < p.next_lsn())?;
        Some(piece.position)
    }

    /// Whether records that were in the run cannot be read.
    pub(crate) fn lost_records(&self) -> bool {
        self.images.iter().any(|i| !self.lost_of(i).is_empty())
    }

    /// The packs of one log. Packs are in order of log ids.
    fn packs_of(&self, log: LogId) -> &[WalkedPack] {
        let first = self.packs.partition_point(|pack| pack.log < log);
        let last = self.packs.partition_point(|pack| pack.log <= log);
        &self.packs[first..last]
    }

    /// The index of the run. It equals the written index if nothing is lost.
    pub(crate) fn index(&self, opened: &OpenedRun) -> SealedIndex {
        let rows = self.images.iter().map(|images| NewRow {
            places: self
                .packs_of(images.image.id)
                .iter()
                .map(|pack| pack.place)
                .collect(),
            image: images.image.clone(),
            below: None,
        });
        let base = base_of(opened.life.id);
        let end = base.advance(opened.end);
        SealedIndex::build(&opened.life, base, end, opened.chain, rows)
    }
}

/// Bytes of a run that do not verify, as addresses.
pub(crate) fn holes_of(disk: &dyn Disk, segment: &Segment) -> io::Result<Vec<Hole>> {
    Ok(walk(disk, &reopened(disk, segment)?)?.holes)
}

fn reopened(disk: &dyn Disk, segment: &Segment) -> io::Result<OpenedRun> {
    open(disk, segment.life.id, segment.life.store_id).map_err(|bad| match bad {
        BadRun::Io(error) => error,
        BadRun::Newer(what) | BadRun::Damaged(what) => io::Error::other(what),
    })
}

/// The index of a run, rebuilt from its frames for a process that found the index file damaged.
pub(crate) fn index_of(disk: &dyn Disk, segment: &Segment) -> io::Result<SealedIndex> {
    let opened = reopened(disk, segment)?;
    let walked = walk(disk, &opened)?;
    let index = walked.index(&opened);
    Ok(match walked.lost_images {
        true => index.into_partial(),
        false => index,
    })
}

/// The stored bytes of a piece, if they match their checksum: the body of its pack begins at
/// `body` in `bytes`.
pub(crate) fn stored<'a>(bytes: &'a [u8], body: usize, piece: &Piece) -> Option<&'a [u8]> {
    let from = body.checked_add(piece.offset as usize)?;
    let stored = bytes.get(from..from.checked_add(piece.stored as usize)?)?;
    (crc::crc32c(stored) == piece.crc).then_some(stored)
}

/// Walks all of a run, and returns its lost records.
pub(crate) fn lost_in(disk: &dyn Disk, segment: &Segment) -> io::Result<LostInRun> {
    let walked = walk(disk, &reopened(disk, segment)?)?;
    let lost = walked.images.iter();
    let lost = lost.map(|images| (images.image.id, walked.lost_of(images)));
    let described = || walked.images.iter().map(|images| images.image.id).collect();
    Ok(LostInRun {
        lost: lost.filter(|(_, lost)| !lost.is_empty()).collect(),
        described: walked.lost_images.then(described),
        holes: walked.holes,
    })
}

//! Writes the file of a run: packs, images, order, and at last the frame that describes the run.

use std::io;
use std::sync::Arc;

use crate::base::bounds;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{LogId, Lsn, Position, SegmentId, Timestamp};
use crate::disk::{Disk, DiskFile};
use crate::format::active::Place;
use crate::format::address::{SPAN, base_of};
use crate::format::frame;
use crate::format::frame::{FrameHeader, FrameKind, HEADER_BYTES};
use crate::format::life::{ENCRYPTED, Life, SORTED_RUN};
use crate::format::pack::{OrderEntry, Piece, put_pieces};
use crate::format::run_head::RunHead;
use crate::format::sealed;
use crate::journal::run::new_path;

/// Returns the salt for a new file.
pub(crate) fn draw_salt(disk: &dyn Disk) -> io::Result<u64> {
    let mut salt = [0; 8];
    disk.draw(&mut salt)?;
    Ok(u64::from_le_bytes(salt))
}

/// Bytes of one write.
const WRITE_BYTES: usize = 1 << 20;

/// Maximum bytes of the body of a pack, and maximum number of its pieces. A reader of one piece reads the
/// whole header of its pack.
const PACK_BYTES: usize = 32 << 10;
const PACK_PIECES: usize = 128;

/// Bytes between the two frames that describe the run.
const COPIES_APART: usize = 8 << 10;

/// Minimum bytes of the body of a frame of images, or of order, before the frame ends.
const IMAGES_BYTES: usize = 256 << 10;
const ORDER_BYTES: usize = 64 << 10;

/// A run that is being written.
pub(crate) struct RunWriter {
    file: Arc<dyn DiskFile>,
    pub(super) life: Life,
    pub(super) base: Position,
    buffer: Vec<u8>,
    /// Offset in the file of the first byte of the buffer.
    offset: u64,
    chain: u32,
    pack: OpenPack,
    /// Incompatible features that its life block will name.
    features: u32,
    order: Vec<PiecePlace>,
    /// Further information on some entries of `order`.
    told: Vec<DroppedRecords>,
    /// The lowest and the highest number of a key of its pieces.
    keys: Option<(u64, u64)>,
    /// The latest arrival of its pieces. Arrivals go back with the system's clock.
    latest: Option<Timestamp>,
    pub(super) records: u64,
    pub(super) pack_bytes: u64,
    /// Bytes written since the last call of [`RunWriter::take_written`].
    written: u64,
}

/// The place of a piece, in few bytes: there may be millions of them.
#[derive(Clone, Copy)]
struct PiecePlace {
    position: Position,
    log: LogId,
    /// Offset of its pack, over 8; 0 = nothing of the log is kept. If `says_more`: index into [`RunWriter::told`].
    pack: u32,
    number: u16,
    says_more: bool,
}

/// Dropped records at one entry of the order. With retention there is one for each log.
#[derive(Clone, Copy)]
struct DroppedRecords {
    /// Offset of the pack, as in [`PiecePlace`].
    pack: u32,
    /// If nothing of the log is kept, the lsn at which it continues.
    next: Lsn,
    dropped: u64,
}

/// The pack that is being filled.
#[derive(Default)]
struct OpenPack {
    log: Option<LogId>,
    pieces: Vec<Piece>,
    body: Vec<u8>,
    /// Records of the log that were dropped right before the first piece.
    dropped: u64,
    places: Vec<Place>,
}

impl RunWriter {
    /// Creates a run under its temporary name.
    pub(super) fn create(disk: &dyn Disk, id: SegmentId, store_id: u128) -> io::Result<Self> {
        let salt = draw_salt(disk)?;
        Self::create_as(disk, &new_path(id), (id, store_id, salt), SORTED_RUN)
    }

    /// Creates a file in the format of a run, with its own name and features.
    pub(crate) fn create_as(
        disk: &dyn Disk,
        path: &str,
        (id, store_id, salt): (SegmentId, u128, u64),
        features: u32,
    ) -> io::Result<Self> {
        bounds::unused(id)?;
        let file = disk.create(path)?;
        Ok(Self {
            file,
            life: Life {
                id,
                size: 0,
                salt,
                store_id,
            },
            base: base_of(id),
            buffer: Vec::with_capacity(WRITE_BYTES + (64 << 10)),
            offset: LIFE_BYTES,
            chain: 0,
            pack: OpenPack::default(),
            features,
            order: Vec::new(),
            told: Vec::new(),
            keys: None,
            latest: None,
            records: 0,
            pack_bytes: 0,
            written: 0,
        })
    }

    pub(crate) fn id(&self) -> SegmentId {
        self.life.id
    }

    /// Bytes written since the last call.
    pub(crate) fn take_written(&mut self) -> u64 {
        std::mem::take(&mut self.written)
    }

    fn end(&self) -> u64 {
        self.offset + self.buffer.len() as u64
    }

    fn frame(
        &mut self,
        about: HeaderFields,
        extensions: &[u8],
        body: &[u8],
    ) -> io::Result<FrameHeader> {
        let length = (HEADER_BYTES + extensions.len() + body.len() + 64) as u64;
        if self.end() + length >= SPAN {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let position = self.base.advance(self.end());
        let start = frame::begin(&mut self.buffer, extensions);
        self.buffer.extend_from_slice(body);
        let head = frame::FrameHead {
            kind: about.kind,
            flags: 0,
            count: about.count,
            position,
            log_id: about.log,
            first_lsn: about.first_lsn,
            arrival: about.arrival,
            durable_mark: Position::ZERO,
            chain: self.chain,
        };
        let header_len = HEADER_BYTES + extensions.len();
        let header = frame::finish(&mut self.buffer, start, header_len, self.life.salt, &head);
        self.chain = header.crc;
        if self.buffer.len() >= WRITE_BYTES {
            self.write_out()?;
        }
        Ok(header)
    }

    fn write_out(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.buffer, self.offset)?;
        let bytes = self.buffer.len() as u64;
        // Hundreds of megabytes in one flush would delay the flushes of the journal.
        self.file.write_behind(self.offset, bytes)?;
        self.offset += bytes;
        self.written += bytes;
        self.buffer.clear();
        Ok(())
    }

    /// Begins the pieces of this log.
    pub(crate) fn begin_log(&mut self, log: LogId) {
        debug_assert!(self.pack.pieces.is_empty() && self.pack.places.is_empty());
        self.pack.log = Some(log);
    }

    /// Adds a piece with its stored bytes; `dropped`: number of dropped records right before it.
    pub(crate) fn add(&mut self, piece: Piece, stored: &[u8], dropped: u64) -> io::Result<()> {
        // The records of a pack follow each other without a gap.
        let full = dropped > 0
            || self.pack.body.len() + stored.len() > PACK_BYTES
            || self.pack.pieces.len() >= PACK_PIECES;
        if full && !self.pack.pieces.is_empty() {
            self.end_pack()?;
        }
        if self.pack.pieces.is_empty() {
            self.pack.dropped = dropped;
        }
        let key = sealed::key_of(piece.codec, stored);
        let (oldest, newest) = self.keys.unwrap_or((key, key));
        self.keys = Some((oldest.min(key), newest.max(key)));
        self.latest = self.latest.max(Some(piece.arrival));
        let offset = u32::try_from(self.pack.body.len()).map_err(io::Error::other)?;
        self.pack.pieces.push(Piece { offset, ..piece });
        self.pack.body.extend_from_slice(stored);
        Ok(())
    }

    fn end_pack(&mut self) -> io::Result<()> {
        let pieces = std::mem::take(&mut self.pack.pieces);
        let (Some(log), Some(first), Some(last)) = (self.pack.log, pieces.first(), pieces.last())
        else {
            return Ok(());
        };
        let count = last.next_lsn().since(first.first_lsn);
        let about = HeaderFields {
            kind: FrameKind::Pack,
            log,
            first_lsn: first.first_lsn,
            count: u32::try_from(count).map_err(io::Error::other)?,
            arrival: last.arrival,
        };
        let mut extension = Vec::new();
        put_pieces(&mut extension, &pieces);
        let body = std::mem::take(&mut self.pack.body);
        let header = self.frame(about, &extension, &body)?;
        let frame_len = header.frame_len();
        self.records += count;
        self.pack_bytes += frame_len;
        self.pack.places.push(Place {
            position: header.position,
            first_lsn: header.first_lsn,
            count: header.count,
            frame_len: u32::try_from(frame_len).map_err(io::Error::other)?,
        });
        let pack = header.position.since(self.base);
        for (number, piece) in (0..).zip(&pieces) {
            let dropped = if number == 0 { self.pack.dropped } else { 0 };
            self.note(OrderEntry {
                position: piece.position,
                log,
                at: Ok((pack, number)),
                dropped,
            })?;
        }
        self.pack.dropped = 0;
        // The buffers are kept, so that not each pack allocates.
        self.pack.body = body;
        self.pack.body.clear();
        self.pack.pieces = pieces;
        self.pack.pieces.clear();
        Ok(())
    }

    /// Ends the log. Returns the places of its packs.
    pub(crate) fn end_log(&mut self) -> io::Result<Vec<Place>> {
        self.end_pack()?;
        Ok(std::mem::take(&mut self.pack.places))
    }

    /// Drops all records of a log, which continues at `next`. Readers learn this at the end of the run.
    pub(super) fn drop_log(
        &mut self,
        log: LogId,
        next: Lsn,
        dropped: u64,
        end: Position,
    ) -> io::Result<()> {
        self.note(OrderEntry {
            position: end,
            log,
            at: Err(next),
            dropped,
        })
    }

    fn note(&mut self, entry: OrderEntry) -> io::Result<()> {
        let (pack, number) = entry.at.unwrap_or((0, 0));
        let mut pack = u32::try_from(pack / 8).map_err(io::Error::other)?;
        let says_more = entry.at.is_err() || entry.dropped > 0;
        if says_more {
            let at = u32::try_from(self.told.len()).map_err(io::Error::other)?;
            self.told.push(DroppedRecords {
                pack,
                next: entry.at.err().unwrap_or(Lsn::ZERO),
                dropped: entry.dropped,
            });
            pack = at;
        }
        self.order.push(PiecePlace {
            position: entry.position,
            log: entry.log,
            pack,
            number: u16::try_from(number).map_err(io::Error::other)?,
            says_more,
        });
        Ok(())
    }

    /// Ends the run and flushes it, under its temporary name. Returns its life, its head, the end of its
    /// frames, and the checksum of the last frame. `images` appends the state of the next log at the end of the
    /// run ([`put_images`](crate::logs::image::put_images)), and returns `false` behind the last. Images lie behind
    /// the packs, and the caller has them in memory anyway.
    pub(crate) fn finish(
        mut self,
        mut head: RunHead,
        images: impl FnMut(&mut Vec<u8>) -> bool,
    ) -> io::Result<(Life, RunHead, u64, u32)> {
        head.images_at = self.end();
        head.logs = self.write_images(images)?;
        self.write_order(&mut head)?;
        head.records = self.records;
        head.pack_bytes = self.pack_bytes;
        head.arrival = self
            .latest
            .map_or(head.arrival, |latest| latest.max(head.arrival));
        (head.oldest_key, head.newest_key) = self.keys.unwrap_or_default();
        if head.newest_key > 0 {
            self.features |= ENCRYPTED;
        }
        let body = head.encode();
        self.frame(HeaderFields::of(FrameKind::Run), &[], &body)?;
        // A marker separates the copies, so that one bad sector does not hit both.
        self.frame(HeaderFields::of(FrameKind::Marker), &[], &[0; COPIES_APART])?;
        let at = self.end();
        self.frame(HeaderFields::of(FrameKind::Run), &[], &body)?;
        let end = self.end();
        self.buffer.extend_from_slice(&at.to_le_bytes());
        self.life.size = self.end();
        self.write_out()?;
        self.file
            .write_all_at(&self.life.encode(self.features), 0)?;
        self.file.sync()?;
        Ok((self.life, head, end, self.chain))
    }

    /// Writes images in frames of some hundred KiB each. An image is never split. Returns their number.
    fn write_images(&mut self, mut next: impl FnMut(&mut Vec<u8>) -> bool) -> io::Result<u64> {
        let mut body = Vec::with_capacity(IMAGES_BYTES + 1024);
        let mut logs = 0;
        let mut more = true;
        while more {
            body.clear();
            while more && body.len() < IMAGES_BYTES {
                more = next(&mut body);
                logs += u64::from(more);
            }
            if !body.is_empty() {
                self.frame(HeaderFields::of(FrameKind::Images), &[], &body)?;
            }
        }
        Ok(logs)
    }

    fn write_order(&mut self, head: &mut RunHead) -> io::Result<()> {
        let mut order = std::mem::take(&mut self.order);
        order.sort_unstable_by_key(|entry| (entry.position, entry.log));
        let mut body = Vec::with_capacity(ORDER_BYTES + 64);
        let mut first = None;
        let mut before = Position::ZERO;
        for noted in &order {
            let more = self.told.get(noted.pack as usize);
            let more = more.filter(|_| noted.says_more).copied();
            let told = more.unwrap_or(DroppedRecords {
                pack: noted.pack,
                next: Lsn::ZERO,
                dropped: 0,
            });
            let at = match told.pack {
                0 => Err(told.next),
                pack => Ok((u64::from(pack) * 8, u32::from(noted.number))),
            };
            let entry = OrderEntry {
                position: noted.position,
                log: noted.log,
                at,
                dropped: told.dropped,
            };
            first.get_or_insert(entry.position);
            entry.put(&mut body, before);
            before = entry.position;
            if body.len() >= ORDER_BYTES {
                self.end_order(head, &mut first, &mut body)?;
                before = Position::ZERO;
            }
        }
        self.end_order(head, &mut first, &mut body)?;
        head.order_end = self.end();
        Ok(())
    }

    fn end_order(
        &mut self,
        head: &mut RunHead,
        first: &mut Option<Position>,
        body: &mut Vec<u8>,
    ) -> io::Result<()> {
        if let Some(first) = first.take() {
            head.order.push((first, self.end()));
            self.frame(HeaderFields::of(FrameKind::Order), &[], body)?;
            body.clear();
        }
        Ok(())
    }
}

/// Header fields of a frame.
struct HeaderFields {
    kind: FrameKind,
    log: LogId,
    first_lsn: Lsn,
    count: u32,
    arrival: Timestamp,
}

impl HeaderFields {
    fn of(kind: FrameKind) -> Self {
        Self {
            kind,
            log: LogId::new(0),
            first_lsn: Lsn::ZERO,
            count: 0,
            arrival: Timestamp::default(),
        }
    }
}

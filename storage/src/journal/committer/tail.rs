//! The end of the journal: the segment at hand, and the frames that the next write adds to it.
//!
//! ```text
//!   Committer: decides ──▶ SegmentTail ──▶ Tail: encodes, writes to the file of a segment
//!                                     └──▶ MemoryTail: notes the frames (tests)
//! ```
//!
//! [`SegmentTail`] is the seam between the decisions of the committer and the bytes on disk. Above it nothing
//! knows how a frame is encoded or written, so tests check the decisions without bytes and without a disk.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use xxhash_rust::xxh3::Xxh3;

#[cfg(doc)]
use crate::api::cipher::BodyCipher;
use crate::api::cipher::Cipher;
use crate::api::codec;
use crate::api::error::FreeSpace;
use crate::api::record::{Compression, Producer};
use crate::api::records::Records;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{Position, Timestamp};
use crate::disk::{DiskFile, is_out_of_space};
use crate::format::body::Seal;
use crate::format::compress;
use crate::format::digest::Digest;
use crate::format::frame;
use crate::format::frame::{DirectoryBuilder, FrameHead, FrameKind, HEADER_BYTES};
use crate::format::sealed;
use crate::format::sealed::{BodyPlace, FirstAndLastTime, SEALED, SEALED_BYTES};
use crate::journal::pool::{Pool, ReadySegment, Use};
use crate::journal::recent::Keeper;
use crate::journal::segment::Segment;

/// Bytes that the page cache reads at once when a write covers only a part of them.
const BLOCK_BYTES: usize = 4096;

/// A frame that is not finished.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Started {
    /// Its offset in the group.
    pub(super) at: usize,
    /// Length of its header with extensions, in bytes.
    pub(super) header_len: usize,
}

/// The segment at hand, and the frames of the group that the next write adds to it.
pub(crate) trait SegmentTail {
    /// The segment at hand.
    fn segment(&self) -> &Arc<Segment>;

    /// Position of an offset in the group.
    fn position(&self, at: usize) -> Position;

    /// Bytes of the group so far.
    fn len(&self) -> usize;

    /// Bytes that the directory of the group takes so far.
    fn directory_len(&self) -> usize;

    /// Bytes that the next frame takes for the directory of the group before. 0 unless the frame begins a group.
    fn directory_before(&self) -> usize;

    /// Header checksum of the last finished frame.
    fn chain(&self) -> u32;

    /// Position of the group's first byte.
    fn start(&self) -> Position {
        self.position(0)
    }

    /// Position behind the group so far.
    fn end(&self) -> Position {
        self.position(self.len())
    }

    /// Bytes of the segment behind the last written group.
    fn left(&self) -> u64;

    /// Whether the segment has room for this number of bytes of frames and of directory entries, and for the
    /// seal behind them. `open`: the last frame is unfinished.
    fn fits(&self, frames: usize, directory: usize, open: bool) -> bool;

    /// Begins a frame, which may name the producer of its batch. The frame before must be finished.
    fn begin(&mut self, producer: Option<(&Producer, Digest)>) -> Started;

    /// Adds bytes to the body of the unfinished frame.
    fn put(&mut self, body: impl FnOnce(&mut Vec<u8>));

    /// Adds records that arrived at `arrival` to the body of the unfinished frame. Their times are not before
    /// `last_time`, which moves to the time of the last record. Returns the time of the first record, unless
    /// it is `arrival`.
    fn put_records(
        &mut self,
        records: &Records,
        arrival: Timestamp,
        last_time: &mut Timestamp,
    ) -> Option<Timestamp>;

    /// Finishes a frame. Returns its position and its end. `head` has no chain and no codec yet. `name`: the
    /// log that the frame creates.
    fn finish(
        &mut self,
        frame: Started,
        head: FrameHead,
        name: Option<&str>,
        compression: Compression,
    ) -> Range<Position>;

    /// Writes the group.
    ///
    /// # Errors
    /// The number of bytes of the group that were written, and the reason.
    fn write(&mut self) -> Result<(), (usize, io::Error)>;

    /// Counts the written group to the segment. Returns the bytes of the group; the next group is empty.
    fn advance(&mut self) -> Bytes;

    /// Drops the group. Its `written` bytes that were written become zeros. Returns whether that took
    /// space of ready segments.
    ///
    /// # Errors
    /// If the zeros cannot be written.
    fn take_back(&mut self, written: usize) -> io::Result<bool>;

    /// The body of the segment's last frame. The group before must be written. `records`: in the segment.
    fn seal(&self, records: u64, next_log_counter: u64, expiry: Timestamp) -> Seal;

    /// Takes the segment to enter next.
    ///
    /// # Errors
    /// As [`Pool::take`].
    fn take_next(&mut self, purpose: Use) -> io::Result<()>;

    /// Size of the segment to enter next, in bytes; 0 if there is none.
    fn next_bytes(&self) -> u64;

    /// Returns the segment that was to be entered next.
    fn give_back_next(&mut self);

    /// Enters the next segment. The segment at hand is sealed and flushed.
    fn roll(&mut self);

    /// Fills the reserve of ready segments again if space had run out.
    ///
    /// # Errors
    /// As [`Pool::restore_reserve`].
    fn restore_reserve(&self) -> io::Result<()>;

    /// Whether space had run out, so that the reserve may be incomplete.
    fn is_starved(&self) -> bool;

    /// The space that a refused request lacks, as [`Pool::refuse`].
    fn lacks(&self, purpose: Use, rolls: bool) -> FreeSpace;

    /// Lets the next attempt to make a segment ready run at once.
    fn try_again(&self);
}

/// The tail in the file of a segment.
///
/// Invariants:
/// - `offset` is the end of the last written group. `whole` is at or beyond it, and both lie in the segment.
/// - The frames of the group fill `buffer` without holes. Their bytes begin at `offset` of the segment. Only
///   the last frame may be unfinished.
/// - `directory` lists the finished frames of the group, `previous` the frames of the group before.
/// - `digest` covers the bytes up to `offset`. `chain` and `frames` include the group at hand.
/// - `before_group` has the `chain` and `frames` at `offset`.
/// - `next` is set from the moment a segment is taken until it becomes the segment at hand.
/// - `cipher` has a key for each log that gets records. A start prepares the keys of all logs before there is a tail
///   (`recovery/begin.rs`). Later only `Committer::push_created` makes logs, and each of its callers calls
///   `Committer::secure_keys` for the same names before. A key that was prepared stays until the deletion of its log is durable
///   ([`BodyCipher::newest`]), and no frame of a batch follows the frame that deletes its log.
pub(crate) struct FileTail {
    pool: Arc<Pool>,
    segment: Arc<Segment>,
    file: Arc<dyn DiskFile>,
    /// The segment to enter next.
    next: Option<ReadySegment>,
    /// Offset in the segment where the group begins.
    offset: u64,
    /// Offset up to which the segment was written in whole blocks.
    whole: u64,
    /// Frames of the group so far.
    buffer: Vec<u8>,
    keeper: Keeper,
    directory: DirectoryBuilder,
    /// Directory of the group before. The first frame of this group stores it.
    previous: DirectoryBuilder,
    /// Header checksum of the last finished frame.
    chain: u32,
    digest: Xxh3,
    /// Number of finished frames in the segment.
    frames: u64,
    before_group: (u32, u64),
    cipher: Option<Cipher>,
    /// Times of the first and the last record of the unfinished frame, if they were put as records.
    times: Option<FirstAndLastTime>,
}

impl FileTail {
    /// The tail in a segment without frames.
    pub(crate) fn new(
        pool: Arc<Pool>,
        segment: Arc<Segment>,
        file: Arc<dyn DiskFile>,
        cipher: Option<Cipher>,
    ) -> Self {
        Self {
            cipher,
            times: None,
            pool,
            segment,
            file,
            next: None,
            offset: LIFE_BYTES,
            whole: LIFE_BYTES,
            buffer: Vec::new(),
            keeper: Keeper::default(),
            directory: DirectoryBuilder::default(),
            previous: DirectoryBuilder::default(),
            chain: 0,
            digest: Xxh3::new(),
            frames: 0,
            before_group: (0, 0),
        }
    }

    fn note_times(&mut self, first: Timestamp, last: Timestamp) {
        self.times.get_or_insert((first, last)).1 = last;
    }

    fn check(&self) {
        debug_assert!(LIFE_BYTES <= self.offset && self.offset <= self.whole);
        debug_assert!(self.whole <= self.segment.life.size);
        debug_assert!(!self.buffer.is_empty() || self.before_group == (self.chain, self.frames));
        debug_assert!(self.before_group.1 <= self.frames);
    }
}

impl SegmentTail for FileTail {
    fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    fn position(&self, at: usize) -> Position {
        self.segment.base.advance(self.offset + at as u64)
    }

    fn len(&self) -> usize {
        self.buffer.len()
    }

    fn directory_len(&self) -> usize {
        self.directory.extension_len()
    }

    fn directory_before(&self) -> usize {
        match self.buffer.is_empty() {
            true => self.previous.extension_len(),
            false => 0,
        }
    }

    fn chain(&self) -> u32 {
        self.chain
    }

    fn left(&self) -> u64 {
        self.segment.life.size - self.offset
    }

    fn fits(&self, frames: usize, directory: usize, open: bool) -> bool {
        let (first, told) = match self.buffer.is_empty() {
            true => (self.previous.extension_len(), 0),
            // The directory does not have an open frame's entry yet.
            false if open => (0, self.directory_len() + DirectoryBuilder::entry_len(None)),
            false => (0, self.directory_len()),
        };
        let seal = HEADER_BYTES + Seal::MAX_LEN + 16 + told + directory + 32;
        // The open frame grows when it is encrypted.
        let grows = match &self.cipher {
            Some(_) if open => SEALED_BYTES,
            _ => 0,
        };
        let need = (self.buffer.len() + grows).next_multiple_of(8) + first + frames + 8 + seal;
        need as u64 <= self.left()
    }

    fn begin(&mut self, producer: Option<(&Producer, Digest)>) -> Started {
        self.check();
        debug_assert!(self.buffer.len().is_multiple_of(8));
        self.times = None;
        let mut extension = Vec::new();
        if self.buffer.is_empty() {
            self.directory.reset(self.start());
            extension = self.previous.extension();
        }
        if let Some((producer, digest)) = producer {
            frame::put_producer(&mut extension, producer, digest);
        }
        Started {
            at: frame::begin(&mut self.buffer, &extension),
            header_len: HEADER_BYTES + extension.len(),
        }
    }

    fn put(&mut self, body: impl FnOnce(&mut Vec<u8>)) {
        body(&mut self.buffer);
    }

    fn put_records(
        &mut self,
        records: &Records,
        arrival: Timestamp,
        last_time: &mut Timestamp,
    ) -> Option<Timestamp> {
        if !records.have_times() && arrival >= *last_time {
            records.put(&mut self.buffer);
            *last_time = arrival;
            self.note_times(arrival, arrival);
            return None;
        }
        let mut first_time = None;
        for record in records.iter() {
            // Stored times never go back within a log.
            let time = record.timestamp.unwrap_or(arrival).max(*last_time);
            let own = (time != arrival).then_some(time);
            codec::put_record(&mut self.buffer, &record, own);
            *last_time = time;
            first_time.get_or_insert(time);
        }
        if let Some(first) = first_time {
            self.note_times(first, *last_time);
        }
        first_time
    }

    fn finish(
        &mut self,
        frame: Started,
        mut head: FrameHead,
        name: Option<&str>,
        compression: Compression,
    ) -> Range<Position> {
        let body = frame.at + frame.header_len;
        let cipher = self.cipher.as_ref();
        let sealing = cipher
            .filter(|_| head.kind == FrameKind::Batch)
            .map(|cipher| {
                // The invariant of `cipher`.
                let key = cipher.newest(head.log_id).expect("the log has a key");
                let plain = u32::try_from(self.buffer.len() - body).expect("body fits 32 bits");
                // Records from memory were put as bytes.
                let of_body = || sealed::times_of(&self.buffer[body..], head.arrival);
                let times = self.times.unwrap_or_else(of_body);
                (key, plain, times)
            });
        let mut codec = compress::PLAIN;
        if let Some((compressed, packed)) = compress::compress(&self.buffer[body..], compression) {
            codec = compressed;
            self.buffer.truncate(body);
            self.buffer.extend_from_slice(&packed);
        }
        if let Some((key, plain, times)) = sealing {
            codec |= SEALED;
            let bound = BodyPlace {
                log: head.log_id,
                first_lsn: head.first_lsn,
                count: head.count,
                codec,
            };
            sealed::seal(&mut self.buffer, body, &*key, &bound, plain, times);
        }
        head.flags |= codec;
        head.chain = self.chain;
        let salt = self.segment.life.salt;
        let header = frame::finish(&mut self.buffer, frame.at, frame.header_len, salt, &head);
        self.chain = header.crc;
        self.frames += 1;
        self.directory.push(&header, name);
        debug_assert_eq!(header.end(), self.end());
        header.position..header.end()
    }

    /// Also writes zeros up to the end of the group's last block if the group enters a new block. A partial
    /// overwrite first reads the block from the device if the page cache has dropped it since the pool
    /// filled it. That read takes most of the time of such a write.
    fn write(&mut self) -> Result<(), (usize, io::Error)> {
        let group = self.buffer.len();
        let end = self.offset + group as u64;
        let size = self.segment.life.size;
        if end > size {
            // No reader would find these bytes, and a start would cut them off.
            return Err((
                0,
                io::Error::other("the group is larger than the rest of its segment"),
            ));
        }
        let whole = end.next_multiple_of(BLOCK_BYTES as u64).min(size);
        if end > self.whole {
            let zeros = usize::try_from(whole - end).unwrap_or_default();
            self.buffer.resize(group + zeros, 0);
        }
        let done = self.file.write_most_at(&self.buffer, self.offset);
        self.buffer.truncate(group);
        done?;
        self.whole = self.whole.max(whole);
        Ok(())
    }

    fn advance(&mut self) -> Bytes {
        self.digest.update(&self.buffer);
        let group = self.keeper.take(&mut self.buffer, BLOCK_BYTES);
        self.offset += group.len() as u64;
        std::mem::swap(&mut self.previous, &mut self.directory);
        self.before_group = (self.chain, self.frames);
        self.check();
        group
    }

    /// On copy-on-write file systems zeros take space: the pool gives up segments for it.
    fn take_back(&mut self, written: usize) -> io::Result<bool> {
        self.buffer.clear();
        (self.chain, self.frames) = self.before_group;
        if written == 0 {
            return Ok(false);
        }
        let mut gave_up = false;
        let zeros = vec![0; written];
        while let Err(error) = self.file.write_all_at(&zeros, self.offset) {
            if !(is_out_of_space(&error) && self.pool.give_up()?) {
                return Err(error);
            }
            gave_up = true;
        }
        Ok(gave_up)
    }

    fn seal(&self, records: u64, next_log_counter: u64, expiry: Timestamp) -> Seal {
        debug_assert!(self.buffer.is_empty());
        let successor = self.next.as_ref().map(|next| next.life.id);
        Seal {
            frames: self.frames,
            records,
            digest: self.digest.digest128(),
            clean: successor.is_none(),
            next_log_counter,
            successor,
            expiry: Some(expiry),
        }
    }

    fn take_next(&mut self, purpose: Use) -> io::Result<()> {
        debug_assert!(self.next.is_none());
        self.next = Some(self.pool.take(purpose)?);
        Ok(())
    }

    fn next_bytes(&self) -> u64 {
        self.next.as_ref().map_or(0, |next| next.life.size)
    }

    fn give_back_next(&mut self) {
        if let Some(next) = self.next.take() {
            self.pool.give_back(next);
        }
    }

    fn roll(&mut self) {
        debug_assert!(self.buffer.is_empty() && self.segment.end.read().is_some());
        let Some(next) = self.next.take() else { return };
        let begun = Segment::begun(next.life, self.segment.limit(), Arc::clone(&next.file));
        self.segment.close();
        *self = Self {
            keeper: std::mem::take(&mut self.keeper),
            buffer: std::mem::take(&mut self.buffer),
            ..Self::new(
                Arc::clone(&self.pool),
                Arc::new(begun),
                next.file,
                self.cipher.take(),
            )
        };
    }

    fn restore_reserve(&self) -> io::Result<()> {
        self.pool.restore_reserve()
    }

    fn is_starved(&self) -> bool {
        self.pool.is_starved()
    }

    fn lacks(&self, purpose: Use, rolls: bool) -> FreeSpace {
        self.pool.refuse(purpose, rolls)
    }

    fn try_again(&self) {
        self.pool.try_again();
    }
}

//! Room for frames: in the current segment, or in the next.

use std::io;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3;

use super::{About, Committer, DIRECTORY_BYTES, GROUP_BYTES, NO_LOG};
use crate::api::error::AppendError;
use crate::api::error::Shortage;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{LogId, Lsn, SegmentId};
use crate::disk::shortage;
use crate::format::body::{Closing, Link, Seal};
use crate::format::frame::{DirectoryBuilder, HEADER_BYTES, Kind};
use crate::journal::pool::{ReadySegment, Use};
use crate::journal::seal::Sealed;
use crate::journal::segment::Segment;

/// Maximum number of records in a segment.
const MOST_RECORDS: u64 = u32::MAX as u64;

impl Committer {
    /// Makes room for this number of bytes of frames and of directory entries. Rolls to the next
    /// segment if necessary.
    ///
    /// # Errors
    /// If there is no space for the next segment or for bytes that must be written first. Frames of the
    /// request that are already in the group are then taken back with the group.
    pub(super) fn secure(
        &mut self,
        frames: usize,
        directory: usize,
        purpose: Use,
    ) -> Result<(), AppendError> {
        if self.is_full(frames, directory) && !self.buffer.is_empty() {
            self.write_out()?;
        }
        if self.on_reserve && purpose == Use::Growth {
            let whole = self.pool.restore_reserve();
            let rolls = !self.fits(frames, directory);
            self.spared(whole, purpose, rolls)?;
        }
        if !self.fits(frames, directory) {
            if purpose == Use::Growth {
                self.seals.has_room(self.segment.life.size)?;
            }
            let taken = self.pool.take(purpose);
            let ready = self.spared(taken, purpose, true)?;
            self.roll(ready, purpose)?;
        }
        match self.journal.failure() {
            Some(error) => Err(AppendError::JournalFailed(error)),
            None => Ok(()),
        }
    }

    /// Makes room for frames that hold records. A segment ends before its number of records exceeds 32
    /// bits, because its index counts in 32 bits.
    pub(super) fn secure_records(
        &mut self,
        records: u64,
        (frames, directory): (usize, usize),
    ) -> Result<(), AppendError> {
        let open = self.open.as_ref().map_or(0, |open| u64::from(open.count));
        if self.records + open + records > MOST_RECORDS {
            self.roll_now(Use::Growth)?;
        }
        self.secure(frames, directory, Use::Growth)
    }

    /// Whether these frames would exceed the bounds of a group, which one write carries.
    fn is_full(&self, frames: usize, directory: usize) -> bool {
        self.buffer.len() + frames > GROUP_BYTES
            || self.directory.extension_len() + directory > DIRECTORY_BYTES
    }

    /// Whether there is room in the group and in the current segment.
    pub(super) fn has_room(&self, frames: usize, directory: usize) -> bool {
        !self.is_full(frames, directory) && self.fits(frames, directory)
    }

    /// Number of bytes that can be written without a slow step. Slow steps are a roll to the next
    /// segment and a search for space.
    pub(crate) fn room(&self) -> u64 {
        let looks = self.on_reserve && self.pool.is_starved();
        if self.closed || looks || self.without_space {
            return 0;
        }
        let left = self.segment.life.size - self.offset;
        left.saturating_sub(self.buffered_bytes)
    }

    /// Continues in the next segment, even if this segment has room.
    ///
    /// # Errors
    /// As [`Committer::secure`].
    pub(super) fn roll_now(&mut self, purpose: Use) -> Result<(), AppendError> {
        if self.on_reserve && purpose == Use::Growth {
            let whole = self.pool.restore_reserve();
            self.spared(whole, purpose, true)?;
        }
        if purpose == Use::Growth {
            self.seals.has_room(self.segment.life.size)?;
        }
        let taken = self.pool.take(purpose);
        let ready = self.spared(taken, purpose, true)?;
        self.roll(ready, purpose)
    }

    /// Converts the pool's answer. Any error except a lack of space or of file descriptors fails the
    /// journal. `rolls`: the request needs another segment.
    fn spared<T>(
        &self,
        result: io::Result<T>,
        purpose: Use,
        rolls: bool,
    ) -> Result<T, AppendError> {
        result.map_err(|error| {
            match shortage(&error) {
                Some(Shortage::Space) => {
                    return AppendError::DiskFull(self.pool.refuse(purpose, rolls));
                }
                Some(shortage) => return shortage.into(),
                None => {}
            }
            let told = Arc::new(io::Error::new(error.kind(), error.to_string()));
            self.journal.fail("making a segment ready", &error);
            AppendError::JournalFailed(self.journal.failure().unwrap_or(told))
        })
    }

    pub(super) fn fits(&self, frames: usize, directory: usize) -> bool {
        let first = if self.buffer.is_empty() {
            self.previous.extension_len()
        } else {
            0
        };
        // The directory does not have an open frame's entry yet.
        let open = self
            .open
            .as_ref()
            .map_or(0, |_| DirectoryBuilder::entry_len(None));
        let told = match self.buffer.is_empty() {
            true => 0,
            false => self.directory.extension_len() + open,
        };
        let seal = HEADER_BYTES + Seal::MAX_LEN + 16 + told + directory + 32;
        let need = self.buffer.len().next_multiple_of(8) + first + frames + 8 + seal;
        self.offset + need as u64 <= self.segment.life.size
    }

    /// Continues in the next segment. First writes, seals and flushes the current one.
    fn roll(&mut self, ready: ReadySegment, purpose: Use) -> Result<(), AppendError> {
        let started = self.journal.clock.monotonic();
        if let Err(error) = self
            .write_out()
            .and_then(|()| self.seal(Some(ready.life.id)))
        {
            self.pool.give_back(ready);
            return Err(error);
        }
        self.journal.flush();
        if let Some(error) = self.journal.failure() {
            return Err(AppendError::JournalFailed(error));
        }
        let (closings, sealed) = self.leave_segment(ready.life.size);
        let link = Link {
            predecessor: Some(self.segment.life.id),
            second: self.before,
            predecessor_end: self.end(),
            predecessor_chain: self.chain,
            recovery_epoch: self.journal.recovery_epoch,
            next_log_counter: self.next_log_counter,
            closings,
            lost_before: None,
            accepted: None,
            expiry: Some(self.expiry),
        };
        let segment = Arc::new(Segment::begun(
            ready.life,
            self.segment.limit(),
            Arc::clone(&ready.file),
        ));
        self.segment.close();
        self.journal.enter(Arc::clone(&segment));
        self.before = Some(self.segment.life.id);
        self.segment = segment;
        self.file = ready.file;
        self.offset = LIFE_BYTES;
        self.whole = LIFE_BYTES;
        self.chain = 0;
        self.digest = Xxh3::new();
        self.frames = 0;
        self.records = 0;
        self.previous = DirectoryBuilder::default();
        self.first_of_run = false;
        self.on_reserve = purpose != Use::Growth;
        self.begin_with(link);
        self.seals.take_over(sealed);
        self.journal
            .observer
            .roll(self.journal.clock.monotonic().duration_since(started));
        Ok(())
    }

    /// State of the logs of this sealed segment: for its index, and for the next link. The link gets
    /// none if there are too many for this segment or for the next.
    pub(super) fn leave_segment(&mut self, next_size: u64) -> (Option<Vec<Closing>>, Sealed) {
        let segment = self.segment.life.id;
        let mut bytes = 0;
        let mut closings = Vec::with_capacity(self.touched.len());
        let mut logs = Vec::with_capacity(self.touched.len());
        for log in self.touched.drain(..) {
            let state = log.state.read();
            let name = (state.created_in == segment.into()).then(|| log.name.as_str().to_owned());
            bytes += 40 + name.as_ref().map_or(0, String::len);
            closings.push(Closing {
                log_id: log.id,
                next_lsn: state.journaled_next(),
                name,
                deleted: state.deleted,
                first_lsn: state.coming_kept().first,
                expired: state.coming_kept().expired,
                writer_epoch: state.writer_epoch(),
            });
            let image = state.image(log.id, Some(log.name.clone()));
            drop(state);
            logs.push((log, image));
        }
        let sealed = Sealed {
            segment: Arc::clone(&self.segment),
            end: self.end(),
            chain: self.chain,
            before: self.before,
            next_log_counter: self.next_log_counter,
            arrival: self.arrival,
            expiry: self.expiry,
            logs,
        };
        let few = bytes as u64 <= self.segment.life.size.min(next_size) / 8;
        (few.then_some(closings), sealed)
    }

    /// Begins a segment with its link. The link's header, and so the next group's directory, has the
    /// main fields: previous segment as log id, its end as first lsn, epoch as count.
    pub(super) fn begin_with(&mut self, link: Link) {
        let body = link.encode();
        let about = About {
            kind: Kind::Link,
            flags: 0,
            first_lsn: Lsn::new(link.predecessor_end.get()),
            count: u32::try_from(link.recovery_epoch.get()).unwrap_or(u32::MAX),
            arrival: None,
        };
        let before = LogId::new(link.predecessor.map_or(0, SegmentId::get));
        self.push_frame(about, before, None, |out| out.extend_from_slice(&body));
        self.link = Some(link);
    }

    /// Ends the segment: the journal continues in `successor`, or is shut down.
    pub(super) fn seal(&mut self, successor: Option<SegmentId>) -> Result<(), AppendError> {
        let seal = Seal {
            frames: self.frames,
            records: self.records,
            digest: self.digest.digest128(),
            clean: successor.is_none(),
            next_log_counter: self.next_log_counter,
            successor,
            expiry: Some(self.expiry),
        };
        self.push_frame(About::act(Kind::Seal, Lsn::ZERO), NO_LOG, None, |out| {
            out.extend_from_slice(&seal.encode());
        });
        self.write_out()?;
        *self.segment.end.write() = Some(self.end());
        Ok(())
    }
}

//! Room for frames: in the current segment, or in the next.

use std::io;
use std::sync::Arc;

use super::tail::SegmentTail;
use super::{Committer, DIRECTORY_BYTES, FrameFields, GROUP_BYTES, NO_LOG};
use crate::api::error::AppendError;
use crate::api::error::HostShortage;
use crate::base::ids::{LogId, Lsn, SegmentId};
use crate::disk::shortage;
use crate::format::body::{Closing, Link, Seal};
use crate::format::frame::{DirectoryBuilder, FrameKind, HEADER_BYTES};
use crate::journal::pool::Use;
use crate::journal::seal::Sealed;
use crate::logs::Log;

/// Maximum number of records in a segment.
const MOST_RECORDS: u64 = u32::MAX as u64;

/// Facts about the segment at hand, for its link, its index, and the next segment.
///
/// Invariants:
/// - `link` is set until the first group of the segment is written.
/// - `touched` lists each log with a finished frame in the segment once, in the order of first frames.
/// - `records` counts the records of all finished frames in the segment.
#[derive(Default)]
pub(super) struct Entered {
    /// The segment before.
    pub(super) before: Option<SegmentId>,
    /// The link, until it is written.
    pub(super) link: Option<Link>,
    /// Whether this is the first segment of the run.
    pub(super) first_of_run: bool,
    /// Whether the segment was taken from the reserve for trims and deletions.
    pub(super) on_reserve: bool,
    /// Logs of the segment, for the next link.
    pub(super) touched: Vec<Arc<Log>>,
    pub(super) records: u64,
}

impl<T: SegmentTail> Committer<T> {
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
        if self.is_full(frames, directory) && self.tail.len() > 0 {
            self.write_out()?;
        }
        if self.entered.on_reserve && purpose == Use::Growth {
            let whole = self.tail.restore_reserve();
            let rolls = !self.fits(frames, directory);
            self.spared(whole, purpose, rolls)?;
        }
        if !self.fits(frames, directory) {
            self.roll(purpose)?;
        }
        self.stands()
    }

    fn stands(&self) -> Result<(), AppendError> {
        let failure = self.journal.failure();
        failure.map_or(Ok(()), |error| Err(AppendError::JournalFailed(error)))
    }

    /// Makes room for frames that hold records. A segment ends before its number of records exceeds 32
    /// bits, because its index counts in 32 bits.
    pub(super) fn secure_records(
        &mut self,
        records: u64,
        (frames, directory): (usize, usize),
    ) -> Result<(), AppendError> {
        let open = self
            .group
            .open
            .as_ref()
            .map_or(0, |open| u64::from(open.count));
        if self.entered.records + open + records > MOST_RECORDS {
            self.roll_now(Use::Growth)?;
        }
        self.secure(frames, directory, Use::Growth)
    }

    /// Whether these frames would exceed the bounds of a group, which one write carries.
    fn is_full(&self, frames: usize, directory: usize) -> bool {
        self.tail.len() + frames > GROUP_BYTES
            || self.tail.directory_len() + directory > DIRECTORY_BYTES
    }

    /// Whether there is room in the group and in the current segment.
    pub(super) fn has_room(&self, frames: usize, directory: usize) -> bool {
        !self.is_full(frames, directory) && self.fits(frames, directory)
    }

    /// Number of bytes that can be written without a slow step. Slow steps are a roll to the next
    /// segment and a search for space.
    pub(crate) fn room(&self) -> u64 {
        let looks = self.entered.on_reserve && self.tail.is_starved();
        if self.closed || looks || self.without_space {
            return 0;
        }
        // The next group begins with the directory of the last one, and may have to write the records in memory.
        let directory = self.tail.directory_before() as u64;
        let frame = HEADER_BYTES + 8 + self.sealed_bytes() + DirectoryBuilder::entry_len(None);
        let buffered = self.memory.bytes + self.memory.logs() * frame as u64;
        let seal = (HEADER_BYTES + Seal::MAX_LEN) as u64;
        let left = self.tail.left();
        left.saturating_sub(directory + buffered + seal)
    }

    /// Continues in the next segment, even if this segment has room.
    ///
    /// # Errors
    /// As [`Committer::secure`].
    pub(super) fn roll_now(&mut self, purpose: Use) -> Result<(), AppendError> {
        if self.entered.on_reserve && purpose == Use::Growth {
            let whole = self.tail.restore_reserve();
            self.spared(whole, purpose, true)?;
        }
        self.roll(purpose)
    }

    /// Converts the pool's answer. Any error except a lack of space or of file descriptors fails the
    /// journal. `rolls`: the request needs another segment.
    pub(super) fn spared(
        &self,
        result: io::Result<()>,
        purpose: Use,
        rolls: bool,
    ) -> Result<(), AppendError> {
        result.map_err(|error| {
            match shortage(&error) {
                Some(HostShortage::Space) => {
                    return AppendError::DiskFull(self.tail.lacks(purpose, rolls));
                }
                Some(shortage) => return shortage.into(),
                None => {}
            }
            let told = Arc::new(io::Error::new(error.kind(), error.to_string()));
            self.journal.fail("making a segment ready", &error);
            AppendError::JournalFailed(self.journal.failure().unwrap_or(told))
        })
    }

    fn fits(&self, frames: usize, directory: usize) -> bool {
        self.tail.fits(frames, directory, self.group.open.is_some())
    }

    /// Continues in the next segment. First writes, seals and flushes the current one.
    fn roll(&mut self, purpose: Use) -> Result<(), AppendError> {
        if purpose == Use::Growth {
            self.seals.has_room(self.tail.segment().life.size)?;
        }
        let taken = self.tail.take_next(purpose);
        self.spared(taken, purpose, true)?;
        let started = self.journal.clock.monotonic();
        let left = self.write_out().and_then(|()| self.seal()).and_then(|()| {
            self.journal.flush();
            self.stands()
        });
        if let Err(error) = left {
            self.tail.give_back_next();
            return Err(error);
        }
        let (closings, sealed) = self.leave_segment();
        let left = self.tail.segment().life.id;
        let link = Link {
            predecessor: Some(left),
            second: self.entered.before,
            predecessor_end: self.tail.end(),
            predecessor_chain: self.tail.chain(),
            recovery_epoch: self.journal.recovery_epoch,
            next_log_counter: self.next_log_counter,
            closings,
            lost_before: None,
            accepted: None,
            expiry: Some(self.expiry),
        };
        self.tail.roll();
        self.journal.enter(Arc::clone(self.tail.segment()));
        self.entered = Entered {
            before: Some(left),
            on_reserve: purpose != Use::Growth,
            ..Entered::default()
        };
        self.begin_with(link);
        self.seals.take_over(sealed);
        self.journal
            .observer
            .roll(self.journal.clock.monotonic().duration_since(started));
        Ok(())
    }

    /// State of the logs of this sealed segment: for its index, and for the next link. The link gets
    /// none if there are too many for this segment or for the next.
    pub(super) fn leave_segment(&mut self) -> (Option<Vec<Closing>>, Sealed) {
        debug_assert!(self.entered.link.is_none());
        let segment = self.tail.segment().life.id.into();
        let mut bytes = 0;
        let mut closings = Vec::with_capacity(self.entered.touched.len());
        let mut logs = Vec::with_capacity(self.entered.touched.len());
        for log in self.entered.touched.drain(..) {
            let state = log.state.read();
            let name = (state.created_in == segment).then(|| log.name.as_str().to_owned());
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
            segment: Arc::clone(self.tail.segment()),
            end: self.tail.end(),
            chain: self.tail.chain(),
            before: self.entered.before,
            next_log_counter: self.next_log_counter,
            arrival: self.arrival,
            expiry: self.expiry,
            logs,
        };
        let size = self.tail.segment().life.size.min(self.tail.next_bytes());
        let few = bytes as u64 <= size / 8;
        (few.then_some(closings), sealed)
    }

    /// Begins a segment with its link. The link's header, and so the next group's directory, has the
    /// main fields: previous segment as log id, its end as first lsn, epoch as count.
    pub(super) fn begin_with(&mut self, link: Link) {
        let body = link.encode();
        let about = FrameFields {
            kind: FrameKind::Link,
            flags: 0,
            first_lsn: Lsn::new(link.predecessor_end.get()),
            count: u32::try_from(link.recovery_epoch.get()).unwrap_or(u32::MAX),
            arrival: None,
        };
        let before = LogId::new(link.predecessor.map_or(0, SegmentId::get));
        self.push_frame(about, before, None, |out| out.extend_from_slice(&body));
        self.entered.link = Some(link);
    }

    /// Ends the segment: the journal continues in the segment that was taken, or is shut down.
    pub(super) fn seal(&mut self) -> Result<(), AppendError> {
        let records = self.entered.records;
        let seal = self.tail.seal(records, self.next_log_counter, self.expiry);
        self.push_frame(
            FrameFields::act(FrameKind::Seal, Lsn::ZERO),
            NO_LOG,
            None,
            |out| {
                out.extend_from_slice(&seal.encode());
            },
        );
        self.write_out()?;
        *self.tail.segment().end.write() = Some(self.tail.end());
        Ok(())
    }
}

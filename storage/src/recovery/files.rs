//! The files of a store: which of them hold frames, and the life block and link of each.

use std::ops::Range;

use super::Recovered;
use crate::api::error::OpenError;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::{LogId, Lsn, Position, RecoveryEpoch, SegmentId};
use crate::base::zeros::are_zeros;
use crate::disk::directory;
use crate::disk::directory::LastBegun;
use crate::disk::{Disk, DiskFile, are_unreadable, read_again, read_some};
use crate::format::body::Link;
use crate::format::content::Content;
use crate::format::frame;
use crate::format::frame::{FrameHeader, FrameKind};
use crate::format::life;
use crate::format::life::{BadLife, ENCRYPTED, Life, journal_path};
use crate::format::walk::{Bytes, Walked};

/// Bytes of a file in which frames are searched for without a good link. Frames are written from the start of a
/// file on. If none is found here, as in a segment that is ready and was not begun, none is expected behind.
const LOOK_BYTES: u64 = 8 << 20;

/// Where frames are searched for in a file without a good link.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameSearch {
    /// Nowhere if its first bytes are zeros, because no process has begun it. Otherwise in [`LOOK_BYTES`].
    Unbegun,
    /// In the first [`LOOK_BYTES`].
    Begin,
    /// In the whole file.
    Whole,
}

/// Size of the pieces in which frames are searched for, bytes.
const PAGE: usize = 4096;

/// Number of times that a start reads the end of the journal while the device cannot read it. Errors
/// of a device may pass.
const END_TRIES: u32 = 3;

/// Bytes of the first frame that suffice to recognise a frame of a newer version.
const FIRST_BYTES: u64 = 4096;

/// A segment file with frames in it. Its bytes are read when it is walked: windows of one segment
/// at a time are in memory.
pub(super) struct UsedSegment {
    pub(super) life: Life,
    pub(super) path: String,
    pub(super) base: Position,
    /// Its link if that is good, or the part of it that the next group records.
    pub(super) link: Option<Link>,
}

/// The last segment, read and walked.
pub(super) struct LoadedTail<'d> {
    pub(super) content: Content<'d>,
    pub(super) walked: Walked,
}

impl UsedSegment {
    /// Path of the file, if it does not have the segment's own name.
    pub(super) fn misnamed(&self) -> Option<String> {
        (self.path != journal_path(self.life.id)).then(|| self.path.clone())
    }

    pub(super) fn as_bytes<'a>(&'a self, bytes: &'a Content<'a>) -> Bytes<'a> {
        Bytes {
            life: &self.life,
            base: self.base,
            bytes,
        }
    }

    /// Whether not even its link is whole.
    fn is_unwritten(&self, disk: &dyn Disk) -> Result<bool, OpenError> {
        let content = self.content(disk)?;
        let walked = self.as_bytes(&content).walk_last();
        self.check(&content)?;
        Ok(walked.end <= self.base.advance(LIFE_BYTES))
    }

    /// The content of the file.
    pub(super) fn content(&self, disk: &dyn Disk) -> Result<Content<'static>, OpenError> {
        Content::open(disk, &self.path).map_err(self.failed())
    }

    /// The bytes of a segment, read from the device. The end of the last segment may never have been flushed, and
    /// the cache must not be believed after a failed flush. Damage of another segment may exist only in the cache.
    pub(super) fn device_content<'d>(&self, disk: &'d dyn Disk) -> Result<Content<'d>, OpenError> {
        Content::from_device(disk, &self.path, self.life.size).map_err(self.failed())
    }

    /// Reads the last segment and walks it. Repeats this while the device cannot read its end.
    fn read_tail<'d>(&self, disk: &'d dyn Disk) -> Result<LoadedTail<'d>, OpenError> {
        let mut tries = 0;
        loop {
            let content = self.device_content(disk)?;
            let walked = self.as_bytes(&content).walk_last();
            self.check(&content)?;
            tries += 1;
            if walked.unread.is_none() || tries == END_TRIES {
                return Ok(LoadedTail { content, walked });
            }
        }
    }

    /// Reports an error of the disk under a walk.
    pub(super) fn check(&self, content: &Content<'_>) -> Result<(), OpenError> {
        content.check().map_err(self.failed())
    }

    fn failed(&self) -> impl FnOnce(std::io::Error) -> OpenError + use<> {
        OpenError::io(format!("reading {}", self.path))
    }
}

impl Recovered {
    /// Lists the store. Returns the segments that `journal/` names, in order.
    pub(super) fn list_files(&mut self, disk: &dyn Disk) -> Result<Vec<SegmentId>, OpenError> {
        let visit = |directory: &str, each: &mut dyn FnMut(&str)| {
            directory::visit(disk, directory, each)
                .map_err(OpenError::io(format!("listing {directory}")))
        };
        visit("pool", &mut |name| match life::id_of(name) {
            Some(id) => self.note_pool_file(id),
            None => self
                .notes
                .push(format!("pool/{name} is not one of Wald's files")),
        })?;
        let mut ids = Vec::new();
        visit("journal", &mut |name| match life::id_of(name) {
            Some(id) => ids.push(id),
            None => self
                .notes
                .push(format!("journal/{name} is not one of Wald's files")),
        })?;
        ids.sort_unstable();
        Ok(ids)
    }

    /// Separates files with frames from files without.
    pub(super) fn sort_files(
        &mut self,
        disk: &dyn Disk,
        ids: &[SegmentId],
    ) -> Result<Vec<UsedSegment>, OpenError> {
        let mut used = Vec::new();
        // The checkpoint of a clean end, and no start since then: nobody has begun a file that it does not cover.
        let is_last = |begun: LastBegun| Some(begun.segment) <= self.last;
        let search = match self.clean && self.last_begun.is_some_and(is_last) {
            true => FrameSearch::Unbegun,
            false => FrameSearch::Begin,
        };
        for id in ids {
            self.next_id = self.next_id.max(id.next());
            if let Some(segment) = self.sort_file(disk, *id, search)? {
                used.push(segment);
            }
        }
        self.look_again(disk, &mut used)?;
        let sorted = self.runs.last();
        used.retain(|segment| {
            let is_stray = Some(segment.life.id) <= sorted;
            if is_stray {
                self.find_stray(&segment.path, "holds a segment that sorted runs stand for");
            }
            !is_stray
        });
        used.sort_by_key(|segment| segment.life.id);
        used.dedup_by(|second, first| {
            let twice = second.life.id == first.life.id;
            if twice {
                self.findings
                    .push(format!("segment {} is there twice", first.life.id));
            }
            twice
        });
        self.drop_passed_over(disk, &mut used)?;
        Ok(used)
    }

    /// Checks files that seem empty. Segments are begun in the order of their ids. An empty file before a begun
    /// segment has lost its beginning, and its other bytes may be good.
    fn look_again(
        &mut self,
        disk: &dyn Disk,
        used: &mut Vec<UsedSegment>,
    ) -> Result<(), OpenError> {
        let ids = used.iter().map(|segment| segment.life.id);
        let newest = ids.chain(self.last_begun.map(|begun| begun.segment)).max();
        let (before, ready) = std::mem::take(&mut self.unused)
            .into_iter()
            .partition::<Vec<_>, _>(|id| Some(*id) <= newest);
        self.unused = ready;
        for id in before {
            used.extend(self.sort_file(disk, id, FrameSearch::Whole)?);
        }
        Ok(())
    }

    /// Checks the file behind the last segment for frames, if the journal has left that segment.
    pub(super) fn look_behind_seal<'d>(
        &mut self,
        disk: &'d dyn Disk,
        used: &mut Vec<UsedSegment>,
        tail: Option<LoadedTail<'d>>,
    ) -> Result<Option<LoadedTail<'d>>, OpenError> {
        let last = used.last().map(|last| last.life.id).or(self.last);
        let left = tail
            .as_ref()
            .map_or(!self.clean, |tail| tail.walked.is_sealed());
        let behind = |id: &&SegmentId| Some(**id) > last;
        let Some(next) = self.unused.iter().filter(behind).min().copied() else {
            return Ok(tail);
        };
        if !left || last.is_none() {
            return Ok(tail);
        }
        self.unused.retain(|id| *id != next);
        let Some(found) = self.sort_file(disk, next, FrameSearch::Whole)? else {
            return Ok(tail);
        };
        used.push(found);
        self.drop_unwritten(disk, used)
    }

    /// Notes an end of the journal that the device cannot read: a file with an unreadable first frame. The
    /// journal continues there if it has left the last segment found, or if the last start began that file.
    pub(super) fn look_for_unread_end(
        &mut self,
        used: &[UsedSegment],
        tail: Option<&LoadedTail<'_>>,
    ) {
        let last = used.last().map(|last| last.life.id).or(self.last);
        let left = tail.map_or(!self.clean, |tail| tail.walked.is_sealed());
        let begun = self.last_begun.map(|begun| begun.segment);
        let goes_on = |(id, _): &(SegmentId, _)| Some(*id) > last && (left || Some(*id) <= begun);
        let first = self.unread_first.iter().find(|first| goes_on(first));
        let first = first.map(|(id, bytes)| (journal_path(*id), bytes.clone()));
        self.unread_end = self.unread_end.take().or(first);
    }

    /// Drops segments that a later link skips. The start that wrote the link found nothing whole in them. It
    /// keeps the file that the last seal names until the link is flushed, so a power cut may leave that file
    /// behind. A file with whole frames was missing then, and came back: it is kept.
    fn drop_passed_over(
        &mut self,
        disk: &dyn Disk,
        used: &mut Vec<UsedSegment>,
    ) -> Result<(), OpenError> {
        let mut kept: Vec<UsedSegment> = Vec::with_capacity(used.len());
        for one in used.drain(..) {
            let before = one.link.as_ref().and_then(|link| link.predecessor);
            while let Some(last) = kept.last()
                && before.is_some_and(|before| before < last.life.id)
                && last.is_unwritten(disk)?
            {
                if last.misnamed().is_none() {
                    self.unused.push(last.life.id);
                }
                kept.pop();
            }
            kept.push(one);
        }
        *used = kept;
        Ok(())
    }

    pub(super) fn note_pool_file(&mut self, id: SegmentId) {
        self.next_id = self.next_id.max(id.next());
        self.free.push(id);
    }

    /// Searches for frames in a file.
    pub(super) fn sort_file(
        &mut self,
        disk: &dyn Disk,
        id: SegmentId,
        search: FrameSearch,
    ) -> Result<Option<UsedSegment>, OpenError> {
        let path = journal_path(id);
        let fail = || OpenError::io(format!("reading {path}"));
        let file = disk.open(&path).map_err(fail())?;
        let head = read_head(disk, &path, &*file).map_err(fail())?;
        let life = match Life::decode(&head) {
            Ok(life) if life.store_id == self.store.id => {
                self.key.note(life.id, &head, self.store.id);
                self.encrypted |= Life::features(&head) & ENCRYPTED != 0;
                life
            }
            Ok(life) => {
                let what = format!(
                    "belongs to store {:032x}, not to this one; it is not used",
                    life.store_id
                );
                self.unreadable(id, &what);
                return Ok(None);
            }
            Err(bad) => {
                if let Some(newer) = bad.too_new(&path) {
                    return Err(newer);
                }
                self.lost_life(id, &*file).map_err(fail())?;
                return Ok(None);
            }
        };
        if life.id != id {
            // The content of the file is checksummed; its name is not.
            self.findings.push(format!(
                "{path} holds segment {}; it is used as that",
                life.id
            ));
            self.next_id = self.next_id.max(life.id.next());
        }
        let first = usize::try_from(LIFE_BYTES)
            .ok()
            .and_then(|at| head.get(at..));
        if let Some(newer) = first.and_then(|first| frame::newer(first, life.salt)) {
            return Err(newer.refused(&path, LIFE_BYTES));
        }
        let (mut found, mut first) = (None, None);
        for _ in 0..END_TRIES {
            found = frames_or_again(disk, &path, &life, &*file, search).map_err(fail())?;
            first = unread_first(disk, &path, &*file).map_err(fail())?;
            if found.is_some() || first.is_none() {
                break;
            }
        }
        match found {
            None if life.id != id => Ok(None),
            Some((base, link)) => Ok(Some(UsedSegment {
                life,
                path,
                base,
                link,
            })),
            None => {
                self.unread_first.extend(first.map(|bytes| (id, bytes)));
                self.unused.push(id);
                Ok(None)
            }
        }
    }

    /// Checks the features of the checkpoint's last segment. Segments below a checkpoint are not read. A newer
    /// version that wrote later has marked that segment with its features.
    pub(super) fn check_life(&mut self, disk: &dyn Disk) -> Result<(), OpenError> {
        let Some(id) = self.last.filter(|id| !self.runs.hold(*id)) else {
            return Ok(());
        };
        let path = journal_path(id);
        let fail = || OpenError::io(format!("reading {path}"));
        let file = disk.open(&path).map_err(fail())?;
        let head = read_some(&*file, 0, LIFE_BYTES).map_err(fail())?;
        match Life::decode(&head) {
            Ok(life) => {
                self.key.note(life.id, &head, self.store.id);
                self.encrypted |= Life::features(&head) & ENCRYPTED != 0;
                Ok(())
            }
            Err(bad) => bad.too_new(&path).map_or(Ok(()), Err),
        }
    }

    /// Notes a file without a life block: nothing in it can be verified.
    pub(super) fn lost_life(&mut self, id: SegmentId, file: &dyn DiskFile) -> std::io::Result<()> {
        let (mut at, size) = (LIFE_BYTES, file.size()?);
        while at < size {
            let bytes = read_some(file, at, LOOK_BYTES)?;
            if bytes.iter().any(|byte| *byte != 0) {
                self.unreadable(id, "has no good life block; it is not used");
                return Ok(());
            }
            at += LOOK_BYTES;
        }
        self.unused.push(id);
        Ok(())
    }

    /// Notes a file with content that cannot be used.
    pub(super) fn unreadable(&mut self, id: SegmentId, what: &str) {
        self.findings.push(format!("{} {what}", journal_path(id)));
        self.unreadable.push(id);
    }

    /// Drops last segments whose first frame never became whole: they hold nothing, and the journal had not
    /// rolled. Returns the content of the last segment that holds frames.
    pub(super) fn drop_unwritten<'d>(
        &mut self,
        disk: &'d dyn Disk,
        used: &mut Vec<UsedSegment>,
    ) -> Result<Option<LoadedTail<'d>>, OpenError> {
        while let Some(last) = used.last() {
            let tail = last.read_tail(disk)?;
            if let Some(bytes) = tail.walked.unread.clone() {
                self.unread_end = Some((last.path.clone(), bytes));
            }
            if tail.walked.end > last.base.advance(LIFE_BYTES) {
                return Ok(Some(tail));
            }
            if last.misnamed().is_none() {
                self.unused.push(last.life.id);
            }
            used.pop();
        }
        Ok(None)
    }
}

/// The life block and first bytes of a segment file. A damaged life block is read again, from the device: the
/// memory of the first read may be wrong, and without the block the whole file counts as missing.
pub(super) fn read_head(
    disk: &dyn Disk,
    path: &str,
    file: &dyn DiskFile,
) -> std::io::Result<bytes::Bytes> {
    let length = LIFE_BYTES + FIRST_BYTES;
    let head = read_some(file, 0, length)?;
    match Life::decode(&head) {
        Err(BadLife::Damaged) => read_again(disk, path, 0, length),
        _ => Ok(head.into()),
    }
}

/// The base and the link of a segment, if it has frames. Damaged bytes are read again, from the device.
fn frames_or_again(
    disk: &dyn Disk,
    path: &str,
    life: &Life,
    file: &dyn DiskFile,
    search: FrameSearch,
) -> std::io::Result<Option<(Position, Option<Link>)>> {
    let cached = first_frame(
        life,
        &|from, bytes| Ok(read_some(file, from, bytes)?.into()),
    )?;
    let is_whole = |first: &FirstFrame| matches!(first, FirstFrame::Link(_, _, true));
    if is_whole(&cached) {
        return Ok(cached.told());
    }
    // A file that is ready holds zeros.
    let is_ready = matches!(cached, FirstFrame::Zeros) && search != FrameSearch::Whole;
    if is_ready && search == FrameSearch::Unbegun {
        return Ok(None);
    }
    let look = match search {
        FrameSearch::Whole => u64::MAX,
        FrameSearch::Unbegun | FrameSearch::Begin => LOOK_BYTES,
    };
    if !is_ready {
        let again = first_frame(life, &|from, bytes| read_again(disk, path, from, bytes))?;
        if is_whole(&again) {
            return Ok(again.told());
        }
    }
    let found = match cached.told() {
        None => frames_within(life, &Content::of_file(file, look)?)?,
        told => told,
    };
    match found {
        None if !is_ready => frames_within(life, &Content::from_device(disk, path, look)?),
        found => Ok(found),
    }
}

/// The first frame of a segment.
enum FirstFrame {
    /// Base, link, and whether all of the link is good.
    Link(Position, Link, bool),
    Zeros,
    Bad,
}

impl FirstFrame {
    fn told(self) -> Option<(Position, Option<Link>)> {
        match self {
            Self::Link(base, link, _) => Some((base, Some(link))),
            Self::Zeros | Self::Bad => None,
        }
    }
}

/// Reads the first frame of a segment by `read`.
fn first_frame(
    life: &Life,
    read: &dyn Fn(u64, u64) -> std::io::Result<bytes::Bytes>,
) -> std::io::Result<FirstFrame> {
    let head = read(LIFE_BYTES, frame::HEADER_BYTES as u64)?;
    if are_zeros(&head) {
        return Ok(FirstFrame::Zeros);
    }
    let header =
        frame::decode_header(&head, life.salt).filter(|header| header.kind == FrameKind::Link);
    let base = header.and_then(|header| header.position.get().checked_sub(LIFE_BYTES));
    let (Some(header), Some(base)) = (header, base) else {
        return Ok(FirstFrame::Bad);
    };
    let frame = read(LIFE_BYTES, header.frame_len())?;
    let link = frame::verified_body(&frame, &header).and_then(Link::decode);
    let is_whole = link.is_some();
    // The header holds a part of the link.
    let link = link.unwrap_or_else(|| partial_link(header.log_id, header.first_lsn, header.count));
    Ok(FirstFrame::Link(Position::new(base), link, is_whole))
}

/// Searches for any frame. The directory of its group describes a damaged link in part.
fn frames_within(
    life: &Life,
    content: &Content<'_>,
) -> std::io::Result<Option<(Position, Option<Link>)>> {
    let found = any_frame(life, content);
    content.check()?;
    Ok(found)
}

/// Offsets of the header of a segment's first frame, if the device cannot read it.
fn unread_first(
    disk: &dyn Disk,
    path: &str,
    file: &dyn DiskFile,
) -> std::io::Result<Option<Range<u64>>> {
    let header = LIFE_BYTES..LIFE_BYTES + frame::HEADER_BYTES as u64;
    let covers = |bad: &Range<u64>| bad.start < header.end && header.start < bad.end;
    if !disk.unreadable().of(path).iter().any(covers) {
        return Ok(None);
    }
    // A later read may have succeeded.
    let bytes = read_some(file, header.start, frame::HEADER_BYTES as u64)?;
    Ok(are_unreadable(&bytes).then_some(header))
}

/// The position of a segment's first byte, if any frame of it is good.
pub(crate) fn base_of(life: &Life, file: &dyn DiskFile) -> std::io::Result<Option<Position>> {
    let first = first_frame(
        life,
        &|from, bytes| Ok(read_some(file, from, bytes)?.into()),
    )?;
    let found = match first.told() {
        None => frames_within(life, &Content::of_file(file, u64::MAX)?)?,
        told => told,
    };
    Ok(found.map(|(base, _)| base))
}

/// Searches for any frame of this life: its position less its offset is the base.
fn any_frame(life: &Life, content: &Content<'_>) -> Option<(Position, Option<Link>)> {
    let mut from = LIFE_BYTES;
    loop {
        // One more header, so that a header can begin at each place in the page.
        let page = content.piece(from, PAGE + frame::HEADER_BYTES);
        let last = page.len().min(PAGE);
        let used = if are_zeros(&page[..last]) { 0 } else { last };
        for step in (0..used).step_by(8) {
            let offset = from + step as u64;
            // Bases are sums of sizes: this cheap check comes before a checksum is computed.
            let claimed = frame::claimed_position(&page[step..]);
            if claimed.is_none_or(|claimed| claimed.wrapping_sub(offset) % 4096 != 0) {
                continue;
            }
            let length = frame::claimed_header_len(&page[step..]).unwrap_or(0);
            let head = content.piece(offset, usize::try_from(length).unwrap_or(0));
            let Some(header) = frame::decode_header(&head, life.salt) else {
                continue;
            };
            let Some(base) = header.position.get().checked_sub(offset) else {
                continue;
            };
            let base = Position::new(base);
            let bytes = Bytes {
                life,
                base,
                bytes: content,
            };
            return Some((base, link_from_directory(&bytes, header)));
        }
        if last < PAGE {
            return None;
        }
        from += PAGE as u64;
    }
}

fn link_from_directory(bytes: &Bytes<'_>, mut header: FrameHeader) -> Option<Link> {
    loop {
        if let Some(directory) = frame::directory_of(&bytes.frame(&header), &header) {
            let entry = directory
                .entries
                .first()
                .filter(|entry| entry.kind == FrameKind::Link)?;
            return Some(partial_link(entry.log_id, entry.first_lsn, entry.count));
        }
        header = bytes.resynchronise(header.position.advance(8))?;
    }
}

fn partial_link(before: LogId, end: Lsn, epoch: u32) -> Link {
    Link {
        predecessor: (before.get() != 0).then(|| SegmentId::new(before.get())),
        second: None,
        predecessor_end: Position::new(end.get()),
        predecessor_chain: 0,
        recovery_epoch: RecoveryEpoch::new(u64::from(epoch)),
        next_log_counter: 0,
        closings: None,
        lost_before: None,
        accepted: None,
        expiry: None,
    }
}

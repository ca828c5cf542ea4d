//! The engine's side of a replica: hands durable bytes to the shipper, and takes its positions.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::{Core, LocalEngine};
use crate::api::content::ContentDigest;
use crate::api::engine::{Backup, BackupManifest, BoxFuture};
use crate::api::error::{BackupError, ReadError};
use crate::api::record::Visibility;
use crate::api::replica::{JournalPart, OwnerLease, Replica, ReplicaProgress, Unreplicated};
use crate::api::watch::{Until, Watched};
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::Position;
use crate::disk::known_bad;
use crate::disk::known_bad::Mistake;
use crate::format::frame;
use crate::journal::segment::Segment;
use crate::read::{Reach, far, near_or_far};
use crate::tools::backup;

impl Core {
    /// As [`Replica::read_part`].
    pub(crate) fn read_part(
        &self,
        from: Position,
        most: usize,
        reach: Reach,
    ) -> io::Result<Option<JournalPart>> {
        let durable = match known_bad::makes(Mistake::ShipFromWritten) {
            true => self.journal.written(),
            false => self.journal.durable(),
        };
        let Some(segment) = self.segment_from(from)? else {
            return Ok(None);
        };
        let end = segment.end.read().unwrap_or(durable).min(durable);
        let start = from.max(segment.base);
        if end <= start.max(segment.first()) {
            return Ok(None);
        }
        let mut part = BytesMut::new();
        if start == segment.base {
            part.extend_from_slice(&self.bytes_at(&segment, start, LIFE_BYTES, reach)?);
        }
        let first = start.max(segment.first());
        let groups = match self.groups_in_memory(first, end, most) {
            Some(groups) => groups,
            None => self.groups_in_file(&segment, first, end, most, reach)?,
        };
        part.extend_from_slice(&groups);
        let mut position = start;
        let skipped = self.journal.recent.at(start, u64::MAX);
        if known_bad::makes(Mistake::SkipRow)
            && let Some(skipped) = skipped.filter(|skipped| skipped.len() < part.len())
        {
            position = start.advance(skipped.len() as u64);
            let _skipped = part.split_to(skipped.len());
        }
        Ok(Some(JournalPart {
            segment: segment.life.id,
            end: position.advance(part.len() as u64),
            position,
            bytes: part.freeze(),
        }))
    }

    /// The segment that holds the byte at `from`, or else the first one behind.
    fn segment_from(&self, from: Position) -> io::Result<Option<Arc<Segment>>> {
        let sorted = self.journal.runs().last().map(|run| run.head.end);
        if sorted.is_some_and(|end| from < end) {
            let gone = format!("the journal is sorted at position {from}");
            return Err(io::Error::new(io::ErrorKind::NotFound, gone));
        }
        let segments = self.journal.segments.read();
        let holds = |segment: &&Arc<Segment>| {
            from < segment.limit() && segment.end.read().is_none_or(|end| from < end)
        };
        let within = segments.range(..=from).next_back().map(|(_, found)| found);
        let behind = || segments.range(from..).next().map(|(_, found)| found);
        let behind = || behind().filter(|segment| segment.base > from);
        let next = within.filter(holds).or_else(behind);
        Ok(next.map(Arc::clone))
    }

    /// Whole groups from `from` up to `end`, as far as they are in memory. `None` if the first one is not.
    fn groups_in_memory(&self, from: Position, end: Position, most: usize) -> Option<Bytes> {
        let recent = |at: Position| self.journal.recent.at(at, end.since(at));
        let first = recent(from)?;
        let mut at = from.advance(first.len() as u64);
        let mut groups = BytesMut::from(first);
        while at < end
            && let Some(next) = recent(at)
            && groups.len() + next.len() <= most
        {
            at = at.advance(next.len() as u64);
            groups.extend_from_slice(&next);
        }
        Some(groups.freeze())
    }

    /// Whole groups from `from` up to `end`, from the file: at most `most` bytes, or one group.
    fn groups_in_file(
        &self,
        segment: &Segment,
        from: Position,
        end: Position,
        most: usize,
        reach: Reach,
    ) -> io::Result<Bytes> {
        let rest = end.since(from);
        let mut length = (most as u64).clamp(frame::HEADER_BYTES as u64, rest);
        loop {
            let bytes = self.bytes_at(segment, from, length, reach)?;
            if rest <= most as u64 {
                return Ok(bytes);
            }
            match whole_groups(&bytes, segment, (from, most))? {
                0 if length == rest => return Ok(bytes),
                // The first group is larger.
                0 => length = (length * 2).min(rest),
                whole => return Ok(bytes.slice(..whole)),
            }
        }
    }

    /// Exactly these bytes of the file of a segment.
    fn bytes_at(
        &self,
        segment: &Segment,
        from: Position,
        length: u64,
        reach: Reach,
    ) -> io::Result<Bytes> {
        if reach != Reach::Disk {
            return Err(far());
        }
        let bytes = self.open_segments.read(segment, from, length)?;
        match bytes.len() as u64 == length {
            true => Ok(bytes),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// As [`Replica::publish`].
    pub(crate) fn publish_replicated(&self, end: Position) {
        self.journal.publish_replicated(end);
        self.indexing.replicated(end);
    }
}

/// Length of the whole groups in `bytes`, which begin with a group at `from`: those within `most` bytes, or the first
/// one. 0 if not even the first one is there. The first frame of a group has the directory of the group before.
fn whole_groups(
    bytes: &[u8],
    segment: &Segment,
    (from, most): (Position, usize),
) -> io::Result<usize> {
    let (mut at, mut whole) = (0, 0);
    while let Some(rest) = bytes
        .get(at..)
        .filter(|rest| rest.len() >= frame::HEADER_BYTES)
    {
        let claimed = frame::claimed_header_len(rest).unwrap_or(u64::MAX);
        if claimed > rest.len() as u64 {
            break;
        }
        let position = from.advance(at as u64);
        let header = frame::decode_header(rest, segment.life.salt);
        let header = header.filter(|header| header.position == position);
        let header = header.ok_or_else(|| {
            let damaged = format!("{} is damaged at position {position}", segment.path());
            io::Error::new(io::ErrorKind::InvalidData, damaged)
        })?;
        if frame::directory_of(rest, &header).is_some() {
            if at > most && whole > 0 {
                break;
            }
            whole = at;
        }
        let length = usize::try_from(header.frame_len()).unwrap_or(usize::MAX);
        at = at.saturating_add(length);
    }
    Ok(whole)
}

impl Replica for LocalEngine {
    fn progress(&self) -> ReplicaProgress {
        self.core.journal.replica_progress()
    }

    fn lag_records(&self) -> u64 {
        self.core.journal.lag_records()
    }

    fn changed(&self, durable: Position, waiting: bool) -> BoxFuture<'_, ()> {
        let journal = Arc::clone(&self.core.journal);
        let Some(replication) = self.core.journal.replication() else {
            return Box::pin(std::future::pending());
        };
        let watched: Vec<Arc<dyn Watched>> = vec![Arc::clone(replication.shipper()) as _];
        Box::pin(Until::new(watched, Visibility::Durable, move || {
            let progress = journal.replica_progress();
            let is_new = progress.durable > durable || (!waiting && progress.waiting > 0);
            (is_new || progress.ended).then_some(())
        }))
    }

    fn read_part(
        &self,
        from: Position,
        most: usize,
    ) -> BoxFuture<'_, io::Result<Option<JournalPart>>> {
        let core = Arc::clone(&self.core);
        Box::pin(async move {
            let read = move |reach| Ok(core.read_part(from, most, reach)?);
            let read = near_or_far(&self.workers, Reach::Memory, read).await;
            read.map_err(|error| match error {
                ReadError::Io(error) => io::Error::new(error.kind(), error),
                other => io::Error::other(other),
            })
        })
    }

    fn publish(&self, end: Position) {
        self.core.publish_replicated(end);
    }

    fn files(
        &self,
        known: HashSet<ContentDigest>,
        earlier: Option<Arc<BackupManifest>>,
    ) -> BoxFuture<'_, Result<Box<dyn Backup>, BackupError>> {
        let core = &self.core;
        Box::pin(backup::begin_finished(
            &core.store,
            &core.indexer,
            &self.workers,
            known,
            earlier,
        ))
    }

    fn release(&self, end: Position) {
        self.core.journal.release(end);
    }

    fn hold_lease(&self, lease: Arc<dyn OwnerLease>) {
        if let Some(replication) = self.core.journal.replication() {
            replication.hold_lease(lease);
        }
    }

    fn stop(&self, reason: Unreplicated) {
        self.core.journal.stop_replication(reason);
    }

    fn resume(&self) {
        self.core.journal.resume_replication();
    }
}

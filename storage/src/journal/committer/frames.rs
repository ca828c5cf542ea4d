//! Frames of the group at hand.

use std::ops::Range;
use std::sync::Arc;

use super::group::OpenFrame;
use super::tail::{SegmentTail, Started};
use super::{Committer, FrameFields};
use crate::api::record::{Compression, Producer};
use crate::base::ids::{LogId, Position};
use crate::format::digest::Digest;
use crate::format::frame::{FrameHead, FrameKind};
use crate::logs::{Log, Logs};

impl<T: SegmentTail> Committer<T> {
    /// Begins a frame, which may name the producer of its batch.
    pub(super) fn begin_frame(&mut self, producer: Option<(&Producer, Digest)>) -> Started {
        if self.tail.len() == 0 {
            self.note_start();
        }
        self.tail.begin(producer)
    }

    pub(super) fn end_batch(&mut self, frame: Started, about: FrameFields, log: &Arc<Log>) {
        let compression = log.state.read().compression();
        let before = self.tail.len().next_multiple_of(8);
        self.end_frame(frame, about, (log.id, None), compression);
        if self.tail.len() != before {
            let frame_len = self.frame_len(frame);
            let mut state = log.state.write();
            let bytes = Logs::bytes_now(&state);
            state.resize_newest(frame_len);
            self.logs.count_bytes(bytes, &state);
        }
        self.entered.records += u64::from(about.count);
        self.touch(log);
    }

    /// Bytes of an unfinished frame so far.
    pub(super) fn frame_len(&self, frame: Started) -> u32 {
        let frame_len = (self.tail.len() - frame.at).next_multiple_of(8);
        u32::try_from(frame_len).unwrap_or(u32::MAX)
    }

    fn end_frame(
        &mut self,
        frame: Started,
        about: FrameFields,
        (log_id, name): (LogId, Option<&str>),
        compression: Compression,
    ) -> Range<Position> {
        let head = FrameHead {
            kind: about.kind,
            flags: about.flags,
            count: about.count,
            position: self.tail.position(frame.at),
            log_id,
            first_lsn: about.first_lsn,
            arrival: about.arrival.unwrap_or(self.arrival),
            durable_mark: self.journal.durable(),
            chain: 0,
        };
        self.tail.finish(frame, head, name, compression)
    }

    /// Adds a whole frame that holds no records. Returns its position and end.
    pub(super) fn push_frame(
        &mut self,
        about: FrameFields,
        log_id: LogId,
        name: Option<&str>,
        body: impl FnOnce(&mut Vec<u8>),
    ) -> Range<Position> {
        let frame = self.begin_frame(None);
        self.tail.put(body);
        self.end_frame(frame, about, (log_id, name), Compression::None)
    }

    pub(super) fn finish_open(&mut self) {
        if let Some(open) = self.group.open.take() {
            let OpenFrame {
                frame,
                log,
                first_lsn,
                count,
                ..
            } = open;
            let about = FrameFields {
                kind: FrameKind::Batch,
                flags: 0,
                first_lsn,
                count,
                arrival: None,
            };
            self.end_batch(frame, about, &log);
        }
    }
}

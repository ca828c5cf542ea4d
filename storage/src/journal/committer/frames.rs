//! Frames in the group that is being encoded.

use std::sync::Arc;

use super::{About, Committer, OpenFrame};
use crate::api::record::Producer;
use crate::base::ids::{LogId, Position};
use crate::format::compress;
use crate::format::digest::Digest;
use crate::format::frame;
use crate::format::frame::{HEADER_BYTES, Head, Header, Kind};
use crate::logs::Log;

impl Committer {
    /// Position of an offset in the buffer.
    pub(super) fn position(&self, at: usize) -> Position {
        self.segment.base.advance(self.offset + at as u64)
    }

    /// Position after the last finished frame.
    pub(super) fn end(&self) -> Position {
        self.position(self.buffer.len())
    }

    pub(super) fn begin_frame(&mut self) -> (usize, usize) {
        self.begin_frame_of(None)
    }

    /// Begins a frame that names the producer of its batch.
    pub(super) fn begin_frame_of(
        &mut self,
        producer: Option<(&Producer, Digest)>,
    ) -> (usize, usize) {
        let mut extension = if self.buffer.is_empty() {
            self.note_start();
            self.directory.reset(self.end());
            self.previous.extension()
        } else {
            Vec::new()
        };
        if let Some((producer, digest)) = producer {
            frame::put_producer(&mut extension, producer, digest);
        }
        (
            frame::begin(&mut self.buffer, &extension),
            HEADER_BYTES + extension.len(),
        )
    }

    pub(super) fn end_batch(
        &mut self,
        start: usize,
        header_len: usize,
        mut about: About,
        log: &Arc<Log>,
    ) {
        let how = log.state.read().compression();
        let packed = compress::compress(&self.buffer[start + header_len..], how);
        if let Some((codec, packed)) = packed {
            about.flags |= codec;
            self.buffer.truncate(start + header_len);
            self.buffer.extend_from_slice(&packed);
            let frame_len = (self.buffer.len() - start).next_multiple_of(8);
            log.state
                .write()
                .resize_newest(u32::try_from(frame_len).unwrap_or(u32::MAX));
        }
        self.end_frame(start, header_len, about, log.id, None);
        self.records += u64::from(about.count);
        self.touch(log);
    }

    pub(super) fn end_frame(
        &mut self,
        start: usize,
        header_len: usize,
        about: About,
        log_id: LogId,
        name: Option<&str>,
    ) -> Header {
        let head = Head {
            kind: about.kind,
            flags: about.flags,
            count: about.count,
            position: self.position(start),
            log_id,
            first_lsn: about.first_lsn,
            arrival: about.arrival.unwrap_or(self.arrival),
            durable_mark: self.journal.durable(),
            chain: self.chain,
        };
        let salt = self.segment.life.salt;
        let header = frame::finish(&mut self.buffer, start, header_len, salt, &head);
        self.chain = header.crc;
        self.frames += 1;
        self.directory.push(&header, name);
        header
    }

    /// Writes a whole frame that holds no records.
    pub(super) fn push_frame(
        &mut self,
        about: About,
        log_id: LogId,
        name: Option<&str>,
        body: impl FnOnce(&mut Vec<u8>),
    ) -> Header {
        let (start, header_len) = self.begin_frame();
        body(&mut self.buffer);
        self.end_frame(start, header_len, about, log_id, name)
    }

    pub(super) fn finish_open(&mut self) {
        if let Some(open) = self.open.take() {
            let OpenFrame {
                start,
                header_len,
                log,
                first_lsn,
                count,
                ..
            } = open;
            let about = About {
                kind: Kind::Batch,
                flags: 0,
                first_lsn,
                count,
                arrival: None,
            };
            self.end_batch(start, header_len, about, &log);
        }
    }
}

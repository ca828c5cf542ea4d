//! Verifying the frames of a segment as its bytes pass, in bounded memory.

use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::Position;
use crate::format::frame;
use crate::format::frame::HEADER_BYTES;
use crate::format::life::Life;

/// Verifies one segment as its bytes pass, from its first byte on.
pub(super) struct FrameCheck {
    life: Life,
    /// Remaining bytes of the life block.
    life_bytes: usize,
    /// Position of the next frame.
    at: Position,
    chain: u32,
    /// The beginning of an incomplete frame.
    rest: Vec<u8>,
    sound: bool,
    until: Position,
    /// End of the last atomic unit that ends at or below `until`.
    whole: Option<Position>,
}

impl FrameCheck {
    pub(super) fn new(life: Life, base: Position, until: Position) -> Self {
        Self {
            life,
            life_bytes: usize::try_from(LIFE_BYTES).unwrap_or(0),
            at: base.advance(LIFE_BYTES),
            chain: 0,
            rest: Vec::new(),
            sound: true,
            until,
            whole: None,
        }
    }

    /// Takes the next bytes.
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        let skipped = self.life_bytes.min(bytes.len());
        self.life_bytes -= skipped;
        if !self.sound {
            return;
        }
        let mut rest = std::mem::take(&mut self.rest);
        rest.extend_from_slice(bytes.get(skipped..).unwrap_or(&[]));
        let mut from = 0;
        while let Some(length) = self.frame(&rest[from..]) {
            from += length;
        }
        if self.sound {
            rest.drain(..from);
            self.rest = rest;
        }
    }

    /// Verifies the frame at the front, if it is complete; returns its length.
    fn frame(&mut self, bytes: &[u8]) -> Option<usize> {
        if bytes.len() < HEADER_BYTES {
            return None;
        }
        // The length is not verified yet, but bounded, so waiting for the header is safe.
        let header_len = usize::from(u16::from_le_bytes([bytes[4], bytes[5]])) * 8;
        if header_len > bytes.len() {
            return None;
        }
        let header = frame::decode_header(bytes, self.life.salt)
            .filter(|header| header.position == self.at && header.chain == self.chain);
        let Some(header) = header else {
            self.sound = false;
            return None;
        };
        let length = usize::try_from(header.frame_len()).unwrap_or(usize::MAX);
        if bytes.len() < length {
            return None;
        }
        if frame::verified_body(bytes, &header).is_none() {
            self.sound = false;
            return None;
        }
        self.at = header.end();
        self.chain = header.crc;
        if !header.continues() && self.at <= self.until {
            self.whole = Some(self.at);
        }
        Some(length)
    }

    /// Whether all frames verified and ended at `end`, after the last byte. Behind the end, a run has some
    /// bytes that are no frame.
    pub(super) fn is_sound(&self, end: Position) -> bool {
        self.sound && self.rest.len() < HEADER_BYTES && self.at == end
    }

    /// End of the last atomic unit that ends at or below the requested position; valid only if the segment is sound.
    pub(super) fn whole(&self) -> Option<Position> {
        self.whole
    }
}

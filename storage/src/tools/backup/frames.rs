//! Verifying the frames of a segment as its bytes pass, in bounded memory.

use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::Position;
use crate::format::frame::HEADER_BYTES;
use crate::format::life::Life;
use crate::format::walk::{Event, SegmentSource, Walk};

/// Verifies one segment as its bytes pass, from its first byte on.
pub(super) struct FrameCheck {
    walk: Walk<Passing>,
    base: Position,
    /// Remaining bytes of the life block.
    life_bytes: usize,
    sound: bool,
    until: Position,
    /// End of the last atomic unit that ends at or below `until`.
    whole: Option<Position>,
}

/// The bytes of an incomplete frame, as far as they have passed.
struct Passing {
    /// Their offset in the segment.
    start: u64,
    bytes: Vec<u8>,
}

/// The bytes have not passed yet.
struct NotYet;

impl SegmentSource for Passing {
    type Error = NotYet;

    fn look<R>(
        &mut self,
        offset: u64,
        length: usize,
        look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, NotYet> {
        let from = usize::try_from(offset - self.start).unwrap_or(usize::MAX);
        let bytes = self.bytes.get(from..from.saturating_add(length));
        bytes.map(look).ok_or(NotYet)
    }
}

impl FrameCheck {
    pub(super) fn new(life: Life, base: Position, until: Position) -> Self {
        let passing = Passing {
            start: LIFE_BYTES,
            bytes: Vec::new(),
        };
        Self {
            walk: Walk::new(passing, &life, base, base.advance(life.size)),
            base,
            life_bytes: usize::try_from(LIFE_BYTES).unwrap_or(0),
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
        let bytes = bytes.get(skipped..).unwrap_or(&[]);
        self.walk.source.bytes.extend_from_slice(bytes);
        loop {
            let mut ends_unit = None;
            let found = self.walk.next_good(|event| {
                if let Event::Frame { header, body, .. } = event {
                    ends_unit = body.map(|_| !header.continues());
                }
            });
            match (found, ends_unit) {
                (Err(NotYet), _) => break,
                (Ok(true), Some(ends_unit)) => {
                    let at = self.walk.position();
                    if ends_unit && at <= self.until {
                        self.whole = Some(at);
                    }
                }
                (Ok(_), _) => {
                    self.sound = false;
                    self.walk.source.bytes = Vec::new();
                    return;
                }
            }
        }
        // The length of an incomplete frame is not verified, but bounded, so waiting for it is safe.
        let start = self.walk.position().since(self.base);
        let passing = &mut self.walk.source;
        let done = usize::try_from(start - passing.start).unwrap_or(usize::MAX);
        passing.bytes.drain(..done);
        passing.start = start;
    }

    /// Whether all frames verified and ended at `end`, after the last byte. Behind the end, a run has some
    /// bytes that are no frame.
    pub(super) fn is_sound(&self, end: Position) -> bool {
        let rest = self.walk.source.bytes.len();
        self.sound && rest < HEADER_BYTES && self.walk.position() == end
    }

    /// Whether all frames verified so far. The rest may be the beginning of one.
    pub(super) fn is_good(&self) -> bool {
        self.sound
    }

    /// End of the last atomic unit that ends at or below the requested position; valid only if the segment is sound.
    pub(super) fn whole(&self) -> Option<Position> {
        self.whole
    }
}

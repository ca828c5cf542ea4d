//! The frames of one segment in order, over damage too, in steps of 1 MiB.
//!
//! The walk finds the same frames as [`crate::recovery`] in a finished segment, by the same rules. It keeps at
//! most one step or one frame in memory.

use bytes::Bytes;

use crate::api::pace::Stop;
use crate::base::bounds::LIFE_BYTES;
use crate::base::ids::Position;
use crate::base::zeros::are_zeros;
use crate::format::frame;
use crate::format::frame::{HEADER_BYTES, Header, MAX_HEADER_BYTES};
use crate::format::life::Life;

/// Bytes read at a time.
pub(crate) const STEP_BYTES: u64 = 1 << 20;

/// Zeros are skipped in steps of about this, bytes.
const ZERO_PAGE: usize = 4096;

/// The next item of a segment.
pub(crate) enum Event<'a> {
    /// A frame with a good header.
    Frame {
        header: &'a Header,
        /// Header and body, as far as the file has them.
        bytes: &'a [u8],
        /// Its body as stored, if it matches its checksum.
        body: Option<&'a [u8]>,
    },
    /// A range of positions that does not verify.
    Hole {
        from: Position,
        to: Position,
        /// A good header at its start that does not follow from the frame before.
        stranger: Option<Header>,
    },
}

/// Returns the bytes of a file from an offset on; fewer only where it ends.
pub(crate) type Read<'a> = dyn FnMut(u64, u64) -> Result<Bytes, Stop> + 'a;

/// A part of a file in memory.
struct Window<'a, 'b> {
    read: &'a mut Read<'b>,
    start: u64,
    bytes: Vec<u8>,
    /// Nothing is read at or beyond this offset.
    limit: u64,
}

impl Window<'_, '_> {
    /// The bytes of the file from `offset` on: at least `need`, unless it ends before.
    fn at(&mut self, offset: u64, need: u64) -> Result<&[u8], Stop> {
        let wanted = offset.saturating_add(need).min(self.limit);
        while self.start + (self.bytes.len() as u64) < wanted {
            let done = offset.saturating_sub(self.start);
            let done = usize::try_from(done).unwrap_or(usize::MAX);
            if done >= self.bytes.len() {
                self.start = offset;
                self.bytes.clear();
            } else {
                self.bytes.drain(..done);
                self.start += done as u64;
            }
            let from = self.start + self.bytes.len() as u64;
            let step = STEP_BYTES.min(self.limit - from);
            let read = (self.read)(from, step)?;
            self.bytes.extend_from_slice(&read);
            if (read.len() as u64) < step {
                self.limit = from + read.len() as u64;
                break;
            }
        }
        let from = usize::try_from(offset.saturating_sub(self.start)).unwrap_or(usize::MAX);
        Ok(self.bytes.get(from..).unwrap_or(&[]))
    }
}

/// Walks one segment.
pub(crate) struct Frames<'a, 'b> {
    life: Life,
    base: Position,
    end: Position,
    position: Position,
    /// Chain value the next header must carry; `None` after a hole.
    chain: Option<u32>,
    window: Window<'a, 'b>,
}

impl<'a, 'b> Frames<'a, 'b> {
    /// Walks the frames up to `end`, which its successor records, or which a walk of the last segment found.
    pub(crate) fn new(life: Life, base: Position, end: Position, read: &'a mut Read<'b>) -> Self {
        Self {
            life,
            base,
            end,
            position: base.advance(LIFE_BYTES),
            chain: Some(0),
            window: Window {
                read,
                start: LIFE_BYTES,
                bytes: Vec::new(),
                limit: end.since(base).min(life.size),
            },
        }
    }

    /// Calls `each` with the next frame or hole; `false` = there is none.
    pub(crate) fn next(&mut self, each: impl FnOnce(Event<'_>)) -> Result<bool, Stop> {
        if self.position >= self.end {
            return Ok(false);
        }
        let at = self.position;
        let header = self.header(at)?.filter(|header| header.end() <= self.end);
        let stranger = match header {
            Some(header) if self.chain.is_none_or(|chain| chain == header.chain) => {
                self.position = header.end();
                self.chain = Some(header.crc);
                let offset = at.since(self.base);
                let bytes = self.window.at(offset, header.frame_len())?;
                let length = usize::try_from(header.frame_len()).unwrap_or(usize::MAX);
                let bytes = &bytes[..length.min(bytes.len())];
                let body = frame::verified_body(bytes, &header);
                each(Event::Frame {
                    header: &header,
                    bytes,
                    body,
                });
                return Ok(true);
            }
            stranger => stranger,
        };
        let next = self.resynchronise(at.advance(8))?;
        let to = next.filter(|next| *next < self.end).unwrap_or(self.end);
        self.position = to;
        self.chain = None;
        each(Event::Hole {
            from: at,
            to,
            stranger,
        });
        Ok(true)
    }

    /// The verified header at `position`.
    fn header(&mut self, position: Position) -> Result<Option<Header>, Stop> {
        let offset = position.since(self.base);
        let bytes = self.window.at(offset, HEADER_BYTES as u64)?;
        if frame::claimed_position(bytes) != Some(position.get()) {
            return Ok(None);
        }
        let bytes = self.window.at(offset, MAX_HEADER_BYTES as u64)?;
        Ok(frame::decode_header(bytes, self.life.salt))
    }

    /// The next position at or after `from` where a header verifies.
    fn resynchronise(&mut self, mut from: Position) -> Result<Option<Position>, Stop> {
        while from.since(self.base) < self.window.limit {
            if self.header(from)?.is_some() {
                return Ok(Some(from));
            }
            let page = self.window.at(from.since(self.base), ZERO_PAGE as u64)?;
            let page = page.get(..ZERO_PAGE);
            let zeros = page.is_some_and(are_zeros);
            // A header may begin with zeros, but not with a page of them.
            from = from.advance(if zeros {
                (ZERO_PAGE - HEADER_BYTES) as u64
            } else {
                8
            });
        }
        Ok(None)
    }
}

//! Frames that a client sends: their number, and their bytes of calls.
//!
//! Only the heads of frames are read, which costs some nanoseconds a frame. The HTTP/2 layer
//! checks them; a frame that it refuses ends the connection.

/// Bytes with which a client begins, before its first frame.
const PREFACE_BYTES: usize = 24;

/// Length in three bytes, type, flags, stream in four bytes.
const HEAD_BYTES: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const PADDED: u8 = 8;

/// Bytes in addition to the data that a frame of data may need: its head, padding, updates of
/// windows.
const DATA_FRAME_BYTES: u64 = 32;

/// The frames that have begun in some bytes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct BegunFrames {
    /// Frames, of any kind.
    pub(super) frames: usize,
    /// Bytes that calls need for their heads, and for the data in them.
    pub(super) useful: u64,
}

/// Position of a connection in its frames.
#[derive(Debug)]
pub(super) struct FramePosition {
    /// Bytes to skip: of the preface, or of the frame that has begun.
    skip: usize,
    head: [u8; HEAD_BYTES],
    /// Bytes of the head that are here.
    have: usize,
    /// Length of a frame of data whose next byte is the length of its padding.
    padded: Option<usize>,
}

impl FramePosition {
    /// A connection that has sent nothing yet.
    pub(super) fn new() -> Self {
        Self {
            skip: PREFACE_BYTES,
            head: [0; HEAD_BYTES],
            have: 0,
            padded: None,
        }
    }

    /// Takes the next bytes of the connection. Returns the frames that begin in them.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> BegunFrames {
        let mut begun = BegunFrames::default();
        while let Some(first) = bytes.first() {
            if let Some(length) = self.padded.take() {
                begun.useful += needed(length.saturating_sub(1 + usize::from(*first)));
            }
            if self.skip > 0 {
                let skipped = self.skip.min(bytes.len());
                self.skip -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            let more = (HEAD_BYTES - self.have).min(bytes.len());
            let (head, rest) = bytes.split_at(more);
            self.head[self.have..][..more].copy_from_slice(head);
            self.have += more;
            bytes = rest;
            if self.have == HEAD_BYTES {
                self.have = 0;
                begun.frames += 1;
                let [high, middle, low, kind, flags, ..] = self.head;
                self.skip = u32::from_be_bytes([0, high, middle, low]) as usize;
                match (kind, flags & PADDED) {
                    (DATA, 0) => begun.useful += needed(self.skip),
                    // An empty frame has no byte that says so.
                    (HEADERS | CONTINUATION, _) if self.skip > 0 => {
                        begun.useful += (HEAD_BYTES + self.skip) as u64;
                    }
                    (DATA, _) if self.skip > 0 => self.padded = Some(self.skip),
                    _ => {}
                }
            }
        }
        begun
    }
}

/// Bytes that so much data takes on the way.
fn needed(data: usize) -> u64 {
    match data {
        0 => 0,
        _ => data as u64 + DATA_FRAME_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    #[test]
    fn data_of_calls_counts_however_the_bytes_are_cut() {
        let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        sent.extend(frame(4, 0, &[0; 18]));
        sent.extend(frame(DATA, 0, &[7; 100]));
        sent.extend(frame(DATA, 0, &[]));
        sent.extend(frame(6, 1, &[0; 8]));
        // Five bytes of data and two of padding; padding alone; padded, and empty.
        sent.extend(frame(DATA, PADDED, &[2, 1, 1, 1, 1, 1, 0, 0]));
        sent.extend(frame(DATA, PADDED, &[3, 0, 0, 0]));
        sent.extend(frame(DATA, PADDED, &[]));
        sent.extend(frame(8, 0, &[0; 4]));
        sent.extend(frame(DATA, 1, &[9; 1]));
        // Heads of calls count as they are, and empty continuations do not count.
        sent.extend(frame(HEADERS, 0, &[0; 40]));
        sent.extend(frame(CONTINUATION, 4, &[0; 7]));
        sent.extend(frame(CONTINUATION, 0, &[]));
        let heads = (2 * HEAD_BYTES + 47) as u64;
        let expected = needed(100) + needed(5) + needed(1) + heads;
        for size in [1, 2, 9, 13, 1000] {
            let mut frames = FramePosition::new();
            let begun: Vec<_> = sent.chunks(size).map(|part| frames.take(part)).collect();
            let useful: u64 = begun.iter().map(|begun| begun.useful).sum();
            assert_eq!(useful, expected, "in parts of {size} bytes");
            let frames: usize = begun.iter().map(|begun| begun.frames).sum();
            assert_eq!(frames, 12, "in parts of {size} bytes");
        }
    }
}

//! Reads frames and packs: verifies, unpacks and decompresses them.
//!
//! Only verified bytes leave this module.

use std::borrow::Cow;
use std::io;

use bytes::Bytes;

use super::reach::{Reach, far};
use crate::api::cipher::Cipher;
use crate::api::codec;
use crate::base::ids::{LogId, Lsn, Position, Timestamp};
use crate::format::active::Place;
use crate::format::compress;
use crate::format::frame;
use crate::format::frame::{FrameHeader, FrameKind};
use crate::format::pack;
use crate::format::pack::Piece;
use crate::format::sealed::{BodyPlace, SEALED, SealedBody, is_sealed};
use crate::index::run_file;
use crate::journal::segment::Segment;
use crate::read::store::Store;

/// Maximum bytes that a read with [`Reach::Cached`] decompresses, however few are stored: it must not take long.
const SHORT_PLAIN_BYTES: u32 = 128 << 10;

/// One frame of the journal, or a piece of a pack that was one, verified.
pub(super) struct Frame {
    pub(super) first_lsn: Lsn,
    pub(super) count: u32,
    pub(super) arrival: Timestamp,
    pub(super) body: Bytes,
}

/// Lsns of the wanted records: from, to (exclusive).
pub(super) type WantedLsns = (Lsn, Lsn);

/// All records.
pub(super) const ALL: WantedLsns = (Lsn::ZERO, Lsn::new(u64::MAX));

/// Why a frame could not be read.
pub(crate) enum FrameFault {
    Damaged,
    Io(io::Error),
}

/// A frame that could not be read: its place, and its position in the journal.
pub(super) struct Bad {
    pub(super) place: Place,
    pub(super) position: Position,
    pub(super) fault: FrameFault,
}

impl Bad {
    fn is_damaged(&self) -> bool {
        matches!(self.fault, FrameFault::Damaged)
    }
}

/// Reads and verifies the frames at `places`, which lie in one segment in this order, until one is bad. From packs it
/// takes only the pieces with wanted records. A frame that does not verify is read again from the device, if `reach`
/// allows that.
pub(super) fn read_frames(
    store: &Store,
    segment: &Segment,
    places: &[Place],
    wanted: WantedLsns,
    reach: Reach,
) -> (Vec<Frame>, Option<Bad>) {
    let (Some(first), Some(last)) = (places.first(), places.last()) else {
        return (Vec::new(), None);
    };
    let (mut start, mut buffer) = (first.position, Bytes::new());
    let mut frames = Vec::with_capacity(places.len());
    let mut effort = Effort::within(reach);
    for place in places {
        let bad = |fault| Bad {
            place: *place,
            position: store.position_of(segment, place.position),
            fault,
        };
        if place.end() > start.advance(buffer.len() as u64) {
            start = place.position;
            buffer = match store.bytes(segment, start, last.end().since(start), reach) {
                Ok(buffer) => buffer,
                Err(error) => return (frames, Some(bad(FrameFault::Io(error)))),
            };
        }
        let from = usize::try_from(place.position.since(start)).unwrap_or(usize::MAX);
        let before = frames.len();
        let cipher = store.config.cipher.as_ref();
        let mut taken = take(
            cipher,
            segment,
            place,
            &buffer,
            from,
            wanted,
            &mut effort,
            &mut frames,
        );
        if reach == Reach::Disk && taken.as_ref().is_err_and(Bad::is_damaged) {
            frames.truncate(before);
            taken = match store.bytes_again(segment, place.position, u64::from(place.frame_len)) {
                Ok(again) => take(
                    cipher,
                    segment,
                    place,
                    &again,
                    0,
                    wanted,
                    &mut effort,
                    &mut frames,
                ),
                Err(error) => Err(bad(FrameFault::Io(error))),
            };
        }
        if let Err(found) = taken {
            // A frame of a run does not record its position in the journal.
            let position = match found.position == place.position {
                true => store.position_of(segment, place.position),
                false => found.position,
            };
            return (frames, Some(Bad { position, ..found }));
        }
    }
    (frames, None)
}

/// Takes the frame at `from` in `buffer`, which must be the frame at `place`: all of it, or the wanted pieces of a
/// pack until one is bad.
#[allow(
    clippy::too_many_arguments,
    reason = "each is one fact about one frame"
)]
fn take(
    cipher: Option<&Cipher>,
    segment: &Segment,
    place: &Place,
    buffer: &Bytes,
    from: usize,
    wanted: WantedLsns,
    effort: &mut Effort,
    frames: &mut Vec<Frame>,
) -> Result<(), Bad> {
    let bad = |fault| Bad {
        place: *place,
        position: place.position,
        fault,
    };
    let header = verified(segment, place, buffer, from).map_err(bad)?;
    if header.kind == FrameKind::Pack {
        return unpack(cipher, &header, buffer, from, wanted, effort, frames).map_err(|found| {
            Bad {
                place: Place {
                    position: place.position,
                    frame_len: place.frame_len,
                    ..found.place
                },
                ..found
            }
        });
    }
    let bytes = buffer.get(from..).unwrap_or(&[]);
    let stored = bytes.get(header.header_len as usize..).unwrap_or(&[]);
    let body = effort
        .spend(header.codec(), stored)
        .and_then(|()| plain_body(cipher, &header, bytes, buffer, from))
        .map_err(bad)?;
    frames.push(Frame {
        first_lsn: header.first_lsn,
        count: header.count,
        arrival: header.arrival,
        body,
    });
    Ok(())
}

fn verified(
    segment: &Segment,
    place: &Place,
    buffer: &Bytes,
    from: usize,
) -> Result<FrameHeader, FrameFault> {
    let bytes = buffer.get(from..).ok_or(FrameFault::Damaged)?;
    let header = frame::decode_header(bytes, segment.life.salt).ok_or(FrameFault::Damaged)?;
    let expected = header.position == place.position
        && header.first_lsn == place.first_lsn
        && header.count == place.count;
    expected.then_some(header).ok_or(FrameFault::Damaged)
}

/// Number of bytes that may still be decompressed. `None`: no bound.
struct Effort(Option<u32>);

impl Effort {
    /// Limits the work on an event loop to less time than a flush takes.
    fn within(reach: Reach) -> Self {
        Self((reach == Reach::Cached).then_some(SHORT_PLAIN_BYTES))
    }

    /// # Errors
    /// If the bytes exceed the limit. A reader thread, which may wait, then decompresses them.
    fn spend(&mut self, codec: u8, stored: &[u8]) -> Result<(), FrameFault> {
        let Some(left) = &mut self.0 else {
            return Ok(());
        };
        *left = left
            .checked_sub(compress::decompressed_len(codec, stored))
            .ok_or_else(|| FrameFault::Io(far()))?;
        Ok(())
    }
}

/// The wanted pieces of the pack at `from` in `buffer`, until one is bad.
fn unpack(
    cipher: Option<&Cipher>,
    header: &FrameHeader,
    buffer: &Bytes,
    from: usize,
    wanted: WantedLsns,
    effort: &mut Effort,
    frames: &mut Vec<Frame>,
) -> Result<(), Bad> {
    let place = Place {
        position: header.position,
        first_lsn: header.first_lsn,
        count: header.count,
        frame_len: 0,
    };
    let bytes = buffer.get(from..).unwrap_or(&[]);
    let Some(pieces) = pack::pieces(bytes, header) else {
        return Err(Bad {
            place,
            position: header.position,
            fault: FrameFault::Damaged,
        });
    };
    for piece in pieces {
        if piece.next_lsn() <= wanted.0 || piece.first_lsn >= wanted.1 {
            continue;
        }
        let at = from + header.header_len as usize;
        let stored = buffer.get(at + piece.offset as usize..).unwrap_or(&[]);
        let body = effort
            .spend(piece.codec, stored)
            .and_then(|()| piece_body(cipher, header.log_id, &piece, buffer, at));
        match body {
            Ok(body) => frames.push(Frame {
                first_lsn: piece.first_lsn,
                count: piece.count,
                arrival: piece.arrival,
                body,
            }),
            Err(fault) => {
                return Err(Bad {
                    place: Place {
                        first_lsn: piece.first_lsn,
                        count: piece.count,
                        ..place
                    },
                    position: piece.position,
                    fault,
                });
            }
        }
    }
    Ok(())
}

/// The verified, decrypted and decompressed body of a piece of the pack of `log` whose body is at `at` in `buffer`.
pub(super) fn piece_body(
    cipher: Option<&Cipher>,
    log: LogId,
    piece: &Piece,
    buffer: &Bytes,
    at: usize,
) -> Result<Bytes, FrameFault> {
    let stored = run_file::stored(buffer, at, piece).ok_or(FrameFault::Damaged)?;
    let from = at + piece.offset as usize;
    let bound = BodyPlace {
        log,
        first_lsn: piece.first_lsn,
        count: piece.count,
        codec: piece.codec,
    };
    plain(cipher, &bound, stored, piece.position, || {
        buffer.slice(from..from + piece.stored as usize)
    })
}

/// The verified, decrypted and decompressed body of the frame at `from` in `buffer`, whose bytes are
/// `bytes`; not copied if it is stored plain.
pub(super) fn plain_body(
    cipher: Option<&Cipher>,
    header: &FrameHeader,
    bytes: &[u8],
    buffer: &Bytes,
    from: usize,
) -> Result<Bytes, FrameFault> {
    let stored = frame::verified_body(bytes, header).ok_or(FrameFault::Damaged)?;
    let bound = BodyPlace {
        log: header.log_id,
        first_lsn: header.first_lsn,
        count: header.count,
        codec: header.codec(),
    };
    plain(cipher, &bound, stored, header.position, || {
        let body = from + header.header_len as usize;
        buffer.slice(body..body + header.body_len as usize)
    })
}

/// The plain bytes of stored ones. `as_it_is` returns them if they are neither encrypted nor compressed.
fn plain(
    cipher: Option<&Cipher>,
    bound: &BodyPlace,
    stored: &[u8],
    position: Position,
    as_it_is: impl FnOnce() -> Bytes,
) -> Result<Bytes, FrameFault> {
    let codec = bound.codec;
    if !compress::is_known(codec) {
        // Good bytes that another build can read are not damaged.
        return Err(FrameFault::Io(io::Error::new(
            io::ErrorKind::Unsupported,
            format!(
                "records at position {position} are compressed with codec {}, which this build of Wald does not have",
                codec & !SEALED
            ),
        )));
    }
    let body = match is_sealed(codec) {
        true => {
            let sealed = SealedBody::parse(stored).ok_or(FrameFault::Damaged)?;
            // Neither are good bytes whose key is missing.
            let place = format_args!("records at position {position}");
            let opened = sealed.open(cipher.map(|cipher| &**cipher), bound);
            let opened = opened.map_err(|why| FrameFault::Io(why.error(place)))?;
            match codec & !SEALED {
                compress::PLAIN => Bytes::from(opened),
                codec => {
                    let plain = compress::decompress(codec, &opened).ok_or(FrameFault::Damaged)?;
                    Bytes::from(plain.into_owned())
                }
            }
        }
        false => match compress::decompress(codec, stored).ok_or(FrameFault::Damaged)? {
            Cow::Owned(plain) => Bytes::from(plain),
            Cow::Borrowed(_) => as_it_is(),
        },
    };
    match codec::may_hold(&body, bound.count) {
        true => Ok(body),
        false => Err(FrameFault::Damaged),
    }
}

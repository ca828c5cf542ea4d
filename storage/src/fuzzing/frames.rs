//! Frames and their bodies.

use arbitrary::Unstructured;
use bytes::Bytes;

use super::number;
use crate::api::codec;
use crate::base::bounds;
use crate::base::crc;
use crate::base::ids::Position;
use crate::format::body;
use crate::format::body::{Created, CursorBody, Link, Seal};
use crate::format::compress;
use crate::format::frame;
use crate::format::frame::{FrameHead, FrameHeader, HEADER_BYTES};
use crate::format::life::{DigestKey, Life};
use crate::logs::image::Image;

/// Makes the header of a frame verify, if there are enough bytes.
pub(super) fn sign(bytes: &mut [u8], salt: u64, body_too: bool) {
    if bytes.len() < HEADER_BYTES {
        return;
    }
    let most = bytes.len() / 8;
    let told = usize::from(u16::from_le_bytes([bytes[4], bytes[5]]));
    let units = told.clamp(HEADER_BYTES / 8, most);
    let length = units * 8;
    let Ok(units) = u16::try_from(units) else {
        return;
    };
    bytes[4..6].copy_from_slice(&units.to_le_bytes());
    bytes[6] = 1;
    bytes[7] = bytes[7].clamp(1, 11);
    if body_too {
        let told = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]) as usize;
        let body = told.min(bytes.len() - length);
        let crc = crc::crc32c(&bytes[length..length + body]);
        let told = u32::try_from(body).unwrap_or(0);
        bytes[8..12].copy_from_slice(&told.to_le_bytes());
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    }
    let crc = frame::salted_crc32c(salt, &bytes[4..length]);
    bytes[..4].copy_from_slice(&crc.to_le_bytes());
}

/// Fuzzes a frame: a salt, a method of signing, and its bytes. A frame that verifies is written again and reads
/// back equal. With a flipped bit or another salt it does not verify.
pub fn frame(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let (salt, how, flipped): (u64, u8, u16) =
        (number(&mut input), number(&mut input), number(&mut input));
    let mut bytes = input.take_rest().to_vec();
    if how & 1 == 0 {
        sign(&mut bytes, salt, how & 2 == 0);
    }
    let claimed = frame::claimed_position(&bytes);
    let Some(header) = frame::decode_header(&bytes, salt) else {
        return;
    };
    assert_eq!(claimed, Some(header.position.get()));
    assert!(header.end() > header.position && header.durable_mark <= header.position);
    let _next = header.next_lsn();

    let length = header.header_len as usize;
    let extensions = &bytes[HEADER_BYTES..length];
    let directory = frame::directory_of(&bytes, &header);
    if let Some(directory) = &directory {
        // An entry takes at least six bytes, which bounds the number of entries.
        assert!(directory.entries.len() * 6 <= extensions.len());
    }
    if let Some((producer, digest)) = frame::producer_of(&bytes, &header) {
        let mut again = vec![0; HEADER_BYTES];
        frame::put_producer(&mut again, &producer, digest);
        assert!(again.len() <= HEADER_BYTES + frame::producer_len(&producer));
        let other = FrameHeader {
            header_len: u32::try_from(again.len()).expect("a name is short"),
            ..header
        };
        let read = frame::producer_of(&again, &other);
        assert_eq!(read, Some((producer, digest)));
    }
    if let Some(body) = frame::verified_body(&bytes, &header) {
        assert_eq!(crc::crc32c(body), header.body_crc);
        write_again(&bytes, &header, extensions, body, salt);
    }

    assert_eq!(frame::decode_header(&bytes, salt ^ 1), None, "another salt");
    // With another length a different range is summed up: any sum may match it.
    let bit = usize::from(flipped) % (length * 8);
    if !(32..48).contains(&bit) {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(frame::decode_header(&bytes, salt), None, "a flipped bit");
    }
}

fn write_again(bytes: &[u8], header: &FrameHeader, extensions: &[u8], body: &[u8], salt: u64) {
    let mut out = Vec::new();
    let start = frame::begin(&mut out, extensions);
    out.extend_from_slice(body);
    let head = FrameHead {
        kind: header.kind,
        flags: header.flags,
        count: header.count,
        position: header.position,
        log_id: header.log_id,
        first_lsn: header.first_lsn,
        arrival: header.arrival,
        durable_mark: header.durable_mark,
        chain: header.chain,
    };
    let length = header.header_len as usize;
    let written = frame::finish(&mut out, start, length, salt, &head);
    assert_eq!(frame::decode_header(&out, salt), Some(written));
    assert_eq!(out.len() as u64, header.frame_len());
    assert_eq!(frame::verified_body(&out, &written), Some(body));
    // The mark is stored as a distance, and several distances mean that there is none.
    let same_mark = out[56..60] == bytes[56..60];
    let plain = bytes[21..24] == [0; 3];
    if same_mark && plain {
        assert_eq!(written, *header);
        assert_eq!(out[..length], bytes[..length]);
    } else if header.durable_mark != Position::ZERO {
        assert_eq!(written.durable_mark, header.durable_mark);
    }
}

/// Checks that [`again`] refuses the input, or that its second writing equals the first.
fn settles(data: &[u8], again: impl Fn(&[u8]) -> Option<Vec<u8>>) {
    if let Some(first) = again(data) {
        let second = again(&first);
        assert_eq!(second.as_ref(), Some(&first), "written, read, written");
    }
}

/// Fuzzes a body: its first byte selects the kind. A body that can be read is written again and reads back equal.
pub fn body(data: &[u8]) {
    let Some((&which, data)) = data.split_first() else {
        return;
    };
    match which % 10 {
        0 => settles(data, |data| {
            let mut out = Vec::new();
            body::put_config(&mut out, &body::config(data)?);
            Some(out)
        }),
        1 => settles(data, |data| {
            let created = Created::decode(data)?;
            let mut out = Vec::new();
            Created::put(
                &mut out,
                &created.name,
                &created.config,
                created.create_time,
            );
            assert!(out.len() <= Created::max_len(&created.name));
            Some(out)
        }),
        2 => settles(data, |data| {
            let cursor = CursorBody::decode(data)?;
            let mut out = Vec::new();
            cursor.put(&mut out);
            assert!(out.len() <= CursorBody::max_len(&cursor.name));
            Some(out)
        }),
        3 => settles(data, |data| Some(Link::decode(data)?.encode())),
        4 => settles(data, |data| {
            let out = Seal::decode(data)?.encode();
            assert!(out.len() <= Seal::MAX_LEN);
            Some(out)
        }),
        5 => settles(data, |data| {
            let mut out = Vec::new();
            Image::decode(data)?.encode(&mut out);
            Some(out)
        }),
        6 => {
            let mut copy = data.to_vec();
            if copy.len() >= 68 {
                copy[..8].copy_from_slice(b"WALDSEG\0");
                let crc = crc::crc32c(&copy[..64]);
                copy[64..68].copy_from_slice(&crc.to_le_bytes());
            }
            // Often enough the key verifies.
            if copy.len() > 104 && copy[104] % 2 == 0 {
                let crc = crc::crc32c(&copy[..100]);
                copy[100..104].copy_from_slice(&crc.to_le_bytes());
            }
            settles(&copy, |data| {
                let life = Life::decode(data).ok()?;
                let secret = match Life::key(data, life.store_id) {
                    DigestKey::Good(secret) => Some(secret),
                    DigestKey::None | DigestKey::Damaged | DigestKey::Unknown => None,
                };
                Some(life.encode_with(secret.as_ref(), Life::features(data)))
            });
        }
        7 => {
            let (codec, stored) = data.split_first().unwrap_or((&0, &[]));
            if let Some(plain) = compress::decompress(codec % 8, stored) {
                let most = (stored.len().max(1) << 16).min(bounds::LARGEST_BODY as usize);
                assert!(codec % 8 == compress::PLAIN || plain.len() <= most);
            }
        }
        8 => {
            let mut input = Unstructured::new(data);
            let cut = u64::from(number::<u8>(&mut input));
            let records = Bytes::copy_from_slice(input.take_rest());
            let all = codec::slice(&records, 0, u64::MAX);
            let (front, back) = (
                codec::slice(&records, 0, cut),
                codec::slice(&records, cut, u64::MAX),
            );
            assert_eq!([front, back].concat(), all, "cut anywhere, nothing is lost");
            assert_eq!(codec::ends(&all).count(), codec::ends(&records).count());
        }
        _ => {
            let mut bytes = data.to_vec();
            sign(&mut bytes, 0, true);
            if let Some(header) = frame::decode_header(&bytes, 0) {
                let _directory = frame::directory_of(&bytes, &header);
            }
        }
    }
}

//! Compression of bodies: whole batches, kept only if smaller.
//!
//! A compressed body starts with the size of the plain body (u32, little endian). The output of the
//! codec follows. The size is checked before memory is allocated for it: no body is larger than the
//! store's FORMAT allows, whatever size it claims.

use std::borrow::Cow;

use crate::api::record::Compression;
use crate::base::bounds;
use crate::format::sealed::{SEALED, SealedBody, is_sealed};

/// Bodies smaller than this stay uncompressed, in bytes.
const LEAST_BYTES: usize = 256;

/// No codec here expands by more than about this factor. A larger claimed size is rejected.
const MOST_EXPANSION: usize = 1 << 16;

/// Why a body is too large to decompress; `None` if its size is allowed.
pub(crate) fn too_large(codec: u8, stored: &[u8]) -> Option<String> {
    let (claimed, most) = (decompressed_len(codec, stored), bounds::allowed_body());
    (claimed > most).then(|| {
        format!(
            "claims {claimed} bytes decompressed, and no body of this store is larger than {most}"
        )
    })
}

/// The codec's number in a frame's flags.
pub(crate) const PLAIN: u8 = 0;
const LZ4: u8 = 1;
pub(crate) const ZSTD: u8 = 2;

/// Whether this build can read bodies of the codec, if it has the key of an encrypted one.
pub(crate) fn is_known(codec: u8) -> bool {
    let codec = codec & !SEALED;
    codec == PLAIN || codec == LZ4 || (codec == ZSTD && cfg!(any(test, feature = "zstd")))
}

/// Compresses a body. Returns the codec's number and the bytes, or `None` if plain is as good.
pub(crate) fn compress(body: &[u8], how: Compression) -> Option<(u8, Vec<u8>)> {
    if body.len() < LEAST_BYTES {
        return None;
    }
    let (codec, packed) = match how {
        Compression::None => return None,
        Compression::Lz4 => (LZ4, lz4_flex::block::compress(body)),
        Compression::Zstd => (ZSTD, zstd_compress(body)?),
    };
    let size = u32::try_from(body.len()).ok()?;
    let mut out = Vec::with_capacity(packed.len() + 4);
    out.extend_from_slice(&size.to_le_bytes());
    out.extend_from_slice(&packed);
    (out.len() < body.len()).then_some((codec, out))
}

/// Size after decryption and decompression that the stored bytes claim, unverified; 0 for a plain body.
pub(crate) fn decompressed_len(codec: u8, stored: &[u8]) -> u32 {
    if is_sealed(codec) {
        return SealedBody::parse(stored).map_or(0, |sealed| sealed.plain);
    }
    match stored.first_chunk::<4>() {
        Some(size) if codec != PLAIN => u32::from_le_bytes(*size),
        _ => 0,
    }
}

/// Returns the plain body of one that is not encrypted. `None` if [`compress`] did not make the bytes, if the claimed size is larger
/// than any body of the store, or if this build lacks the codec.
pub(crate) fn decompress(codec: u8, stored: &[u8]) -> Option<Cow<'_, [u8]>> {
    if codec == PLAIN {
        return Some(Cow::Borrowed(stored));
    }
    let (size, packed) = stored.split_first_chunk::<4>()?;
    let size = u32::from_le_bytes(*size);
    if size > bounds::allowed_body() {
        return None;
    }
    let size = usize::try_from(size).ok()?;
    if size / MOST_EXPANSION > packed.len() {
        return None;
    }
    let plain = match codec {
        LZ4 if size / 256 > packed.len() => return None,
        LZ4 => lz4_flex::block::decompress(packed, size).ok()?,
        ZSTD => zstd_decompress(packed, size)?,
        _ => return None,
    };
    (plain.len() == size).then_some(Cow::Owned(plain))
}

#[cfg(any(test, feature = "zstd"))]
fn zstd_compress(body: &[u8]) -> Option<Vec<u8>> {
    zstd::bulk::compress(body, 0).ok()
}

#[cfg(any(test, feature = "zstd"))]
fn zstd_decompress(packed: &[u8], size: usize) -> Option<Vec<u8>> {
    zstd::bulk::decompress(packed, size).ok()
}

#[cfg(not(any(test, feature = "zstd")))]
fn zstd_compress(_body: &[u8]) -> Option<Vec<u8>> {
    None
}

#[cfg(not(any(test, feature = "zstd")))]
fn zstd_decompress(_packed: &[u8], _size: usize) -> Option<Vec<u8>> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn compression_loses_no_byte(body in proptest::collection::vec(0u8..4, 0..5000)) {
            for how in [Compression::None, Compression::Lz4, Compression::Zstd] {
                if let Some((codec, stored)) = compress(&body, how) {
                    prop_assert!(stored.len() < body.len());
                    let plain = decompress(codec, &stored).unwrap();
                    prop_assert_eq!(&plain[..], &body[..]);
                }
            }
        }

        #[test]
        fn any_bytes_are_decompressed_without_panic_or_much_memory(
            codec in 0u8..8, stored: Vec<u8>,
        ) {
            if let Some(plain) = decompress(codec, &stored) {
                prop_assert!(plain.len() <= stored.len().max(1) * MOST_EXPANSION);
            }
        }

    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4))]

        #[test]
        fn no_body_becomes_larger_than_a_store_allows(beyond in (1u32 << 20)..1 << 21) {
            // Zeros expand 255 times: the stored bytes alone are no bound.
            let plain = vec![0; bounds::LARGEST_BODY as usize + beyond as usize];
            let mut stored = (bounds::LARGEST_BODY + beyond).to_le_bytes().to_vec();
            stored.extend(lz4_flex::block::compress(&plain));
            prop_assert!(stored.len() < 1 << 20);
            prop_assert!(decompress(LZ4, &stored).is_none());
            prop_assert!(too_large(LZ4, &stored).is_some());
        }
    }
}

//! Finds zeros, which fill a fresh file. It compares pieces that the processor takes at once: byte by byte, a
//! start after a crash spends most of its time on space that was never written.

/// Bytes compared at once.
const PIECE: usize = 64;

fn is_zero(piece: &[u8; PIECE]) -> bool {
    piece.iter().fold(0, |all, byte| all | byte) == 0
}

/// Whether all bytes are zero.
pub(crate) fn are_zeros(bytes: &[u8]) -> bool {
    let (pieces, rest) = bytes.as_chunks();
    pieces.iter().all(is_zero) && rest.iter().all(|byte| *byte == 0)
}

/// Number of bytes up to the last one that is not zero.
pub(crate) fn used_length(bytes: &[u8]) -> usize {
    let (_, pieces) = bytes.as_rchunks();
    let zeros = pieces.iter().rev().take_while(|piece| is_zero(piece));
    let used = &bytes[..bytes.len() - PIECE * zeros.count()];
    let last = used.iter().rposition(|byte| *byte != 0);
    last.map_or(0, |last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_checked() {
        for length in [0, 1, 7, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5] {
            let mut bytes = vec![0; length];
            assert!(are_zeros(&bytes), "{length}");
            assert_eq!(used_length(&bytes), 0, "{length}");
            for at in 0..length {
                for value in [1, 0x80] {
                    bytes[at] = value;
                    assert!(!are_zeros(&bytes), "{at} of {length}");
                    assert_eq!(used_length(&bytes), at + 1, "{at} of {length}");
                    // Bytes before it change nothing.
                    bytes[0] |= 1;
                    assert_eq!(used_length(&bytes), at + 1, "{at} of {length}");
                    bytes.fill(0);
                }
            }
        }
    }
}

//! CRC-32C, the checksum of everything on disk.

/// The CRC-32C of `bytes`.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    low32(crc_fast::checksum(
        crc_fast::CrcAlgorithm::Crc32Iscsi,
        bytes,
    ))
}

/// The library gives 32-bit checksums in 64 bits.
pub(crate) fn low32(value: u64) -> u32 {
    u32::try_from(value).expect("a 32-bit checksum")
}

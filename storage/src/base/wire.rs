//! The few pieces of the protobuf wire format that the engine writes and reads by
//! hand: varints, fixed fields, length-delimited fields; and plain numbers.
//!
//! Bodies of frames are written in it, so that any protobuf tool can look inside, and
//! so that a later version can add fields. Reading never panics and never allocates
//! by a length it has not checked.

/// Wire type of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value<'a> {
    Varint(u64),
    Fixed64(u64),
    Fixed32(u32),
    Bytes(&'a [u8]),
}

/// Bytes that `value` takes as a varint.
pub(crate) fn varint_len(value: u64) -> usize {
    let bits = (64 - (value | 1).leading_zeros()) as usize;
    bits.div_ceil(7)
}

pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value & 0x7F) as u8 | 0x80);
        value >>= 7;
    }
    out.push((value & 0x7F) as u8);
}

pub(crate) fn put_key(out: &mut Vec<u8>, field: u32, wire_type: u32) {
    put_varint(out, u64::from(field << 3 | wire_type));
}

/// A varint field; left out if 0, as proto3 does.
pub(crate) fn put_uint(out: &mut Vec<u8>, field: u32, value: u64) {
    if value != 0 {
        put_key(out, field, 0);
        put_varint(out, value);
    }
}

pub(crate) fn put_fixed64(out: &mut Vec<u8>, field: u32, value: u64) {
    put_key(out, field, 1);
    out.extend_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_fixed32(out: &mut Vec<u8>, field: u32, value: u32) {
    put_key(out, field, 5);
    out.extend_from_slice(&value.to_le_bytes());
}

pub(crate) fn put_bytes(out: &mut Vec<u8>, field: u32, value: &[u8]) {
    put_key(out, field, 2);
    put_varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// Takes one varint off the front.
pub(crate) fn take_varint(input: &mut &[u8]) -> Option<u64> {
    match *input {
        // Keys, and most counts.
        [byte @ ..0x80, rest @ ..] => {
            *input = rest;
            return Some(u64::from(*byte));
        }
        // Lengths of most records.
        [low, high @ ..0x80, rest @ ..] => {
            *input = rest;
            return Some(u64::from(low & 0x7F) | u64::from(*high) << 7);
        }
        _ => {}
    }
    let mut value = 0u64;
    for shift in (0..70).step_by(7) {
        let (&byte, rest) = input.split_first()?;
        *input = rest;
        if shift == 63 && byte > 1 {
            return None;
        }
        value |= u64::from(byte & 0x7F) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Takes `count` bytes off the front.
pub(crate) fn take_bytes<'a>(input: &mut &'a [u8], count: u64) -> Option<&'a [u8]> {
    let count = usize::try_from(count).ok()?;
    let (bytes, rest) = input.split_at_checked(count)?;
    *input = rest;
    Some(bytes)
}

/// Takes one length-delimited field off the front and returns its value. The key must have one byte, and the
/// length as few bytes as it needs.
pub(crate) fn take_entry<'a>(input: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (key, rest) = input.split_first()?;
    if key & 0x87 != 2 {
        return None;
    }
    let mut behind = rest;
    let length = take_varint(&mut behind)?;
    if rest.len() - behind.len() != varint_len(length) {
        return None;
    }
    *input = behind;
    take_bytes(input, length)
}

/// Takes one field off the front: its number and value.
pub(crate) fn take_field<'a>(input: &mut &'a [u8]) -> Option<(u32, Value<'a>)> {
    let key = take_varint(input)?;
    let field = u32::try_from(key >> 3).ok()?;
    let value = match key & 7 {
        0 => Value::Varint(take_varint(input)?),
        1 => Value::Fixed64(u64::from_le_bytes(take_bytes(input, 8)?.try_into().ok()?)),
        2 => {
            let length = take_varint(input)?;
            Value::Bytes(take_bytes(input, length)?)
        }
        5 => Value::Fixed32(u32::from_le_bytes(take_bytes(input, 4)?.try_into().ok()?)),
        _ => return None,
    };
    Some((field, value))
}

/// The fields of a message. A malformed field gives `None` and ends the iterator.
pub(crate) fn fields(mut input: &[u8]) -> impl Iterator<Item = Option<(u32, Value<'_>)>> {
    std::iter::from_fn(move || {
        if input.is_empty() {
            return None;
        }
        let field = take_field(&mut input);
        if field.is_none() {
            input = &[];
        }
        Some(field)
    })
}

/// The little-endian number at an offset.
///
/// # Panics
/// Past the end: callers have checked the length.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut raw = [0; 4];
    raw.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(raw)
}

/// The little-endian number of 8 bytes at an offset. Panics as [`u32_at`].
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut raw = [0; 8];
    raw.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_varint_reads_back_and_has_the_predicted_length(value: u64) {
            let mut out = Vec::new();
            put_varint(&mut out, value);
            prop_assert_eq!(out.len(), varint_len(value));
            let mut input = out.as_slice();
            prop_assert_eq!(take_varint(&mut input), Some(value));
            prop_assert!(input.is_empty());
        }

        #[test]
        fn any_bytes_are_read_without_panic(bytes: Vec<u8>) {
            fields(&bytes).for_each(drop);
        }
    }
}

//! The five bytes before each message of gRPC: whether the message is compressed, and its length as a big-endian
//! number of four bytes.

use bytes::BufMut;
use tonic::Status;

use crate::status::{self, Access};

/// Length of a prefix in bytes.
pub(super) const PREFIX_BYTES: usize = 5;

/// The length in bytes of the message that begins with these bytes. `None` while its prefix is not whole.
///
/// # Errors
/// `MALFORMED_REQUEST` if the message is compressed, or if the bytes are no prefix. Clients that know the content type
/// and not the format send such bytes.
pub(super) fn length(received: &[u8], access: Access) -> Result<Option<u64>, Status> {
    let Some([flag, length @ ..]) = received.first_chunk::<PREFIX_BYTES>() else {
        return Ok(None);
    };
    match flag {
        0 => Ok(Some(u32::from_be_bytes(*length).into())),
        1 => {
            let why = "its message is marked as compressed, and no compression is supported";
            Err(status::malformed("request", why, access))
        }
        other => {
            let why = format_args!(
                "it begins with {:?} and not with a gRPC message, which has a zero byte and its length in 4 bytes before its Protobuf; grpcurl makes such messages of JSON",
                char::from(*other)
            );
            Err(status::malformed("request", why, access))
        }
    }
}

/// Writes the prefix of a message of `length` bytes.
///
/// # Errors
/// `OUT_OF_RANGE` if the length exceeds the 4 GiB that a prefix can express.
pub(super) fn put(length: usize, out: &mut impl BufMut) -> Result<(), Status> {
    let length = u32::try_from(length)
        .map_err(|_| Status::out_of_range("a message is larger than 4 GiB"))?;
    out.put_u8(0);
    out.put_u32(length);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_is_read_as_it_was_written() {
        let mut bytes = Vec::new();
        put(70_000, &mut bytes).unwrap();
        assert_eq!(bytes, [0, 0, 1, 0x11, 0x70]);
        for there in 0..PREFIX_BYTES {
            assert_eq!(length(&bytes[..there], Access::Read).unwrap(), None);
        }
        bytes.extend_from_slice(b"the message");
        assert_eq!(length(&bytes, Access::Read).unwrap(), Some(70_000));
        assert!(put(1 << 32, &mut bytes).is_err());
    }
}

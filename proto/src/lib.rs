//! The gRPC contract of Wald, generated from `wald/v1/*.proto`, and how its messages
//! become bytes ([`codec`]) and files (`backup`, a feature). [`reasons`] spells and lists the reasons of
//! errors. No logic.
//!
//! Bytes fields decode to [`bytes::Bytes`]: a payload is a slice of the buffer that the
//! request arrived in, not a copy.

#[cfg(feature = "backup")]
pub mod backup;
pub mod codec;
pub mod reasons;

/// Messages, clients and server traits of the package `wald.v1`.
// The proto files document the contract. The code that the generator adds has no documentation.
#[allow(missing_docs, clippy::all, clippy::missing_errors_doc)]
pub mod v1 {
    tonic::include_proto!("wald.v1");
}

/// Messages, client and server trait of the package `wald.echo.v1`, which measures the cost of
/// the transport alone.
#[allow(missing_docs, clippy::all, clippy::missing_errors_doc)]
pub mod echo {
    tonic::include_proto!("wald.echo.v1");
}

include!(concat!(env!("OUT_DIR"), "/methods.rs"));

/// The compiled contract that reflection serves: a `google.protobuf.FileDescriptorSet` with
/// imports and comments.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wald.v1.bin"));

/// The compiled contract of the package `wald.echo.v1`.
pub const ECHO_FILE_DESCRIPTOR_SET: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/wald.echo.v1.bin"));

#[cfg(test)]
mod tests {
    use prost::Message;
    use prost_types::FileDescriptorSet;

    use super::FILE_DESCRIPTOR_SET;

    #[test]
    fn descriptor_set_carries_comments_and_imports() {
        let set = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap();
        let file = |name: &str| set.file.iter().find(|file| file.name() == name).unwrap();
        let comments: Vec<&str> = file("wald/v1/wal.proto")
            .source_code_info
            .as_ref()
            .unwrap()
            .location
            .iter()
            .filter_map(|location| location.leading_comments.as_deref())
            .collect();
        assert!(
            comments
                .iter()
                .any(|text| text.contains("Appends one record to one log"))
        );
        assert!(file("google/protobuf/duration.proto").package() == "google.protobuf");
    }

    #[test]
    fn payload_decodes_without_a_copy() {
        let record = super::v1::Record {
            payload: Some(super::v1::record::Payload::Data(bytes::Bytes::from_static(
                &[7; 4096],
            ))),
            ..Default::default()
        };
        let request = bytes::Bytes::from(record.encode_to_vec());
        let decoded = super::v1::Record::decode(request.clone()).unwrap();
        let Some(super::v1::record::Payload::Data(data)) = decoded.payload else {
            panic!("the payload is bytes");
        };
        assert!(request.as_ptr_range().contains(&data.as_ptr()));
    }
}

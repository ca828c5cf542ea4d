//! Records on their way in, in their stored form. The engine checks a client's bytes once and copies them
//! once into the journal's buffer, however many records there are.

use std::fmt;

use bytes::Bytes;

use crate::api::codec;
use crate::api::codec::RecordRef;
use crate::api::record::Record;
use crate::base::ids::Timestamp;
use crate::base::wire;

/// Records to append, in order: made from [`Record`]s, or of bytes that hold their encoding.
#[derive(Clone, Default)]
pub struct Records {
    /// Entries, one after another. Each has a key of any field number, a length, and a record.
    entries: Bytes,
    /// Entries of records that were joined to these.
    joined: Vec<u8>,
    sums: Sums,
}

/// Totals of records, so that the records are not parsed again.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    count: u64,
    bytes: u64,
    largest: u64,
    stored: u64,
    with_headers: bool,
    timed: bool,
    /// Whether a record has the time 0, which means no time in the contract.
    at_zero: bool,
    with_checksums: bool,
}

impl Sums {
    fn add(&mut self, record: &RecordRef<'_>) {
        let bytes = record.bytes();
        self.count += 1;
        self.bytes += bytes;
        self.largest = self.largest.max(bytes);
        self.stored += codec::encoded_len(record) as u64;
        self.with_headers |= record.has_headers();
        self.timed |= record.timestamp.is_some();
        self.at_zero |= record.timestamp == Some(Timestamp::default());
        self.with_checksums |= record.crc32c.is_some();
    }

    fn join(&mut self, next: &Self) {
        self.count += next.count;
        self.bytes += next.bytes;
        self.largest = self.largest.max(next.largest);
        self.stored += next.stored;
        self.with_headers |= next.with_headers;
        self.timed |= next.timed;
        self.at_zero |= next.at_zero;
        self.with_checksums |= next.with_checksums;
    }
}

impl Records {
    /// The records that `entries` holds: length-delimited fields of one number or several,
    /// each a `wald.v1.Record`, and nothing else.
    ///
    /// `None` if a record is not encoded as it would be stored: its payload as `data`, fields in order, each
    /// once, only fields that the engine stores, lengths in as few bytes as they need. In that case decode
    /// them, and collect the [`Record`]s.
    pub fn of_encoded(entries: Bytes) -> Option<Self> {
        Self::summed(entries).filter(|records| !records.sums.at_zero)
    }

    fn summed(entries: Bytes) -> Option<Self> {
        let mut sums = Sums::default();
        let mut input = &entries[..];
        while !input.is_empty() {
            sums.add(&RecordRef::checked(wire::take_entry(&mut input)?)?);
        }
        let joined = Vec::new();
        Some(Self {
            entries,
            joined,
            sums,
        })
    }

    /// Appends the records of `next`, by a copy.
    pub(crate) fn join(&mut self, next: &Self) {
        self.joined.extend_from_slice(&next.entries);
        self.joined.extend_from_slice(&next.joined);
        self.sums.join(&next.sums);
    }

    /// Number of records.
    pub fn len(&self) -> u64 {
        self.sums.count
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.sums.count == 0
    }

    /// Bytes of their data and headers.
    pub fn bytes(&self) -> u64 {
        self.sums.bytes
    }

    /// Bytes of data and headers of the largest record.
    pub(crate) fn largest(&self) -> u64 {
        self.sums.largest
    }

    /// Maximum bytes that the records take in a frame's body.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.sums.stored
    }

    /// Whether a record has headers.
    pub(crate) fn have_headers(&self) -> bool {
        self.sums.with_headers
    }

    /// Whether a record has a time of its own.
    pub(crate) fn have_times(&self) -> bool {
        self.sums.timed
    }

    /// Whether a record has a checksum.
    pub(crate) fn have_checksums(&self) -> bool {
        self.sums.with_checksums
    }

    /// The records, one after another.
    pub(crate) fn iter(&self) -> impl Iterator<Item = RecordRef<'_>> {
        let entries = [&self.entries[..], &self.joined];
        entries.into_iter().flat_map(|mut input| {
            std::iter::from_fn(move || {
                let message = wire::take_entry(&mut input)?;
                // The entries were checked when this was made.
                RecordRef::checked(message)
            })
        })
    }

    /// Appends all records to `out`, as field 3 of `wald.v1.RecordBatch`. This is the body of a stored batch.
    pub fn put(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&self.entries);
        out.extend_from_slice(&self.joined);
        codec::set_keys(&mut out[start..]);
    }
}

impl FromIterator<Record> for Records {
    fn from_iter<T: IntoIterator<Item = Record>>(records: T) -> Self {
        let mut entries = Vec::new();
        for record in records {
            codec::put_sent(&mut entries, &record);
        }
        Self::summed(entries.into()).expect("what is written here is as it is stored")
    }
}

impl From<Vec<Record>> for Records {
    fn from(records: Vec<Record>) -> Self {
        records.into_iter().collect()
    }
}

impl PartialEq for Records {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Records {}

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;
    use wald_proto::v1;

    use super::*;
    use crate::api::record::Header;

    /// Records of a request, as prost encodes them.
    fn encoded(records: &[v1::Record]) -> Bytes {
        let batch = v1::LogBatch {
            records: records.to_vec(),
            ..v1::LogBatch::default()
        };
        batch.encode_to_vec().into()
    }

    fn data(data: &[u8]) -> v1::Record {
        v1::Record {
            payload: Some(v1::record::Payload::Data(Bytes::copy_from_slice(data))),
            ..v1::Record::default()
        }
    }

    fn sent() -> impl Strategy<Value = (v1::Record, Record)> {
        let bytes = || proptest::collection::vec(any::<u8>(), 0..200).prop_map(Bytes::from);
        let header = (".{0,8}", bytes());
        (
            bytes(),
            proptest::collection::vec(header, 0..3),
            prop_oneof![Just(0), any::<i64>()],
            proptest::option::of(any::<u32>()),
        )
            .prop_map(|(data, headers, time, crc32c)| {
                let message = v1::Record {
                    payload: Some(v1::record::Payload::Data(data.clone())),
                    headers: headers
                        .iter()
                        .map(|(key, value)| v1::Header {
                            key: key.clone(),
                            value: value.clone(),
                        })
                        .collect(),
                    timestamp_us: time,
                    crc32c,
                    ..v1::Record::default()
                };
                let headers = headers
                    .into_iter()
                    .map(|(key, value)| Header { key, value })
                    .collect();
                let record = Record {
                    data,
                    headers,
                    timestamp: (time != 0).then(|| Timestamp::from_micros(time)),
                    crc32c,
                };
                (message, record)
            })
    }

    proptest! {
        #[test]
        fn records_encoded_by_a_client_equal_decoded_records(
            sent in proptest::collection::vec(sent(), 0..5),
        ) {
            let (messages, records): (Vec<_>, Vec<_>) = sent.into_iter().unzip();
            let of_records = Records::from(records.clone());
            let of_bytes = Records::of_encoded(encoded(&messages)).unwrap();
            prop_assert_eq!(&of_bytes, &of_records);
            prop_assert_eq!(of_bytes.len(), records.len() as u64);
            let size = |record: &Record| {
                let headers = record.headers.iter().map(|h| h.key.len() + h.value.len());
                (record.data.len() + headers.sum::<usize>()) as u64
            };
            prop_assert_eq!(of_bytes.bytes(), records.iter().map(size).sum::<u64>());
            prop_assert_eq!(of_bytes.largest(), records.iter().map(size).max().unwrap_or(0));
            // A copy of all entries equals copies one by one.
            let (mut at_once, mut singly) = (Vec::new(), Vec::new());
            of_bytes.put(&mut at_once);
            for record in of_bytes.iter() {
                codec::put_record(&mut singly, &record, record.timestamp);
            }
            prop_assert_eq!(&at_once, &singly);
            prop_assert_eq!(codec::records(&at_once), Some(records));
            prop_assert!(at_once.len() as u64 <= of_bytes.stored_bytes());
            // Joins one by one equal all records together.
            let mut joined = Records::default();
            for message in &messages {
                joined.join(&Records::of_encoded(encoded(std::slice::from_ref(message))).unwrap());
            }
            prop_assert_eq!(&joined, &of_bytes);
            prop_assert_eq!(format!("{:?}", joined.sums), format!("{:?}", of_bytes.sums));
            let mut put = Vec::new();
            joined.put(&mut put);
            prop_assert_eq!(&put, &at_once);
        }

        #[test]
        fn accepted_bytes_are_stored_unchanged(
            sent in proptest::collection::vec(sent(), 1..3), at: prop::sample::Index, byte: u8,
        ) {
            let messages: Vec<_> = sent.into_iter().map(|(message, _)| message).collect();
            let mut bytes = encoded(&messages).to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Some(records) = Records::of_encoded(bytes.clone().into()) {
                let (mut at_once, mut singly) = (Vec::new(), Vec::new());
                records.put(&mut at_once);
                for record in records.iter() {
                    codec::put_record(&mut singly, &record, record.timestamp);
                }
                prop_assert_eq!(at_once, singly);
            }
        }
    }

    #[test]
    fn records_in_another_encoding_are_not_accepted_unchanged() {
        let text = v1::Record {
            payload: Some(v1::record::Payload::Text("x".to_owned())),
            ..v1::Record::default()
        };
        let of_a_scan = v1::Record {
            lsn: Some(3),
            ..data(b"x")
        };
        let nothing = v1::Record::default();
        for record in [text, of_a_scan, nothing] {
            assert!(
                Records::of_encoded(encoded(std::slice::from_ref(&record))).is_none(),
                "{record:?}"
            );
        }
        let refused: [&[u8]; 10] = [
            // A length, also of the payload, in more bytes than it needs.
            &[0x12, 0x83, 0x00, 0x0A, 1, b'x'],
            &[0x12, 4, 0x0A, 0x81, 0x00, b'x'],
            // The payload twice, an unknown field, a time of 0.
            &[0x12, 6, 0x0A, 1, b'x', 0x0A, 1, b'x'],
            &[0x12, 5, 0x0A, 1, b'x', 0x78, 1],
            &[0x12, 12, 0x0A, 1, b'x', 0x19, 0, 0, 0, 0, 0, 0, 0, 0],
            // A header with an empty key written down, or one that is no text.
            &[0x12, 7, 0x0A, 1, b'x', 0x12, 2, 0x0A, 0],
            &[0x12, 8, 0x0A, 1, b'x', 0x12, 3, 0x0A, 1, 0xFF],
            // Cut off, another type, a key of two bytes.
            &[0x12, 3, 0x0A, 2, b'x'],
            &[0x10, 3, 0x0A, 1, b'x'],
            &[0x82, 0x01, 3, 0x0A, 1, b'x'],
        ];
        for bytes in refused {
            assert!(
                Records::of_encoded(Bytes::from_static(bytes)).is_none(),
                "{bytes:x?}"
            );
        }
        let same = Records::of_encoded(Bytes::from_static(&[0x12, 3, 0x0A, 1, b'x']));
        assert_eq!(
            same,
            Some(Records::from(vec![Record {
                data: Bytes::from_static(b"x"),
                ..Record::default()
            }]))
        );
    }
}

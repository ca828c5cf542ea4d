//! Scan cursors, as a client can make them up: their checksum is no secret.

use std::sync::{Arc, LazyLock};

use arbitrary::Unstructured;
use bytes::Bytes;

use super::recovery::{at_once, open, store, target};
use super::{number, tables};
use crate::api::engine::{ScanRequest, ScanStart, Selector};
use crate::api::record::Visibility;
use crate::base::ids::Position;
use crate::engine::Core;
use crate::read::scan;

/// Offset of the first number of a cursor behind the digest of its selection, and the count of numbers.
const NUMBERS_AT: usize = 10;
const NUMBERS: usize = 4;

/// Maximum number of messages of one scan.
const MOST_CHUNKS: usize = 10_000;

/// The store of [`super::recovery`] while it is served. No input may change it.
fn served() -> &'static Arc<Core> {
    static SERVED: LazyLock<Arc<Core>> =
        LazyLock::new(|| open(&store().disk.copy()).expect("it can be opened"));
    &SERVED
}

fn request(selector: &Selector, start: ScanStart) -> ScanRequest {
    ScanRequest {
        selector: selector.clone(),
        start,
        until_lsn: None,
        max_records: 0,
        follow: false,
        visibility: Some(Visibility::Durable),
        chunk_bytes: 4 << 10,
    }
}

/// Scans from a start on, and returns the last cursor. `None` if the scan was refused.
fn scan(selector: &Selector, start: ScanStart) -> Option<Bytes> {
    let request = request(selector, start);
    let mut scan = scan::begin(&served().store, &Arc::default(), request).ok()?;
    for _ in 0..MOST_CHUNKS {
        if at_once(scan.next())
            .expect("a plain scan never waits")
            .ok()?
            .is_none()
        {
            return Some(scan.cursor());
        }
    }
    panic!("the scan has no end");
}

/// Fuzzes a cursor: the selection, then a change of each number of a good cursor. The scan is refused or ends,
/// and no record counts as damaged.
pub fn cursor(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let selector = match number::<u8>(&mut input) % 3 {
        0 => Selector::All,
        1 => Selector::Prefix("log-1".to_owned()),
        _ => Selector::Log(target("a")),
    };
    let good = scan(&selector, ScanStart::First).expect("the store is whole");
    let mut bytes = good.to_vec();
    let tail = served().journal.durable().get();
    bytes[1] ^= number::<u8>(&mut input) % 4;
    for index in 0..NUMBERS {
        let at = NUMBERS_AT + index * 8;
        let mut old = [0; 8];
        old.copy_from_slice(&bytes[at..at + 8]);
        let old = u64::from_le_bytes(old);
        let new = match number::<u8>(&mut input) % 4 {
            0 => old,
            1 => old.wrapping_add_signed(number::<i16>(&mut input).into()),
            2 => number::<u64>(&mut input) % (tail + (64 << 10)),
            _ => number(&mut input),
        };
        bytes[at..at + 8].copy_from_slice(&new.to_le_bytes());
    }
    tables::sign(&mut bytes);
    let _end = scan(&selector, ScanStart::Cursor(bytes.into()));
    let all = Position::new(u64::MAX);
    let damages = served().store.damages.between(Position::ZERO, all);
    assert!(damages.is_empty(), "{} damages", damages.len());
    let segments = served().journal.segments.read();
    assert!(
        segments
            .values()
            .all(|segment| segment.holes.read().is_empty())
    );
}

/// Inputs of [`cursor`]: each selection, with each number changed in each way.
pub fn cursor_seeds() -> Vec<(String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for selection in 0..3u8 {
        for changed in 0..NUMBERS {
            let mut near = vec![selection, 0];
            near.extend(std::iter::repeat_n(0, changed));
            let (mut within, mut any) = (near.clone(), near.clone());
            near.extend_from_slice(&[1, 0xF9, 0xFF]);
            within.extend_from_slice(&[2, 8, 0x21, 2, 0, 0, 0, 0, 0]);
            any.extend_from_slice(&[3, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF]);
            for (how, seed) in [("near", near), ("within", within), ("any", any)] {
                seeds.push((format!("{selection}-{changed}-{how}"), seed));
            }
        }
    }
    seeds
}

//! Files that a start reads in place of the journal: checkpoints and indexes.

use std::sync::Arc;

use arbitrary::Unstructured;
use bytes::Bytes;

use super::number;
use super::recovery::{Store, store};
use crate::base::crc::crc32c;
use crate::base::ids::{LogId, Lsn, RecoveryEpoch, SegmentId};
use crate::disk::held_files::Backups;
use crate::disk::{Disk, SimDisk};
use crate::format::active::Place;
use crate::format::life::Life;
use crate::index::checkpoint;
use crate::index::checkpoint::CheckpointWriter;
use crate::index::{NewRow, SealedIndex};
use crate::logs::image::Image;

/// Replaces the checksum at the end of a file, if it has room for one.
pub(super) fn sign(bytes: &mut [u8]) {
    if let Some(at) = bytes.len().checked_sub(4) {
        let crc = crc32c(&bytes[..at]);
        bytes[at..].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Fuzzes a checkpoint: a method of signing, then the file. A checkpoint that can be read is written again and
/// reads back equal.
pub fn checkpoint(data: &[u8]) {
    let Some((how, file)) = data.split_first() else {
        return;
    };
    let mut file = file.to_vec();
    if how & 1 == 0 && file.len() >= 12 {
        file[..12].copy_from_slice(b"WALDCKP\0\x01\0\0\0");
        sign(&mut file);
    }
    let Some((summary, images)) = read(&file) else {
        return;
    };
    // A log takes at least two bytes.
    assert!(images.len() * 2 <= file.len() && summary.segments.len() * 2 <= file.len());
    let disk: Arc<dyn Disk> = Arc::new(SimDisk::new());
    let mut writer = CheckpointWriter::new(&*disk, &summary).expect("there is space");
    let written = images.iter().try_for_each(|image| writer.add(image));
    written.expect("there is space");
    let backups = Backups::new(Arc::clone(&disk));
    writer.finish(&backups).expect("there is space");
    let whole = checkpoint::read(&*disk, summary.last).expect("it is there");
    let mut again = Vec::new();
    let read = checkpoint::decode(&whole.expect("it is whole"), |image| again.push(image));
    // Zeros are left out. They mean none, or the first.
    let mut told = summary;
    told.before = told.before.filter(|before| before.get() != 0);
    told.sorted = told.sorted.filter(|sorted| sorted.get() != 0);
    told.next_log_counter = told.next_log_counter.max(1);
    told.epoch = told.epoch.max(RecoveryEpoch::FIRST);
    told.last = told.last.max(SegmentId::FIRST);
    assert_eq!(read, Some(told));
    assert_eq!(again.len(), images.len());
}

fn read(file: &[u8]) -> Option<(checkpoint::Summary, Vec<Image>)> {
    let disk = SimDisk::new();
    let id = SegmentId::new(1);
    disk.replace(&format!("checkpoint/{id}.ckp"), file.to_vec());
    let whole = checkpoint::read(&disk, id).expect("it is there")?;
    let mut images = Vec::new();
    let summary = checkpoint::decode(&whole, |image| images.push(image))?;
    Some((summary, images))
}

/// Fuzzes an index: a method of signing, a number to search for, then the file. Every lookup ends, and a new
/// index made of its rows is equal.
pub fn index(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let (how, wanted): (u8, u64) = (number(&mut input), number(&mut input));
    let mut file = input.take_rest().to_vec();
    if how & 1 == 0 && file.len() >= 68 {
        file[..16].copy_from_slice(b"WALDIDX\0\x01\0\0\0\0\0\0\0");
        sign(&mut file);
    }
    let bytes = Bytes::from(file);
    let Some(index) = SealedIndex::decode(bytes.clone()) else {
        return;
    };
    assert_eq!(*index.bytes(), bytes);
    let rows: Vec<_> = index.rows().collect();
    assert!(rows.len() * 64 <= bytes.len());
    let sorted = rows.is_sorted_by(|one, next| one.log_id < next.log_id);
    let mut again = Vec::new();
    let mut sound = sorted && index.base <= index.end;
    for row in &rows {
        let found = index.row(row.log_id);
        assert!(!sorted || found.is_some_and(|found| found.next_lsn == row.next_lsn));
        let entries = index.entries(row);
        let places: Vec<Place> = entries.from(0).collect();
        assert!(places.len() * 16 <= bytes.len());
        let below = |place: &Place| place.first_lsn < Lsn::new(wanted);
        assert!(entries.partition_point(below) <= entries.len());
        let image = index.image(row);
        let in_order = places.is_sorted_by(|one, next| {
            one.first_lsn <= next.first_lsn && one.position <= next.position
        });
        let first = places.first().map_or(row.next_lsn, |place| place.first_lsn);
        sound &= in_order && first == row.first_lsn;
        match image {
            Some(image) if image.id == row.log_id && image.next == row.next_lsn => {
                let below = row.below;
                again.push((
                    NewRow {
                        image,
                        places: places.clone(),
                        below,
                    },
                    places,
                ));
            }
            _ => sound = false,
        }
    }
    assert!(
        index.row(LogId::new(wanted)).is_none()
            || rows.iter().any(|row| row.log_id.get() == wanted)
    );
    if sound {
        let life = Life {
            id: index.segment,
            size: 0,
            salt: 0,
            store_id: 0,
        };
        let (new, places): (Vec<_>, Vec<_>) = again.into_iter().unzip();
        let built = SealedIndex::build(&life, index.base, index.end, index.chain, new.into_iter());
        let built = SealedIndex::decode(built.bytes().clone()).expect("it was just made");
        for (row, places) in built.rows().zip(places) {
            assert_eq!(built.entries(&row).from(0).collect::<Vec<_>>(), places);
            assert!(built.image(&row).is_some());
        }
    }
}

/// Inputs of [`super::frame`], [`super::body`], [`checkpoint`] and [`index`], by target and name, cut out of a
/// store that the engine made.
pub fn table_seeds() -> Vec<(&'static str, String, Vec<u8>)> {
    let Store {
        disk,
        files,
        frames,
        ..
    } = store();
    let mut seeds = Vec::new();
    for (number, one) in frames.iter().enumerate() {
        let file = &files[one.file];
        let bytes = disk.contents(&file.path).expect("it is there");
        let frame = &bytes[one.offset..one.offset + one.len];
        // One of each kind, and a few batches.
        let kind = frame[7];
        let same = |seed: &(&str, String, Vec<u8>)| seed.0 == "frame" && seed.2[11 + 7] == kind;
        if frame.len() > 2048 || seeds.iter().filter(|seed| same(seed)).count() > 2 {
            continue;
        }
        let name = format!("kind-{kind}-{number}");
        let mut seed = vec![0; 11];
        seed[..8].copy_from_slice(&file.salt.to_le_bytes());
        seed.extend_from_slice(frame);
        seeds.push(("frame", name.clone(), seed));
        let header = usize::from(u16::from_le_bytes([frame[4], frame[5]])) * 8;
        // The number of the body's decoder: see `body`.
        let which = match kind {
            1 => 8,
            2 => 1,
            3 => 0,
            7 => 2,
            8 => 3,
            11 => 4,
            _ => continue,
        };
        let mut seed = vec![which];
        if which == 8 {
            seed.push(1);
        }
        seed.extend_from_slice(&frame[header..]);
        seeds.push(("body", name, seed));
    }
    // Bodies that claim to become 900 MiB, by each codec; the second as lz4 makes zeros.
    for codec in 1..3u8 {
        let mut seed = vec![7, codec];
        seed.extend_from_slice(&(900u32 << 20).to_le_bytes());
        seed.extend_from_slice(&[0x1F, 0, 1, 0]);
        seed.extend(std::iter::repeat_n(0xFF, 300));
        seeds.push(("body", format!("claims-{codec}"), seed));
    }
    for file in files {
        let Some(bytes) = disk.contents(&file.path) else {
            continue;
        };
        let name = file.path.replace(['/', '.'], "-");
        if file.path.starts_with("checkpoint/") {
            seeds.push(("checkpoint", name, [&[0][..], &bytes].concat()));
        } else if file.path.starts_with("index/") {
            if let Some(index) = SealedIndex::decode(bytes.clone().into()) {
                for (number, row) in index.rows().enumerate().take(4) {
                    let mut seed = vec![5];
                    if let Some(image) = index.image(&row) {
                        image.encode(&mut seed);
                        seeds.push(("body", format!("image-{number}-{name}"), seed));
                    }
                }
            }
            seeds.push(("index", name, [&[0; 9][..], &bytes].concat()));
        } else if file.path.starts_with("journal/") && file.salt != 0 {
            seeds.push(("body", name, [&[6][..], &bytes[..112]].concat()));
        }
    }
    seeds
}

//! The content of a store as JSON, in the words of `storage/reader`.

use prost::Message;
use serde_json::{Map, Value, json};
use wald_proto::v1::RecordBatch;
use wald_storage::{
    Administer as _, Compression, GapReason, LocalEngine, LogInfo, LogName, LogTarget, Lsn,
    ReadLogs as _, ScanRequest, ScanStart, Selector, SyncMode, block_on,
};
use xxhash_rust::xxh3::Xxh3;

/// All logs by name.
pub(crate) fn store(engine: &LocalEngine) -> Value {
    let logs = block_on(engine.list_logs(String::new(), None, 1000)).unwrap();
    let told = logs
        .iter()
        .map(|info| (info.name.as_str().to_owned(), log(engine, info)));
    Value::Object(told.collect())
}

fn log(engine: &LocalEngine, info: &LogInfo) -> Value {
    let scan = engine.scan(ScanRequest {
        selector: Selector::Log(target(&info.name)),
        start: ScanStart::Lsn(Lsn::ZERO),
        until_lsn: None,
        max_records: u64::MAX,
        follow: false,
        visibility: None,
        chunk_bytes: 64 << 10,
    });
    let mut scan = block_on(scan).unwrap();
    let (mut records, mut expired, mut digest) = (0, 0, Xxh3::new());
    let mut quarantined: Vec<(u64, u64)> = Vec::new();
    let mut proven = true;
    while let Some(chunk) = block_on(scan.next()).unwrap() {
        for gap in &chunk.gaps {
            match gap.reason {
                GapReason::Quarantined => {}
                GapReason::Expired => {
                    expired += gap.to.unwrap().since(gap.from.unwrap());
                    continue;
                }
                reason => {
                    assert_eq!(reason, GapReason::Trimmed);
                    continue;
                }
            }
            match (gap.from, gap.to) {
                (Some(from), Some(to)) => {
                    let (from, to) = (from.get(), to.get());
                    match quarantined.last_mut() {
                        Some(last) if from <= last.1 => last.1 = last.1.max(to),
                        _ => quarantined.push((from, to)),
                    }
                }
                // Nobody knows where the log ended.
                _ => proven = false,
            }
        }
        for stored in chunk.batches {
            let batch = RecordBatch::decode(stored.body).unwrap();
            for (lsn, record) in (stored.first_lsn.get()..).zip(batch.records) {
                let time = Some(record.timestamp_us).filter(|time| *time != 0);
                digest.update(&lsn.to_le_bytes());
                digest.update(&time.unwrap_or(stored.arrival.micros()).to_le_bytes());
                let data = match record.payload {
                    Some(wald_proto::v1::record::Payload::Data(data)) => data,
                    _ => bytes::Bytes::new(),
                };
                part(&mut digest, &data);
                for header in &record.headers {
                    part(&mut digest, header.key.as_bytes());
                    part(&mut digest, &header.value);
                }
                let crc = record.crc32c.map(u32::to_le_bytes);
                part(&mut digest, crc.as_ref().map_or(&[], |crc| &crc[..]));
                records += 1;
            }
        }
    }
    let cursors: Vec<Value> = block_on(engine.list_cursors(target(&info.name), None, 1000))
        .unwrap()
        .iter()
        .map(|cursor| json!({"name": cursor.name.as_str(), "lsn": cursor.lsn.get(), "time_us": cursor.update_time.micros()}))
        .collect();
    let mut told = json!({
        "log_id": info.log_id.get(),
        "first_lsn": info.first_lsn.get(),
        "next_lsn": info.tail_lsn.get(),
        "writer_epoch": info.writer_epoch,
        "config": config(info),
        "create_time_us": info.create_time.micros(),
        "update_time_us": info.update_time.micros(),
        "stored_bytes": info.stored_bytes,
        "cursors": cursors,
        "tail_proven": proven,
        "quarantined": quarantined,
        "records": records,
        "digest": format!("{:032x}", digest.digest128()),
    });
    if expired > 0 {
        // Files of stores older than retention have no such key.
        told["expired"] = expired.into();
    }
    told
}

/// Adds the length of `bytes` and then `bytes` to the digest.
fn part(digest: &mut Xxh3, bytes: &[u8]) {
    digest.update(&(bytes.len() as u64).to_le_bytes());
    digest.update(bytes);
}

fn target(name: &LogName) -> LogTarget {
    LogTarget {
        name: name.clone(),
        log_id: None,
    }
}

/// The settings that a log does not take from the server.
fn config(info: &LogInfo) -> Value {
    let mut told = Map::new();
    if let Some(mode) = info.config.sync_mode {
        let mode = match mode {
            SyncMode::Strict => "strict",
            SyncMode::Batch => "batch",
            SyncMode::Interval => "interval",
            SyncMode::Async => "async",
            SyncMode::Manual => "manual",
            SyncMode::Replicated => "replicated",
        };
        told.insert("sync_mode".to_owned(), mode.into());
    }
    if let Some(compression) = info.config.compression {
        let compression = match compression {
            Compression::None => "none",
            Compression::Lz4 => "lz4",
            Compression::Zstd => "zstd",
        };
        told.insert("compression".to_owned(), compression.into());
    }
    if let Some(bytes) = info.config.max_record_bytes {
        told.insert("max_record_bytes".to_owned(), bytes.into());
    }
    if let Some(retention) = &info.config.retention {
        for (bound, number) in [
            ("max_age_ns", retention.max_age.map(|age| age.as_nanos())),
            ("max_bytes", retention.max_bytes.map(u128::from)),
            ("max_records", retention.max_records.map(u128::from)),
        ] {
            if let Some(number) = number.and_then(|number| u64::try_from(number).ok()) {
                told.insert(bound.to_owned(), number.into());
            }
        }
        if retention.respect_cursors {
            told.insert("respect_cursors".to_owned(), true.into());
        }
    }
    Value::Object(told)
}

/// Checks that all kept logs and no others are there, with all their facts.
pub(crate) fn assert_same(name: &str, seen: &Value, kept: &Map<String, Value>) {
    let names: Vec<&String> = seen.as_object().unwrap().keys().collect();
    assert_eq!(names, kept.keys().collect::<Vec<_>>(), "{name}");
    for (log, told) in seen.as_object().unwrap() {
        for (key, value) in told.as_object().unwrap() {
            // Whether damaged records count depends on whether the start read their segment.
            let counted =
                key == "stored_bytes" && !told["quarantined"].as_array().unwrap().is_empty();
            if !counted {
                assert_eq!(value, &kept[log][key], "{name}: {key} of {log}");
            }
        }
    }
}

fn sum(seen: &Value, of: impl Fn(&Value) -> u64) -> u64 {
    seen.as_object().unwrap().values().map(of).sum()
}

/// Records that can be read.
pub(crate) fn records(seen: &Value) -> u64 {
    sum(seen, |log| log["records"].as_u64().unwrap())
}

/// Records that are named as damaged.
pub(crate) fn quarantined(seen: &Value) -> u64 {
    sum(seen, |log| {
        let ranges = log["quarantined"].as_array().unwrap();
        let length = |range: &Value| range[1].as_u64().unwrap() - range[0].as_u64().unwrap();
        ranges.iter().map(length).sum()
    })
}

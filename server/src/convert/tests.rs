use std::sync::Arc;

use bytes::Bytes;
use prost::Message;
use tonic_types::StatusExt;
use wald_proto::codec::{Encode as _, Sent};
use wald_proto::v1;
use wald_storage::{
    AppendTimes, Appended, Batch, Compression, Limits, LogAppended, LogConfig, LogId, LogName, Lsn,
    Page, Position, RecoveryEpoch, ScanChunk, ScanStart, SegmentContents, SegmentInfo, Selector,
    StorageConfig, StoredBatch, SyncMode, Timestamp,
};

use super::*;

fn append(request: v1::AppendRequest) -> Result<(Batch, Option<Durability>), Status> {
    intake::append(&Sent::from(&request), &limits())
}

fn append_batch(request: v1::AppendBatchRequest) -> Result<(Batch, Option<Durability>), Status> {
    intake::append_batch(&Sent::from(&request), &limits())
}

fn unsupported(status: &Status) -> String {
    assert_eq!(status.code(), tonic::Code::Unimplemented);
    let details = status.get_error_details();
    let info = details.error_info().unwrap();
    assert_eq!(info.reason, "NOT_SUPPORTED");
    info.metadata["field"].clone()
}

fn reason(status: &Status) -> String {
    let details = status.get_error_details();
    details.error_info().unwrap().reason.clone()
}

fn limits() -> Limits {
    StorageConfig::default().limits()
}

fn data(bytes: &'static [u8]) -> v1::Record {
    v1::Record {
        payload: Some(v1::record::Payload::Data(Bytes::from_static(bytes))),
        ..v1::Record::default()
    }
}

fn stored(first_lsn: u64, arrival: i64, records: Vec<v1::Record>) -> StoredBatch {
    let body = v1::RecordBatch {
        records: records.clone(),
        ..v1::RecordBatch::default()
    };
    StoredBatch {
        log: LogName::new("a").unwrap(),
        log_id: LogId::new(7),
        first_lsn: Lsn::new(first_lsn),
        count: u32::try_from(records.len()).unwrap(),
        arrival: Timestamp::from_micros(arrival),
        body: body.encode_to_vec().into(),
    }
}

fn page(batches: Vec<StoredBatch>) -> Page {
    let next_lsn = batches.last().map_or(Lsn::ZERO, StoredBatch::next_lsn);
    Page {
        log_id: LogId::new(7),
        batches,
        next_lsn,
        tail_lsn: next_lsn,
        durable_lsn: next_lsn,
        replicated_lsn: None,
        first_lsn: Lsn::ZERO,
    }
}

fn answer(batches: Vec<StoredBatch>, view: v1::RecordView) -> v1::ReadResponse {
    read_response(&page(batches), view, RecoveryEpoch::FIRST).unwrap()
}

#[test]
fn payloads_of_a_batch_are_not_copied() {
    let part = v1::LogBatch {
        log: "a".to_owned(),
        records: vec![data(&[7; 4096])],
        ..v1::LogBatch::default()
    };
    let sent = Sent::from(&v1::AppendBatchRequest {
        batches: vec![part],
        ..v1::AppendBatchRequest::default()
    });
    assert!(sent.bytes.is_unique());
    let (batch, durability) = intake::append_batch(&sent, &limits()).unwrap();
    assert!(!sent.bytes.is_unique());
    assert_eq!(batch.logs[0].records.bytes(), 4096);
    assert_eq!(durability, None);
}

#[test]
fn text_is_data_and_an_absent_record_is_empty() {
    let request = v1::AppendRequest {
        log: "a".to_owned(),
        record: Some(v1::Record {
            payload: Some(v1::record::Payload::Text("hällo".to_owned())),
            timestamp_us: 5,
            ..v1::Record::default()
        }),
        ..v1::AppendRequest::default()
    };
    let (batch, _) = append(request.clone()).unwrap();
    let record = Record {
        data: "hällo".into(),
        timestamp: Some(Timestamp::from_micros(5)),
        ..Record::default()
    };
    assert_eq!(batch.logs[0].records, vec![record].into());
    let (batch, _) = append(v1::AppendRequest {
        record: None,
        ..request
    })
    .unwrap();
    assert_eq!(batch.logs[0].records, vec![Record::default()].into());
}

#[test]
fn page_has_a_bounded_number_of_records() {
    let page = |max_records| {
        let request = v1::ReadRequest {
            log: "a".to_owned(),
            max_records,
            ..v1::ReadRequest::default()
        };
        read(&request).unwrap().0.max_records
    };
    assert_eq!([0, 7, u32::MAX].map(page), [100, 7, 10_000]);
}

/// The parts of a record are one record, also where an append has its fields in another order.
#[test]
fn append_is_read_as_prost_reads_it() {
    let request = v1::AppendRequest {
        log: "a".to_owned(),
        record: Some(v1::Record {
            headers: vec![v1::Header::default()],
            ..data(b"x")
        }),
        durability: v1::Durability::Written.into(),
        ..v1::AppendRequest::default()
    };
    let whole = request.encode_to_vec();
    let more = v1::AppendRequest {
        record: Some(v1::Record {
            headers: vec![v1::Header::default()],
            timestamp_us: 5,
            ..v1::Record::default()
        }),
        ..v1::AppendRequest::default()
    };
    let parts = [&more.encode_to_vec()[..], &whole].concat();
    for bytes in [whole, parts] {
        let sent = v1::AppendRequest::decode(&bytes[..]).unwrap();
        let (batch, level) = intake::append(&Sent::new(bytes.into()), &limits()).unwrap();
        let expected = record(sent.record.unwrap());
        assert_eq!(batch.logs[0].records, vec![expected].into());
        assert_eq!((batch.single, level), (true, Some(Durability::Written)));
    }
}

#[test]
fn fields_that_are_not_built_are_refused_by_name() {
    let append_with = |durability| {
        unsupported(
            &append(v1::AppendRequest {
                log: "a".to_owned(),
                durability,
                ..v1::AppendRequest::default()
            })
            .unwrap_err(),
        )
    };
    assert_eq!(append_with(99), "durability");
    assert_eq!(
        view(99).unwrap_err().message(),
        "view: 99 is not supported by this server"
    );
}

#[test]
fn conditions_producer_and_cursors_reach_the_engine() {
    let (batch, _) = append_batch(v1::AppendBatchRequest {
        batches: vec![v1::LogBatch {
            log: "a".to_owned(),
            records: vec![data(b"x")],
            condition: Some(v1::AppendCondition {
                expected_lsn: Some(1),
                writer_epoch: Some(2),
                producer: Some(v1::Producer {
                    id: "p".to_owned(),
                    epoch: 3,
                    sequence: 4,
                }),
                log_id: Some(5),
                ..v1::AppendCondition::default()
            }),
        }],
        cursors: vec![v1::CursorCommit {
            log: "b".to_owned(),
            cursor: "c".to_owned(),
            lsn: 6,
            expected_lsn: Some(7),
            log_id: Some(8),
        }],
        ..v1::AppendBatchRequest::default()
    })
    .unwrap();
    let guard = Guard {
        expected_lsn: Some(Lsn::new(1)),
        writer_epoch: Some(2),
        log_id: Some(LogId::new(5)),
        ..Guard::default()
    };
    assert_eq!(batch.logs[0].guard, guard);
    let producer = Producer {
        id: Name::new("p").unwrap(),
        epoch: 3,
        sequence: 4,
    };
    assert_eq!(batch.logs[0].producer, Some(producer));
    let moved = CursorCommit {
        log: LogName::new("b").unwrap(),
        cursor: Name::new("c").unwrap(),
        lsn: Lsn::new(6),
        expected_lsn: Some(Lsn::new(7)),
        log_id: Some(LogId::new(8)),
    };
    assert_eq!(batch.cursors, [moved]);
}

#[test]
fn names_of_producers_and_cursors_are_checked_where_they_stand() {
    let told = |status: Status| {
        let details = status.get_error_details();
        let field = details.bad_request().unwrap().field_violations[0]
            .field
            .clone();
        (reason(&status), field)
    };
    let nameless = v1::AppendCondition {
        producer: Some(v1::Producer::default()),
        ..v1::AppendCondition::default()
    };
    let invalid = |reason: &str, field: &str| (reason.to_owned(), field.to_owned());
    let refused = append(v1::AppendRequest {
        log: "a".to_owned(),
        condition: Some(nameless.clone()),
        ..v1::AppendRequest::default()
    });
    assert_eq!(
        told(refused.unwrap_err()),
        invalid("INVALID_PRODUCER", "condition.producer.id")
    );
    let refused = append_batch(v1::AppendBatchRequest {
        batches: vec![v1::LogBatch {
            log: "a".to_owned(),
            condition: Some(nameless),
            ..v1::LogBatch::default()
        }],
        ..v1::AppendBatchRequest::default()
    });
    assert_eq!(
        told(refused.unwrap_err()),
        invalid("INVALID_PRODUCER", "batches[0].condition.producer.id")
    );
    let refused = append_batch(v1::AppendBatchRequest {
        cursors: vec![v1::CursorCommit {
            log: "a".to_owned(),
            cursor: "a\nb".to_owned(),
            ..v1::CursorCommit::default()
        }],
        ..v1::AppendBatchRequest::default()
    });
    assert_eq!(
        told(refused.unwrap_err()),
        invalid("INVALID_CURSOR_NAME", "cursors[0].cursor")
    );
}

#[test]
fn log_settings_that_are_not_built_are_refused_by_name() {
    let refused = |config| unsupported(&log_config(Some(config), &limits()).unwrap_err());
    let plain = v1::LogConfig::default;
    assert_eq!(
        refused(v1::LogConfig {
            sync_mode: 99,
            ..plain()
        }),
        "config.sync_mode"
    );
    assert_eq!(
        refused(v1::LogConfig {
            compression: 99,
            ..plain()
        }),
        "config.compression"
    );
}

#[test]
fn log_settings_come_back_as_they_were_given() {
    for sync_mode in sync_modes(true)
        .into_iter()
        .chain([v1::SyncMode::Unspecified])
    {
        let given = v1::LogConfig {
            sync_mode: sync_mode.into(),
            max_record_bytes: 9,
            ..v1::LogConfig::default()
        };
        let config = log_config(Some(given), &limits()).unwrap();
        assert_eq!(config.max_record_bytes, Some(9));
        assert_eq!(
            config.sync_mode.map(proto_sync_mode),
            Some(sync_mode).filter(|mode| *mode != v1::SyncMode::Unspecified)
        );
        assert_eq!(settings::proto_log_config(&config), given);
    }
    for (number, built) in [(0, true), (1, true), (2, true), (3, cfg!(feature = "zstd"))] {
        let given = v1::LogConfig {
            compression: number,
            ..v1::LogConfig::default()
        };
        match log_config(Some(given), &limits()) {
            Ok(config) => assert_eq!(settings::proto_log_config(&config), given),
            Err(status) => assert_eq!(unsupported(&status), "config.compression"),
        }
        assert_eq!(
            log_config(Some(given), &limits()).is_ok(),
            built,
            "{number}"
        );
    }
}

#[test]
fn update_changes_the_fields_of_the_mask_only() {
    let current = LogConfig {
        sync_mode: Some(SyncMode::Async),
        compression: Some(Compression::Lz4),
        max_record_bytes: Some(9),
        retention: None,
    };
    let update = |paths: &[&str], max_record_bytes| {
        let request = v1::UpdateLogRequest {
            log: "a".to_owned(),
            config: Some(v1::LogConfig {
                max_record_bytes,
                ..v1::LogConfig::default()
            }),
            update_mask: Some(prost_types::FieldMask {
                paths: paths.iter().map(|&path| path.to_owned()).collect(),
            }),
        };
        log_config_change(&request, &limits()).map(|change| change.apply(&current))
    };
    assert_eq!(update(&[], 0).unwrap(), current);
    assert_eq!(update(&[], 5).unwrap().max_record_bytes, Some(5));
    assert_eq!(
        update(&["max_record_bytes"], 0).unwrap().max_record_bytes,
        None
    );
    let reset = update(&["sync_mode"], 5).unwrap();
    assert_eq!((reset.sync_mode, reset.max_record_bytes), (None, Some(9)));
    assert_eq!(reset.compression, Some(Compression::Lz4));
    let reset = update(&["compression"], 5).unwrap();
    assert_eq!(
        (reset.compression, reset.sync_mode),
        (None, current.sync_mode)
    );
    assert_eq!(
        reason(&update(&["colour"], 5).unwrap_err()),
        "INVALID_UPDATE_MASK"
    );
    assert_eq!(
        reason(&update(&[], u32::MAX).unwrap_err()),
        "INVALID_LOG_CONFIG"
    );
}

fn aged(seconds: i64, nanos: i32) -> v1::Retention {
    v1::Retention {
        max_age: Some(prost_types::Duration { seconds, nanos }),
        ..v1::Retention::default()
    }
}

#[test]
fn retention_round_trips_and_an_absent_one_differs_from_an_empty_one() {
    let whole = v1::Retention {
        max_bytes: 1,
        max_records: u64::MAX,
        respect_cursors: true,
        ..aged(315_576_000_000, 999_999_999)
    };
    let bounds = [v1::Retention::default(), aged(0, 1), whole].map(Some);
    for retention in bounds.into_iter().chain([None]) {
        let given = v1::LogConfig {
            retention,
            ..v1::LogConfig::default()
        };
        let config = log_config(Some(given), &limits()).unwrap();
        assert_eq!(settings::proto_log_config(&config), given);
    }
    for retention in [
        aged(-1, 0),
        aged(0, -1),
        aged(0, 1_000_000_000),
        aged(i64::MAX, 0),
    ] {
        let given = v1::LogConfig {
            retention: Some(retention),
            ..v1::LogConfig::default()
        };
        let refused = log_config(Some(given), &limits()).unwrap_err();
        assert_eq!(reason(&refused), "INVALID_LOG_CONFIG", "{retention:?}");
    }
}

#[test]
fn update_changes_single_bounds_of_a_retention_or_resets_all() {
    let update = |current: &LogConfig, paths: &[&str], retention| {
        let request = v1::UpdateLogRequest {
            log: "a".to_owned(),
            config: Some(v1::LogConfig {
                retention,
                ..v1::LogConfig::default()
            }),
            update_mask: Some(prost_types::FieldMask {
                paths: paths.iter().map(|&path| path.to_owned()).collect(),
            }),
        };
        log_config_change(&request, &limits())
            .unwrap()
            .apply(current)
    };
    let all = v1::Retention {
        max_bytes: 10,
        max_records: 20,
        respect_cursors: true,
        ..aged(5, 0)
    };
    let told = |config: &LogConfig| settings::proto_log_config(config).retention;
    let own = update(&LogConfig::default(), &[], Some(all));
    assert_eq!(told(&own), Some(all));
    // Only the named fields change; a named field without a value becomes no bound.
    let changed = update(&own, &["retention.max_bytes"], Some(aged(9, 0)));
    assert_eq!(
        told(&changed),
        Some(v1::Retention {
            max_bytes: 0,
            ..all
        })
    );
    let paths = ["retention.max_age", "retention.respect_cursors"];
    let changed = update(&own, &paths, Some(aged(9, 0)));
    let expected = v1::Retention {
        max_age: aged(9, 0).max_age,
        respect_cursors: false,
        ..all
    };
    assert_eq!(told(&changed), Some(expected));
    let first = update(&LogConfig::default(), &["retention.max_records"], Some(all));
    let expected = v1::Retention {
        max_records: 20,
        ..v1::Retention::default()
    };
    assert_eq!(told(&first), Some(expected));
    assert_eq!(told(&update(&own, &[], None)), Some(all), "nothing is set");
    assert_eq!(told(&update(&own, &["retention"], None)), None);
    // A path covers the fields within it.
    for paths in [
        ["retention", "retention.max_bytes"],
        ["retention.max_bytes", "retention"],
    ] {
        assert_eq!(told(&update(&own, &paths, None)), None);
    }
    let empty = update(&own, &["retention"], Some(v1::Retention::default()));
    assert_eq!(told(&empty), Some(v1::Retention::default()));
}

#[test]
fn scan_needs_a_selector_and_one_log_for_a_log_id() {
    let refused = |request| reason(&scan(request).unwrap_err());
    assert_eq!(refused(v1::ScanRequest::default()), "INVALID_SCAN");
    assert_eq!(
        refused(v1::ScanRequest {
            selector: Some(v1::scan_request::Selector::Prefix("a/".to_owned())),
            log_id: Some(1),
            ..v1::ScanRequest::default()
        }),
        "INVALID_SCAN"
    );
    let (request, _) = scan(v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::All(v1::AllLogs {})),
        start: Some(v1::scan_request::Start::TailOffset(0)),
        follow: true,
        ..v1::ScanRequest::default()
    })
    .unwrap();
    assert_eq!(
        (request.selector, request.start, request.follow),
        (Selector::All, ScanStart::TailOffset(0), true)
    );
}

#[test]
fn acks_tell_the_stored_time_of_a_record_and_the_arrival_of_a_batch() {
    let appended = wald_storage::Appended {
        appends: [LogAppended {
            log_id: LogId::new(1),
            first_lsn: Lsn::ZERO,
            next_lsn: Lsn::new(2),
            timestamp: Timestamp::from_micros(500),
            arrival: Timestamp::from_micros(400),
            deduplicated: true,
        }]
        .into(),
        durable_lsns: [Lsn::ZERO].into(),
        replicated_lsns: [Lsn::new(3)].into(),
        durability: Durability::Accepted,
        position: None,
        times: wald_storage::AppendTimes::default(),
    };
    let single = append_response(&appended, RecoveryEpoch::FIRST);
    assert_eq!((single.timestamp_us, single.position), (500, None));
    assert_eq!(single.replicated_lsn, Some(3));
    assert_eq!(single.durability(), v1::Durability::Accepted);
    assert!(single.deduplicated);
    let names = [LogName::new("a").unwrap()];
    let batch = append_batch_response(&names, &appended, RecoveryEpoch::FIRST);
    assert_eq!(batch.appends[0].timestamp_us, 400);
    assert!(batch.appends[0].deduplicated);
    assert_eq!(batch.appends[0].replicated_lsn, Some(3));
}

#[test]
fn segments_are_shown_with_their_ends_and_what_is_known_of_them() {
    let segment = |id, sealed| SegmentInfo {
        id,
        base: Position::new(id * 100),
        bytes: 100,
        end: Position::new(id * 100 + 60),
        sealed,
        damaged: false,
        sorted: None,
        contents: None,
    };
    let full = SegmentInfo {
        damaged: true,
        contents: Some(SegmentContents {
            records: 7,
            logs: 2,
            left: Some(Timestamp::from_micros(5_000_000)),
            live_bytes: None,
        }),
        ..segment(1, true)
    };
    let shown = segments(&[full]);
    assert_eq!(shown[0].state(), v1::SegmentState::Damaged);
    assert_eq!((shown[0].record_count, shown[0].log_count), (7, 2));
    assert_eq!(
        shown[0].seal_time.as_ref().map(|time| time.seconds),
        Some(5)
    );
    let shown = segments(&[segment(2, true), segment(3, false)]);
    let ends: Vec<_> = shown
        .iter()
        .map(|s| (s.segment_id, s.end_position))
        .collect();
    assert_eq!(ends, [(2, Some(260)), (3, Some(360))]);
    assert_eq!(shown[0].state(), v1::SegmentState::Sealed);
    assert_eq!(shown[1].state(), v1::SegmentState::Active);
    assert_eq!((shown[1].record_count, shown[1].seal_time), (0, None));
    let run = SegmentInfo {
        sorted: Some((3, 8)),
        contents: Some(SegmentContents {
            records: 9,
            logs: 1,
            left: None,
            live_bytes: Some(50),
        }),
        ..segment(12, true)
    };
    let shown = &segments(&[run])[0];
    assert_eq!(shown.kind(), v1::SegmentKind::Sorted);
    assert_eq!((shown.first_segment_id(), shown.last_segment_id()), (3, 8));
    assert_eq!((shown.live_bytes, shown.record_count), (50, 9));
}

#[test]
fn merged_records_keep_the_time_of_their_batch() {
    let own = v1::Record {
        timestamp_us: 5,
        ..data(b"own")
    };
    let response = answer(
        vec![
            stored(3, 100, vec![data(b"a")]),
            stored(4, 100, vec![data(b"b")]),
            stored(5, 200, vec![data(b"c"), own]),
        ],
        v1::RecordView::Unspecified,
    );
    let batch = response.batch.unwrap();
    assert_eq!((batch.first_lsn, batch.timestamp_us), (Some(3), 100));
    let times: Vec<i64> = batch.records.iter().map(|r| r.timestamp_us).collect();
    assert_eq!(times, [0, 0, 200, 5]);
    assert_eq!(response.next_lsn, Some(7));
}

/// The response of a scan with these batches.
fn scanned(batches: Vec<StoredBatch>, view: v1::RecordView) -> Result<v1::ScanResponse, Status> {
    let chunk = ScanChunk {
        batches,
        gaps: Vec::new(),
        caught_up: true,
        cursor: Bytes::from_static(b"here"),
        tail_lsn: Some(Lsn::new(9)),
        durable_lsn: Some(Lsn::ZERO),
        replicated_lsn: None,
    };
    let message = scan_response(chunk, view, RecoveryEpoch::FIRST)?;
    let mut bytes = Vec::new();
    message.put(&mut bytes);
    assert_eq!(bytes.len(), message.length());
    Ok(v1::ScanResponse::decode(&bytes[..]).unwrap())
}

#[test]
fn scan_sends_what_a_read_would_though_it_decodes_nothing() {
    let own = v1::Record {
        timestamp_us: 5,
        headers: vec![v1::Header {
            key: "k".to_owned(),
            value: Bytes::from_static(&[3; 200]),
        }],
        crc32c: Some(7),
        ..data(b"own")
    };
    // Batches of one record, of many, large and empty, with consecutive times and with others.
    let batches = vec![
        stored(3, 100, vec![data(b"a")]),
        stored(4, 100, vec![data(&[7; 5000]), data(b"")]),
        stored(
            6,
            200,
            vec![data(b"c"), own.clone(), data(&[8; 5000]), data(b"")],
        ),
        stored(10, 200, vec![own]),
        stored(11, 100, vec![data(&[9; 5000])]),
    ];
    let expected = answer(batches.clone(), v1::RecordView::Unspecified);
    let mut response = scanned(batches, v1::RecordView::Unspecified).unwrap();
    assert_eq!(response.batches.pop(), expected.batch);
    assert_eq!(response.batches, []);
    assert!(response.caught_up);
    assert_eq!(
        (response.tail_lsn, response.durable_lsn),
        (Some(9), Some(0))
    );
    assert_eq!(&response.cursor[..], b"here");
}

#[test]
fn batches_of_a_scan_that_do_not_follow_each_other_stay_apart() {
    let other = StoredBatch {
        log: LogName::new("b").unwrap(),
        log_id: LogId::new(8),
        ..stored(2, 100, vec![data(b"other")])
    };
    let response = scanned(
        vec![
            stored(0, 100, vec![data(b"a"), data(b"b")]),
            other,
            stored(2, 100, vec![data(b"c")]),
            stored(5, 100, vec![data(b"f")]),
        ],
        v1::RecordView::Unspecified,
    );
    let batches = response.unwrap().batches;
    let found: Vec<_> = batches
        .iter()
        .map(|batch| (batch.log.as_str(), batch.first_lsn(), batch.records.len()))
        .collect();
    let expected = [("a", 0, 2), ("b", 2, 1), ("a", 2, 1), ("a", 5, 1)];
    assert_eq!(found, expected);
}

#[test]
fn body_that_a_scan_cannot_send_is_damage() {
    let good = stored(4, 1, vec![data(b"a"), data(b"b")]);
    let fewer = StoredBatch {
        count: 1,
        ..good.clone()
    };
    let broken = StoredBatch {
        body: Bytes::from_static(&[0x1a, 0xff]),
        ..good.clone()
    };
    let no_record = StoredBatch {
        body: Bytes::from_static(&[0x08, 1, 0x08, 1]),
        ..good
    };
    for bad in [fewer, broken, no_record] {
        let status = scanned(vec![bad], v1::RecordView::Unspecified).unwrap_err();
        assert_eq!(status.code(), tonic::Code::DataLoss);
    }
}

#[test]
fn stored_payloads_are_slices_of_the_stored_body() {
    let batch = stored(0, 1, vec![data(&[7; 4096])]);
    let body = batch.body.clone();
    let response = answer(vec![batch], v1::RecordView::Unspecified);
    let Some(v1::record::Payload::Data(payload)) = &response.batch.unwrap().records[0].payload
    else {
        panic!("the payload is bytes");
    };
    assert!(body.as_ptr_range().contains(&payload.as_ptr()));
}

#[test]
fn text_view_has_text_lsn_and_time_and_leaves_other_bytes_alone() {
    let response = answer(
        vec![stored(0, 1_500_000, vec![data(b"text"), data(b"\xff")])],
        v1::RecordView::Text,
    );
    let records = response.batch.unwrap().records;
    assert_eq!(
        records[0].payload,
        Some(v1::record::Payload::Text("text".to_owned()))
    );
    assert_eq!(records[0].lsn, Some(0));
    assert_eq!(records[0].time, "1970-01-01T00:00:01.500000Z");
    assert_eq!(records[1].lsn, Some(1));
    assert_eq!(records[1].payload, data(b"\xff").payload);
}

#[test]
fn response_stays_below_its_limit_unless_one_record_is_larger() {
    static LARGE: [u8; 700 << 10] = [0; 700 << 10];
    static HUGE: [u8; 2 << 20] = [0; 2 << 20];
    let two = stored(0, 1, vec![data(&LARGE), data(&LARGE)]);
    let response = answer(vec![two], v1::RecordView::Unspecified);
    assert!(response.encoded_len() < MAX_RESPONSE_BYTES);
    assert_eq!(response.next_lsn, Some(1));
    let response = answer(
        vec![stored(0, 1, vec![data(&HUGE)])],
        v1::RecordView::Unspecified,
    );
    assert_eq!(response.batch.unwrap().records.len(), 1);
    let tiny: Vec<v1::Record> = (0..50_000).map(|_| data(b"")).collect();
    let response = answer(vec![stored(0, 1, tiny)], v1::RecordView::Text);
    assert!(response.encoded_len() < MAX_RESPONSE_BYTES);
    assert_eq!(
        response.next_lsn,
        Some(u64::try_from(response.batch.unwrap().records.len()).unwrap())
    );
}

#[test]
fn body_that_does_not_decode_is_damage() {
    let mut batch = stored(4, 1, vec![data(b"a")]);
    batch.body = Bytes::from_static(&[0x1a, 0xff]);
    let status = read_response(
        &page(vec![batch]),
        v1::RecordView::Unspecified,
        RecoveryEpoch::FIRST,
    )
    .unwrap_err();
    assert_eq!(status.code(), tonic::Code::DataLoss);
}

#[test]
fn page_tokens_give_back_the_name_they_were_made_from() {
    for name in ["a", "ü/é", "x y"] {
        let token = page_token(name);
        assert_eq!(parse_page_token(&token).unwrap().as_deref(), Some(name));
    }
    assert_eq!(parse_page_token("").unwrap(), None);
    for bad in ["x", "0", "zz", "ff"] {
        assert_eq!(
            reason(&parse_page_token(bad).unwrap_err()),
            "INVALID_PAGE_TOKEN"
        );
    }
}

#[test]
fn log_shows_lsn_zero_and_its_settings() {
    let info = wald_storage::LogInfo {
        name: LogName::new("a").unwrap(),
        log_id: LogId::new(0),
        config: Arc::new(LogConfig {
            sync_mode: None,
            compression: Some(Compression::Lz4),
            max_record_bytes: Some(9),
            retention: None,
        }),
        first_lsn: Lsn::ZERO,
        expired: 0,
        tail_lsn: Lsn::ZERO,
        durable_lsn: Lsn::ZERO,
        replicated_lsn: Some(Lsn::ZERO),
        writer_epoch: 3,
        stored_bytes: 0,
        create_time: Timestamp::from_micros(-1),
        update_time: Timestamp::from_micros(0),
        first_producer_epoch: 7,
    };
    let shown = log(&info);
    assert_eq!(shown.first_producer_epoch, 7);
    assert_eq!((shown.first_lsn, shown.writer_epoch), (Some(0), Some(3)));
    assert_eq!(shown.replicated_lsn, Some(0));
    assert_eq!(shown.config.unwrap().max_record_bytes, 9);
    let created = shown.create_time.unwrap();
    assert_eq!((created.seconds, created.nanos), (-1, 999_999_000));
    assert_eq!(uuid(1), "00000000-0000-0000-0000-000000000001");
}

#[test]
fn records_that_are_not_encoded_as_they_are_stored_are_the_same_records() {
    let of = |bytes: &[u8]| {
        let mut message = b"\x0a\x01a".to_vec();
        message.extend_from_slice(bytes);
        let request = v1::AppendBatchRequest {
            batches: vec![v1::LogBatch::decode(&message[..]).unwrap()],
            ..v1::AppendBatchRequest::default()
        };
        // prost makes it canonical.
        let expected = append_batch(request).unwrap().0;
        let mut whole = vec![0x0A, u8::try_from(message.len()).unwrap()];
        whole.extend_from_slice(&message);
        let sent = Sent::new(whole.into());
        assert_eq!(intake::append_batch(&sent, &limits()).unwrap().0, expected);
        expected.logs[0].records.len()
    };
    // The usual order of clients; a payload behind its checksum; an unknown field between them;
    // a condition between them, and once more.
    assert_eq!(of(b"\x12\x03\x0a\x01x\x12\x03\x0a\x01y"), 2);
    assert_eq!(of(b"\x12\x08\x25\x0b\x04\x30\x83\x0a\x01x"), 1);
    assert_eq!(of(b"\x12\x03\x0a\x01x\x78\x01\x12\x03\x0a\x01y"), 2);
    assert_eq!(
        of(b"\x12\x03\x0a\x01x\x1a\x02\x08\x05\x12\x03\x0a\x01y\x1a\x02\x10\x01"),
        2
    );
}

#[test]
fn a_message_that_cannot_be_read_is_refused_in_the_words_of_prost() {
    let malformed: [&[u8]; 6] = [
        b"\x0a\x05\x0a",
        b"\x10\x01",
        b"\x0a\x05\x0a\x01a\x12\x03",
        b"\x0a\x04\x0a\x02\xff\xff",
        b"\x0a\x08\x0a\x01a\x12\x03\x0a\x02x",
        b"\x1a\x00",
    ];
    for bytes in malformed {
        let bytes = Bytes::from_static(bytes);
        let Err(expected) = v1::AppendBatchRequest::decode(bytes.clone()) else {
            panic!("prost reads {bytes:?}");
        };
        let status = intake::append_batch(&Sent::new(bytes), &limits()).unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(
            status.message().starts_with("request: failed to decode"),
            "{status}, {expected}"
        );
    }
}

#[test]
fn message_with_too_many_records_is_refused_before_it_is_decoded() {
    let refused = |bytes: &[u8], expected: &str| {
        let sent = Sent::new(Bytes::copy_from_slice(bytes));
        let status = intake::append_batch(&sent, &limits()).unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
        assert!(status.message().contains(expected), "{}", status.message());
    };
    // Batches without a name, checks and cursors that cannot be read: nobody gets there.
    refused(&b"\x0a\x00".repeat(1001), "1001 batches; at most 1000");
    refused(&b"\x12\x01\xff".repeat(1001), "1001 checks; at most 1000");
    refused(&b"\x22\x01\xff".repeat(1001), "1001 cursors; at most 1000");
    // Empty records, in two logs; the second has no name.
    let part = |log: &[u8], records| {
        let body = [log, &b"\x12\x00".repeat(records)].concat();
        let mut bytes = vec![0x0a];
        prost::encoding::encode_varint(body.len() as u64, &mut bytes);
        [bytes, body].concat()
    };
    let (one, other) = (part(b"\x0a\x01a", 600), part(b"", 500));
    refused(&[one.clone(), other.clone(), one].concat(), "1700 records");
    refused(&other, "log name");
    let long = [vec![0x38; 70_000], vec![0x0a]].concat();
    let status = intake::append_batch(&Sent::new(long.into()), &limits()).unwrap_err();
    assert_eq!(
        status.message(),
        "request: failed to decode Protobuf message"
    );
}

#[test]
fn a_request_of_a_session_is_its_number_and_its_batch() {
    let batch = |durability: v1::Durability| v1::AppendBatchRequest {
        batches: vec![v1::LogBatch {
            log: "a".to_owned(),
            records: vec![data(b"x")],
            condition: None,
        }],
        durability: durability.into(),
        ..v1::AppendBatchRequest::default()
    };
    let request = v1::AppendSessionRequest {
        request_id: 7,
        batch: Some(batch(v1::Durability::Written)),
        ..v1::AppendSessionRequest::default()
    };
    let content = |request| match SessionRequest::read(&request).unwrap() {
        SessionRequest {
            request_id,
            content: intake::SessionContent::Batch(batch),
            ..
        } => (
            request_id,
            v1::AppendBatchRequest::decode(batch.bytes).unwrap(),
        ),
        _ => panic!("it has a batch"),
    };
    let (number, decoded) = content(Sent::from(&request));
    assert_eq!(number, 7);
    assert_eq!(decoded, batch(v1::Durability::Written));
    // Twice: one batch, of both.
    let later = v1::AppendSessionRequest {
        request_id: 8,
        batch: Some(batch(v1::Durability::Durable)),
        ..v1::AppendSessionRequest::default()
    };
    let both = [request.encode_to_vec(), later.encode_to_vec()].concat();
    let expected = v1::AppendSessionRequest::decode(&both[..]).unwrap();
    let (number, decoded) = content(Sent::new(both.into()));
    assert_eq!(number, 8);
    assert_eq!(Some(decoded), expected.batch);
    let malformed = Sent::new(Bytes::from_static(b"\x0a\x01"));
    assert_eq!(
        SessionRequest::read(&malformed).err().unwrap().code(),
        tonic::Code::InvalidArgument
    );
}

#[test]
fn an_ack_of_a_session_is_what_prost_would_make_of_it() {
    let appended = |name: &str, lsn: u64, position, deduplicated| {
        let log = LogAppended {
            log_id: LogId::new(lsn),
            first_lsn: Lsn::new(lsn),
            next_lsn: Lsn::new(lsn + 1),
            timestamp: Timestamp::from_micros(1),
            arrival: Timestamp::from_micros(if deduplicated { 0 } else { -5 }),
            deduplicated,
        };
        let logs = usize::from(!name.is_empty()) * 2;
        let appended = Appended {
            appends: std::iter::repeat_n(log, logs).collect(),
            durable_lsns: std::iter::repeat_n(Lsn::new(lsn), logs).collect(),
            // As with a replica, and without one.
            replicated_lsns: std::iter::repeat_n(Lsn::new(lsn), logs)
                .filter(|_| deduplicated)
                .collect(),
            durability: Durability::Written,
            position,
            times: AppendTimes::default(),
        };
        let names: Vec<_> = (0..logs).map(|_| LogName::new(name).unwrap()).collect();
        (names, appended)
    };
    let long = "n".repeat(200);
    let cases = [
        (0, appended("a", 0, None, false)),
        (
            1,
            appended(&long, u64::MAX - 1, Some(Position::new(0)), true),
        ),
        (
            u64::MAX,
            appended("a/b", 300, Some(Position::new(1 << 40)), false),
        ),
        (5, appended("", 1, None, false)),
    ];
    for (request_id, (names, appended)) in cases {
        let epoch = RecoveryEpoch::FIRST;
        let expected = v1::AppendSessionResponse {
            request_id,
            ack: Some(append_batch_response(&names, &appended, epoch)),
            ..v1::AppendSessionResponse::default()
        };
        let ack = SessionAck::new(request_id, &names, &appended, epoch);
        let mut bytes = Vec::new();
        ack.put(&mut bytes);
        assert_eq!(bytes.len(), ack.length());
        assert_eq!(bytes, expected.encode_to_vec());
    }
}

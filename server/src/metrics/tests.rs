use std::collections::HashSet;
use std::time::Duration;

use wald_storage::{
    AppendError, AppendPhase, FailedCheck, FailedCondition, LogName, Name, Observer, Statistics,
};

use super::{Durability, Metrics, ReadOp, latency_buckets, phase_buckets};

fn text(metrics: &Metrics) -> String {
    String::from_utf8(metrics.encode(None, &[]).unwrap()).unwrap()
}

#[test]
fn every_promised_metric_is_there_before_anything_happened() {
    let text = text(&Metrics::new().unwrap());
    let names: HashSet<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    for name in [
        "grpc_server_started_total",
        "grpc_server_handled_total",
        "grpc_server_handling_seconds",
        "wald_append_duration_seconds",
        "wald_append_phase_seconds",
        "wald_flush_duration_seconds",
        "wald_group_records",
        "wald_group_bytes",
        "wald_group_requests",
        "wald_read_duration_seconds",
        "wald_scan_delivery_lag_seconds",
        "wald_appended_records_total",
        "wald_appended_bytes_total",
        "wald_read_records_total",
        "wald_read_bytes_total",
        "wald_durable_lag_bytes",
        "wald_durable_lag_seconds",
        "wald_inflight_bytes",
        "wald_rejected_total",
        "wald_deduplicated_total",
        "wald_append_sessions",
        "wald_condition_failures_total",
        "wald_logs",
        "wald_producers",
        "wald_cursors",
        "wald_name_bytes",
        "wald_store_limit",
        "wald_followers",
        "wald_segments",
        "wald_segment_roll_duration_seconds",
        "wald_open_segments",
        "wald_segment_cache_evictions_total",
        "wald_disk_bytes",
        "wald_disk_free_bytes",
        "wald_checksum_failures_total",
        "wald_quarantined_records",
        "wald_unreadable_bytes",
        "wald_indexing_failed",
        "wald_unattributed_losses",
        "wald_held_back",
        "wald_engine_panics_total",
        "wald_recovery_duration_seconds",
        "wald_recovery_epoch",
        "wald_journal_failed",
        "wald_build_info",
        "process_resident_memory_bytes",
    ] {
        assert!(names.contains(name), "{name} is missing");
    }
}

#[test]
fn every_combination_of_labels_starts_at_zero() {
    let text = text(&Metrics::new().unwrap());
    for line in [
        r#"wald_rejected_total{operation="read",reason="READ_FAILED"} 0"#,
        r#"wald_rejected_total{operation="write",reason="BUSY"} 0"#,
        r#"wald_condition_failures_total{reason="POSITION_MISMATCH"} 0"#,
        r#"wald_condition_failures_total{reason="FENCED"} 0"#,
        r#"wald_condition_failures_total{reason="PRODUCER_GAP"} 0"#,
        r#"wald_checksum_failures_total{where="read"} 0"#,
        r#"wald_append_phase_seconds_count{phase="reply"} 0"#,
        r#"wald_append_duration_seconds_count{durability="durable"} 0"#,
        r#"wald_segments{state="ready"} 0"#,
        r#"grpc_server_handled_total{grpc_code="DataLoss",grpc_method="Read",grpc_service="wald.v1.WalService",grpc_type="unary"} 0"#,
        r#"grpc_server_started_total{grpc_method="Scan",grpc_service="wald.v1.WalService",grpc_type="server_stream"} 0"#,
        r#"grpc_server_started_total{grpc_method="Check",grpc_service="grpc.health.v1.Health",grpc_type="unary"} 0"#,
    ] {
        assert!(text.lines().any(|found| found == line), "no line {line}");
    }
}

#[test]
fn latency_buckets_double_and_have_ten_milliseconds_on_a_bound() {
    let buckets = latency_buckets();
    assert!(buckets.contains(&0.01));
    assert!(buckets[0] <= 20e-6 && buckets.iter().any(|bound| *bound > 1.3));
    assert!(buckets.windows(2).all(|pair| pair[1] == 2.0 * pair[0]));
    assert!(phase_buckets().ends_with(&buckets) && phase_buckets()[0] < 3e-6);
}

#[test]
fn every_help_text_is_a_statement() {
    for help in text(&Metrics::new().unwrap())
        .lines()
        .filter(|line| line.starts_with("# HELP"))
    {
        assert!(help.ends_with('.') && !help.contains('?'), "{help}");
    }
}

#[test]
fn what_happens_is_counted_where_it_belongs() {
    let metrics = Metrics::new().unwrap();
    metrics.appended(Durability::Durable, Duration::from_millis(1), 1, (3, 30));
    metrics.read(ReadOp::Scan, Duration::from_millis(1));
    metrics.phase(AppendPhase::Queue, Duration::from_millis(1), 1);
    Observer::read(&metrics, 5, 50);
    metrics.deduplicated();
    drop(metrics.session_opened());
    let _open = metrics.session_opened();
    metrics.append_failed(&AppendError::ProducerGap {
        log: LogName::new("a").unwrap(),
        producer: Name::new("p").unwrap(),
        given: 1,
        expected: 0,
    });
    metrics.append_failed(&AppendError::ConditionsFailed(vec![FailedCondition {
        log: LogName::new("a").unwrap(),
        check: FailedCheck::LogMissing,
    }]));
    let now = Statistics {
        journal_segments: 3,
        open_segments: 2,
        segment_evictions: 4,
        journal_failed: true,
        free_bytes: Some(7),
        durable_lag_bytes: 40,
        buffered_bytes: 2,
        sorter_freed_bytes: 90,
        sorted_live_bytes: 60,
        sorted_dead_bytes: 5,
        unrenewed_bytes: 11,
        sorter_part_bytes: 64,
        ..Statistics::default()
    };
    metrics.encode(Some(&now), &[]).unwrap();
    let text = String::from_utf8(metrics.encode(Some(&now), &[]).unwrap()).unwrap();
    for line in [
        "wald_appended_records_total 3",
        "wald_appended_bytes_total 30",
        "wald_read_records_total 5",
        r#"wald_append_duration_seconds_count{durability="durable"} 1"#,
        r#"wald_append_phase_seconds_count{phase="queue"} 1"#,
        r#"wald_read_duration_seconds_count{op="scan"} 1"#,
        "wald_deduplicated_total 1",
        "wald_append_sessions 1",
        r#"wald_condition_failures_total{reason="PRODUCER_GAP"} 1"#,
        r#"wald_condition_failures_total{reason="LOG_MISSING"} 1"#,
        r#"wald_segments{state="sealed"} 2"#,
        "wald_journal_failed 1",
        "wald_sorter_freed_bytes_total 90",
        "wald_sorted_live_bytes 60",
        "wald_sorted_dead_bytes 5",
        "wald_encryption_unrenewed_bytes 11",
        "wald_sorter_part_bytes 64",
        "wald_open_segments 2",
        "wald_segment_cache_evictions_total 4",
        "wald_disk_free_bytes 7",
        "wald_durable_lag_bytes 42",
    ] {
        assert!(text.lines().any(|found| found == line), "no line {line}");
    }
}

//! The replica of the store, as a message.

use wald_proto::v1;
use wald_storage::ReplicaState;

use super::proto_duration;
use crate::metrics::ReplicaFigures;

/// The replica of a node in a bucket.
pub(crate) fn replica_status(
    bucket_url: &str,
    node_id: &str,
    now: &ReplicaFigures,
) -> v1::ReplicaStatus {
    let progress = &now.progress;
    let state = match progress.state {
        ReplicaState::Serving => v1::ReplicaState::Serving,
        ReplicaState::BucketDown => v1::ReplicaState::BucketDown,
        ReplicaState::Fenced => v1::ReplicaState::Fenced,
    };
    v1::ReplicaStatus {
        bucket_url: bucket_url.to_owned(),
        node_id: node_id.to_owned(),
        term: now.term,
        state: state.into(),
        replicated_position: progress.replicated.get(),
        lag_bytes: now.lag_bytes(),
        lag_records: now.lag_records,
        lag_age: Some(proto_duration(now.lag_age)),
        max_lag_bytes: now.max_lag,
        put_p50: now.puts.map(|(p50, _)| proto_duration(p50)),
        put_p99: now.puts.map(|(_, p99)| proto_duration(p99)),
        ..v1::ReplicaStatus::default()
    }
}

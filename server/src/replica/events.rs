//! Events of the shipper and requests to the bucket, as lines of the log and in metrics.

use std::fmt;
use std::sync::Arc;

use wald_bucket::{Bucket, BucketRequest, RequestObserver, ShipError, ShipEvent, ShipObserver};

use super::cluster::Cluster;
use crate::metrics::{ReplicaMetrics, UploadKind};

/// Counts requests.
pub(super) struct Requests(pub(super) Arc<ReplicaMetrics>);

impl fmt::Debug for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Requests")
    }
}

impl RequestObserver for Requests {
    fn ended(&self, request: &BucketRequest) {
        let labels = (request.op.name(), request.result);
        let bytes = (request.sent, request.received);
        self.0.requested(labels, request.took, bytes);
    }
}

/// Logs and counts events.
pub(super) struct Events {
    place: String,
    metrics: Arc<ReplicaMetrics>,
    cluster: Arc<Cluster>,
}

impl Events {
    pub(super) fn new(
        bucket: &Bucket,
        metrics: Arc<ReplicaMetrics>,
        cluster: Arc<Cluster>,
    ) -> Self {
        Self {
            place: bucket.place().to_owned(),
            metrics,
            cluster,
        }
    }

    fn count(&self, event: &ShipEvent<'_>) {
        let (kind, is_done) = match event {
            ShipEvent::Stored {
                tail_rows, took, ..
            } => {
                self.metrics.has_rows(*tail_rows);
                self.metrics.stored(*took);
                (UploadKind::Rows, true)
            }
            ShipEvent::Named { tail_rows, .. } => {
                self.metrics.has_rows(*tail_rows);
                (UploadKind::Files, true)
            }
            ShipEvent::Down | ShipEvent::Failed(ShipError::Tail(_)) => (UploadKind::Rows, false),
            ShipEvent::Failed(_) => (UploadKind::Files, false),
            ShipEvent::Owns { term } => return self.metrics.owns(*term),
            ShipEvent::Nodes { owner, nodes } => return self.cluster.note(owner, Some(nodes)),
            ShipEvent::Up
            | ShipEvent::Unread(_)
            | ShipEvent::NotOpened(_)
            | ShipEvent::Damaged { .. } => return,
        };
        self.metrics.uploaded(kind, is_done);
    }
}

impl ShipObserver for Events {
    fn event(&self, event: &ShipEvent<'_>) {
        self.count(event);
        let place = &*self.place;
        match event {
            ShipEvent::Stored { .. } | ShipEvent::Nodes { .. } => {}
            ShipEvent::Owns { term } => {
                tracing::info!(place, term, "this node owns the store in the bucket");
            }
            ShipEvent::Down => tracing::error!(
                place,
                "nothing of the journal reaches the bucket; REPLICATED is refused until it does"
            ),
            ShipEvent::Up => tracing::info!(place, "the journal reaches the bucket again"),
            ShipEvent::Unread(error) => tracing::error!(
                place,
                %error,
                "the journal cannot be read to ship it; the daemon tries again"
            ),
            ShipEvent::Named {
                files,
                sent_bytes,
                position,
                ..
            } => tracing::debug!(
                place,
                files,
                sent_bytes,
                position = position.get(),
                "files of the store are in the bucket"
            ),
            ShipEvent::Damaged { places } => tracing::error!(
                place,
                places,
                "the newest files in the bucket lack records that are damaged here; older files stay in the bucket until `wald repair` \
                 has mended or accepted this"
            ),
            ShipEvent::Failed(error) => {
                tracing::warn!(place, %error, "the replica failed; the daemon tries again");
            }
            ShipEvent::NotOpened(error) => {
                tracing::warn!(place, %error, "the replica is not open; the daemon tries again");
            }
        }
    }
}

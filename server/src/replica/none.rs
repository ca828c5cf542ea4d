//! Builds without object stores have no replica: `bucket_url` is refused before a start.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use wald_proto::v1;
use wald_storage::LocalEngine;

use crate::config::Config;
use crate::encryption::KeyRing;
use crate::metrics::Metrics;
use crate::serve::{Exit, StartFacts};

/// There is none.
pub(crate) enum ReplicaStart {}

/// There is none.
pub(crate) enum RunningReplica {}

/// There is none.
pub(crate) enum ReplicaWatch {}

impl ReplicaWatch {
    pub(crate) fn now(&self) -> v1::ReplicaStatus {
        match *self {}
    }
}

impl ReplicaStart {
    #[allow(clippy::unnecessary_wraps, reason = "as with object stores")]
    pub(crate) fn prepare(
        _: &Config,
        _: &Metrics,
        _: &StartFacts,
        _: Option<&Arc<KeyRing>>,
    ) -> Result<Option<Self>, Exit> {
        Ok(None)
    }

    pub(crate) fn begin(self, _: &Arc<LocalEngine>) -> Result<RunningReplica, Exit> {
        match self {}
    }
}

impl RunningReplica {
    pub(crate) fn reload(&self) {
        match *self {}
    }

    #[allow(clippy::unused_async, reason = "as with object stores")]
    pub(crate) async fn moved(&mut self) -> Exit {
        match *self {}
    }

    #[allow(clippy::unused_async, reason = "as with object stores")]
    pub(crate) async fn announce_end(&mut self, _: Duration) -> Result<(), Exit> {
        match *self {}
    }

    #[allow(clippy::unused_async, reason = "as with object stores")]
    pub(crate) async fn finish(self, _: Instant) -> Result<(), Exit> {
        match self {}
    }
}

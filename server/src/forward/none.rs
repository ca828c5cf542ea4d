//! Builds without object stores have no stand-bys, which alone forward calls.

use std::sync::Arc;

use http::{HeaderMap, Request};
use tonic::Status;

use crate::admission::{GroupShare, Share};
use crate::auth::Caller;
use crate::config::Config;
use crate::grpc::RequestBody;
use crate::methods::Rpc;
use crate::rpc::Node;
use crate::serve::{Exit, StoreOwner};
use crate::transport::HttpAnswer;

/// There is none.
pub(crate) enum Forwarder {}

/// There is none.
pub(crate) enum ForwardPool {}

/// This node answers.
#[allow(dead_code, reason = "as with object stores")]
pub(crate) enum CallRoute {
    Here,
    Owner(StoreOwner),
    Refused(Status),
}

impl Forwarder {
    #[allow(clippy::unnecessary_wraps, reason = "as with object stores")]
    pub(crate) fn new(_: &Arc<Node>, _: &Config) -> Result<Option<Arc<Self>>, Exit> {
        Ok(None)
    }

    pub(crate) fn pool(self: &Arc<Self>) -> Arc<ForwardPool> {
        match **self {}
    }
}

impl ForwardPool {
    pub(crate) fn is_forwarded(&self, _: &HeaderMap) -> bool {
        match *self {}
    }

    pub(crate) fn route(&self, _: Rpc, _: &HeaderMap, _: &Caller) -> CallRoute {
        match *self {}
    }

    pub(crate) fn forward(
        self: &Arc<Self>,
        _: StoreOwner,
        _: Request<RequestBody>,
        _: Rpc,
        _: (Share, Option<Arc<GroupShare>>),
        _: impl FnOnce(Request<RequestBody>) -> HttpAnswer + Send + 'static,
    ) -> HttpAnswer {
        match **self {}
    }
}

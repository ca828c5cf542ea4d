//! The RPCs: each checks, converts, calls the engine, and converts back. They share the
//! [`Node`]; their code is in the modules by topic.

mod append;
mod backup;
mod cursor;
mod echo;
mod log;
mod ops;
mod read;
mod reflection;
mod scan;
mod session;
mod wal;

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_core::Stream;
use http::Extensions;
use tokio::sync::watch;
use tonic::{Response, Status};
use wald_proto::v1;
use wald_storage::{
    CopyReader, Limits, RecoveryEpoch, RecoveryReport, Retention, SyncMode, Timestamp,
};

use crate::auth::{Caller, Engine, ReadEngine};
use crate::backups::keys::SigningKey;
use crate::config::LogPatterns;
use crate::convert::ServerLimits;
use crate::drain::Phase;
use crate::encryption::KeyRing;
use crate::metrics::{Deadline, Metrics};
use crate::replica::ReplicaWatch;
use crate::serve::StoreOwner;
use crate::status::{self, Access};

/// A stream of answers.
pub(crate) type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The engine and its constants while it is open.
pub(crate) struct OpenStore {
    /// The engine behind the check of rights.
    pub(crate) engine: Engine,
    /// In every answer.
    pub(crate) epoch: RecoveryEpoch,
    /// The findings of opening it.
    pub(crate) report: RecoveryReport,
    /// The keys of its records. `None`: they are plain.
    pub(crate) keys: Option<Arc<KeyRing>>,
}

/// An engine or a copy that reads, and the recovery epoch of its answers.
pub(crate) struct OpenReads<'a> {
    pub(crate) engine: ReadEngine<'a>,
    pub(crate) epoch: RecoveryEpoch,
}

/// The order of an operator to end as SIGTERM does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DrainOrder {
    /// Time for which calls are still accepted; `None`: the setting `drain_delay`.
    pub(crate) delay: Option<Duration>,
}

/// State that the RPCs share.
pub(crate) struct Node {
    /// Empty until the store is recovered.
    pub(crate) store: OnceLock<OpenStore>,
    /// Describes the replica of the store; empty without one, or while the daemon starts.
    pub(crate) replica: Arc<OnceLock<ReplicaWatch>>,
    /// Reads the copy of a stand-by; empty on other nodes.
    pub(crate) copies: Arc<OnceLock<Arc<CopyReader>>>,
    /// The owner of the store while this node is a stand-by.
    pub(crate) owner: watch::Receiver<Option<StoreOwner>>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) phase: watch::Receiver<Phase>,
    pub(crate) heartbeat_interval: Duration,
    pub(crate) sync_mode: SyncMode,
    /// Whether the store has a replica, which REPLICATED needs.
    pub(crate) has_replica: bool,
    pub(crate) sync_interval: Duration,
    pub(crate) retention: Retention,
    pub(crate) limits: ServerLimits,
    /// Limits of the engine before it is open.
    pub(crate) engine_limits: Limits,
    /// Takes the order of an operator to end.
    pub(crate) drain: watch::Sender<Option<DrainOrder>>,
    pub(crate) auto_create: bool,
    /// The protection against strangers.
    pub(crate) protection: v1::Protection,
    /// Whose cursors the metrics show.
    pub(crate) cursor_lag_logs: LogPatterns,
    pub(crate) start_time: Timestamp,
    /// Signs the manifests of backups.
    pub(crate) signing_key: Option<SigningKey>,
}

impl Node {
    /// The replica of the store; `None` without one, or while the daemon starts.
    pub(crate) fn replica(&self) -> Option<&ReplicaWatch> {
        self.replica.get()
    }

    /// The reads of this node: of its store, or of its copy of the owner's if `any_node` may answer.
    ///
    /// # Errors
    /// MOVED and the others of [`Node::store`], if there is neither.
    pub(crate) fn reads(&self, any_node: bool) -> Result<OpenReads<'_>, Status> {
        if any_node
            && self.store.get().is_none()
            && let Some(copies) = self.copies.get()
            && let Ok(epoch) = copies.epoch()
        {
            let engine = ReadEngine::new(copies);
            return Ok(OpenReads { engine, epoch });
        }
        let store = self.store(Access::Read)?;
        Ok(OpenReads {
            engine: store.engine.reads(),
            epoch: store.epoch,
        })
    }

    /// Whether a stand-by can read its copy now.
    #[cfg(feature = "object")]
    pub(crate) fn has_copy(&self) -> bool {
        let copies = self.copies.get();
        copies.is_some_and(|copies| copies.epoch().is_ok())
    }

    pub(crate) fn store(&self, access: Access) -> Result<&OpenStore, Status> {
        self.store.get().ok_or_else(|| match &*self.owner.borrow() {
            Some(owner) => status::moved(access, &owner.endpoint, owner.term),
            None => status::starting(access),
        })
    }
}

/// The caller that the transport has put beside a request.
fn caller(extensions: &Extensions) -> Result<&Caller, Status> {
    let caller = extensions.get::<Caller>();
    caller.ok_or_else(|| Status::internal("the call has no caller"))
}

/// Refuses a request that nobody waits for any more, before it costs a flush; otherwise
/// it goes to the engine now.
fn refuse_late(extensions: &Extensions) -> Result<(), Status> {
    match extensions.get::<Deadline>() {
        Some(deadline) if !deadline.begin() => Err(status::deadline_before_start()),
        _ => Ok(()),
    }
}

/// The services, all views of one node.
#[derive(Clone)]
pub(crate) struct Services(pub(crate) Arc<Node>);

pub(crate) use echo::Echo;
pub(crate) use reflection::FirstFault;
pub(crate) use wal::WalCalls;

type RpcResult<T> = Result<Response<T>, Status>;

#[cfg(test)]
mod tests;

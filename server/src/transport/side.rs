//! Calls that come over another port: the services answer them as if a gRPC client had made them.
//!
//! A connection of that port has the place of a gRPC connection in every budget: its shares, its calls, its tenants.

use std::sync::Arc;

use http::{Request, Response};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tonic::Status;
use tonic::body::Body;

use super::Incoming;
use super::peer::{Connections, OpenCall, Peer};
use super::routes::{Calls, ConnectionCalls};
use crate::answers::AnswerShare;
use crate::audit::AuditedPeer;
use crate::auth::{CertNames, ConnectionTenants, LastCaller};
use crate::drain::Phase;
use crate::forward::{ForwardPool, Forwarder};
use crate::metrics::CallBody;
use crate::status::{self, Access};

/// The way into the services from another port.
pub(crate) struct SidePort {
    calls: Arc<Calls>,
    connections: Arc<Connections>,
    /// A clone of it keeps the transport from ending. `None` comes of it once the transport has ended.
    running: mpsc::WeakSender<()>,
    forward: Option<Arc<ForwardPool>>,
}

impl SidePort {
    pub(super) fn new(
        calls: &Arc<Calls>,
        connections: &Arc<Connections>,
        running: mpsc::WeakSender<()>,
    ) -> Self {
        Self {
            calls: Arc::clone(calls),
            connections: Arc::clone(connections),
            running,
            forward: calls.forward.as_ref().map(Forwarder::pool),
        }
    }

    /// A share in the memory of answers that are no calls.
    pub(crate) fn answers(&self) -> AnswerShare {
        AnswerShare::new(self.connections.answers())
    }

    /// A connection that has made no call yet. `names`: those in the certificate of the client.
    pub(crate) fn connect(
        &self,
        names: Option<Arc<CertNames>>,
        audited: Option<Arc<AuditedPeer>>,
    ) -> SideConnection {
        let peer = Peer::of_another_port(&self.connections);
        SideConnection {
            peer: peer.clone(),
            phase: self.calls.admission.phase.clone(),
            running: self.running.clone(),
            calls: Mutex::new(ConnectionCalls {
                calls: Arc::clone(&self.calls),
                peer,
                names,
                last: LastCaller::default(),
                audited,
                tenants: ConnectionTenants::default(),
                forward: self.forward.clone(),
            }),
        }
    }
}

/// A connection of another port.
pub(crate) struct SideConnection {
    peer: Peer,
    phase: watch::Receiver<Phase>,
    running: mpsc::WeakSender<()>,
    calls: Mutex<ConnectionCalls>,
}

/// An answer to a call, which is open until this is dropped.
pub(crate) struct SideAnswer {
    pub(crate) response: Response<CallBody<Body>>,
    pub(crate) open: OpenSideCall,
}

/// Counts a call, and keeps the transport from ending.
pub(crate) struct OpenSideCall {
    _open: OpenCall,
    _running: mpsc::Sender<()>,
}

impl SideConnection {
    /// Answers a call. To be called on an event loop that runs [`crate::wakes::run`].
    ///
    /// # Errors
    /// DRAINING if the server ends.
    pub(crate) async fn call(
        &self,
        request: Request<Incoming>,
        access: Access,
    ) -> Result<SideAnswer, Status> {
        let (call, open) = {
            let mut calls = self.calls.lock();
            let is_draining = *self.phase.borrow() == Phase::Draining;
            let running = self.running.upgrade().filter(|_| !is_draining);
            let open = OpenSideCall {
                _running: running.ok_or_else(|| status::draining_call(access))?,
                _open: self.peer.begin_call(),
            };
            (calls.call(request), open)
        };
        // Boxed, because calls are large.
        match Box::pin(call).await {
            Ok(response) => Ok(SideAnswer { response, open }),
            Err(never) => match never {},
        }
    }

    /// The phase of the server.
    pub(crate) fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.clone()
    }

    /// The share of the connection in the memory of answers.
    pub(crate) fn answers(&self) -> &AnswerShare {
        &self.peer.answers
    }
}

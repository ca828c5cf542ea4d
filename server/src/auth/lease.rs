//! Streams end when the right of their caller ends, also while they are silent.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;
use tokio::time::{Sleep, sleep};
use tokio_stream::wrappers::WatchStream;
use tonic::Status;
use wald_storage::Selector;

use super::permitted::NamesLogs as _;
use super::right::{LogRight, ServerRight};
use super::rules::Rules;
use super::{Caller, Identity};
use crate::status;

/// Longest wait before the time of an expiry is looked at again: the system's clock can jump.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// The right that a stream needs as long as it lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HeldRight {
    /// A credential. Each message is checked besides.
    Principal,
    /// A right on logs.
    Logs(LogRight, Selector),
    /// A right to operate the server.
    Server(ServerRight),
}

/// Watches the right of a stream.
pub(crate) struct Lease {
    caller: Caller,
    held: HeldRight,
    rules: WatchStream<Arc<Rules>>,
    /// `None`: the credential does not expire.
    expiry: Option<Pin<Box<Sleep>>>,
}

impl Caller {
    /// Watches a right. `None` without `auth_file`: nothing ends.
    pub(crate) fn lease(&self, held: HeldRight) -> Option<Lease> {
        let identity = self.identity.as_ref()?;
        Some(Lease {
            caller: self.clone(),
            held,
            rules: WatchStream::from_changes(identity.authority.rules.clone()),
            expiry: until_expiry(identity),
        })
    }
}

/// A timer for the expiry of the credential.
fn until_expiry(identity: &Identity) -> Option<Pin<Box<Sleep>>> {
    let left = identity.expires?.micros() - identity.authority.clock.now().micros();
    let left = Duration::from_micros(u64::try_from(left).unwrap_or(0));
    Some(Box::pin(sleep(left.min(LOOK_AGAIN))))
}

impl Lease {
    /// Ready with the status that ends the stream.
    pub(crate) fn poll_ended(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        loop {
            let changed = matches!(
                Pin::new(&mut self.rules).poll_next(context),
                Poll::Ready(Some(_))
            );
            let timer = self.expiry.as_mut();
            let due = timer.is_some_and(|timer| timer.as_mut().poll(context).is_ready());
            if !changed && !due && self.caller.is_current() {
                return Poll::Pending;
            }
            if let Err(status) = self.judge() {
                return Poll::Ready(status);
            }
        }
    }

    /// Resolves with the status that ends the stream.
    pub(crate) async fn ended(&mut self) -> Status {
        std::future::poll_fn(|context| self.poll_ended(context)).await
    }

    fn judge(&mut self) -> Result<(), Status> {
        let before = self.caller.tenant().cloned();
        self.caller.renew()?;
        self.expiry = (self.caller.identity.as_deref()).and_then(until_expiry);
        match &self.held {
            HeldRight::Principal => Ok(()),
            HeldRight::Logs(right, selector) => {
                selector.clone().check(&self.caller, *right)?;
                // The stream counts for the tenant with which it began.
                match self.caller.tenant().map(Arc::as_ptr) == before.as_ref().map(Arc::as_ptr) {
                    true => Ok(()),
                    false => Err(status::tenant_changed()),
                }
            }
            HeldRight::Server(right) => self.caller.check_server(*right),
        }
    }
}

/// A stream of answers that ends with the lease.
struct Leased<S> {
    lease: Lease,
    answers: S,
    ended: bool,
}

impl<T, S: Stream<Item = Result<T, Status>> + Unpin> Stream for Leased<S> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if let Poll::Ready(status) = self.lease.poll_ended(context) {
            self.ended = true;
            return Poll::Ready(Some(Err(status)));
        }
        Pin::new(&mut self.answers).poll_next(context)
    }
}

/// Ends the answers with the lease, if there is one.
pub(crate) fn leased<T: 'static>(
    lease: Option<Lease>,
    answers: crate::rpc::Answers<T>,
) -> crate::rpc::Answers<T> {
    match lease {
        None => answers,
        Some(lease) => Box::pin(Leased {
            lease,
            answers,
            ended: false,
        }),
    }
}

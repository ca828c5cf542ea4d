//! The caller of one call, and its rights.

use std::borrow::Cow;
use std::sync::Arc;

use tonic::Status;

use super::Identity;
use super::right::{LogRight, Right, ServerRight};
use crate::audit::{CallFacts, Trail};
use crate::methods::{Class, Rpc};
use crate::status;

/// The caller of one call: its principal, and the rights that the method needs.
#[derive(Clone)]
pub(crate) struct Caller {
    /// `None`: without `auth_file`, or the method needs nothing.
    pub(super) identity: Option<Arc<Identity>>,
    pub(super) rpc: Rpc,
    pub(super) trail: Trail,
}

impl Caller {
    /// A caller without an `auth_file`.
    #[cfg(test)]
    pub(crate) fn anyone() -> Self {
        Self {
            identity: None,
            rpc: crate::methods::of(wald_proto::Method::Scan),
            trail: Trail::default(),
        }
    }

    /// Its principal and credential. `None` without `auth_file`.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.identity.as_deref()
    }

    /// The trail of the call, for the audit log.
    pub(crate) fn trail(&self) -> &Trail {
        &self.trail
    }

    /// Whether the call is a session of appends.
    pub(crate) fn is_session(&self) -> bool {
        self.rpc.class == Class::AppendSession
    }

    /// Adds facts to the line of the call in the audit log, if it gets one.
    pub(crate) fn note(&self, add: impl FnOnce(&mut CallFacts)) {
        self.trail.note(add);
    }

    /// Whether it has a right to operate the server.
    pub(crate) fn may_operate(&self, right: ServerRight) -> bool {
        (self.identity.as_ref())
            .is_none_or(|identity| identity.principal.server_rights.contains(&right))
    }

    /// Whether it has a right on the log of this name.
    pub(crate) fn may(&self, right: LogRight, log: &str) -> bool {
        self.identity.as_ref().is_none_or(|identity| {
            let mut scopes = identity.principal.scopes(right);
            scopes.any(|scope| scope.covers(log))
        })
    }

    /// Checks a right to operate the server.
    ///
    /// # Errors
    /// NOT_ALLOWED.
    pub(crate) fn check_server(&self, right: ServerRight) -> Result<(), Status> {
        match self.may_operate(right) {
            true => Ok(()),
            false => Err(self.denied(right.into(), None)),
        }
    }

    /// The answer to a request for which the caller lacks a right. `asked`: the field of the request, and its value.
    pub(crate) fn denied(&self, right: Right, asked: Option<(&str, &str)>) -> Status {
        let principal = match &self.identity {
            Some(identity) => {
                identity.authority.metrics.denied(right);
                self.trail.denied(identity, self.rpc, right, asked);
                identity.principal.name.as_str()
            }
            None => "nobody",
        };
        status::not_allowed(principal, right.name(), asked, self.rpc.access)
    }

    pub(super) fn is_current(&self) -> bool {
        self.identity
            .as_ref()
            .is_none_or(|identity| identity.is_current())
    }

    /// The caller by the rules in force. The message of a request can come long after its head.
    ///
    /// # Errors
    /// UNAUTHENTICATED if the credential does not count any more.
    pub(crate) fn current(&self) -> Result<Cow<'_, Self>, Status> {
        if self.is_current() {
            return Ok(Cow::Borrowed(self));
        }
        let mut renewed = self.clone();
        renewed.renew()?;
        Ok(Cow::Owned(renewed))
    }

    /// Judges the credential again if it has expired, or the file has changed.
    ///
    /// # Errors
    /// UNAUTHENTICATED if it does not count any more.
    pub(crate) fn renew(&mut self) -> Result<(), Status> {
        let Some(identity) = self.identity.as_ref().filter(|_| !self.is_current()) else {
            return Ok(());
        };
        let authority = &identity.authority;
        match authority.identify(identity.sent.clone()) {
            Ok(identity) => {
                self.identity = Some(identity);
                Ok(())
            }
            Err(refused) => Err(authority.refuse(&refused, self.rpc, &self.trail, Some(identity))),
        }
    }
}

//! Checks the logs that a request names, before anything looks them up.

use std::borrow::Cow;
use std::fmt;

use tonic::Status;
use wald_storage::{
    AppendError, Batch, CursorCommit, FailedCheck, LogName, LogTarget, ReadRequest, ScanRequest,
    Selector,
};

use super::right::{LogRight, Right, Scope};
use super::{Amount, Caller};
use crate::audit::CallFacts;
use crate::methods::Need;
use crate::status;

/// A request whose caller has the rights that it needs. Only [`Caller`] makes one.
#[derive(Debug, Clone)]
pub(crate) struct Permitted<T>(T);

impl<T> Permitted<T> {
    /// The request.
    pub(crate) fn get(&self) -> &T {
        &self.0
    }

    pub(super) fn get_mut(&mut self) -> &mut T {
        &mut self.0
    }

    pub(super) fn into_inner(self) -> T {
        self.0
    }

    /// Another form of a request that was allowed.
    pub(super) fn assumed(request: T) -> Self {
        Self(request)
    }
}

/// A request that names logs.
pub(crate) trait NamesLogs: Sized {
    /// Checks that the caller has `right` on each log that the request names, and the rights that some of its parts
    /// need besides.
    ///
    /// # Errors
    /// NOT_ALLOWED with the field.
    fn check(self, caller: &Caller, right: LogRight) -> Result<Self, Status>;

    /// Adds the names of the logs to the facts of a call.
    fn note(&self, facts: &mut CallFacts);
}

impl Caller {
    /// Checks the request by the right in the row of the method (`methods.rs`). Takes a small change out of the rates of
    /// its tenant: only a caller with the right may use these up.
    ///
    /// # Errors
    /// NOT_ALLOWED, or RATE.
    pub(crate) fn allow<T: NamesLogs>(&self, request: T) -> Result<Permitted<T>, Status> {
        match self.rpc.need {
            Need::Logs(right) => {
                let allowed = self.allow_by(right, request)?;
                if self.rpc.is_small_change()
                    && let Some(tenant) = self.tenant()
                {
                    tenant.append(Amount::of_changes(1))?;
                }
                Ok(allowed)
            }
            // A method that names logs and has no right for them in the table.
            Need::Nothing | Need::Principal | Need::Server(_) => {
                self.note(|facts| request.note(facts));
                match self.identity {
                    None => Ok(Permitted(request)),
                    Some(_) => Err(self.denied(Right::Log(LogRight::Read), None)),
                }
            }
        }
    }

    /// Checks the request by a right: the console's requests have no row.
    ///
    /// # Errors
    /// NOT_ALLOWED.
    pub(crate) fn allow_by<T: NamesLogs>(
        &self,
        right: LogRight,
        request: T,
    ) -> Result<Permitted<T>, Status> {
        self.note(|facts| request.note(facts));
        match self.identity {
            None => Ok(Permitted(request)),
            Some(_) => request.check(&*self.current()?, right).map(Permitted),
        }
    }

    /// Checks the right on a log again for a request that had to wait.
    ///
    /// # Errors
    /// UNAUTHENTICATED or NOT_ALLOWED if the credential or the right has ended.
    pub(crate) fn check_again(&self, right: LogRight, log: &LogName) -> Result<(), Status> {
        match self.current()? {
            Cow::Borrowed(_) => Ok(()),
            Cow::Owned(current) => current.check_log(right, log, format_args!("log")),
        }
    }

    /// Judges the caller again, and checks batches that had to wait, if the credential has expired or the rules have changed.
    ///
    /// # Errors
    /// UNAUTHENTICATED or NOT_ALLOWED if the credential or a right has ended.
    pub(crate) fn renew_with<'b>(
        &mut self,
        waiting: impl IntoIterator<Item = &'b mut Permitted<Batch>>,
    ) -> Result<(), Status> {
        if self.is_current() {
            return Ok(());
        }
        self.renew()?;
        let mut waiting = waiting.into_iter();
        waiting.try_for_each(|batch| check_batch(batch.get_mut(), self))
    }

    /// The part of the names that begin with `prefix` that the caller may list.
    ///
    /// # Errors
    /// UNAUTHENTICATED if the credential does not count any more.
    pub(crate) fn listed(&self, prefix: String) -> Result<Permitted<ListScopes>, Status> {
        self.note(|facts| facts.prefix(&prefix));
        let current = self.current()?;
        Ok(Permitted(match &current.identity {
            None => ListScopes::of_prefix(prefix),
            Some(identity) => {
                let scopes = identity.principal.scopes(LogRight::List);
                ListScopes::within(prefix, scopes)
            }
        }))
    }

    fn check_log(
        &self,
        right: LogRight,
        log: &LogName,
        field: fmt::Arguments<'_>,
    ) -> Result<(), Status> {
        match self.may(right, log.as_str()) {
            true => Ok(()),
            false => Err(self.denied(right.into(), Some((&field.to_string(), log.as_str())))),
        }
    }

    /// The answer to a failed append. A caller who may not create logs learns that where a log is missing, whose
    /// existence the check has made a condition.
    pub(crate) fn append_failed(&self, error: &AppendError) -> Status {
        if let AppendError::ConditionsFailed(failed) = error {
            let missing = failed.iter().find(|check| {
                matches!(check.check, FailedCheck::LogMissing)
                    && !self.may(LogRight::Create, check.log.as_str())
            });
            if let Some(check) = missing {
                let asked = Some(("log", check.log.as_str()));
                return self.denied(LogRight::Create.into(), asked);
            }
        }
        status::append(error)
    }
}

impl NamesLogs for LogName {
    fn check(self, caller: &Caller, right: LogRight) -> Result<Self, Status> {
        caller.check_log(right, &self, format_args!("log"))?;
        Ok(self)
    }

    fn note(&self, facts: &mut CallFacts) {
        facts.log(self);
    }
}

/// No name: the request is for all logs together, and the right on any log is enough.
impl NamesLogs for Option<LogName> {
    fn check(self, caller: &Caller, right: LogRight) -> Result<Self, Status> {
        match self {
            Some(log) => log.check(caller, right).map(Some),
            None => {
                let identity = caller.identity.as_ref();
                let has = identity
                    .is_none_or(|identity| identity.principal.scopes(right).next().is_some());
                match has {
                    true => Ok(None),
                    false => Err(caller.denied(right.into(), None)),
                }
            }
        }
    }

    fn note(&self, facts: &mut CallFacts) {
        if let Some(log) = self {
            facts.log(log);
        }
    }
}

impl NamesLogs for LogTarget {
    fn check(self, caller: &Caller, right: LogRight) -> Result<Self, Status> {
        caller.check_log(right, &self.name, format_args!("log"))?;
        Ok(self)
    }

    fn note(&self, facts: &mut CallFacts) {
        facts.target(self);
    }
}

impl NamesLogs for ReadRequest {
    fn check(self, caller: &Caller, right: LogRight) -> Result<Self, Status> {
        caller.check_log(right, &self.log.name, format_args!("log"))?;
        Ok(self)
    }

    fn note(&self, facts: &mut CallFacts) {
        facts.target(&self.log);
    }
}

impl NamesLogs for CursorCommit {
    fn check(self, caller: &Caller, right: LogRight) -> Result<Self, Status> {
        caller.check_log(right, &self.log, format_args!("commit.log"))?;
        Ok(self)
    }

    fn note(&self, facts: &mut CallFacts) {
        facts.log(&self.log);
    }
}

impl NamesLogs for Selector {
    fn check(self, caller: &Caller, right: LogRight) -> Result<Self, Status> {
        let (field, prefix) = match &self {
            Self::Log(target) => {
                caller.check_log(right, &target.name, format_args!("log"))?;
                return Ok(self);
            }
            Self::Prefix(prefix) => ("prefix", prefix.as_str()),
            Self::All => ("all", ""),
        };
        let covered = caller.identity.as_ref().is_none_or(|identity| {
            let mut scopes = identity.principal.scopes(right);
            scopes.any(|scope| scope.covers_prefix(prefix))
        });
        match covered {
            true => Ok(self),
            false => Err(caller.denied(right.into(), Some((field, prefix)))),
        }
    }

    fn note(&self, facts: &mut CallFacts) {
        facts.selector(self);
    }
}

impl NamesLogs for ScanRequest {
    fn check(self, caller: &Caller, right: LogRight) -> Result<Self, Status> {
        let selector = self.selector.check(caller, right)?;
        Ok(Self { selector, ..self })
    }

    fn note(&self, facts: &mut CallFacts) {
        facts.selector(&self.selector);
    }
}

/// Batches need append, checks read, cursors cursor. Without create on a log, its existence becomes a condition.
fn check_batch(batch: &mut Batch, caller: &Caller) -> Result<(), Status> {
    let single = batch.single;
    for (index, part) in batch.logs.iter_mut().enumerate() {
        match single {
            true => caller.check_log(LogRight::Append, &part.log, format_args!("log"))?,
            false => {
                let field = format_args!("batches[{index}].log");
                caller.check_log(LogRight::Append, &part.log, field)?;
            }
        }
        if !caller.may(LogRight::Create, part.log.as_str()) {
            part.guard.must_exist = true;
        }
    }
    for (index, check) in batch.checks.iter().enumerate() {
        let field = format_args!("checks[{index}].log");
        caller.check_log(LogRight::Read, &check.log, field)?;
    }
    for (index, commit) in batch.cursors.iter().enumerate() {
        let field = format_args!("cursors[{index}].log");
        caller.check_log(LogRight::Cursor, &commit.log, field)?;
    }
    Ok(())
}

impl NamesLogs for Batch {
    fn check(mut self, caller: &Caller, _: LogRight) -> Result<Self, Status> {
        check_batch(&mut self, caller)?;
        Ok(self)
    }

    fn note(&self, facts: &mut CallFacts) {
        facts.batch(self);
    }
}

/// Names to list, in order. No scope lies in another.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ListScopes(Vec<Scope>);

impl ListScopes {
    fn of_prefix(prefix: String) -> Self {
        Self(vec![Scope::Prefix(prefix.into())])
    }

    /// The part of the scopes that lies in `prefix`.
    fn within<'a>(prefix: String, scopes: impl Iterator<Item = &'a Scope> + Clone) -> Self {
        if scopes.clone().any(|scope| scope.covers_prefix(&prefix)) {
            return Self::of_prefix(prefix);
        }
        let inner = |scope: &&Scope| scope.text().as_bytes().starts_with(prefix.as_bytes());
        let mut inner: Vec<&Scope> = scopes.filter(inner).collect();
        // A prefix comes before the names that it covers.
        let is_exact = |scope: &Scope| matches!(scope, Scope::Exact(_));
        inner.sort_by_key(|scope| (scope.text(), is_exact(scope)));
        let mut kept: Vec<Scope> = Vec::new();
        for scope in inner {
            let is_covered = kept.last().is_some_and(|last| match scope {
                Scope::Exact(name) => last.covers(name),
                Scope::Prefix(prefix) => last.covers_prefix(prefix),
            });
            if !is_covered {
                kept.push(scope.clone());
            }
        }
        Self(kept)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Scope> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(text: &str) -> Scope {
        Scope::Prefix(text.into())
    }

    fn exact(text: &str) -> Scope {
        Scope::Exact(text.into())
    }

    #[test]
    fn longer_prefix_than_a_scope_is_listed_as_it_was_asked_for() {
        let scopes = [prefix("a/")];
        let listed = ListScopes::within("a/b".to_owned(), scopes.iter());
        assert_eq!(listed.0, [prefix("a/b")]);
    }

    #[test]
    fn shorter_prefix_lists_the_scopes_in_order_and_each_name_once() {
        let scopes = [
            prefix("b/c/"),
            exact("a"),
            prefix("b/"),
            exact("b/x"),
            prefix("d/"),
            exact("a/"),
            prefix("b/"),
        ];
        let listed = ListScopes::within(String::new(), scopes.iter());
        assert_eq!(
            listed.0,
            [exact("a"), exact("a/"), prefix("b/"), prefix("d/")]
        );
        let listed = ListScopes::within("b".to_owned(), scopes.iter());
        assert_eq!(listed.0, [prefix("b/")]);
        let listed = ListScopes::within("e".to_owned(), scopes.iter());
        assert!(listed.0.is_empty());
    }

    #[test]
    fn exact_name_does_not_hide_the_prefix_of_the_same_text() {
        let scopes = [exact("a"), prefix("a")];
        let listed = ListScopes::within(String::new(), scopes.iter());
        assert_eq!(listed.0, [prefix("a")]);
        // A name in order between two scopes.
        let scopes = [exact("a"), prefix("a/")];
        let listed = ListScopes::within(String::new(), scopes.iter());
        assert_eq!(listed.0, [exact("a"), prefix("a/")]);
    }
}

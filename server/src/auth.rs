//! Identities of callers, and their rights.
//!
//! ```text
//! auth_file ──every 10 s, SIGHUP──▶ thread wald-reload: changed? ─▶ checked (file.rs) ─▶ Rules in force
//!
//! head of a call: certificate, `authorization` ─▶ Authority::identify ─▶ Caller ─┐ UNAUTHENTICATED
//! its message:    names of logs ─▶ Caller::allow ─▶ Permitted<request> ──▶ Engine  │ NOT_ALLOWED
//! its stream:     Lease: judged again with each new file, and when the credential expires
//! ```
//!
//! Rule: RPCs and console reach the engine through [`Engine`] alone. It takes [`Permitted`] requests, which only a
//! [`Caller`] makes, so no path to the logs leads around the check. The table in `methods.rs` says which right a
//! method needs. The check comes before the lookup: the answer to a log of others is that to a log that does not
//! exist.
//!
//! Without `auth_file` every caller may do everything.
//!
//! | file | purpose |
//! |---|---|
//! | `source.rs` | reads `auth_file` and the files that it names, and puts them in force |
//! | `file.rs` | checks the text of `auth_file` |
//! | `rules.rs` | its contents in force |
//! | `limits.rs`, `tenant.rs` | limits of a tenant, and its use of them |
//! | `quotas.rs` | those limits that the engine enforces |
//! | `right.rs` | rights and scopes |
//! | `token.rs`, `names.rs`, `jwt.rs` | the three kinds of credentials |
//! | `issuer.rs`, `jwks.rs` | issuers of JWTs, and their keys |
//! | `key_files.rs`, `key_fetch.rs` | the sources of keys: files, and URLs |
//! | `last.rs` | the caller of the last call of a connection |
//! | `caller.rs` | the caller of one call |
//! | `permitted.rs` | checks the logs that a request names |
//! | `engine.rs` | the engine behind the check |
//! | `sessions.rs` | logins at the console |
//! | `lease.rs` | ends streams whose right has ended |
//! | `commands.rs` | `wald token` |

mod caller;
mod commands;
mod engine;
mod file;
mod issuer;
mod jwks;
mod jwt;
mod key_fetch;
mod key_files;
mod last;
mod lease;
mod limits;
mod names;
mod permitted;
mod quotas;
mod right;
mod rules;
mod sessions;
mod source;
mod tenant;
mod token;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use parking_lot::Mutex;
use tokio::sync::watch;
use tonic::Status;
use wald_proto::v1::Reason;
use wald_storage::{Clock as _, SystemClock, Timestamp};

use crate::audit::{ShownCredential, Trail};
use crate::encryption::TenantOf;
use crate::methods::{self, Need, Rpc};
use crate::metrics::{AuthFailure, AuthMetrics};
use crate::status;
pub(crate) use caller::Caller;
pub(crate) use commands::{command, print_secret, run, write_new_secret};
pub(crate) use engine::{Engine, ReadEngine};
pub(crate) use jwt::VerifiedJwt;
use jwt::{CredentialFault, PresentedJwt, SignatureFault};
pub(crate) use key_fetch::KeyRequests;
pub(crate) use last::LastCaller;
pub(crate) use lease::{HeldRight, Lease, leased};
pub(crate) use limits::TenantLimits;
pub(crate) use names::CertNames;
pub(crate) use permitted::Permitted;
pub(crate) use quotas::{keep as keep_quotas, rows as quota_rows};
pub(crate) use right::{LogRight, Right, Scope, ServerRight};
use rules::{Principal, Rules, TokenFault};
pub(crate) use sessions::{CookieSession, SESSION_LIFE, Sessions};
pub(crate) use source::{AuthSources, start};
pub(crate) use tenant::{Amount, ConnectionTenants, CountedUse, OverRate, TenantUsage};
use token::PresentedToken;
pub(crate) use token::TokenId;

/// Shortest time between two reports that the clock of credentials is ahead of the system's.
const LEAD_EVERY: Duration = Duration::from_secs(60);

/// Knows the callers.
#[derive(Clone)]
pub(crate) enum Authority {
    /// No `auth_file`: every caller may do everything.
    Open,
    /// The rules of a file.
    File(Arc<FileAuthority>),
}

/// The rules in force, and all that judges by them.
pub(crate) struct FileAuthority {
    rules: watch::Receiver<Arc<Rules>>,
    clock: ExpiryClock,
    metrics: AuthMetrics,
    keys: Arc<KeyRequests>,
}

/// The system's clock, without its jumps back: a credential that has expired stays so.
#[derive(Debug, Default)]
struct ExpiryClock {
    /// Latest time of the system's clock, microseconds since 1970.
    latest: AtomicI64,
    /// Time at which the log had a line about its lead.
    reported: Mutex<Option<Instant>>,
}

impl ExpiryClock {
    fn now(&self) -> Timestamp {
        let now = SystemClock.now().micros();
        Timestamp::from_micros(self.latest.fetch_max(now, Ordering::Relaxed).max(now))
    }

    /// Reports a credential that has expired at this time by this clock alone: without a restart it is never accepted again.
    fn report_lead(&self, expired: Timestamp) {
        if let Some(lead) = self.lead(expired, SystemClock.now()) {
            tracing::error!(
                lead_seconds = lead.as_secs(),
                "credentials are refused that have not expired: the system's clock was ahead, and the clock that judges \
                 credentials never goes back; restart the daemon"
            );
        }
    }

    /// The lead over the system's clock if the credential has not expired by that. At most once in a while.
    fn lead(&self, expired: Timestamp, system: Timestamp) -> Option<Duration> {
        let since = |earlier: i64, later: i64| {
            Duration::from_micros(u64::try_from(later.saturating_sub(earlier)).unwrap_or(0))
        };
        // A step of the clock that is shorter ends on its own.
        if since(system.micros(), expired.micros()) < LEAD_EVERY {
            return None;
        }
        let mut reported = self.reported.lock();
        if reported.is_some_and(|at| at.elapsed() < LEAD_EVERY) {
            return None;
        }
        *reported = Some(Instant::now());
        Some(since(system.micros(), self.latest.load(Ordering::Relaxed)))
    }
}

/// The credentials of one call.
#[derive(Clone)]
struct SentCredentials {
    token: Option<SentToken>,
    names: Option<Arc<CertNames>>,
}

/// A token that a caller sent.
#[derive(Clone)]
enum SentToken {
    Wald(PresentedToken),
    Jwt(Arc<VerifiedJwt>),
}

impl SentCredentials {
    /// The credential without its secret.
    fn shown(&self) -> ShownCredential {
        match (&self.token, &self.names) {
            (Some(SentToken::Wald(token)), _) => ShownCredential::Token(token.id),
            (Some(SentToken::Jwt(jwt)), _) => ShownCredential::Jwt(Arc::clone(jwt)),
            (None, Some(_)) => ShownCredential::Certificate,
            (None, None) => ShownCredential::None,
        }
    }
}

/// A principal that a call has shown to be its caller.
pub(crate) struct Identity {
    authority: Arc<FileAuthority>,
    principal: Arc<Principal>,
    /// The credential that counted.
    credential: ShownCredential,
    expires: Option<Timestamp>,
    sent: SentCredentials,
    generation: u64,
}

impl Identity {
    pub(crate) fn principal(&self) -> &Principal {
        &self.principal
    }

    pub(crate) fn credential(&self) -> &ShownCredential {
        &self.credential
    }

    /// Time at which the credential expires.
    pub(crate) fn expires(&self) -> Option<Timestamp> {
        self.expires
    }

    /// Whether the credential has not expired, and the rules have not changed, since they were judged.
    fn is_current(&self) -> bool {
        let is_expired = (self.expires).is_some_and(|at| at <= self.authority.clock.now());
        !is_expired && self.authority.rules.borrow().generation == self.generation
    }
}

/// The reason why a person is not logged in.
pub(crate) enum LoginRefusal {
    /// There is no `auth_file`.
    NotNeeded,
    /// Too many logins of the address have failed.
    Wait,
    /// The token does not count, or its principal lacks the right.
    Refused(Status),
}

/// The reason why a call has no principal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unknown {
    NoCredential,
    /// There is a certificate and no token, and no principal has a name of it.
    Stranger,
    Bad,
    /// The issuer of the token has no such key yet.
    AbsentKey,
    /// The token is right, and the certificate beside it is not of its principal.
    Mismatch,
    Expired(Timestamp),
    /// No keys of the issuer are in force. The credential may be right.
    NoKeys,
}

impl Unknown {
    fn failure(self) -> AuthFailure {
        match self {
            Self::NoCredential | Self::Stranger => AuthFailure::NoCredential,
            Self::Bad | Self::AbsentKey | Self::Mismatch => AuthFailure::Bad,
            Self::Expired(_) => AuthFailure::Expired,
            Self::NoKeys => AuthFailure::NoKeys,
        }
    }

    /// The reason as clients get it.
    fn reason(self) -> &'static str {
        match self {
            Self::NoCredential | Self::Stranger => Reason::NoCredential.as_str(),
            Self::Bad | Self::AbsentKey | Self::Mismatch => Reason::BadCredential.as_str(),
            Self::Expired(_) => Reason::CredentialExpired.as_str(),
            Self::NoKeys => Reason::Starting.as_str(),
        }
    }

    /// The answer. It contains `why` only if that names nothing but the client's own certificate.
    fn status(self, rpc: Rpc, why: Option<&str>) -> Status {
        match self {
            Self::NoCredential => status::no_credential(rpc.access),
            Self::Stranger => status::unknown_certificate(why.unwrap_or_default(), rpc.access),
            Self::Bad | Self::AbsentKey => status::bad_credential(rpc.access),
            Self::Mismatch => status::credentials_differ(rpc.access),
            Self::Expired(at) => status::credential_expired(&file::show_time(at), rpc.access),
            Self::NoKeys => status::no_keys(rpc.access),
        }
    }
}

impl Authority {
    /// Finds the tenant of the name of a log, by the rules in force at the time of the question.
    pub(crate) fn tenants(&self) -> TenantOf {
        match self {
            Self::Open => Box::new(|_| None),
            Self::File(authority) => {
                let rules = authority.rules.clone();
                Box::new(move |log| {
                    let rules = rules.borrow();
                    let mut tenants = rules.file.tenants.values();
                    let tenant = tenants.find(|tenant| log.starts_with(&tenant.prefix))?;
                    Some(tenant.name.as_str().to_owned())
                })
            }
        }
    }

    /// The caller of a call, from its head and the names in the certificate of its connection. `trail`: the origin of
    /// the call, for the audit log.
    ///
    /// # Errors
    /// UNAUTHENTICATED, or NOT_ALLOWED if the method needs a right to operate the server that the caller lacks.
    pub(crate) fn identify(
        &self,
        headers: &HeaderMap,
        names: Option<&Arc<CertNames>>,
        rpc: Rpc,
        trail: Trail,
    ) -> Result<Caller, Status> {
        let find = |authority: &Arc<FileAuthority>| {
            let value = authorization(headers)?;
            authority.find(value, names)
        };
        self.judge(find, rpc, trail)
    }

    /// The caller of a call, as [`Authority::identify`] finds it. `last`: the caller of the call before on this
    /// connection, whose names never change.
    ///
    /// # Errors
    /// As [`Authority::identify`].
    pub(crate) fn identify_next(
        &self,
        last: &mut LastCaller,
        headers: &HeaderMap,
        names: Option<&Arc<CertNames>>,
        rpc: Rpc,
        trail: Trail,
    ) -> Result<Caller, Status> {
        let find = |authority: &Arc<FileAuthority>| {
            let value = authorization(headers)?;
            if let Some(identity) = last.find(value) {
                return Ok(identity);
            }
            let generation = authority.rules.borrow().generation;
            let token = value.map(|value| {
                last.token(value, generation, || authority.read_token(bearer(value)?))
            });
            let identity = authority.identify(SentCredentials {
                token: token.transpose()?,
                names: names.cloned(),
            })?;
            last.keep(value, &identity);
            Ok(identity)
        };
        self.judge(find, rpc, trail)
    }

    /// The caller of a request from a browser: from its head, or else from its session.
    ///
    /// # Errors
    /// UNAUTHENTICATED or NOT_ALLOWED, as [`Authority::identify`] would give.
    pub(crate) fn identify_person(
        &self,
        headers: &HeaderMap,
        names: Option<&Arc<CertNames>>,
        (sessions, cookie): (&Sessions, &str),
        rpc: Rpc,
        trail: Trail,
    ) -> Result<Caller, Status> {
        if !headers.contains_key(AUTHORIZATION)
            && let Some(sent) = sessions.find(headers, cookie)
        {
            // The certificate of this connection counts, not that of the login.
            let names = names.cloned();
            let sent = SentCredentials { names, ..sent };
            return self.judge(|authority| authority.identify(sent), rpc, trail);
        }
        self.identify(headers, names, rpc, trail)
    }

    /// Opens a session for a person with a token, and returns the value of its cookie.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub(crate) fn log_in(
        &self,
        token: &str,
        names: Option<Arc<CertNames>>,
        (address, trail): (IpAddr, Trail),
        sessions: &Sessions,
    ) -> Result<String, LoginRefusal> {
        if let Self::Open = self {
            return Err(LoginRefusal::NotNeeded);
        }
        let find = |authority: &Arc<FileAuthority>| {
            let token = Some(authority.read_token(token.as_bytes())?);
            authority.identify(SentCredentials { token, names })
        };
        let rpc = methods::of_http(ServerRight::Console);
        match self.judge(find, rpc, trail) {
            Ok(caller) => {
                let opened = caller
                    .identity
                    .as_ref()
                    .and_then(|known| sessions.open(&known.principal.name, known.sent.clone()));
                let failed = || LoginRefusal::Refused(Status::internal("no random numbers"));
                opened.ok_or_else(failed)
            }
            // A right token is let in at once: others may share the address.
            Err(_) if sessions.has_to_wait(address) => Err(LoginRefusal::Wait),
            Err(status) => {
                sessions.failed(address);
                Err(LoginRefusal::Refused(status))
            }
        }
    }

    fn judge(
        &self,
        find: impl FnOnce(&Arc<FileAuthority>) -> Result<Arc<Identity>, RefusedCredential>,
        rpc: Rpc,
        mut trail: Trail,
    ) -> Result<Caller, Status> {
        let authority = match self {
            Self::File(authority) if rpc.need != Need::Nothing => authority,
            _ => {
                trail.begin(rpc, None);
                return Ok(Caller {
                    identity: None,
                    rpc,
                    trail,
                });
            }
        };
        let identity =
            find(authority).map_err(|refused| authority.refuse(&refused, rpc, &trail, None))?;
        trail.begin(rpc, Some(&identity));
        let caller = Caller {
            identity: Some(identity),
            rpc,
            trail,
        };
        if let Need::Server(right) = rpc.need {
            caller.check_server(right)?;
        }
        Ok(caller)
    }
}

/// A principal, and the time at which its credential expires.
type Judged<'r> = (&'r Arc<Principal>, Option<Timestamp>);

/// A credential that does not count.
#[derive(Clone)]
struct RefusedCredential {
    unknown: Unknown,
    shown: ShownCredential,
    /// For the audit log. A stranger must not learn the fault of a token.
    why: Option<CredentialFault>,
}

impl RefusedCredential {
    /// A credential whose form or signature is wrong.
    fn unverified(unknown: Unknown, why: impl Into<CredentialFault>) -> Self {
        Self {
            unknown,
            shown: ShownCredential::Unverified,
            why: Some(why.into()),
        }
    }

    fn malformed(why: &'static str) -> Self {
        Self::unverified(Unknown::Bad, why)
    }
}

impl FileAuthority {
    /// The caller with these credentials: the value of `authorization`, and the names in the certificate.
    fn find(
        self: &Arc<Self>,
        authorization: Option<&HeaderValue>,
        names: Option<&Arc<CertNames>>,
    ) -> Result<Arc<Identity>, RefusedCredential> {
        let token = authorization.map(|value| self.read_token(bearer(value)?));
        let token = token.transpose()?;
        self.identify(SentCredentials {
            token,
            names: names.cloned(),
        })
    }

    /// Reads a token. The signature of a JWT is checked here, and only here.
    fn read_token(&self, text: &[u8]) -> Result<SentToken, RefusedCredential> {
        if text.starts_with(token::START.as_bytes()) {
            let token = PresentedToken::parse(text);
            let token = token
                .ok_or_else(|| RefusedCredential::malformed("the token is cut off or mistyped"))?;
            return Ok(SentToken::Wald(token));
        }
        let rules = Arc::clone(&self.rules.borrow());
        if rules.file.issuers.is_empty() {
            let why = "the token is not of Wald, and auth_file has no [jwt.NAME]";
            return Err(RefusedCredential::malformed(why));
        }
        let presented = PresentedJwt::parse(text)
            .map_err(|why| RefusedCredential::unverified(Unknown::Bad, why))?;
        let is_fetched = presented.has_fetched_keys(&rules);
        let (fault, why) = match presented.verify(&rules) {
            Ok(jwt) => return Ok(SentToken::Jwt(Arc::new(jwt))),
            Err(refused) => refused,
        };
        // A file is read every 10 s, whatever callers send.
        if fault == SignatureFault::UnknownKey && is_fetched {
            self.keys.unknown_key();
        }
        let unknown = match fault {
            SignatureFault::NoKeys => Unknown::NoKeys,
            SignatureFault::Bad => Unknown::Bad,
            SignatureFault::UnknownKey => Unknown::AbsentKey,
        };
        Err(RefusedCredential::unverified(unknown, why))
    }

    fn identify(
        self: &Arc<Self>,
        sent: SentCredentials,
    ) -> Result<Arc<Identity>, RefusedCredential> {
        let rules = Arc::clone(&self.rules.borrow());
        let credential = sent.shown();
        match self.principal_of(&sent, &rules) {
            Ok((principal, expires)) => Ok(Arc::new(Identity {
                authority: Arc::clone(self),
                principal: Arc::clone(principal),
                credential,
                expires,
                sent,
                generation: rules.generation,
            })),
            Err((unknown, why)) => Err(RefusedCredential {
                unknown,
                shown: credential,
                why,
            }),
        }
    }

    /// The principal of the credentials, and the time at which they expire.
    fn principal_of<'r>(
        &self,
        sent: &SentCredentials,
        rules: &'r Rules,
    ) -> Result<Judged<'r>, (Unknown, Option<CredentialFault>)> {
        let of_certificate =
            (sent.names.as_deref()).and_then(|names| rules.file.of_certificate(names));
        let now = self.clock.now();
        let known = match &sent.token {
            None => {
                let unknown = || match &sent.names {
                    Some(names) => (Unknown::Stranger, Some(names.to_string().into())),
                    None => (Unknown::NoCredential, None),
                };
                return of_certificate
                    .map(|known| (known, None))
                    .ok_or_else(unknown);
            }
            Some(SentToken::Wald(token)) => {
                let known = rules.file.of_token(token, now);
                known
                    .map(|known| (&known.principal, known.expires))
                    .map_err(|fault| (fault, None))
            }
            Some(SentToken::Jwt(jwt)) => jwt
                .judge(rules, now)
                .map_err(|(fault, why)| (fault, Some(why))),
        };
        let (principal, expires) = known.map_err(|(fault, why)| match fault {
            TokenFault::Bad => (Unknown::Bad, why),
            TokenFault::Expired(at) => {
                self.clock.report_lead(at);
                (Unknown::Expired(at), why)
            }
            TokenFault::NoKeys => (Unknown::NoKeys, why),
        })?;
        // With a certificate the token is worth nothing to a thief who has another certificate.
        let agrees = sent.names.is_none()
            || of_certificate.is_some_and(|other| other.is_proxy || Arc::ptr_eq(other, principal));
        match agrees {
            true => Ok((principal, Some(expires))),
            false => {
                let names = sent.names.as_deref().map(|names| names.to_string().into());
                Err((Unknown::Mismatch, names))
            }
        }
    }

    /// The answer to a call whose credential does not count. `identity`: the caller for whom it counted before.
    fn refuse(
        &self,
        refused: &RefusedCredential,
        rpc: Rpc,
        trail: &Trail,
        identity: Option<&Identity>,
    ) -> Status {
        let RefusedCredential {
            unknown,
            shown,
            why,
        } = refused;
        self.metrics.failed(unknown.failure());
        trail.unauthenticated(rpc, shown, (unknown.reason(), why.as_deref()), identity);
        unknown.status(rpc, why.as_deref())
    }
}

/// The value of `authorization`. `None`: there is none.
fn authorization(headers: &HeaderMap) -> Result<Option<&HeaderValue>, RefusedCredential> {
    let mut all = headers.get_all(AUTHORIZATION).iter();
    let value = all.next();
    match all.next() {
        None => Ok(value),
        Some(_) => Err(RefusedCredential::malformed(
            "the call has several values of authorization",
        )),
    }
}

/// The token in a value of `authorization`.
fn bearer(value: &HeaderValue) -> Result<&[u8], RefusedCredential> {
    let scheme = value.as_bytes().split_first_chunk::<7>();
    let token = scheme.filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer "));
    let token = token.map(|(_, token)| token);
    token.ok_or_else(|| RefusedCredential::malformed("authorization is not `Bearer TOKEN`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lead_of_the_clock_is_reported_once_where_it_alone_refuses() {
        const SECOND: i64 = 1_000_000;
        const DAY: i64 = 86_400 * SECOND;
        let clock = ExpiryClock::default();
        let now = clock.now();
        let after = |micros| now.saturating_add_micros(micros);
        clock.latest.fetch_add(365 * DAY, Ordering::Relaxed);
        assert_eq!(clock.now(), after(365 * DAY));
        // Expired by both clocks, or a second ago by one.
        assert_eq!(clock.lead(after(-DAY), now), None);
        assert_eq!(clock.lead(after(SECOND), now), None);
        let year = Duration::from_secs(365 * 86_400);
        assert_eq!(clock.lead(after(30 * DAY), now), Some(year));
        assert_eq!(clock.lead(after(30 * DAY), now), None);
    }
}

//! Logins of people at the console: a cookie stands for the token that was given once.
//!
//! A request with the cookie is judged by the token as if it carried the token, so a session ends with its token.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aws_lc_rs::rand;
use http::HeaderMap;
use http::header::{AUTHORIZATION, COOKIE};
use parking_lot::Mutex;

use super::SentCredentials;

/// Longest life of a session.
pub(crate) const SESSION_LIFE: Duration = Duration::from_secs(8 * 3600);
/// Pause between two looks whether a session is open.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Maximum number of sessions. One more ends the session that would end first.
const MOST_SESSIONS: usize = 1_000;
/// Maximum number of sessions of one principal. One more ends its own oldest: one person must not log all others out.
const MOST_OF_PRINCIPAL: usize = 10;
/// Failed logins of one address within [`FAILURES_SPAN`] after which it has to wait.
const MOST_FAILURES: u32 = 10;
const FAILURES_SPAN: Duration = Duration::from_secs(60);
/// Maximum number of addresses whose failures are remembered.
const MOST_ADDRESSES: usize = 1_024;

/// Open sessions, and failed logins.
#[derive(Default)]
pub(crate) struct Sessions {
    open: Mutex<HashMap<String, LoginSession>>,
    failures: Mutex<HashMap<IpAddr, FailedLogins>>,
}

struct LoginSession {
    /// Name of the principal that logged in.
    principal: String,
    sent: SentCredentials,
    until: Instant,
}

#[derive(Clone, Copy)]
struct FailedLogins {
    count: u32,
    since: Instant,
}

impl Sessions {
    /// Opens a session of a principal, and returns the value of its cookie. `None` if the system has no random numbers.
    pub(super) fn open(&self, principal: &str, sent: SentCredentials) -> Option<String> {
        let mut bytes = [0; 32];
        rand::fill(&mut bytes).ok()?;
        let value: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let now = Instant::now();
        let mut open = self.open.lock();
        open.retain(|_, session| session.until > now);
        let own = |session: &LoginSession| session.principal == principal;
        let has_most = open.values().filter(|session| own(session)).count() >= MOST_OF_PRINCIPAL;
        if has_most || open.len() >= MOST_SESSIONS {
            let ended = open.iter().filter(|(_, session)| !has_most || own(session));
            let first = ended.min_by_key(|(_, session)| session.until);
            if let Some(first) = first.map(|(value, _)| value.clone()) {
                open.remove(&first);
            }
        }
        let session = LoginSession {
            principal: principal.to_owned(),
            sent,
            until: now + SESSION_LIFE,
        };
        open.insert(value.clone(), session);
        Some(value)
    }

    /// The credentials of the session that the request names.
    pub(super) fn find(&self, headers: &HeaderMap, cookie: &str) -> Option<SentCredentials> {
        let value = cookie_value(headers, cookie)?;
        let open = self.open.lock();
        let session = open.get(value)?;
        (session.until > Instant::now()).then(|| session.sent.clone())
    }

    /// Ends the session that the request names.
    pub(crate) fn close(&self, headers: &HeaderMap, cookie: &str) {
        if let Some(value) = cookie_value(headers, cookie) {
            self.open.lock().remove(value);
        }
    }

    /// Whether the address has failed so often that it has to wait.
    pub(super) fn has_to_wait(&self, address: IpAddr) -> bool {
        let failures = self.failures.lock();
        failures.get(&address).is_some_and(|failed| {
            failed.count >= MOST_FAILURES && failed.since.elapsed() < FAILURES_SPAN
        })
    }

    /// Counts a failed login.
    pub(super) fn failed(&self, address: IpAddr) {
        let mut failures = self.failures.lock();
        failures.retain(|_, failed| failed.since.elapsed() < FAILURES_SPAN);
        if failures.len() >= MOST_ADDRESSES && !failures.contains_key(&address) {
            // Many addresses fail at once: the oldest is forgotten.
            let oldest = failures.iter().min_by_key(|(_, failed)| failed.since);
            if let Some(oldest) = oldest.map(|(address, _)| *address) {
                failures.remove(&oldest);
            }
        }
        let now = FailedLogins {
            count: 0,
            since: Instant::now(),
        };
        failures.entry(address).or_insert(now).count += 1;
    }
}

/// The session that a request came with.
#[derive(Clone)]
pub(crate) struct CookieSession {
    sessions: Arc<Sessions>,
    value: String,
}

impl CookieSession {
    /// The open session that the request names, if it carries no token of its own. A browser also sends cookies of other
    /// daemons on the same host: they are no session here.
    pub(crate) fn of(sessions: &Arc<Sessions>, headers: &HeaderMap, cookie: &str) -> Option<Self> {
        if headers.contains_key(AUTHORIZATION) {
            return None;
        }
        let value = cookie_value(headers, cookie)?;
        (sessions.open.lock().contains_key(value)).then(|| Self {
            value: value.to_owned(),
            sessions: Arc::clone(sessions),
        })
    }

    /// Resolves at most a second after the end of the session.
    pub(crate) async fn ended(&self) {
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        loop {
            ticks.tick().await;
            let open = self.sessions.open.lock();
            let session = open.get(&self.value);
            if session.is_none_or(|session| session.until <= Instant::now()) {
                return;
            }
        }
    }
}

/// The value of a cookie in the request.
fn cookie_value<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let all = headers.get_all(COOKIE).iter();
    let pairs = all.filter_map(|value| value.to_str().ok());
    let mut pairs = pairs.flat_map(|value| value.split(';'));
    pairs.find_map(|pair| pair.trim().strip_prefix(name)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent() -> SentCredentials {
        SentCredentials {
            token: None,
            names: None,
        }
    }

    fn with_cookie(text: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(COOKIE, text.parse().unwrap());
        headers
    }

    #[test]
    fn session_is_found_by_the_whole_value_of_its_cookie() {
        let sessions = Sessions::default();
        let value = sessions.open("a", sent()).unwrap();
        let found = |text: &str| sessions.find(&with_cookie(text), "wald").is_some();
        assert!(found(&format!("wald={value}")));
        assert!(found(&format!("a=b; wald={value}; c=d")));
        assert!(!found(&format!("wald={}", &value[1..])));
        assert!(!found(&format!("xwald={value}")));
        assert!(!found("wald="));
        sessions.close(&with_cookie(&format!("wald={value}")), "wald");
        assert!(!found(&format!("wald={value}")));
    }

    #[test]
    fn cookie_of_another_daemon_is_no_session() {
        let sessions = Arc::new(Sessions::default());
        let value = sessions.open("a", sent()).unwrap();
        let of = |text: &str| CookieSession::of(&sessions, &with_cookie(text), "wald").is_some();
        assert!(of(&format!("wald={value}")));
        assert!(!of("wald=0123456789abcdef"));
    }

    #[test]
    fn sessions_and_addresses_are_bounded() {
        let sessions = Sessions::default();
        let first = sessions.open("first", sent()).unwrap();
        for number in 0..MOST_SESSIONS {
            sessions.open(&number.to_string(), sent()).unwrap();
        }
        assert_eq!(sessions.open.lock().len(), MOST_SESSIONS);
        let headers = with_cookie(&format!("wald={first}"));
        assert!(sessions.find(&headers, "wald").is_none());
        let address = |number: u32| IpAddr::from(number.to_be_bytes());
        for number in 0..5_000 {
            sessions.failed(address(number));
        }
        assert_eq!(sessions.failures.lock().len(), MOST_ADDRESSES);
    }

    #[test]
    fn principal_that_logs_in_again_and_again_ends_only_its_own_sessions() {
        let sessions = Sessions::default();
        let other = sessions.open("other", sent()).unwrap();
        let own: Vec<_> = (0..=MOST_SESSIONS)
            .map(|_| sessions.open("own", sent()).unwrap())
            .collect();
        let is_open = |value: &String| {
            let headers = with_cookie(&format!("wald={value}"));
            sessions.find(&headers, "wald").is_some()
        };
        assert!(is_open(&other));
        let open = own.iter().filter(|value| is_open(value)).count();
        assert_eq!(open, MOST_OF_PRINCIPAL);
        assert!(is_open(&own[MOST_SESSIONS]));
    }

    #[test]
    fn address_that_fails_ten_times_has_to_wait_and_others_do_not() {
        let sessions = Sessions::default();
        let (bad, good) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        for _ in 0..MOST_FAILURES {
            assert!(!sessions.has_to_wait(bad));
            sessions.failed(bad);
        }
        assert!(sessions.has_to_wait(bad) && !sessions.has_to_wait(good));
    }
}

use futures_util::FutureExt as _;

use super::*;
use crate::auth::rules::FileRules;

fn state(now: Instant) -> FetchState {
    let source = KeyUrl {
        url: "https://issuer/keys".parse().unwrap(),
        ca: None,
        token: None,
    };
    FetchState::new("https://issuer", &source, now)
}

#[test]
fn issuer_is_asked_every_five_minutes_and_soon_after_a_request() {
    let now = Instant::now();
    let mut state = state(now);
    assert_eq!(state.due(now), now);
    state.begin(now);
    assert_eq!(state.due(now), now + REFRESH);
    state.wanted = true;
    assert_eq!(state.due(now), now + LEAST_PAUSE);
    let later = now + LEAST_PAUSE;
    state.begin(later);
    assert_eq!(state.due(later), later + REFRESH);
}

#[test]
fn issuer_that_fails_is_asked_once_a_minute() {
    let now = Instant::now();
    let mut state = state(now);
    state.begin(now);
    state.fault = Some(Fault::new("jwks_url", Path::new("x"), "away"));
    assert_eq!(state.due(now), now + LEAST_PAUSE);
}

#[test]
fn operator_does_not_wait() {
    let now = Instant::now();
    let mut state = state(now);
    state.begin(now);
    state.at_once = true;
    assert_eq!(state.due(now), now);
}

const ISSUER: &str = "https://issuer";

/// An `auth_file` with an issuer.
fn file(source: &str) -> Arc<FileRules> {
    let text = format!(
        "[jwt.k8s]\nissuer = \"{ISSUER}\"\naudience = \"wald\"\nalgorithms = [\"ES256\"]\n{source}\n"
    );
    Arc::new(FileRules::of(&text))
}

/// A fetcher whose issuer has a key.
fn fetcher(now: Instant) -> KeyFetcher {
    let rules = Arc::new(Rules {
        file: file("jwks_url = \"https://localhost:1/keys\""),
        ..Rules::default()
    });
    let metrics = crate::metrics::Metrics::new().unwrap();
    let requests = Arc::new(KeyRequests::default());
    let mut fetcher = KeyFetcher::new(watch::channel(rules).0, requests, &metrics.reloads);
    fetcher.take_issuers(now);
    fetcher.fetched("k8s", Ok(Bytes::from_static(KEYS)));
    fetcher
}

/// The point of the example in RFC 7517, A.1.
const KEYS: &[u8] = br#"{"keys":[{"kty":"EC","crv":"P-256","kid":"1",
    "x":"MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4","y":"4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM"}]}"#;

#[test]
fn keys_stay_for_a_day_without_the_issuer_and_no_longer() {
    let mut fetcher = fetcher(Instant::now());
    let keys = |fetcher: &KeyFetcher| Arc::clone(&fetcher.rules.borrow().keys[ISSUER]);
    let first = keys(&fetcher);
    assert_ne!(*first, KeySet::default());
    let left = fetcher.issuers["k8s"]
        .kept_until
        .saturating_duration_since(Instant::now());
    assert!(left > KEPT - Duration::from_secs(60), "{left:?}");
    fetcher.fetched("k8s", Err("away".to_owned()));
    assert_eq!(keys(&fetcher), first);
    // A day later.
    let generation = fetcher.rules.borrow().generation;
    fetcher.issuers.get_mut("k8s").unwrap().kept_until = Instant::now();
    fetcher.fetched("k8s", Err("away".to_owned()));
    assert_eq!(*keys(&fetcher), KeySet::default());
    assert!(
        fetcher.rules.borrow().generation > generation,
        "streams are judged again"
    );
    fetcher.fetched("k8s", Ok(Bytes::from_static(KEYS)));
    assert_eq!(keys(&fetcher), first);
}

#[test]
fn keys_that_did_not_change_are_no_change_of_the_rules() {
    let mut fetcher = fetcher(Instant::now());
    let generation = fetcher.rules.borrow().generation;
    fetcher.fetched("k8s", Ok(Bytes::from_static(KEYS)));
    assert_eq!(fetcher.rules.borrow().generation, generation);
}

#[test]
fn keys_of_an_earlier_source_do_not_come_back() {
    for source in ["jwks_file = \"keys\"", "jwks_url = \"https://other/keys\""] {
        let mut fetcher = fetcher(Instant::now());
        // The source changes while a fetch is under way.
        fetcher.rules.send_modify(|rules| {
            *rules = Arc::new(Rules {
                file: file(source),
                ..Rules::default()
            });
        });
        fetcher.fetched("k8s", Ok(Bytes::from_static(KEYS)));
        assert!(fetcher.rules.borrow().keys.is_empty(), "{source}");
    }
}

#[tokio::test]
async fn unknown_keys_wake_the_task_once_between_two_fetches() {
    let mut fetcher = fetcher(Instant::now());
    let requests = Arc::clone(&fetcher.requests);
    let wakes = || {
        requests.unknown_key();
        requests.notify.notified().now_or_never().is_some()
    };
    assert!(wakes());
    assert!(!wakes());
    // Nobody answers at that port.
    fetcher.fetch_due().await;
    assert!(wakes());
}

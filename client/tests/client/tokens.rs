//! Tokens: every call carries one, and a refused one is read again from its file.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::memory::{Fault, Memory, refused_token};
use wald_client::{Client, ClientBuilder, ErrorKind, Lsn, Reason, RetryPolicy, ScanEvent};

const BAD: &str = "BAD_CREDENTIAL";
const EXPIRED: &str = "CREDENTIAL_EXPIRED";

/// A file with a token, which goes with the test.
struct TokenFile(PathBuf);

impl TokenFile {
    fn new(text: &str) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("wald-tokens-{}-{number}", std::process::id());
        let file = Self(std::env::temp_dir().join(name));
        file.write(text);
        file
    }

    fn write(&self, text: &str) {
        std::fs::write(&self.0, text).unwrap();
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TokenFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

async fn start(token: &'static str, reason: &'static str) -> (Arc<Memory>, ClientBuilder) {
    let (memory, endpoint) = Memory::start().await;
    *memory.door.lock().unwrap() = Some((token, reason));
    let builder = Client::builder(endpoint).retry(RetryPolicy {
        first_pause: Duration::from_millis(1),
        max_pause: Duration::from_millis(5),
        ..RetryPolicy::default()
    });
    (memory, builder)
}

fn calls(memory: &Memory) -> usize {
    memory.tokens.lock().unwrap().len()
}

#[tokio::test]
async fn every_call_carries_the_token() {
    let (memory, builder) = start("first", BAD).await;
    let client = builder.token(" first\n").connect().await.unwrap();
    client.append("log", "x").await.unwrap();
    let appender = client.appender().open();
    appender.append("log", "y").await.unwrap().await.unwrap();
    appender.close().await.unwrap();
    client.server_info().await.unwrap();
    assert!(client.scan("log").open().next().await.unwrap().is_ok());
    let tokens = memory.tokens.lock().unwrap();
    assert_eq!(*tokens, ["Bearer first"; 4]);
}

#[tokio::test]
async fn refused_token_is_read_again_and_the_call_repeated() {
    for reason in [BAD, EXPIRED] {
        let file = TokenFile::new("first");
        let (memory, builder) = start("first", reason).await;
        let client = builder.token_file(file.path()).connect().await.unwrap();
        client.append("log", "x").await.unwrap();
        *memory.door.lock().unwrap() = Some(("second", reason));
        file.write("second\n");
        // A plain append: nothing was applied, so that it is repeated.
        client.append("log", "y").await.unwrap();
        assert_eq!(calls(&memory), 2);
        assert_eq!(memory.payloads("log"), ["x", "y"]);
    }
}

#[tokio::test]
async fn refused_token_that_stays_is_not_sent_again() {
    for (reason, expected) in [
        (BAD, Reason::BadCredential),
        (EXPIRED, Reason::CredentialExpired),
    ] {
        let file = TokenFile::new("k7Qp2mXa");
        let (memory, builder) = start("second", reason).await;
        for builder in [
            builder.clone().token_file(file.path()),
            builder.token("k7Qp2mXa"),
        ] {
            let client = builder.connect().await.unwrap();
            let before = calls(&memory);
            let error = client.append("log", "x").await.unwrap_err();
            assert_eq!(error.reason(), Some(expected));
            assert_eq!(calls(&memory), before + 1);
            let shown = format!("{error} {error:?} {client:?}");
            assert!(!shown.contains("k7Qp2mXa"), "{shown}");
        }
    }
}

#[tokio::test]
async fn producer_goes_on_across_an_expired_token() {
    let file = TokenFile::new("first");
    let (memory, builder) = start("first", EXPIRED).await;
    let client = builder.token_file(file.path()).connect().await.unwrap();
    let producer = client.producer("log").open().await.unwrap();
    producer.append("0").await.unwrap().await.unwrap();
    *memory.door.lock().unwrap() = Some(("second", EXPIRED));
    memory.script([Fault::Fail(refused_token(EXPIRED))]);
    let before = calls(&memory);
    let pending = producer.append("1").await.unwrap();
    // The file comes later than the end of the token.
    while calls(&memory) < before + 2 {
        tokio::task::yield_now().await;
    }
    file.write("second");
    assert_eq!(pending.await.unwrap().lsn, Lsn::new(1));
    producer.close().await.unwrap();
    assert_eq!(memory.payloads("log"), ["0", "1"]);
}

#[tokio::test]
async fn producer_with_a_fixed_token_ends_when_it_expires() {
    let (memory, builder) = start("first", EXPIRED).await;
    let client = builder.token("first").connect().await.unwrap();
    let producer = client.producer("log").open().await.unwrap();
    *memory.door.lock().unwrap() = Some(("second", EXPIRED));
    let error = producer.append("x").await.unwrap().await.unwrap_err();
    assert_eq!(error.reason(), Some(Reason::CredentialExpired));
}

#[tokio::test]
async fn follower_goes_on_with_the_token_of_the_file() {
    let file = TokenFile::new("first");
    let (memory, endpoint) = Memory::start_behind_proxy().await;
    *memory.door.lock().unwrap() = Some(("first", EXPIRED));
    let client = Client::builder(endpoint).token_file(file.path());
    let client = client.connect().await.unwrap();
    client.append("log", "x").await.unwrap();
    let mut follower = client.follow("log").open();
    while !matches!(follower.next().await, Some(Ok(ScanEvent::Batch(_)))) {}
    *memory.door.lock().unwrap() = Some(("second", EXPIRED));
    file.write("second");
    memory.cut();
    loop {
        match follower.next().await.unwrap().unwrap() {
            ScanEvent::Interrupted(_) => break,
            _ => continue,
        }
    }
    // Its connection may be cut while it is on its way.
    let another = client.append("log", "z").expected_lsn(1).await.unwrap();
    assert_eq!(another.lsn, Lsn::new(1));
}

#[tokio::test]
async fn token_crosses_plaintext_only_to_loopback() {
    for endpoint in ["wald.internal", "http://10.0.0.1", "127.0.0.1.nip.io"] {
        let builder = Client::builder(endpoint).token("k7Qp2mXa");
        let error = builder.clone().connect_lazy().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Token { .. }), "{error}");
        assert!(!format!("{error:?} {builder:?}").contains("k7Qp"));
        builder.allow_insecure_token().connect_lazy().unwrap();
    }
    for endpoint in ["localhost", "[::1]:80", "https://wald.internal"] {
        let client = Client::builder(endpoint).token("k7Qp2mXa").connect_lazy();
        assert!(!format!("{:?}", client.unwrap()).contains("k7Qp"));
    }
}

#[tokio::test]
async fn interceptor_and_a_channel_of_ones_own_see_every_call() {
    let (memory, builder) = start("first", BAD).await;
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&seen);
    let builder = builder.token("first").interceptor(move |mut request| {
        counted.fetch_add(1, Ordering::Relaxed);
        request
            .metadata_mut()
            .insert("x-team", "a".parse().unwrap());
        Ok(request)
    });
    let client = builder.clone().connect().await.unwrap();
    client.append("log", "x").await.unwrap();
    client.server_info().await.unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), 2);
    let endpoint = tonic::transport::Endpoint::from_shared(client.endpoint().to_owned());
    let channel = endpoint.unwrap().connect_lazy();
    let error = builder.clone().over(channel.clone()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Token { .. }), "{error}");
    let own = builder.allow_insecure_token().over(channel).unwrap();
    own.append("log", "y").await.unwrap();
    assert_eq!((seen.load(Ordering::Relaxed), calls(&memory)), (3, 3));
}

//! Servers that take a connection and never answer: each call of the client ends by itself.
//!
//! A killed server cannot answer, and another process may have its port.

use std::fmt::Debug;
use std::future::{Future, pending};
use std::pin::Pin;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::service::Routes;
use wald_client::{Client, CursorCommit, Error, Lsn, RetryPolicy, SyncTarget, Visibility};

/// Bound of each call, in each of its forms.
const BOUND: Duration = Duration::from_millis(200);

/// Time in which each call must have ended, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(20);

type Call = Pin<Box<dyn Future<Output = Option<&'static str>>>>;

/// Resolves with the name of a call that does not end. The call must fail.
fn must_fail<T: Debug + 'static>(
    name: &'static str,
    call: impl Future<Output = Result<T, Error>> + 'static,
) -> Call {
    Box::pin(async move {
        let ended = tokio::time::timeout(PATIENCE, call).await.ok();
        assert!(!matches!(ended, Some(Ok(_))), "{name}: {ended:?}");
        ended.is_none().then_some(name)
    })
}

/// A client with short bounds, apart from the keepalive.
fn client(listener: &TcpListener, keepalive: Duration) -> Client {
    Client::builder(format!("http://{}", listener.local_addr().unwrap()))
        .timeout(BOUND)
        .silence_timeout(BOUND)
        .keepalive(keepalive, keepalive)
        .retry(RetryPolicy {
            max_attempts: 2,
            first_pause: Duration::from_millis(1),
            ..RetryPolicy::default()
        })
        .connect_lazy()
        .unwrap()
}

macro_rules! calls {
    ($client:expr, $($name:ident($($argument:expr),*)),* $(,)?) => {
        vec![$({
            let client = $client.clone();
            must_fail(stringify!($name), async move { client.$name($($argument),*).await })
        }),*]
    };
}

/// Each call that has a bound of its own. Returns the names of those that do not end.
async fn endless(client: &Client) -> Vec<&'static str> {
    let mut calls = calls!(
        client,
        append("log", "x"),
        read("log"),
        get_tail("log", Visibility::Durable, None),
        survived_position("log", 1, None),
        trim("log", Lsn::new(1), None),
        fence("log", None, None),
        sync(SyncTarget::Device, None),
        create_log("log", Default::default()),
        get_log("log"),
        list_logs("", 0, None),
        update_log("log", Default::default(), ["sync_mode"]),
        delete_log("log", None),
        list_producers("log", 0, None, None),
        forget_producer("log", "p", None),
        commit_cursor(CursorCommit::new("log", "c", 1)),
        get_cursor("log", "c", None),
        list_cursors("log", 0, None, None),
        delete_cursor("log", "c", None),
        server_info(),
        list_segments(0, None),
        drain(None),
        health(""),
        verify(None, 0),
    );
    let own = client.clone();
    calls.push(must_fail("append_batch", async move {
        own.append_batch().log("log", ["x"]).await
    }));
    for (name, scan) in [
        ("scan", client.scan("log")),
        ("follow", client.follow("log")),
        ("follow from now", client.follow("log").from_now()),
    ] {
        calls.push(must_fail(name, async move {
            let mut events = scan.open();
            // Interruptions come before the error.
            while let Some(event) = events.next().await {
                event?;
            }
            Ok(())
        }));
    }
    let own = client.clone();
    calls.push(must_fail("appender", async move {
        let appender = own.appender().ack_timeout(BOUND).open();
        let _ack = appender.append("log", "x").await?;
        appender.close().await
    }));
    let own = client.clone();
    calls.push(must_fail("producer that is opened", async move {
        own.producer("log").retry_for(BOUND).open().await
    }));
    let own = client.clone();
    calls.push(must_fail("producer with a known log", async move {
        let producer = own.producer("log").id("p", 0).log_id(1).retry_for(BOUND);
        let producer = producer.open().await?;
        let _ack = producer.append("x").await?;
        producer.close().await
    }));
    join_all(calls).await.into_iter().flatten().collect()
}

#[tokio::test]
async fn each_call_to_a_server_that_says_nothing_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    // The deadlines of the calls alone end them.
    let own = client(&listener, Duration::from_secs(3600));
    assert_eq!(endless(&own).await, [""; 0]);
    // A backup has no deadline. The keepalive ends it.
    let own = client(&listener, BOUND);
    let backup = must_fail("backup", async move { own.backup(Vec::new(), 0).await });
    assert_eq!(backup.await, None);
}

#[tokio::test]
async fn each_call_to_a_server_that_only_answers_pings_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let own = client(&listener, BOUND);
    let routes = Routes::default().into_axum_router();
    let routes = routes.fallback(|| async { pending::<()>().await });
    let server = tonic::transport::Server::builder().add_routes(routes.into());
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    assert_eq!(endless(&own).await, [""; 0]);
}

//! Credentials that count, and those that do not.

use std::time::{Duration, Instant};

use prost::Message as _;
use tonic::Code;
use wald_proto::v1;

use super::principals::{AuthFile, COMPANY, ops, wal};
use super::raw::{call, request};
use crate::support::{Told, append};

#[tokio::test]
async fn caller_learns_its_principal_its_rights_and_the_expiry() {
    let file = AuthFile::new(COMPANY);
    let token = file.token("writer");
    let daemon = file.start(&[]);
    let mut client = ops(&daemon, &token).await;
    let answer = client.get_caller(v1::GetCallerRequest {}).await.unwrap();
    let caller = answer.into_inner();
    assert_eq!(
        (caller.principal.as_str(), caller.tenant.as_str()),
        ("writer", "payments")
    );
    assert_eq!(caller.credential(), v1::CredentialKind::Token);
    assert_eq!(caller.token_id, token[6..14]);
    assert!(caller.expire_time.is_some());
    assert_eq!(
        caller.grants,
        [v1::Grant {
            rights: ["append", "create", "cursor"].map(str::to_owned).to_vec(),
            logs: Some(v1::grant::Logs::Prefix("payments/billing/".to_owned())),
        }]
    );
    assert_eq!(caller.limits, Some(v1::TenantLimits::default()));
}

#[tokio::test]
async fn caller_learns_the_limits_of_its_tenant() {
    let file = AuthFile::new(
        "[tenant.a]\nprefix = \"a/\"\n\
         limits = { append_bytes_per_second = \"20MiB\", logs = 10_000, stored_bytes = 4096 }\n\
         [principal.a]\ntenant = \"a\"\nallow = []",
    );
    let token = file.token("a");
    let daemon = file.start(&[]);
    let mut client = ops(&daemon, &token).await;
    let answer = client.get_caller(v1::GetCallerRequest {}).await.unwrap();
    let expected = v1::TenantLimits {
        append_bytes_per_second: 20 << 20,
        logs: 10_000,
        stored_bytes: 4096,
        ..v1::TenantLimits::default()
    };
    assert_eq!(answer.into_inner().limits, Some(expected));
}

#[tokio::test]
async fn caller_of_a_server_without_auth_file_has_no_name() {
    let daemon = crate::support::Daemon::start(&[]);
    let answer = daemon.ops().await.get_caller(v1::GetCallerRequest {}).await;
    let caller = answer.unwrap().into_inner();
    assert_eq!(caller, v1::GetCallerResponse::default());
}

#[tokio::test]
async fn each_malformed_credential_is_refused_and_the_connection_goes_on() {
    let file = AuthFile::new(COMPANY);
    let token = file.token("root");
    let mut mistyped = token.clone();
    let last = mistyped.pop().unwrap();
    mistyped.push(if last == '0' { '1' } else { '0' });
    let daemon = file.start(&[]);
    let channel = daemon.channel().await;
    let path = wald_proto::Method::Append.path();
    let message = || request(wald_proto::Method::Append, "a");
    let absent = call(&channel, path, None, message()).await.unwrap_err();
    assert_eq!(Told::of(&absent).reason, "NO_CREDENTIAL");
    let mut texts = Vec::new();
    for value in [
        "".to_owned(),
        "Bearer".to_owned(),
        "Bearer ".to_owned(),
        "Basic cm9vdDpyb290".to_owned(),
        format!("Basic {token}"),
        token.clone(),
        format!("Bearer  {token}"),
        format!("Bearer {token} "),
        format!("Bearer {mistyped}"),
        format!("Bearer {}", "0".repeat(8_000)),
    ] {
        let refused = call(&channel, path, Some(&value), message()).await;
        let refused = refused.expect_err(&value);
        let told = Told::of(&refused);
        assert_eq!(told.code, Code::Unauthenticated, "{value}");
        assert_eq!(told.reason, "BAD_CREDENTIAL", "{value}");
        assert_eq!(
            (told.fact("outcome"), told.fact("retry")),
            ("NOT_APPLIED", "NEVER")
        );
        texts.push((refused.message().to_owned(), told.facts));
    }
    // Nothing tells unknown from wrong.
    texts.dedup();
    assert_eq!(texts.len(), 1);
    for good in [format!("Bearer {token}"), format!("bearer {token}")] {
        call(&channel, path, Some(&good), message()).await.unwrap();
    }
    assert_eq!(daemon.start["logs"], 0);
}

/// A connection remembers its last caller.
#[tokio::test]
async fn callers_of_one_connection_are_told_apart() {
    let file = AuthFile::new(COMPANY);
    let tokens = ["root", "reader", "writer"].map(|name| (name, file.token(name)));
    let daemon = file.start(&[]);
    let channel = daemon.channel().await;
    let path = wald_proto::Method::GetCaller.path();
    let caller = async |authorization: Option<String>| {
        let answer = call(&channel, path, authorization.as_deref(), Vec::new()).await;
        answer.map(|messages| {
            v1::GetCallerResponse::decode(&*messages[0])
                .unwrap()
                .principal
        })
    };
    for _ in 0..2 {
        for (name, token) in &tokens {
            for _ in 0..2 {
                let known = caller(Some(format!("Bearer {token}"))).await;
                assert_eq!(known.unwrap(), *name);
            }
            // Neither the absence of a token nor a part of it is the caller before.
            let none = caller(None).await.unwrap_err();
            assert_eq!(Told::of(&none).reason, "NO_CREDENTIAL");
            for bad in [&token[..56], "", &format!("{token}0")] {
                let refused = caller(Some(format!("Bearer {bad}"))).await.unwrap_err();
                assert_eq!(Told::of(&refused).reason, "BAD_CREDENTIAL");
            }
        }
    }
}

#[tokio::test]
async fn authorization_given_twice_is_refused() {
    let file = AuthFile::new(COMPANY);
    let token = file.token("root");
    let daemon = file.start(&[]);
    let mut client = daemon.wal().await;
    let mut twice = tonic::Request::new(append("a", "x"));
    for _ in 0..2 {
        let value = format!("Bearer {token}").parse().unwrap();
        twice.metadata_mut().append("authorization", value);
    }
    let refused = client.append(twice).await.unwrap_err();
    assert_eq!(Told::of(&refused).reason, "BAD_CREDENTIAL");
}

#[tokio::test]
async fn unknown_wrong_and_revoked_tokens_get_the_same_answer() {
    let file = AuthFile::new(COMPANY);
    let (kept, revoked) = (file.token("root"), file.token("root"));
    let elsewhere = AuthFile::new(COMPANY);
    let unknown = elsewhere.token("root");
    let before = file.text();
    let removed = file.command(&["revoke", &revoked[6..14]]);
    assert!(removed.status.success(), "{removed:?}");
    assert_ne!(file.text(), before);
    let daemon = file.start(&[]);
    let mut answers = Vec::new();
    for token in [&revoked, &unknown] {
        let refused = wal(&daemon, token).await.append(append("a", "x")).await;
        let refused = refused.unwrap_err();
        let told = Told::of(&refused);
        assert_eq!(told.reason, "BAD_CREDENTIAL");
        answers.push((refused.message().to_owned(), told.facts));
    }
    assert_eq!(answers[0], answers[1]);
    wal(&daemon, &kept)
        .await
        .append(append("a", "x"))
        .await
        .unwrap();
    assert_eq!(
        daemon.metric_as("wald_auth_failures_total{reason=\"bad\"}", &kept),
        2.0
    );
}

#[tokio::test]
async fn expired_token_is_told_so_and_its_wrong_secret_is_not() {
    let file = AuthFile::new(COMPANY);
    let token = file.token("root");
    let kept = file.token("root");
    let text = file.text();
    let line = text
        .lines()
        .find(|line| line.contains(&token[6..14]))
        .unwrap();
    let at = line.find(&token[6..14]).unwrap();
    let entry = &line[at..at + line[at..].find('"').unwrap()];
    let (body, _) = entry.rsplit_once(' ').unwrap();
    file.write(&text.replace(entry, &format!("{body} 2026-01-01")));
    let daemon = file.start(&[]);
    let refused = wal(&daemon, &token).await.append(append("a", "x")).await;
    let told = Told::of(&refused.unwrap_err());
    assert_eq!(told.reason, "CREDENTIAL_EXPIRED");
    assert_eq!(told.fact("expire_time"), "2026-01-01T00:00:00Z");
    assert_eq!(told.fact("retry"), "SAFE");
    wal(&daemon, &kept)
        .await
        .append(append("a", "x"))
        .await
        .unwrap();
    // The id of the expired token with the secret of another one.
    let other = AuthFile::new(COMPANY).token("root");
    let forged = format!("{}{}", &token[..14], &other[14..]);
    let refused = wal(&daemon, &forged).await.append(append("a", "x")).await;
    assert_eq!(Told::of(&refused.unwrap_err()).reason, "BAD_CREDENTIAL");
}

#[tokio::test]
async fn revoked_token_fails_soon_and_the_other_goes_on() {
    let file = AuthFile::new(COMPANY);
    let (kept, revoked) = (file.token("root"), file.token("root"));
    let daemon = file.start(&[]);
    let mut with_kept = wal(&daemon, &kept).await;
    let mut with_revoked = wal(&daemon, &revoked).await;
    with_kept.append(append("a", "x")).await.unwrap();
    with_revoked.append(append("a", "x")).await.unwrap();
    assert!(file.command(&["revoke", &revoked[6..14]]).status.success());
    let begin = Instant::now();
    daemon.signal(rustix::process::Signal::HUP);
    let refused = loop {
        with_kept.append(append("a", "x")).await.unwrap();
        match with_revoked.append(append("a", "x")).await {
            Ok(_) => assert!(begin.elapsed() < Duration::from_secs(20), "it still counts"),
            Err(status) => break status,
        }
    };
    assert_eq!(Told::of(&refused).reason, "BAD_CREDENTIAL");
    assert!(
        begin.elapsed() < Duration::from_secs(6),
        "{:?}",
        begin.elapsed()
    );
}

/// A request whose message comes after the token was revoked.
#[tokio::test]
async fn message_that_comes_after_the_revocation_is_refused() {
    for (method, service) in [
        (wald_proto::Method::CreateLog, "Log"),
        (wald_proto::Method::Drain, "Ops"),
    ] {
        late_message(method, service).await;
    }
}

async fn late_message(method: wald_proto::Method, service: &str) {
    let file = AuthFile::new(COMPANY);
    let (kept, revoked) = (file.token("root"), file.token("root"));
    let daemon = file.start(&[]);
    let socket = tokio::net::TcpStream::connect(daemon.start["grpc"].as_str().unwrap());
    let (mut client, connection) = h2::client::handshake(socket.await.unwrap()).await.unwrap();
    tokio::spawn(connection);
    let request = http::Request::post(format!("http://wald{}", method.path()))
        .header("content-type", "application/grpc")
        .header("authorization", format!("Bearer {revoked}"))
        .body(())
        .unwrap();
    let (answer, mut body) = client.send_request(request, false).unwrap();
    let started = format!(
        "grpc_server_started_total{{grpc_method=\"{method:?}\",grpc_service=\"wald.v1.{service}Service\",grpc_type=\"unary\"}}"
    );
    crate::support::until_as(&daemon, &started, &kept, |count| count == 1.0).await;
    assert!(file.command(&["revoke", &revoked[6..14]]).status.success());
    daemon.signal(rustix::process::Signal::HUP);
    daemon.wait_for_log("the changed auth_file is in force");
    let message = request_bytes(method, "a");
    body.send_data(message.into(), true).unwrap();
    let head = answer.await.unwrap();
    assert_eq!(head.headers()["grpc-status"], "16", "{method:?}");
    // Nothing has changed, and the server still serves.
    let mut logs = super::principals::logs(&daemon, &kept).await;
    let list = logs.list_logs(v1::ListLogsRequest::default()).await;
    assert!(list.unwrap().into_inner().logs.is_empty());
}

/// A message with the five bytes before it.
fn request_bytes(method: wald_proto::Method, log: &str) -> Vec<u8> {
    let message = request(method, log);
    let mut framed = vec![0];
    framed.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
    framed.extend_from_slice(&message);
    framed
}

#[test]
fn secrets_appear_in_no_log_and_no_metric() {
    let file = AuthFile::new(COMPANY);
    let token = file.token("root");
    let daemon = file.start(&["--log-filter", "trace"]);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let mut client = wal(&daemon, &token).await;
        client.append(append("a", "x")).await.unwrap();
        let forged = format!("{}0", &token[..token.len() - 1]);
        let _ = wal(&daemon, &forged).await.append(append("a", "x")).await;
    });
    let (_, metrics) = daemon.http_as("/metrics", &token);
    let mut all = vec![metrics, file.text()];
    all.extend(daemon.log.try_iter());
    for text in all {
        assert!(
            !text.contains("wald1_") && !text.contains(&token[14..57]),
            "{text}"
        );
    }
}

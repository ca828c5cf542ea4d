//! Every RPC of the contract by every kind of caller. `matrix.txt` has the answers.

use std::fmt::Write as _;

use wald_proto::Method;

use super::principals::{AuthFile, COMPANY};
use super::raw::{call, request};
use crate::support::{Daemon, Told, append};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/daemon/auth/matrix.txt");
const PRINCIPALS: [&str; 7] = [
    "none", "reader", "writer", "appender", "admin", "other", "ops",
];
const LOG: &str = "payments/billing/a";

/// The log with one record and nothing else.
async fn prepare(daemon: &Daemon, root: &str) {
    let mut logs = super::principals::logs(daemon, root).await;
    let delete = wald_proto::v1::DeleteLogRequest {
        shred: false,
        log: LOG.to_owned(),
        log_id: None,
    };
    let _ = logs.delete_log(delete).await;
    let mut wal = super::principals::wal(daemon, root).await;
    wal.append(append(LOG, "x")).await.unwrap();
}

/// `cargo test -p wald-server --test daemon auth::matrix` compares; with WALD_WRITE=1 it writes the file.
#[tokio::test]
async fn answers_of_every_rpc_to_every_principal_are_those_of_the_golden_file() {
    let file = AuthFile::new(COMPANY);
    let root = file.token("root");
    let tokens: Vec<String> = PRINCIPALS.map(|name| file.token(name)).to_vec();
    let daemon = file.start(&[]);
    let channel = daemon.channel().await;
    let mut found = format!("{:<16}{:<15}", "RPC", "nobody");
    for name in PRINCIPALS {
        write!(found, "{name:<20}").unwrap();
    }
    for method in Method::ALL {
        let path = method.path();
        let name = path.rsplit('/').next().unwrap();
        write!(found, "\n{name:<16}").unwrap();
        let mut authorizations = vec![None];
        authorizations.extend(tokens.iter().map(|token| Some(format!("Bearer {token}"))));
        for (index, authorization) in authorizations.iter().enumerate() {
            prepare(&daemon, &root).await;
            let message = request(*method, LOG);
            let answer = match call(&channel, path, authorization.as_deref(), message).await {
                // A list of nothing is an empty message.
                Ok(messages) if *method == Method::ListLogs && messages[0].is_empty() => {
                    "empty".to_owned()
                }
                Ok(_) => "ok".to_owned(),
                Err(status) => Told::of(&status).reason,
            };
            let width = if index == 0 { 15 } else { 20 };
            write!(found, "{answer:<width$}").unwrap();
        }
    }
    let found: String = found
        .lines()
        .map(|line| format!("{}\n", line.trim_end()))
        .collect();
    if std::env::var_os("WALD_WRITE").is_some() {
        std::fs::write(GOLDEN, &found).unwrap();
    }
    let expected = std::fs::read_to_string(GOLDEN).unwrap();
    assert!(found == expected, "expected\n{expected}\nfound\n{found}");
}

/// A log of others is absent, as far as anyone can tell.
#[tokio::test]
async fn answers_for_absent_logs_and_logs_of_others_are_the_same() {
    let file = AuthFile::new(COMPANY);
    let (root, other) = (file.token("root"), file.token("other"));
    let daemon = file.start(&[]);
    prepare(&daemon, &root).await;
    let channel = daemon.channel().await;
    let other = format!("Bearer {other}");
    let absent = LOG.replace("/a", "/b");
    for method in Method::ALL {
        let (theirs, nobodys) = (request(*method, LOG), request(*method, &absent));
        let theirs = call(&channel, method.path(), Some(&other), theirs).await;
        let nobodys = call(&channel, method.path(), Some(&other), nobodys).await;
        match (theirs, nobodys) {
            (Err(theirs), Err(nobodys)) => {
                let said = nobodys.message().replace(&absent, LOG);
                assert_eq!(theirs.message(), said);
                let (theirs, nobodys) = (Told::of(&theirs), Told::of(&nobodys));
                assert_eq!(theirs.code, nobodys.code, "{method:?}");
                assert_eq!(theirs.facts, nobodys.facts, "{method:?}");
            }
            (Ok(theirs), Ok(nobodys)) => {
                assert_eq!(theirs, nobodys, "{method:?}");
            }
            (theirs, nobodys) => panic!("{method:?}: {theirs:?}, {nobodys:?}"),
        }
    }
}

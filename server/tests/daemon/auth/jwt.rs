//! Tokens of other issuers, whose keys are in a file.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use tonic::Code;
use wald_client::Client;
use wald_proto::v1;

use super::principals::{AuthFile, COMPANY, ops, wal};
use super::signer::{Signer, encoded, key_set, unsigned, with};
use crate::support::{Daemon, Told, append, output, wald};

pub(crate) const ISSUER: &str = "https://kubernetes.default.svc";
pub(crate) const SUBJECT: &str = "system:serviceaccount:billing:writer";
const LOG: &str = "payments/billing/a";

/// `auth_file` of the company, with a principal of Kubernetes and these lines about its keys.
pub(crate) fn company(keys: &str) -> String {
    format!(
        "{COMPANY}\n[principal.billing]\ntenant = \"payments\"\njwt = {{ issuer = \"k8s\", sub = \"{SUBJECT}\" }}\n\
         allow = [{{ do = [\"append\", \"create\", \"read\"], logs = \"payments/billing/\" }}]\n[jwt.k8s]\n\
         issuer = \"{ISSUER}\"\naudience = \"wald\"\nalgorithms = [\"RS256\", \"ES256\"]\n{keys}\n"
    )
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.unwrap().as_secs()
}

/// Claims of a good token.
pub(crate) fn claims() -> Value {
    json!({ "iss": ISSUER, "aud": ["wald"], "sub": SUBJECT, "exp": now() + 600, "nbf": now(), "jti": "5f1c" })
}

/// A file with the keys of these signers.
fn file_of(signers: &[&Signer]) -> AuthFile {
    let file = AuthFile::new("");
    let path = file.write_beside("jwks.json", &key_set(signers));
    file.write(&company(&format!("jwks_file = \"{}\"", path.display())));
    file
}

/// The reason of an append with the token.
pub(crate) async fn reason(daemon: &Daemon, token: &str) -> String {
    let refused = wal(daemon, token).await.append(append(LOG, "x")).await;
    Told::of(&refused.unwrap_err()).reason
}

pub(crate) async fn accepts(daemon: &Daemon, token: &str) {
    let appended = wal(daemon, token).await.append(append(LOG, "x")).await;
    appended.unwrap();
}

/// Waits, for as long as a slow machine may need, until the token counts.
pub(crate) async fn until_accepted(daemon: &Daemon, token: &str) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut client = wal(daemon, token).await;
    while let Err(refused) = client.append(append(LOG, "x")).await {
        assert!(Instant::now() < deadline, "{refused:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The audit log of a daemon.
pub(crate) struct AuditFile(PathBuf);

impl AuditFile {
    /// A file next to `auth_file`.
    pub(crate) fn new(beside: &AuthFile) -> Self {
        Self(beside.write_beside("audit.log", ""))
    }

    pub(crate) fn argument(&self) -> String {
        format!("--audit-log={}", self.0.display())
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.0).unwrap()
    }

    /// Sends SIGHUP, and waits for the line of a reload with this reason.
    pub(crate) async fn reloads_with(&self, daemon: &Daemon, reason: &str) {
        daemon.signal(rustix::process::Signal::HUP);
        let deadline = Instant::now() + Duration::from_secs(20);
        let has_it = |text: String| text.lines().any(|line| line.contains(reason));
        while !has_it(self.text()) {
            assert!(Instant::now() < deadline, "no {reason:?}: {}", self.text());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn good_rs256_and_es256_tokens_are_their_principal() {
    let (rsa, ec) = (Signer::new("rsa", "RS256"), Signer::new("ec", "ES256"));
    let file = file_of(&[&rsa, &ec]);
    let daemon = file.start(&[]);
    for signer in [&rsa, &ec] {
        let token = signer.token(&claims());
        accepts(&daemon, &token).await;
        let mut client = ops(&daemon, &token).await;
        let answer = client.get_caller(v1::GetCallerRequest {}).await.unwrap();
        let caller = answer.into_inner();
        assert_eq!(caller.principal, "billing");
        assert_eq!(caller.credential(), v1::CredentialKind::Jwt);
        assert_eq!(caller.token_id, "k8s/5f1c");
        assert!(caller.expire_time.unwrap().seconds as u64 >= now());
        // The HTTP port knows the caller, who lacks the right.
        assert_eq!(daemon.http_as("/metrics", &token).0, 403);
    }
}

#[tokio::test]
async fn each_bad_token_gets_the_answer_to_an_unknown_credential() {
    let (rsa, ec) = (Signer::new("rsa", "RS256"), Signer::new("ec", "ES256"));
    let file = file_of(&[&rsa, &ec]);
    let daemon = file.start(&["--max-header-bytes", "256KiB"]);
    let changed = |changes: Value| rsa.token(&with(&claims(), &changes));
    let hs256 = {
        let text = unsigned(&json!({ "alg": "HS256", "kid": "rsa" }), &claims());
        let key = aws_lc_rs::hmac::Key::new(
            aws_lc_rs::hmac::HMAC_SHA256,
            rsa.jwk().to_string().as_bytes(),
        );
        format!(
            "{text}.{}",
            encoded(aws_lc_rs::hmac::sign(&key, text.as_bytes()))
        )
    };
    let cases = [
        ("a token of Wald", AuthFile::new(COMPANY).token("root")),
        (
            "none",
            format!("{}.", unsigned(&json!({ "alg": "none" }), &claims())),
        ),
        ("HS256 with the public key", hs256),
        ("wrong aud", changed(json!({ "aud": "vault" }))),
        ("wrong iss", changed(json!({ "iss": "https://evil" }))),
        (
            "wrong sub",
            changed(json!({ "sub": "system:serviceaccount:billing:reader" })),
        ),
        ("future nbf", changed(json!({ "nbf": now() + 300 }))),
        ("exp absent", changed(json!({ "exp": null }))),
        (
            "exp in 10 years",
            changed(json!({ "exp": now() + 10 * 365 * 86_400 })),
        ),
        (
            "path as kid",
            rsa.sign(
                &with(&rsa.header(), &json!({ "kid": "../../dev/null" })),
                &claims(),
            ),
        ),
        ("unknown key", Signer::new("rsa", "RS256").token(&claims())),
        (
            "expired, of an unknown key",
            Signer::new("rsa", "RS256").token(&with(&claims(), &json!({ "exp": 1 }))),
        ),
        (
            "64 KiB",
            changed(json!({ "padding": "x".repeat(48 << 10) })),
        ),
    ];
    let mut answers = Vec::new();
    for (case, token) in &cases {
        let refused = wal(&daemon, token).await.append(append(LOG, "x")).await;
        let refused = refused.expect_err(case);
        assert_eq!(refused.code(), Code::Unauthenticated, "{case}: {refused:?}");
        let told = Told::of(&refused);
        assert_eq!(
            (told.reason.as_str(), told.fact("retry")),
            ("BAD_CREDENTIAL", "NEVER"),
            "{case}"
        );
        answers.push((refused.message().to_owned(), told.facts));
    }
    answers.dedup();
    assert_eq!(answers.len(), 1, "{answers:?}");
    accepts(&daemon, &rsa.token(&claims())).await;
}

#[tokio::test]
async fn expired_jwt_is_told_so_and_stays_expired() {
    let signer = Signer::new("key", "ES256");
    let file = file_of(&[&signer]);
    let daemon = file.start(&[]);
    let token = signer.token(&with(&claims(), &json!({ "exp": now() - 1 })));
    let mut client = wal(&daemon, &token).await;
    for _ in 0..2 {
        let refused = client.append(append(LOG, "x")).await.unwrap_err();
        let told = Told::of(&refused);
        assert_eq!(told.reason, "CREDENTIAL_EXPIRED");
        assert_eq!(told.fact("retry"), "SAFE");
    }
}

#[tokio::test]
async fn stream_and_calls_of_a_jwt_end_when_it_expires() {
    let signer = Signer::new("key", "ES256");
    let file = file_of(&[&signer]);
    let daemon = file.start(&[]);
    let expires = now() + 4;
    let token = signer.token(&with(&claims(), &json!({ "exp": expires })));
    let mut client = wal(&daemon, &token).await;
    client.append(append(LOG, "1")).await.unwrap();
    let request = v1::ScanRequest {
        selector: Some(v1::scan_request::Selector::Log(LOG.to_owned())),
        follow: true,
        ..Default::default()
    };
    let mut stream = client.scan(request).await.unwrap().into_inner();
    let ended = loop {
        match stream.message().await {
            Ok(message) => assert!(message.is_some(), "a follower does not end by itself"),
            Err(status) => break status,
        }
    };
    assert_eq!(Told::of(&ended).reason, "CREDENTIAL_EXPIRED");
    // An idle machine needs less than 1 s, a busy one may need more.
    assert!(
        (expires..expires + 6).contains(&now()),
        "{} s late",
        now() - expires
    );
    // The connection remembers its caller, and not for longer than the token counts.
    let refused = client.append(append(LOG, "2")).await.unwrap_err();
    assert_eq!(Told::of(&refused).reason, "CREDENTIAL_EXPIRED");
}

#[tokio::test]
async fn changed_key_file_ends_the_tokens_of_the_withdrawn_key() {
    let (old, next) = (Signer::new("old", "RS256"), Signer::new("next", "RS256"));
    let file = file_of(&[&old]);
    let daemon = file.start(&[]);
    let token = old.token(&claims());
    let mut client = wal(&daemon, &token).await;
    client.append(append(LOG, "x")).await.unwrap();
    assert_eq!(
        reason(&daemon, &next.token(&claims())).await,
        "BAD_CREDENTIAL"
    );
    file.write_beside("jwks.json", &key_set(&[&old, &next]));
    daemon.signal(rustix::process::Signal::HUP);
    until_accepted(&daemon, &next.token(&claims())).await;
    client.append(append(LOG, "x")).await.unwrap();
    file.write_beside("jwks.json", &key_set(&[&next]));
    daemon.signal(rustix::process::Signal::HUP);
    let begin = Instant::now();
    let refused = loop {
        match client.append(append(LOG, "x")).await {
            Ok(_) => assert!(begin.elapsed() < Duration::from_secs(20), "it still counts"),
            Err(refused) => break refused,
        }
    };
    assert_eq!(Told::of(&refused).reason, "BAD_CREDENTIAL");
    accepts(&daemon, &next.token(&claims())).await;
}

#[tokio::test]
async fn broken_key_file_keeps_the_keys_and_blocks_no_other_change() {
    let signer = Signer::new("key", "RS256");
    let file = file_of(&[&signer]);
    let root = file.token("root");
    let audit = AuditFile::new(&file);
    let daemon = file.start(&[&audit.argument()]);
    let same = Signer::new("key", "ES256");
    for (text, why) in [
        ("", "it is no key set"),
        ("{\"keys\": []}", "the key set is empty"),
        (&key_set(&[&signer, &same]), "two keys have the kid"),
        (&"x".repeat(2 << 20), "larger than 1MiB"),
    ] {
        file.write_beside("jwks.json", text);
        audit.reloads_with(&daemon, why).await;
        accepts(&daemon, &signer.token(&claims())).await;
    }
    let failures = daemon.metric_as("wald_reload_failures_total{kind=\"jwks_file\"}", &root);
    assert!(failures >= 4.0, "{failures}");
    // The rest of auth_file changes, although the keys are broken.
    let text = file.text();
    file.put_in_force(
        &daemon,
        &text.replace(SUBJECT, "system:serviceaccount:billing:other"),
    );
    assert_eq!(
        reason(&daemon, &signer.token(&claims())).await,
        "BAD_CREDENTIAL"
    );
    assert!(file.command(&["revoke", &root[6..14]]).status.success());
}

/// The audit log shows which keys counted at any time.
#[tokio::test]
async fn keys_next_to_a_broken_file_come_into_force_with_their_line() {
    let signer = Signer::new("key", "RS256");
    let file = file_of(&[&signer]);
    let other = file.write_beside("other.json", &key_set(&[&signer]));
    file.write(&format!(
        "{}[jwt.other]\nissuer = \"https://other\"\naudience = \"wald\"\njwks_file = \"{}\"\n\
         algorithms = [\"RS256\"]\n",
        file.text(),
        other.display()
    ));
    let audit = AuditFile::new(&file);
    let daemon = file.start(&[&audit.argument()]);
    file.write_beside("jwks.json", "");
    audit.reloads_with(&daemon, "it is no key set").await;
    let keys = key_set(&[&Signer::new("next", "RS256")]);
    file.write_beside("other.json", &keys);
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, keys.as_bytes());
    let digest: String = (digest.as_ref().iter())
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let in_force = format!("\"jwt.other.jwks_file\":\"sha256:{digest}\"");
    audit.reloads_with(&daemon, &in_force).await;
    daemon.wait_for_log("the changed files of jwks_file are in force");
}

#[tokio::test]
async fn rust_client_sends_the_jwt_of_its_token_file_and_reads_the_next() {
    let signer = Signer::new("key", "ES256");
    let file = file_of(&[&signer]);
    let daemon = file.start(&[]);
    let expires = now() + 3;
    let short = signer.token(&with(&claims(), &json!({ "exp": expires })));
    let path = file.write_beside("token", &short);
    let endpoint = format!("http://127.0.0.1:{}", daemon.port());
    let client = Client::builder(endpoint).token_file(&path).connect().await;
    let client = client.unwrap();
    client.append(LOG, "1").await.unwrap();
    // The kubelet replaces a projected token long before its end.
    file.write_beside("token", &signer.token(&claims()));
    let begin = Instant::now();
    while now() <= expires {
        client.append(LOG, "2").await.unwrap();
        assert!(begin.elapsed() < Duration::from_secs(20));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    client.append(LOG, "3").await.unwrap();
}

#[test]
fn jwt_appears_in_no_log_and_the_audit_log_has_its_id() {
    let signer = Signer::new("key", "ES256");
    let file = file_of(&[&signer]);
    let audit = AuditFile::new(&file);
    let daemon = file.start(&["--log-filter", "trace", &audit.argument(), "--audit", "all"]);
    let token = signer.token(&claims());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        accepts(&daemon, &token).await;
        let expired = signer.token(&with(&claims(), &json!({ "exp": 1_000_000_000 })));
        assert_eq!(reason(&daemon, &expired).await, "CREDENTIAL_EXPIRED");
    });
    let begin = Instant::now();
    let lines = loop {
        let text = audit.text();
        let calls: Vec<Value> = (text.lines())
            .map(|line| serde_json::from_str(line).unwrap())
            .filter(|line: &Value| line["event"] == "call")
            .collect();
        if calls.len() >= 2 {
            break calls;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "{text}");
        std::thread::sleep(Duration::from_millis(20));
    };
    for line in &lines {
        assert_eq!(
            (&line["credential"], &line["token_id"]),
            (&json!("jwt"), &json!("k8s/5f1c"))
        );
    }
    assert_eq!(lines[0]["principal"], "billing");
    let mut all = vec![audit.text()];
    all.extend(daemon.log.try_iter());
    assert!(all.len() > 10);
    let signature = token.rsplit_once('.').unwrap().1;
    for text in all {
        assert!(!text.contains("eyJ") && !text.contains(signature), "{text}");
    }
}

#[test]
fn faulty_issuer_is_refused_in_one_sentence_by_start_and_check_alike() {
    let signer = Signer::new("key", "RS256");
    let good = file_of(&[&signer]).text();
    let path = |text: &str| text.replace("RS256\", \"ES256", "RS256");
    let algorithms = |list: &str| good.replace("[\"RS256\", \"ES256\"]", list);
    let line = |line: &str| {
        let start = good.find("jwks_file").unwrap();
        format!("{}{line}\n", &good[..start])
    };
    let cases = [
        (algorithms("[\"none\"]"), "\"none\" is not one of RS256"),
        (
            algorithms("[\"RS256\", \"HS256\"]"),
            "\"HS256\" is not one of RS256",
        ),
        (algorithms("[\"rs256\"]"), "\"rs256\" is not one of RS256"),
        (algorithms("[]"), "algorithms is empty"),
        (
            path(&good).replace("issuer = \"k8s\"", "issuer = \"k9s\""),
            "there is no issuer \"k9s\"; add [jwt.k9s]",
        ),
        (line(""), "give jwks_file or jwks_url"),
        (
            line("jwks_file = \"a\"\njwks_url = \"https://a/\""),
            "give jwks_file or jwks_url",
        ),
        (
            line("jwks_file = \"a\"\njwks_ca = \"b\""),
            "belong to jwks_url",
        ),
        (
            line("jwks_url = \"http://issuer/keys\""),
            "expected https://HOST/PATH",
        ),
        (
            line("jwks_url = \"https://user@issuer/keys\""),
            "expected https://HOST/PATH",
        ),
        (
            line("jwks_file = \"/nowhere/jwks.json\""),
            "/nowhere/jwks.json: cannot be opened",
        ),
        (
            line("jwks_url = \"https://issuer/keys\"\njwks_ca = \"/nowhere/ca.pem\""),
            "/nowhere/ca.pem: cannot be opened",
        ),
        (line("jwks_files = \"a\""), "unknown field `jwks_files`"),
        (
            format!(
                "{good}[principal.second]\njwt = [{{ issuer = \"k8s\", sub = \"{SUBJECT}\" }}]\n"
            ),
            "principal billing has the sub",
        ),
        (
            format!("{good}[principal.second]\njwt = \"eyJhbGciOiJ9.e30.c2ln\"\n"),
            "\"(a token)\"",
        ),
        (
            format!("{good}[principal.second]\njwt = {{ issuer = \"k8s\", subject = \"a\" }}\n"),
            "unknown field `subject`",
        ),
        (
            format!(
                "{good}[jwt.other]\nissuer = \"{ISSUER}\"\naudience = \"a\"\njwks_file = \"a\"\nalgorithms = [\"RS256\"]\n"
            ),
            "has the issuer",
        ),
    ];
    for (text, why) in &cases {
        let file = AuthFile::new(text);
        let checked = output(wald().args(["token", "check"]).arg(file.path()));
        let said = String::from_utf8(checked.stderr).unwrap();
        assert_eq!(checked.status.code(), Some(78), "{why}: {said}");
        assert!(
            said.contains(why) && said.lines().count() == 1,
            "{why}: {said}"
        );
    }
    let file = AuthFile::new(&cases[0].0);
    let directory = tempfile::tempdir().unwrap();
    let mut start = wald();
    start.arg("--data-dir").arg(directory.path().join("data"));
    let started = output(start.args(["--listen", ":0", "--http-listen", ":0", &file.argument()]));
    let said = String::from_utf8(started.stderr).unwrap();
    assert_eq!(started.status.code(), Some(78), "{said}");
    assert!(said.contains("is not one of RS256"), "{said}");
}

//! The HTTP port with an `auth_file`.

use super::principals::{AuthFile, COMPANY, wal};
use crate::support::{Daemon, append};

#[test]
fn probes_are_open_and_metrics_need_their_right() {
    let file = AuthFile::new(COMPANY);
    let (operator, reader) = (file.token("ops"), file.token("reader"));
    let daemon = file.start(&[]);
    for probe in ["/livez", "/readyz"] {
        assert_eq!(daemon.http(probe).0, 200, "{probe}");
    }
    assert_eq!(daemon.http("/metrics").0, 401);
    assert_eq!(daemon.http_as("/metrics", "nonsense").0, 401);
    assert_eq!(daemon.http_as("/metrics", &reader).0, 403);
    let (status, text) = daemon.http_as("/metrics", &operator);
    assert!(status == 200 && text.contains("wald_authz_denied_total{op=\"metrics\"} 1"));
}

#[test]
fn metrics_open_serves_metrics_to_everyone_and_nothing_else() {
    let file = AuthFile::new(COMPANY);
    let daemon = file.start(&["--metrics-open"]);
    assert_eq!(daemon.http("/metrics").0, 200);
    assert_eq!(daemon.http("/console/api/logs").0, 401);
}

#[tokio::test]
async fn console_shows_each_caller_its_own_logs() {
    let file = AuthFile::new(&format!(
        "{COMPANY}\n[principal.viewer]\nallow = [{{ do = [\"console\"] }}, \
         {{ do = [\"read\", \"list\"], logs = \"payments/\" }}]\n"
    ));
    let (root, viewer, operator) = (file.token("root"), file.token("viewer"), file.token("ops"));
    let daemon = file.start(&[]);
    let mut own = wal(&daemon, &root).await;
    for log in ["payments/a", "orders/a"] {
        own.append(append(log, "secret")).await.unwrap();
    }
    // The port answers hosts that it knows.
    let as_viewer = |path: &str| daemon.http_as(path, &viewer);
    assert_eq!(daemon.http_as("/console/api/logs", &operator).0, 403);
    let (status, text) = as_viewer("/console/api/logs");
    assert!(
        status == 200 && text.contains("payments/a") && !text.contains("orders/a"),
        "{text}"
    );
    assert_eq!(as_viewer("/console/api/records?log=payments/a").0, 200);
    for path in [
        "/console/api/records?log=orders/a",
        "/console/api/records?log=orders/absent",
        "/console/api/record?log=orders/a&lsn=0",
        "/console/api/log?log=orders/a",
        "/console/api/producers?log=orders/a",
        "/console/api/segments",
    ] {
        let (status, text) = as_viewer(path);
        assert!(
            status == 403 && !text.contains("secret"),
            "{path}: {status} {text}"
        );
    }
    let (status, text) = as_viewer("/console/api/server");
    assert!(
        status == 200 && text.contains("\"data_dir\":null") && text.contains("\"durability\":null"),
        "{text}"
    );
    assert!(
        daemon
            .http_as("/console/api/server", &root)
            .1
            .contains("fdatasync")
    );
}

const SESSION: &str = "/console/api/session";
const JSON: &str = "Content-Type: application/json\r\n";

/// Status of a login, and the header line with its cookie.
fn log_in(daemon: &Daemon, token: &str, headers: &str) -> (u16, String) {
    let body = format!("{{\"token\": \"{token}\"}}");
    let (status, head, _) = daemon.send_http("POST", SESSION, headers, &body);
    let cookie = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("set-cookie").then_some(value)
    });
    (status, cookie.unwrap_or_default().to_owned())
}

fn with_cookie(cookie: &str) -> String {
    format!("Cookie: {}\r\n", cookie.split(';').next().unwrap())
}

#[test]
fn login_gives_a_cookie_that_ends_with_logout_and_with_the_token() {
    let file = AuthFile::new(COMPANY);
    let token = file.token("root");
    let daemon = file.start(&[]);
    let logs = |headers: &str| daemon.send_http("GET", "/console/api/logs", headers, "").0;
    assert_eq!(logs(""), 401);
    let (status, cookie) = log_in(&daemon, &token, JSON);
    assert_eq!(status, 204);
    let address = daemon.start["http"].as_str().unwrap();
    let port = address.rsplit(':').next().unwrap();
    let name = format!("wald-{port}=");
    for part in [
        name.as_str(),
        "; HttpOnly",
        "; SameSite=Strict",
        "; Path=/",
        "; Max-Age=28800",
    ] {
        assert!(cookie.contains(part), "{cookie}");
    }
    assert!(!cookie.contains("wald1_"), "{cookie}");
    assert_eq!(logs(&with_cookie(&cookie)), 200);
    assert_eq!(logs(&format!("Cookie: {name}0123\r\n")), 401);
    // The cookie is no key to anything else.
    assert_eq!(
        daemon
            .send_http("GET", "/metrics", &with_cookie(&cookie), "")
            .0,
        401
    );
    let out = daemon.send_http("DELETE", SESSION, &with_cookie(&cookie), "");
    assert!(
        out.0 == 204 && out.1.to_lowercase().contains("max-age=0"),
        "{}",
        out.1
    );
    assert_eq!(logs(&with_cookie(&cookie)), 401);
    let (_, cookie) = log_in(&daemon, &token, JSON);
    assert_eq!(logs(&with_cookie(&cookie)), 200);
    assert!(file.command(&["revoke", &token[6..14]]).status.success());
    daemon.signal(rustix::process::Signal::HUP);
    daemon.wait_for_log("the changed auth_file is in force");
    assert_eq!(logs(&with_cookie(&cookie)), 401);
}

#[test]
fn login_of_another_page_or_without_the_right_is_refused() {
    let file = AuthFile::new(COMPANY);
    let (root, reader) = (file.token("root"), file.token("reader"));
    let daemon = file.start(&[]);
    for (headers, status) in [
        (format!("{JSON}Origin: http://evil.test\r\n"), 403),
        (format!("{JSON}Sec-Fetch-Site: cross-site\r\n"), 403),
        ("Content-Type: text/plain\r\n".to_owned(), 415),
    ] {
        assert_eq!(log_in(&daemon, &root, &headers), (status, String::new()));
    }
    assert_eq!(log_in(&daemon, &reader, JSON), (403, String::new()));
    let large = "x".repeat(5_000);
    assert_eq!(log_in(&daemon, &large, JSON).0, 400);
    let open = Daemon::start(&[]);
    assert_eq!(log_in(&open, &root, JSON).0, 404);
}

#[test]
fn address_whose_logins_fail_has_to_wait() {
    let file = AuthFile::new(COMPANY);
    let token = file.token("root");
    let daemon = file.start(&[]);
    for _ in 0..10 {
        assert_eq!(log_in(&daemon, "nonsense", JSON).0, 401);
    }
    assert_eq!(log_in(&daemon, "nonsense", JSON).0, 429);
    // Others may share the address: a right token is let in.
    assert_eq!(log_in(&daemon, &token, JSON).0, 204);
}

#[test]
fn open_page_ends_with_its_session() {
    use std::io::{Read as _, Write as _};
    let file = AuthFile::new(COMPANY);
    let token = file.token("root");
    let daemon = file.start(&[]);
    let (_, cookie) = log_in(&daemon, &token, JSON);
    let cookie = with_cookie(&cookie);
    let address = daemon.start["http"].as_str().unwrap();
    let mut page = std::net::TcpStream::connect(address).unwrap();
    page.set_read_timeout(Some(std::time::Duration::from_secs(20)))
        .unwrap();
    write!(
        page,
        "GET /console/api/live HTTP/1.1\r\nHost: {address}\r\n{cookie}Connection: close\r\n\r\n"
    )
    .unwrap();
    let mut begun = [0; 12];
    page.read_exact(&mut begun).unwrap();
    assert_eq!(&begun, b"HTTP/1.1 200");
    assert_eq!(daemon.send_http("DELETE", SESSION, &cookie, "").0, 204);
    let begin = std::time::Instant::now();
    // To the end of the stream: it would go on for ever.
    page.read_to_end(&mut Vec::new()).unwrap();
    assert!(
        begin.elapsed() < std::time::Duration::from_secs(10),
        "{:?}",
        begin.elapsed()
    );
}

/// The page waits for the rate of its tenant when its right to read ends.
#[tokio::test]
async fn open_page_gets_no_record_after_its_right_to_read_has_ended() {
    use std::io::{BufRead as _, BufReader, Write as _};
    const READ: &str = r#", { do = ["read", "list"], logs = "payments/" }"#;
    let text = COMPANY.replace(
        "prefix = \"payments/\"",
        "prefix = \"payments/\"\nlimits = { reads_per_second = 1 }",
    );
    let viewer = format!(
        "[principal.viewer]\ntenant = \"payments\"\nallow = [{{ do = [\"console\"] }}{READ}]"
    );
    let file = AuthFile::new(&format!("{text}\n{viewer}\n"));
    let (root, viewer) = (file.token("root"), file.token("viewer"));
    let daemon = file.start(&[]);
    let mut own = wal(&daemon, &root).await;
    for _ in 0..60 {
        own.append(append("payments/a", "secret")).await.unwrap();
    }
    let address = daemon.start["http"].as_str().unwrap();
    let mut page = std::net::TcpStream::connect(address).unwrap();
    page.set_read_timeout(Some(std::time::Duration::from_secs(20)))
        .unwrap();
    write!(
        page,
        "GET /console/api/live?log=payments/a&from=0 HTTP/1.1\r\nHost: {address}\r\n\
         Authorization: Bearer {viewer}\r\n\r\n"
    )
    .unwrap();
    let mut events = BufReader::new(page).lines().map(Result::unwrap);
    let mut next = || {
        let ends = ["event: records", "event: ended"];
        events.find(|line| ends.contains(&line.as_str())).unwrap()
    };
    assert_eq!(next(), "event: records");
    own.append(append("payments/a", "secret")).await.unwrap();
    let less = file.text().replace(READ, "");
    file.put_in_force(&daemon, &less);
    let begin = std::time::Instant::now();
    assert_eq!(next(), "event: ended");
    // Its turn would come in a minute. The samples of the page do not end meanwhile.
    let waited = begin.elapsed();
    assert!(waited < std::time::Duration::from_secs(20), "{waited:?}");
}

#[test]
fn slow_logins_leave_the_port_and_the_login_to_others() {
    use std::io::{Read as _, Write as _};
    let file = AuthFile::new(COMPANY);
    let token = file.token("root");
    let daemon = file.start(&["--http-max-connections", "16"]);
    let address = daemon.start["http"].as_str().unwrap();
    let (ended, answers) = std::sync::mpsc::channel();
    for _ in 0..9 {
        let mut socket = std::net::TcpStream::connect(address).unwrap();
        let head = "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{";
        write!(
            socket,
            "POST {SESSION} HTTP/1.1\r\nHost: {address}\r\n{head}"
        )
        .unwrap();
        let ended = ended.clone();
        std::thread::spawn(move || {
            let mut answer = [0; 12];
            socket.read_exact(&mut answer).unwrap();
            let _ = ended.send((answer, socket));
        });
    }
    // Each ends one before it. When all but one have an answer, the daemon has seen them all.
    let _sockets: Vec<_> = (0..8)
        .map(|_| {
            let limit = std::time::Duration::from_secs(30);
            let (answer, socket) = answers.recv_timeout(limit).unwrap();
            assert_eq!(&answer, b"HTTP/1.1 503");
            socket
        })
        .collect();
    // A login whose body comes at once is not kept out.
    assert_eq!(log_in(&daemon, &token, JSON).0, 204);
    assert_eq!(daemon.http_as("/metrics", &token).0, 200);
    assert_eq!(daemon.http("/readyz").0, 200);
}

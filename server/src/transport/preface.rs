//! The first bytes of a connection: whether it speaks HTTP/2, and the answer if it does not.
//!
//! A client of HTTP/2 sends its preface before anything else, and does not wait for the server
//! (RFC 9113, 3.4). So its first bytes tell it from a browser, a probe or a scraper that has the wrong
//! port, to which HTTP/2's own answer (a SETTINGS frame) is noise. They are looked at, not taken: a
//! connection that speaks HTTP/2 is served as if nobody had looked.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::TcpStream;

use super::routes::HttpUrl;
use crate::linger;
use crate::tls::HANDSHAKE_RECORD;

/// The first bytes that a client of HTTP/2 sends.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Bytes that are enough to tell: no other protocol begins with them.
const ENOUGH: usize = 3;

/// Longest method of HTTP/1.1 that is taken for one.
const METHOD_BYTES: usize = 16;

/// Pause after fewer bytes than tell anything. They stay where they are, so nothing wakes for more.
const PAUSE: Duration = Duration::from_millis(10);

/// Result of the first bytes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Greeting {
    /// The protocol of the port: the connection continues.
    Expected,
    /// Another protocol: it was answered, if there is an answer, and must be closed.
    Answered,
}

/// Awaits the first bytes of a connection, and answers those that are not TLS on a port with TLS, or not HTTP/2 on
/// one without. The caller bounds the time: a client may never send anything.
///
/// # Errors
/// If the connection fails, or is closed by its client.
pub(super) async fn greet(
    socket: &TcpStream,
    http: Option<HttpUrl>,
    has_tls: bool,
) -> io::Result<Greeting> {
    let mut first = [0; PREFACE.len()];
    let protocol = loop {
        let length = socket.peek(&mut first).await?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match Protocol::of(&first[..length]) {
            Some(protocol) => break protocol,
            None => tokio::time::sleep(PAUSE).await,
        }
    };
    let name = match protocol {
        Protocol::Tls if has_tls => return Ok(Greeting::Expected),
        Protocol::Http2 if !has_tls => return Ok(Greeting::Expected),
        Protocol::Http2 => "HTTP/2 without TLS",
        Protocol::Http1 => "HTTP/1.1",
        Protocol::Tls => "TLS",
        Protocol::Other => return Ok(Greeting::Answered),
    };
    tracing::info!(
        client = socket.peer_addr().ok().map(|client| client.to_string()),
        protocol = name,
        "a client does not speak the protocol of the gRPC port; it got an explanation in HTTP/1.1"
    );
    say_goodbye(
        socket,
        answer(protocol, socket.local_addr()?, http, has_tls).as_bytes(),
    )
    .await?;
    Ok(Greeting::Answered)
}

/// The protocol of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protocol {
    Http2,
    Http1,
    Tls,
    Other,
}

impl Protocol {
    /// Recognises it by the bytes that a connection begins with, at least one; `None` if more are needed.
    fn of(first: &[u8]) -> Option<Self> {
        let length = first.len().min(PREFACE.len());
        if first[..length] == PREFACE[..length] {
            return (length >= ENOUGH).then_some(Self::Http2);
        }
        if first[0] == HANDSHAKE_RECORD {
            return Some(Self::Tls);
        }
        let method = first.iter().take_while(|byte| byte.is_ascii_uppercase());
        match (method.count(), first) {
            (0, _) => Some(Self::Other),
            (letters, first) if letters == first.len() && letters < METHOD_BYTES => None,
            (letters, first) if first.get(letters) == Some(&b' ') => Some(Self::Http1),
            _ => Some(Self::Other),
        }
    }
}

/// An answer in HTTP/1.1. TLS clients get it too: they report "wrong version number" or "first
/// record does not look like a TLS handshake", which is the sign of a port without TLS. An
/// alert would report versions and ciphers.
fn answer(protocol: Protocol, own: SocketAddr, http: Option<HttpUrl>, has_tls: bool) -> String {
    let what = match protocol {
        _ if has_tls => "This port speaks gRPC over TLS: use https:// instead of http://.\n",
        Protocol::Tls => "This port speaks gRPC without TLS: use http:// instead of https://.\n",
        _ => "This port speaks gRPC, over HTTP/2 only.\n",
    };
    let http = http.map_or_else(String::new, |mut http| {
        if http.address.ip().is_unspecified() {
            http.address.set_ip(reached(own.ip()));
        }
        format!("/metrics, /livez, /readyz, the console and the HTTP API (/v1) are at {http}/\n")
    });
    let security = if has_tls {
        "-cacert ca.pem"
    } else {
        "-plaintext"
    };
    let body = format!(
        "{what}{http}A call from the command line:\n  grpcurl {security} -d '{{\"log\":\"greetings\",\"record\":\
         {{\"text\":\"hello\"}}}}' {own} wald.v1.WalService/Append\n"
    );
    let length = body.len();
    format!(
        "HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n\
         content-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
}

/// The address by which the client has reached this machine, as it would write it.
fn reached(own: IpAddr) -> IpAddr {
    own.to_canonical()
}

/// Sends an answer that fits into the socket's buffer, and waits for the client to close.
async fn say_goodbye(socket: &TcpStream, answer: &[u8]) -> io::Result<()> {
    socket.writable().await?;
    let _sent = socket.try_write(answer)?;
    linger::end(socket).await
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn protocol_is_told_by_the_first_bytes() {
        let cases: [(&[u8], Option<Protocol>); 16] = [
            (PREFACE, Some(Protocol::Http2)),
            (
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04",
                Some(Protocol::Http2),
            ),
            (b"PRI * HT", Some(Protocol::Http2)),
            (b"P", None),
            (b"PR", None),
            (b"PU", None),
            (b"GET", None),
            (b"GET / HTTP/1.1\r\n", Some(Protocol::Http1)),
            (b"POST /wald.v1.WalService", Some(Protocol::Http1)),
            (b"OPTIONS *", Some(Protocol::Http1)),
            (b"PRI * HTTP/1.1", Some(Protocol::Http1)),
            (b"\x16\x03\x01\x02\0\x01", Some(Protocol::Tls)),
            (b"ABCDEFGHIJKLMNOPQ", Some(Protocol::Other)),
            (b"get /", Some(Protocol::Other)),
            (b"\0\0\0\x04", Some(Protocol::Other)),
            (b"SSH-2.0-OpenSSH", Some(Protocol::Other)),
        ];
        for (first, expected) in cases {
            assert_eq!(Protocol::of(first), expected, "{}", first.escape_ascii());
        }
    }

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (client, accepted) = tokio::join!(client, listener.accept());
        (client.unwrap(), accepted.unwrap().0)
    }

    #[tokio::test]
    async fn preface_stays_unread_however_it_is_cut() {
        for cut in [1, 2, 3, 23] {
            let (mut client, mut server) = pair().await;
            let (before, after) = PREFACE.split_at(cut);
            client.write_all(before).await.unwrap();
            let greeted = async {
                tokio::task::yield_now().await;
                client.write_all(after).await.unwrap();
            };
            let (greeting, ()) = tokio::join!(greet(&server, None, false), greeted);
            assert_eq!(greeting.unwrap(), Greeting::Expected);
            let mut read = [0; PREFACE.len()];
            server.read_exact(&mut read).await.unwrap();
            assert_eq!(&read, PREFACE);
        }
    }

    #[tokio::test]
    async fn plaintext_on_a_port_with_tls_gets_an_answer_that_names_https() {
        let http = HttpUrl {
            address: "127.0.0.1:6926".parse().unwrap(),
            has_tls: true,
        };
        for sent in [PREFACE.as_slice(), b"GET / HTTP/1.1\r\n\r\n"] {
            let (mut client, server) = pair().await;
            let served = tokio::spawn(async move { greet(&server, Some(http), true).await });
            client.write_all(sent).await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            assert!(answer.contains("use https://"), "{answer}");
            assert!(answer.contains("https://127.0.0.1:6926/"), "{answer}");
            assert!(answer.contains("grpcurl -cacert"), "{answer}");
            drop(client);
            assert_eq!(served.await.unwrap().unwrap(), Greeting::Answered);
        }
        let (mut client, server) = pair().await;
        client.write_all(b"\x16\x03\x01\x02\0\x01").await.unwrap();
        assert_eq!(
            greet(&server, None, true).await.unwrap(),
            Greeting::Expected
        );
    }

    #[tokio::test]
    async fn other_protocols_are_told_where_to_go() {
        let http = HttpUrl {
            address: "0.0.0.0:6926".parse().unwrap(),
            has_tls: false,
        };
        let request = [b"POST / HTTP/1.1\r\n\r\n".as_slice(), &[b'x'; 100_000]].concat();
        for (sent, names) in [
            (request.as_slice(), "over HTTP/2 only"),
            (b"\x16\x03\x01\x02\0\x01\0", "without TLS"),
        ] {
            let (mut client, server) = pair().await;
            let port = server.local_addr().unwrap().port();
            let served = tokio::spawn(async move { greet(&server, Some(http), false).await });
            client.write_all(sent).await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
            let (_, body) = answer.split_once("\r\n\r\n").unwrap();
            assert!(answer.contains(&format!("content-length: {}\r\n", body.len())));
            assert!(body.contains(names), "{body}");
            assert!(body.contains("http://127.0.0.1:6926/"), "{body}");
            assert!(
                body.contains(&format!("127.0.0.1:{port} wald.v1")),
                "{body}"
            );
            drop(client);
            assert_eq!(served.await.unwrap().unwrap(), Greeting::Answered);
        }
    }
}

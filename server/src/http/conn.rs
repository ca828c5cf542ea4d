//! The socket of one HTTP connection: reports its progress to its place, and closes so that
//! the last answer arrives.

use std::future::{Future as _, poll_fn};
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::places::ConnPlace;
use crate::tls::{ConnStream, HANDSHAKE_RECORD};

/// Longest time that a client may take to close after the server has.
const LINGER: Duration = Duration::from_secs(1);
/// Most bytes that are read and dropped in that time.
const LINGER_BYTES: usize = 1 << 20;

/// Bytes that open an HTTP/2 connection.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The protocol that a peer speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PeerProtocol {
    /// HTTP/1, or something that its parser refuses.
    Http1,
    /// HTTP/2 in plaintext: gRPC, as a rule.
    Http2,
    /// A handshake of TLS.
    Tls,
}

impl PeerProtocol {
    /// Goes by the first bytes; `None` if more are needed, of at most 24.
    fn of(first: &[u8]) -> Option<Self> {
        match first {
            [] => None,
            [HANDSHAKE_RECORD, ..] => Some(Self::Tls),
            _ if first.starts_with(PREFACE) => Some(Self::Http2),
            _ if PREFACE.starts_with(first) => None,
            _ => Some(Self::Http1),
        }
    }
}

/// A connection of the HTTP port.
pub(super) struct HttpConn {
    stream: ConnStream,
    place: Arc<ConnPlace>,
    /// Bytes that were read and must be read again.
    first: Bytes,
    /// Bytes that may still be read; more are an error.
    left: usize,
    linger: Option<(Pin<Box<Sleep>>, usize)>,
    is_shut_down: bool,
}

impl HttpConn {
    pub(super) fn new(stream: ConnStream, place: Arc<ConnPlace>) -> Self {
        Self {
            stream,
            place,
            first: Bytes::new(),
            left: usize::MAX,
            linger: None,
            is_shut_down: false,
        }
    }

    /// Address of the peer; unspecified if it is gone.
    pub(super) fn address(&self) -> IpAddr {
        let address = self.stream.socket().peer_addr();
        address.map_or(IpAddr::from([0; 4]), |address| address.ip())
    }

    /// Whether the bytes are inside TLS.
    pub(super) fn is_tls(&self) -> bool {
        self.stream.is_tls()
    }

    /// Reads as many bytes as tell the protocol. They stay to be read.
    ///
    /// # Errors
    /// If the socket fails.
    pub(super) async fn protocol(&mut self) -> io::Result<PeerProtocol> {
        let mut first = Vec::with_capacity(PREFACE.len());
        loop {
            let mut bytes = [0; PREFACE.len()];
            let mut buffer = ReadBuf::new(&mut bytes[..PREFACE.len() - first.len()]);
            poll_fn(|context| Pin::new(&mut *self).poll_read(context, &mut buffer)).await?;
            first.extend_from_slice(buffer.filled());
            let closed = buffer.filled().is_empty();
            if let Some(protocol) =
                PeerProtocol::of(&first).or(closed.then_some(PeerProtocol::Http1))
            {
                self.first = first.into();
                return Ok(protocol);
            }
        }
    }

    /// Ends the connection with an error once `bytes` more were read.
    pub(super) fn read_at_most(&mut self, bytes: usize) {
        self.left = bytes;
    }

    /// Sends a last answer and closes.
    ///
    /// # Errors
    /// If the socket fails.
    pub(super) async fn answer(mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = poll_fn(|context| Pin::new(&mut self).poll_write(context, bytes)).await?;
            bytes = bytes.get(written..).unwrap_or_default();
        }
        poll_fn(|context| Pin::new(&mut self).poll_shutdown(context)).await
    }

    fn wrote(&self, written: &Poll<io::Result<usize>>) {
        match written {
            Poll::Ready(written) => self.place.sent(*written.as_ref().unwrap_or(&0)),
            Poll::Pending => self.place.blocked(),
        }
    }
}

impl Drop for HttpConn {
    /// Resets a connection whose peer takes nothing: closed normally, the system would keep it,
    /// and the unsent bytes, until the peer reads them.
    fn drop(&mut self) {
        if self.place.is_blocked() {
            let _ = SockRef::from(self.stream.socket()).set_linger(Some(Duration::ZERO));
        }
    }
}

impl AsyncRead for HttpConn {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.first.is_empty() {
            let taken = self.first.len().min(buffer.remaining());
            buffer.put_slice(&self.first[..taken]);
            self.first.advance(taken);
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let read = buffer.filled().len() - before;
        if read > 0 {
            self.place.received(read);
        }
        let Some(left) = self.left.checked_sub(read) else {
            return Poll::Ready(Err(io::Error::other("more bytes than this protocol needs")));
        };
        self.left = left;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for HttpConn {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.wrote(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.wrote(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        // Encrypted bytes that the peer does not take wait here.
        if self.is_tls() {
            match &flushed {
                Poll::Ready(_) if self.place.is_blocked() => self.place.sent(0),
                Poll::Ready(_) => {}
                Poll::Pending => self.place.blocked(),
            }
        }
        flushed
    }

    /// Waits for the client to close, too, and drops the rest of its bytes: the system resets a
    /// socket that is closed with unread bytes, and the last answer is lost with it.
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let conn = &mut *self;
        let (linger, dropped) =
            (conn.linger).get_or_insert_with(|| (Box::pin(tokio::time::sleep(LINGER)), 0));
        if !conn.is_shut_down {
            match Pin::new(&mut conn.stream).poll_shutdown(context) {
                Poll::Ready(shut_down) => shut_down?,
                // Inside TLS the last bytes may wait for a peer that takes nothing.
                Poll::Pending => return linger.as_mut().poll(context).map(Ok),
            }
            conn.is_shut_down = true;
        }
        let mut bytes = [0; 4 << 10];
        loop {
            let mut buffer = ReadBuf::new(&mut bytes);
            let read = Pin::new(conn.stream.socket_mut()).poll_read(context, &mut buffer);
            let gone = match &read {
                Poll::Ready(read) => read.is_err() || buffer.filled().is_empty(),
                Poll::Pending => false,
            };
            *dropped += buffer.filled().len();
            let enough = *dropped > LINGER_BYTES || linger.as_mut().poll(context).is_ready();
            if gone || enough {
                return Poll::Ready(Ok(()));
            }
            ready!(read)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocol_is_told_by_the_first_bytes() {
        assert_eq!(PeerProtocol::of(b""), None);
        assert_eq!(PeerProtocol::of(b"\x16\x03\x01"), Some(PeerProtocol::Tls));
        assert_eq!(PeerProtocol::of(b"G"), Some(PeerProtocol::Http1));
        assert_eq!(PeerProtocol::of(b"P"), None);
        assert_eq!(PeerProtocol::of(b"POST"), Some(PeerProtocol::Http1));
        assert_eq!(PeerProtocol::of(&PREFACE[..23]), None);
        assert_eq!(PeerProtocol::of(PREFACE), Some(PeerProtocol::Http2));
        assert_eq!(
            PeerProtocol::of(b"PRI * HTTP/1.1\r\n"),
            Some(PeerProtocol::Http1),
            "not the preface"
        );
    }
}

//! The bytes of a connection: in plaintext, or inside TLS.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

/// Maximum bytes of data that are encrypted and wait for the socket: four records, which one call writes. More would
/// hide from the server for how long a client takes nothing.
pub(super) const UNSENT_BYTES: usize = 64 << 10;

/// A connection of either port, after the handshake of TLS if there is one.
pub(crate) enum ConnStream {
    Plain(TcpStream),
    Tls(Box<TlsStream<CountedSocket>>),
}

impl ConnStream {
    pub(super) fn secured(mut stream: TlsStream<CountedSocket>) -> Self {
        (stream.get_mut().1).set_buffer_limit(Some(UNSENT_BYTES));
        Self::Tls(Box::new(stream))
    }

    /// Whether the bytes are inside TLS.
    pub(crate) fn is_tls(&self) -> bool {
        matches!(self, Self::Tls(_))
    }

    /// Bytes received inside TLS, its own overhead included; `None` without TLS.
    pub(crate) fn received_in_tls(&self) -> Option<u64> {
        match self {
            Self::Plain(_) => None,
            Self::Tls(stream) => Some(stream.get_ref().0.received),
        }
    }

    /// The socket, for its options.
    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => &stream.get_ref().0.socket,
        }
    }

    /// The socket, to drop the rest of its bytes: they are read without being decrypted.
    pub(crate) fn socket_mut(&mut self) -> &mut TcpStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => &mut stream.get_mut().0.socket,
        }
    }
}

impl Drop for ConnStream {
    /// Sends close_notify if the socket takes it at once, so that a client can distinguish the end of a connection
    /// from one that was cut on its way.
    fn drop(&mut self) {
        if let Self::Tls(stream) = self {
            let (counted, session) = stream.get_mut();
            session.send_close_notify();
            while session.wants_write() {
                match session.write_tls(&mut TryWrite(&counted.socket)) {
                    Ok(1..) => {}
                    Ok(0) | Err(_) => break,
                }
            }
        }
    }
}

/// Writes as much as the socket takes at once.
struct TryWrite<'a>(&'a TcpStream);

impl io::Write for TryWrite<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Calls one method of either stream.
macro_rules! either {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream {
            ConnStream::Plain(socket) => {
                let $inner = Pin::new(socket);
                $call
            }
            ConnStream::Tls(stream) => {
                let $inner = Pin::new(stream.as_mut());
                $call
            }
        }
    };
}

impl AsyncRead for ConnStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(&mut *self, stream => stream.poll_read(context, buffer))
    }
}

impl AsyncWrite for ConnStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(&mut *self, stream => stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(&mut *self, stream => stream.poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(socket) => socket.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(&mut *self, stream => stream.poll_flush(context))
    }

    /// Inside TLS it sends close_notify first.
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(&mut *self, stream => stream.poll_shutdown(context))
    }
}

/// A socket that counts the bytes that it gave.
pub(crate) struct CountedSocket {
    pub(super) socket: TcpStream,
    received: u64,
}

impl CountedSocket {
    pub(super) fn new(socket: TcpStream) -> Self {
        Self {
            socket,
            received: 0,
        }
    }
}

impl AsyncRead for CountedSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.socket).poll_read(context, buffer))?;
        self.received += (buffer.filled().len() - before) as u64;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for CountedSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

//! One connection: its socket, its place among those allowed, and its end.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::task::AtomicWaker;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;

use super::{Accepted, Load};
use crate::admission::Share;

/// So many bytes count as one step of a task, of which it has 128 in a turn.
const UNIT_BYTES: usize = 1 << 10;

/// How long a client may take to close after the server has.
const LINGER: Duration = Duration::from_secs(1);

/// What the calls of one connection share; in the extensions of a session's request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Peer {
    /// What they have under way.
    pub(crate) share: Share,
    cut: Arc<Cut>,
}

#[derive(Debug, Default)]
struct Cut {
    asked: AtomicBool,
    connection: AtomicWaker,
}

impl Peer {
    /// Ends the connection, with all that runs on it: the one way to end a call whose
    /// client does not read.
    pub(crate) fn cut_off(&self) {
        self.cut.asked.store(true, Ordering::Release);
        self.cut.connection.wake();
    }

    /// Whether the connection may go on.
    fn go_on(&self) -> io::Result<()> {
        if self.cut.asked.load(Ordering::Acquire) {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the server leaves, and the client does not read",
            ));
        }
        Ok(())
    }
}

/// A connection that an event loop serves.
pub(super) struct Conn {
    socket: TcpStream,
    end: Option<Pin<Box<Sleep>>>,
    linger: Option<Pin<Box<Sleep>>>,
    peer: Peer,
    _permit: Option<OwnedSemaphorePermit>,
    _load: Load,
}

impl Conn {
    /// Takes a socket into the event loop of the calling thread.
    pub(super) fn new(accepted: Accepted, lifetime: Option<Duration>) -> io::Result<Self> {
        Ok(Self {
            socket: TcpStream::from_std(accepted.socket)?,
            end: lifetime.map(|lifetime| Box::pin(tokio::time::sleep(lifetime))),
            linger: None,
            peer: Peer::default(),
            _permit: accepted.permit,
            _load: accepted.load,
        })
    }

    /// What its calls share.
    pub(super) fn peer(&self) -> Peer {
        self.peer.clone()
    }
}

/// Takes what was written out of what the task may do in its turn: by the number of writes alone
/// it could be megabytes, for which all others on the event loop wait.
fn spend(written: usize, context: &mut Context<'_>) {
    for _ in 0..written / UNIT_BYTES {
        // Nothing left: the next write is for the next turn.
        if pin!(tokio::task::coop::consume_budget())
            .poll(context)
            .is_pending()
        {
            return;
        }
    }
}

impl AsyncRead for Conn {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(end) = &mut self.end
            && end.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the connection outlived its age and grace",
            )));
        }
        self.peer.cut.connection.register(context.waker());
        self.peer.go_on()?;
        Pin::new(&mut self.socket).poll_read(context, buffer)
    }
}

impl AsyncWrite for Conn {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.peer.go_on()?;
        let written = ready!(Pin::new(&mut self.socket).poll_write(context, bytes))?;
        spend(written, context);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.peer.go_on()?;
        let written = ready!(Pin::new(&mut self.socket).poll_write_vectored(context, slices))?;
        spend(written, context);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    /// Waits for the client to close, too, and drops what it still sends: a socket that is
    /// closed with something unread in it is reset, and takes the last answers with it.
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let conn = &mut *self;
        let linger = match &mut conn.linger {
            Some(linger) => linger,
            none => {
                ready!(Pin::new(&mut conn.socket).poll_shutdown(context))?;
                none.insert(Box::pin(tokio::time::sleep(LINGER)))
            }
        };
        let mut dropped = [0; 4 << 10];
        loop {
            let mut buffer = ReadBuf::new(&mut dropped);
            let read = Pin::new(&mut conn.socket).poll_read(context, &mut buffer);
            let gone = match &read {
                Poll::Ready(read) => read.is_err() || buffer.filled().is_empty(),
                Poll::Pending => false,
            };
            if gone || linger.as_mut().poll(context).is_ready() {
                return Poll::Ready(Ok(()));
            }
            ready!(read)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Read;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[tokio::test]
    async fn a_connection_that_sends_much_leaves_turns_to_others() {
        const PIECE: usize = 16 << 10;
        const TURN: usize = 128 * UNIT_BYTES + PIECE;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (socket, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        let all = 4 << 20;
        let reader = std::thread::spawn(move || {
            let mut read = vec![0; all];
            client.read_exact(&mut read).unwrap();
        });
        let load = Load::new(&Arc::new(AtomicUsize::new(0)));
        let permit = None;
        let accepted = Accepted {
            socket,
            permit,
            load,
        };
        let mut conn = Conn::new(accepted, None).unwrap();
        let sender = tokio::spawn(async move {
            let (mut sent, mut most) = (0, 0);
            poll_fn(|context| {
                let before = sent;
                let polled = loop {
                    let piece = PIECE.min(all - sent);
                    if piece == 0 {
                        break Poll::Ready(());
                    }
                    match Pin::new(&mut conn).poll_write(context, &[0; PIECE][..piece]) {
                        Poll::Ready(written) => sent += written.unwrap(),
                        Poll::Pending => break Poll::Pending,
                    }
                };
                most = most.max(sent - before);
                polled
            })
            .await;
            most
        });
        let most = sender.await.unwrap();
        assert!(most <= TURN, "{most} bytes in one turn");
        reader.join().unwrap();
    }
}

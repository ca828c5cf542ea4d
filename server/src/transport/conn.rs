//! One connection: its bytes, its place among those allowed, and its end.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep_until};

use super::frames::FramePosition;
use super::peer::{OpenConnection, Peer};
use super::{AcceptedSocket, LoopLoad};
use crate::metrics::CountedConnection;
use crate::tls::ConnStream;

/// Bytes moved that count as one step of a task. A task has 128 steps in a turn.
const UNIT_BYTES: usize = 1 << 10;

/// Frames read that count as one step, whatever their size: 16 KiB hold up to 1,800.
const UNIT_FRAMES: usize = 8;

/// Bytes for no call that a connection may send in a second ([`Overhead`]): 120,000 pings.
const OVERHEAD_RATE: u64 = 2 << 20;

/// Bytes of those that it may send at once.
const OVERHEAD_BURST: u64 = 256 << 10;

/// Bytes of those that a connection may have sent too fast at its end before its address is suspect:
/// another connection begins with a burst of its own.
const OVERHEAD_OWED: u64 = OVERHEAD_BURST / 4;

/// Least pause of a connection that has sent more.
const OVERHEAD_PAUSE: Duration = Duration::from_millis(5);

/// Bytes that the kernel takes before it has sent those before them. More would hide from the server
/// for how long a client takes nothing: at 50 KB/s the usual 2.5 MiB are 50 s.
const UNSENT_BYTES: u32 = 128 << 10;

/// Bytes inside TLS that a client may send for each byte of data. The smallest frame of HTTP/2 in a record of its own
/// needs 5.
const TLS_PER_DATA: u64 = 5;

/// Bytes inside TLS that it may send besides, for handshakes and a record that has not arrived whole.
const TLS_BESIDES: u64 = 64 << 10;

/// Maximum time for a client to close after the server has.
const LINGER: Duration = Duration::from_secs(1);

/// Counts a connection among those allowed, from its accept to its end.
pub(super) struct ConnectionGuard {
    address: Option<SocketAddr>,
    peer: Peer,
    counted: CountedConnection,
    _permit: Option<OwnedSemaphorePermit>,
    _load: LoopLoad,
    _open: OpenConnection,
}

impl ConnectionGuard {
    /// Takes a socket into the event loop of the calling thread.
    ///
    /// # Errors
    /// If the socket cannot be used.
    pub(super) fn take(accepted: AcceptedSocket) -> io::Result<(TcpStream, Self)> {
        // If it cannot be set, slow clients look silent for longer.
        let _ = SockRef::from(&accepted.socket).set_tcp_notsent_lowat(UNSENT_BYTES);
        let address = accepted.socket.peer_addr();
        let socket = TcpStream::from_std(accepted.socket)?;
        let guard = Self {
            address: address.ok(),
            peer: accepted.peer,
            counted: accepted.counted,
            _open: accepted.open,
            _permit: accepted.permit,
            _load: accepted.load,
        };
        Ok((socket, guard))
    }

    /// Address of the client; `None` if it was gone too early.
    pub(super) fn address(&self) -> Option<IpAddr> {
        self.address.map(|address| address.ip())
    }

    /// Address and port of the client; `None` if it was gone too early.
    pub(super) fn client(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The state that its calls share.
    pub(super) fn peer(&self) -> Peer {
        self.peer.clone()
    }
}

/// A connection that an event loop serves: its bytes, its guard and its end.
pub(super) struct Conn {
    stream: ConnStream,
    guard: ConnectionGuard,
    linger: Option<Pin<Box<Sleep>>>,
    is_shut_down: bool,
    /// Bytes dropped since the server has closed.
    dropped: u64,
    frames: FramePosition,
    records: RecordOverhead,
    overhead: Overhead,
}

impl Conn {
    /// A connection whose handshakes, but for HTTP/2's own, are done.
    pub(super) fn new(stream: ConnStream, guard: ConnectionGuard) -> Self {
        Self {
            stream,
            guard,
            linger: None,
            is_shut_down: false,
            dropped: 0,
            frames: FramePosition::new(),
            records: RecordOverhead::default(),
            overhead: Overhead::new(),
        }
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        let owed = self.overhead.owed(&self.guard.peer, Instant::now());
        if let Some(address) = self.guard.address()
            && owed > OVERHEAD_OWED
        {
            self.guard.peer.suspects().add(address);
        }
    }
}

/// Bytes of a connection that are for no call: pings, settings, updates of windows, frames
/// without data. A client that sends more than any client needs is read no faster than
/// [`OVERHEAD_RATE`], so that the event loop has time for others.
struct Overhead {
    /// Bytes that time has made up for.
    forgiven: u64,
    forgiven_at: Instant,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Overhead {
    fn new() -> Self {
        Self {
            forgiven: 0,
            forgiven_at: Instant::now(),
            pause: None,
        }
    }

    /// Bytes that time has not made up for.
    fn owed(&self, peer: &Peer, now: Instant) -> u64 {
        let made_up = (now - self.forgiven_at).as_micros() * u128::from(OVERHEAD_RATE) / 1_000_000;
        let made_up = u64::try_from(made_up).unwrap_or(u64::MAX);
        let forgiven = self.forgiven.saturating_add(made_up);
        peer.useless_so_far().saturating_sub(forgiven)
    }

    /// Resolves when more may be read.
    fn poll_room(&mut self, peer: &Peer, context: &mut Context<'_>) -> Poll<()> {
        loop {
            let useless = peer.useless_so_far();
            if useless.saturating_sub(self.forgiven) <= OVERHEAD_BURST {
                return Poll::Ready(());
            }
            let now = Instant::now();
            let owed = self.owed(peer, now);
            self.forgiven = useless.saturating_sub(owed);
            self.forgiven_at = now;
            let excess = owed.saturating_sub(OVERHEAD_BURST);
            if excess == 0 {
                return Poll::Ready(());
            }
            let pause = Duration::from_micros(excess.saturating_mul(1_000_000) / OVERHEAD_RATE);
            let end = now + pause.max(OVERHEAD_PAUSE);
            let sleep = (self.pause).get_or_insert_with(|| Box::pin(sleep_until(end)));
            sleep.as_mut().reset(end);
            ready!(sleep.as_mut().poll(context));
        }
    }
}

/// Bytes inside TLS that carry no data: empty records, new keys, a byte in each record. They count as bytes for no call.
#[derive(Debug, Default)]
struct RecordOverhead {
    data: u64,
    counted: u64,
}

impl RecordOverhead {
    /// Bytes to count, after `data` more bytes of data, of all those that were received inside TLS.
    fn excess(&mut self, inside_tls: u64, data: usize) -> usize {
        self.data += data as u64;
        let most = self.data * TLS_PER_DATA + TLS_BESIDES + self.counted;
        let excess = inside_tls.saturating_sub(most);
        self.counted += excess;
        usize::try_from(excess).unwrap_or(usize::MAX)
    }
}

/// Charges steps to the task's turn: by the number of reads and writes alone a turn could
/// move megabytes, for which all others on the event loop wait.
fn spend(steps: usize, context: &mut Context<'_>) {
    for _ in 0..steps {
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
        let conn = &mut *self;
        ready!(conn.overhead.poll_room(&conn.guard.peer, context));
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        let read = buffer.filled().len() - before;
        if let Some(inside_tls) = self.stream.received_in_tls() {
            let excess = self.records.excess(inside_tls, read);
            self.guard.peer.received(excess);
        }
        ready!(polled)?;
        let begun = self.frames.take(&buffer.filled()[before..]);
        self.guard.peer.received(read);
        self.guard.counted.received(read);
        self.guard.peer.useful(begun.useful);
        spend(read / UNIT_BYTES + begun.frames / UNIT_FRAMES, context);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Conn {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        self.guard.peer.sent(written);
        self.guard.counted.sent(written);
        spend(written / UNIT_BYTES, context);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, slices))?;
        self.guard.peer.sent(written);
        self.guard.counted.sent(written);
        spend(written / UNIT_BYTES, context);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    /// Waits for the client to close, too, and drops the bytes that it still sends: closing a
    /// socket with unread bytes resets it, and the last answers are lost. If a client continues
    /// to send, only the bytes that can have been under way are read.
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let conn = &mut *self;
        let linger = (conn.linger).get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER)));
        if !conn.is_shut_down {
            match Pin::new(&mut conn.stream).poll_shutdown(context) {
                Poll::Ready(shut_down) => shut_down?,
                // Inside TLS the last bytes may wait for a client that takes nothing.
                Poll::Pending => return linger.as_mut().poll(context).map(Ok),
            }
            conn.is_shut_down = true;
        }
        let most = OVERHEAD_BURST + 2 * conn.guard.peer.window();
        let mut dropped = [0; 4 << 10];
        loop {
            if conn.dropped > most {
                return linger.as_mut().poll(context).map(Ok);
            }
            let mut buffer = ReadBuf::new(&mut dropped);
            let read = Pin::new(conn.stream.socket_mut()).poll_read(context, &mut buffer);
            let gone = match &read {
                Poll::Ready(read) => read.is_err() || buffer.filled().is_empty(),
                Poll::Pending => false,
            };
            if gone || linger.as_mut().poll(context).is_ready() {
                return Poll::Ready(Ok(()));
            }
            ready!(read)?;
            conn.dropped += buffer.filled().len() as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Read;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::super::peer::Connections;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_sends_frames_for_no_call_is_read_at_a_bounded_rate() {
        const PIECE: u64 = 16 << 10;
        let (peer, _open) = Arc::new(Connections::default()).enter();
        let mut overhead = Overhead::new();
        let begin = Instant::now();
        let mut read = 0;
        while begin.elapsed() < Duration::from_secs(10) {
            poll_fn(|context| overhead.poll_room(&peer, context)).await;
            peer.received(usize::try_from(PIECE).unwrap());
            read += PIECE;
        }
        let most = OVERHEAD_BURST + 10 * OVERHEAD_RATE;
        assert!((most / 2..most + 4 * PIECE).contains(&read), "{read} bytes");
        // Data for calls is read as fast as the calls take it.
        let begin = Instant::now();
        for _ in 0..10_000 {
            poll_fn(|context| overhead.poll_room(&peer, context)).await;
            peer.received(usize::try_from(PIECE).unwrap());
            peer.useful(PIECE);
        }
        assert!(
            begin.elapsed() < Duration::from_millis(50),
            "{:?}",
            begin.elapsed()
        );
    }

    #[test]
    fn bytes_of_tls_without_data_count_as_bytes_for_no_call() {
        const RECORD: u64 = 22;
        let mut records = RecordOverhead::default();
        let (mut inside, mut counted) = (0, 0);
        // Frames of 9 bytes in records of their own.
        for _ in 0..10_000 {
            inside += RECORD + 9;
            counted += records.excess(inside, 9);
        }
        assert_eq!(counted, 0);
        for _ in 0..100_000 {
            inside += RECORD;
            counted += records.excess(inside, 0);
        }
        let spare = 10_000 * (9 * TLS_PER_DATA - RECORD - 9) + TLS_BESIDES;
        assert_eq!(counted as u64, 100_000 * RECORD - spare);
    }

    #[tokio::test(start_paused = true)]
    async fn calls_give_no_credit_for_pings() {
        const HEAD: usize = 60;
        const PINGS: usize = 900 * 17;
        let (peer, _open) = Arc::new(Connections::default()).enter();
        let mut overhead = Overhead::new();
        let begin = Instant::now();
        let mut read = 0;
        for _ in 0..10_000 {
            poll_fn(|context| overhead.poll_room(&peer, context)).await;
            if begin.elapsed() >= Duration::from_secs(10) {
                break;
            }
            peer.received(HEAD + PINGS);
            peer.useful(HEAD as u64);
            drop(peer.begin_call());
            read += PINGS as u64;
        }
        let most = OVERHEAD_BURST + 10 * OVERHEAD_RATE;
        assert!(read < most + most / 8, "{read} bytes");
    }

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
        let load = LoopLoad::new(&Arc::new(AtomicUsize::new(0)));
        let (peer, open) = Arc::new(Connections::default()).enter();
        let metrics = crate::metrics::Metrics::new().unwrap();
        let accepted = AcceptedSocket {
            counted: metrics.ports.grpc.connected(),
            socket,
            permit: None,
            load,
            peer,
            open,
            at: tokio::time::Instant::now(),
        };
        let (socket, guard) = ConnectionGuard::take(accepted).unwrap();
        let mut conn = Conn::new(ConnStream::Plain(socket), guard);
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

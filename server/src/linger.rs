//! The end of a socket whose last answer must arrive.

use std::io;
use std::net::Shutdown;
use std::time::Duration;

use socket2::SockRef;
use tokio::net::TcpStream;

/// Maximum time, and maximum bytes, for which the rest of the peer's data is dropped.
const MOST_TIME: Duration = Duration::from_secs(1);
const MOST_BYTES: usize = 1 << 20;

/// Ends the sending side, and drops data until the peer closes. The system resets a socket that is closed with unread
/// bytes, and the last answer is lost.
///
/// # Errors
/// If the socket fails.
pub(crate) async fn end(socket: &TcpStream) -> io::Result<()> {
    SockRef::from(socket).shutdown(Shutdown::Write)?;
    let rest = async {
        let (mut dropped, mut buffer) = (0, [0; 4 << 10]);
        while dropped < MOST_BYTES {
            socket.readable().await?;
            match socket.try_read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => dropped += read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    };
    // Later it is closed whatever still comes.
    tokio::time::timeout(MOST_TIME, rest)
        .await
        .unwrap_or(Ok(()))
}

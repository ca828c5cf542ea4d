//! Lines on their way to stderr: a queue of bounded bytes, and the one thread that may block.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

use super::limit;

/// Most bytes of lines that wait.
const QUEUE_BYTES: usize = 1 << 20;

/// Further bytes for errors, and for the lines of the start and the end.
const RESERVE_BYTES: usize = 256 << 10;

/// Memory that a line takes besides its bytes.
const LINE_OVERHEAD: usize = 64;

/// Pause before stderr is tried again that takes nothing now and does not block either.
const WOULD_BLOCK: Duration = Duration::from_millis(10);

/// Target of the lines that tell of lines which are missing.
pub(super) const TARGET: &str = "wald::logging";

/// The lines of the process.
pub(super) static LINES: Lines = Lines::new();

/// Lines that wait, and their number that were lost.
pub(super) struct Lines {
    state: Mutex<WriterState>,
    /// There is something to write or to tell.
    more: Condvar,
    /// Everything is written.
    empty: Condvar,
}

struct WriterState {
    waiting: VecDeque<Vec<u8>>,
    /// Bytes that wait, those being written included.
    bytes: usize,
    lost: u64,
    /// Number of lost lines that no line has reported.
    untold: u64,
    /// Whether a thread writes.
    has_writer: bool,
}

impl Lines {
    const fn new() -> Self {
        Self {
            state: Mutex::new(WriterState {
                waiting: VecDeque::new(),
                bytes: 0,
                lost: 0,
                untold: 0,
                has_writer: false,
            }),
            more: Condvar::new(),
            empty: Condvar::new(),
        }
    }

    /// Queues a line, or counts it as lost if there is no room.
    pub(super) fn push(&self, line: Vec<u8>, is_important: bool) {
        let mut state = self.state.lock();
        let most = match is_important {
            true => QUEUE_BYTES + RESERVE_BYTES,
            false => QUEUE_BYTES,
        };
        let bytes = state.bytes + line.len() + LINE_OVERHEAD;
        if bytes > most {
            state.lost += 1;
            state.untold += 1;
            return;
        }
        state.bytes = bytes;
        state.waiting.push_back(line);
        drop(state);
        self.more.notify_one();
    }

    /// Lets the thread look whether there is something to tell.
    pub(super) fn wake(&self) {
        // With the lock: the thread has not looked yet, or it waits.
        let _state = self.state.lock();
        self.more.notify_one();
    }

    /// Whether a thread writes the lines.
    pub(super) fn has_writer(&self) -> bool {
        self.state.lock().has_writer
    }

    pub(super) fn lost(&self) -> u64 {
        self.state.lock().lost
    }

    /// Waits until everything is written, for so long at most.
    pub(super) fn flush(&self, most: Duration) {
        let until = Instant::now() + most;
        let mut state = self.state.lock();
        while state.has_writer && state.bytes > 0 {
            if self.empty.wait_until(&mut state, until).timed_out() {
                return;
            }
        }
    }

    /// Starts the thread that writes the lines.
    pub(super) fn start_writing(&'static self, out: impl Write + Send + 'static) -> io::Result<()> {
        thread::Builder::new()
            .name("wald-log".to_owned())
            .spawn(move || self.write(out))?;
        self.state.lock().has_writer = true;
        Ok(())
    }

    fn write(&self, mut out: impl Write) {
        // Time of the next report of suppressed lines.
        let mut due = None;
        loop {
            if let Some(line) = self.next(&mut due) {
                let written = write_whole(&mut out, &line);
                let mut state = self.state.lock();
                state.bytes -= line.len() + LINE_OVERHEAD;
                if written.is_err() {
                    state.lost += 1;
                    state.untold += 1;
                }
                // After a failure a further line would only be lost, too.
                let has_room = written.is_ok() && state.bytes < QUEUE_BYTES / 2;
                let lost = match has_room {
                    true => std::mem::take(&mut state.untold),
                    false => 0,
                };
                if state.bytes == 0 {
                    self.empty.notify_all();
                }
                drop(state);
                if lost > 0 {
                    tracing::warn!(
                        target: TARGET,
                        lines = lost,
                        "log lines were dropped: stderr was not read fast enough"
                    );
                }
            }
            if due.is_some_and(|due| Instant::now() >= due) {
                due = None;
                limit::tell();
            }
        }
    }

    /// Waits for a line; `None` when it is time to tell of suppressed ones.
    fn next(&self, due: &mut Option<Instant>) -> Option<Vec<u8>> {
        let mut state = self.state.lock();
        loop {
            if due.is_none() && limit::is_untold() {
                *due = Some(Instant::now() + limit::PAUSE);
            }
            if let Some(line) = state.waiting.pop_front() {
                return Some(line);
            }
            match *due {
                None => self.more.wait(&mut state),
                Some(due) => {
                    if self.more.wait_until(&mut state, due).timed_out() {
                        return None;
                    }
                }
            }
        }
    }
}

/// Writes a line. If another process made the stream non-blocking, waits as if it blocked.
pub(crate) fn write_whole(out: &mut impl Write, line: &[u8]) -> io::Result<()> {
    let mut left = line;
    while !left.is_empty() {
        match out.write(left) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => left = &left[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(WOULD_BLOCK),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Makes the writer of each event.
pub(super) struct LineQueue;

impl<'a> MakeWriter<'a> for LineQueue {
    type Writer = EventWriter;

    fn make_writer(&'a self) -> EventWriter {
        EventWriter {
            is_important: false,
        }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> EventWriter {
        let target = metadata.target();
        EventWriter {
            is_important: *metadata.level() == Level::ERROR
                || target == "wald"
                || target == "wald::serve",
        }
    }
}

/// The writer of one event, which is written with one call.
pub(super) struct EventWriter {
    is_important: bool,
}

impl Write for EventWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        LINES.push(line.to_vec(), self.is_important);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc;

    use super::*;

    /// Takes a line each time it is let.
    struct Pipe {
        permits: mpsc::Receiver<()>,
        written: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // Closed: reads everything from now on.
            let _ = self.permits.recv();
            self.written.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn full_queue_drops_lines_without_blocking_and_keeps_errors() {
        let lines: &'static Lines = Box::leak(Box::new(Lines::new()));
        let (permit, permits) = mpsc::channel();
        let written = Arc::new(Mutex::new(Vec::new()));
        let pipe = Pipe {
            permits,
            written: Arc::clone(&written),
        };
        lines.start_writing(pipe).unwrap();
        let line = vec![b'x'; 1000];
        let began = Instant::now();
        let pushed = 2 * QUEUE_BYTES / line.len();
        for _ in 0..pushed {
            lines.push(line.clone(), false);
        }
        lines.push(b"the end\n".to_vec(), true);
        lines.flush(Duration::from_millis(50));
        assert!(began.elapsed() < Duration::from_secs(10), "it blocked");
        let lost = usize::try_from(lines.lost()).unwrap();
        assert!(lost > pushed / 3, "{lost} lost");
        drop(permit);
        lines.flush(Duration::from_secs(20));
        let written = written.lock();
        assert_eq!(written.len(), (pushed - lost) * line.len() + 8);
        assert!(written.ends_with(b"the end\n"));
    }

    #[test]
    fn line_is_written_whole_to_a_pipe_that_takes_little() {
        struct Stutter(Vec<u8>, u32);
        impl Write for Stutter {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.1 += 1;
                match self.1 % 3 {
                    0 => Err(io::ErrorKind::WouldBlock.into()),
                    1 => Err(io::ErrorKind::Interrupted.into()),
                    _ => {
                        self.0.push(bytes[0]);
                        Ok(1)
                    }
                }
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut out = Stutter(Vec::new(), 0);
        write_whole(&mut out, b"whole\n").unwrap();
        assert_eq!(out.0, b"whole\n");
    }
}

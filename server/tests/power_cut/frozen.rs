//! A daemon at the moment when the power goes: it is stopped, and never runs again.
//!
//! When an ioctl cuts the power of a file system, its users notice, unlike with real power. A
//! flush that the ioctl meets may even report success, though its pages were dropped. Therefore
//! no process is left that could notice. All output of the daemon before counts to the last
//! byte; its next output never comes.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Whatever is waited for comes sooner, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process whose threads no longer run their own code.
#[derive(Debug)]
pub(crate) struct Frozen {
    pid: Pid,
    /// Calls that threads were in the middle of. They never come back from them.
    calls: Vec<Call>,
}

/// A call to the kernel that cannot be interrupted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Call {
    /// fdatasync or fsync.
    Flush,
    Write,
    Other,
}

/// The system call of a thread, as the kernel reports it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Thread {
    Stopped,
    InCall(Call),
    Running,
}

impl Frozen {
    /// Stops a process. Returns at once when each of its threads is stopped, or waits in a
    /// call to the kernel that cannot be interrupted: it stops on the way out of there.
    pub(crate) fn stop(pid: Pid) -> Self {
        kill_process(pid, Signal::STOP).unwrap();
        let tasks = tasks(pid);
        let began = Instant::now();
        loop {
            let threads = look(&tasks);
            // The signal reaches one thread, which tells the others when it stops.
            let told = threads.contains(&Thread::Stopped) || threads.is_empty();
            if told && !threads.contains(&Thread::Running) {
                let call = |thread: &Thread| match thread {
                    Thread::InCall(call) => Some(*call),
                    _ => None,
                };
                let calls = threads.iter().filter_map(call).collect();
                return Self { pid, calls };
            }
            assert!(began.elapsed() < PATIENCE, "it does not stop: {threads:?}");
        }
    }

    /// Waits until all peers of a port have read every byte that the process had sent. Unread
    /// bytes may be thrown away when it is killed.
    pub(crate) fn is_heard(&self, port: u16) {
        let began = Instant::now();
        while unread(port) {
            assert!(
                began.elapsed() < PATIENCE,
                "nobody reads what {self:?} sent"
            );
            std::thread::yield_now();
        }
    }

    /// Ends the process; returns the calls that it never came back from.
    pub(crate) fn kill(self) -> Vec<Call> {
        kill_process(self.pid, Signal::KILL).unwrap();
        self.calls
    }
}

/// Watches a process until a thread of it waits in a flush. A process that does not flush
/// within a second of load is found by its losses.
pub(crate) fn wait_for_flush(pid: Pid) {
    let tasks = tasks(pid);
    let began = Instant::now();
    let flushes = || look(&tasks).contains(&Thread::InCall(Call::Flush));
    while !flushes() && began.elapsed() < Duration::from_secs(1) {}
}

fn tasks(pid: Pid) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/task"))
}

/// The system call of each thread.
fn look(tasks: &Path) -> Vec<Thread> {
    let state = |task: PathBuf| {
        // A thread may have ended.
        let stat = fs::read_to_string(task.join("stat")).ok()?;
        let (_, after_name) = stat.rsplit_once(") ")?;
        Some(match after_name.as_bytes()[0] {
            b'T' => Thread::Stopped,
            b'D' => Thread::InCall(call(&task)),
            b'Z' | b'X' => return None,
            _ => Thread::Running,
        })
    };
    let tasks = fs::read_dir(tasks).unwrap();
    tasks
        .filter_map(|task| state(task.unwrap().path()))
        .collect()
}

fn call(task: &Path) -> Call {
    let text = fs::read_to_string(task.join("syscall")).unwrap_or_default();
    let number = text.split(' ').next().unwrap().parse::<libc::c_long>();
    match number {
        Ok(libc::SYS_fdatasync | libc::SYS_fsync) => Call::Flush,
        Ok(libc::SYS_pwrite64 | libc::SYS_pwritev | libc::SYS_write) => Call::Write,
        _ => Call::Other,
    }
}

/// Whether something that was sent from a port of this machine is not read yet.
fn unread(port: u16) -> bool {
    let port = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let table = fs::read_to_string(table).unwrap_or_default();
        table.lines().skip(1).any(|line| {
            let mut columns = line.split_whitespace().skip(1);
            let mut column = || columns.next().unwrap();
            let (local, remote, _state) = (column(), column(), column());
            let (sent, received) = column().split_once(':').unwrap();
            let waits = |bytes: &str| bytes.bytes().any(|digit| digit != b'0');
            local.ends_with(&port) && waits(sent) || remote.ends_with(&port) && waits(received)
        })
    })
}

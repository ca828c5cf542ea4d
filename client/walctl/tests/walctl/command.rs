//! The command `walctl` beside a server in memory: with pipes as scripts run it, or on a terminal.

#![allow(dead_code, reason = "each test file uses its part")]

use std::fs::{File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

use crate::memory::Memory;

pub(crate) struct Fixture {
    pub(crate) memory: Arc<Memory>,
    pub(crate) endpoint: String,
}

pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) struct RanBytes {
    pub(crate) code: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

/// Writes a file with this mode.
pub(crate) fn write_with_mode(path: &Path, text: &str, mode: u32) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Sends a process the signal of Ctrl-C.
pub(crate) async fn interrupt(process: u32) {
    let mut kill = Command::new("kill");
    kill.args(["-INT", &process.to_string()]);
    assert!(kill.status().await.unwrap().success());
}

impl Fixture {
    pub(crate) async fn new() -> Self {
        let (memory, endpoint) = Memory::start().await;
        Self { memory, endpoint }
    }

    pub(crate) fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_walctl"));
        command
            .args(arguments.split_whitespace())
            .env("WALD_ENDPOINT", &self.endpoint)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs walctl with these arguments and this stdin.
    pub(crate) async fn walctl(&self, arguments: &str, stdin: &str) -> Ran {
        let ran = self.walctl_bytes(arguments, stdin.as_bytes()).await;
        Ran {
            code: ran.code,
            stdout: String::from_utf8(ran.stdout).unwrap(),
            stderr: ran.stderr,
        }
    }

    /// Runs walctl with bytes on its stdin and stdout.
    pub(crate) async fn walctl_bytes(&self, arguments: &str, stdin: &[u8]) -> RanBytes {
        Self::fed(self.command(arguments), stdin).await
    }

    /// Runs walctl with this stdin, and a stdout that nobody reads.
    pub(crate) async fn unread(&self, arguments: &str, stdin: &str) -> RanBytes {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = self.command(arguments);
        command.stdout(writer);
        Self::fed(command, stdin.as_bytes()).await
    }

    async fn fed(mut command: Command, stdin: &[u8]) -> RanBytes {
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let mut pipe = child.stdin.take().unwrap();
        let stdin = stdin.to_owned();
        // walctl may end before it has read everything.
        tokio::spawn(async move { pipe.write_all(&stdin).await });
        let ended = child.wait_with_output().await.unwrap();
        RanBytes {
            code: ended.status.code().unwrap(),
            stdout: ended.stdout,
            stderr: String::from_utf8(ended.stderr).unwrap(),
        }
    }

    /// Runs walctl on a terminal with this number of columns, where somebody types `typed`.
    /// Returns its exit code and all that the terminal was given, echoes included.
    pub(crate) async fn on_terminal(
        &self,
        arguments: &str,
        typed: &str,
        columns: u16,
    ) -> (i32, String) {
        self.on_terminal_with(arguments, &[], typed, columns).await
    }

    /// [`on_terminal`](Self::on_terminal) with more variables.
    pub(crate) async fn on_terminal_with(
        &self,
        arguments: &str,
        variables: &[(&str, &Path)],
        typed: &str,
        columns: u16,
    ) -> (i32, String) {
        let (mut child, terminal) = self.start_on_terminal(arguments, variables, columns);
        let mut keyboard = terminal.try_clone().unwrap();
        keyboard.write_all(typed.as_bytes()).unwrap();
        let screen = tokio::task::spawn_blocking(move || {
            let mut terminal = terminal;
            let (mut seen, mut some) = (Vec::new(), [0; 4096]);
            // A terminal whose other side is closed answers EIO.
            while let Ok(read @ 1..) = terminal.read(&mut some) {
                seen.extend_from_slice(&some[..read]);
            }
            String::from_utf8_lossy(&seen).into_owned()
        });
        let code = child.wait().await.unwrap().code().unwrap();
        // The command had the other side's descriptors, too.
        drop(child);
        (code, screen.await.unwrap())
    }

    /// Runs walctl on a terminal, and interrupts it once the screen has these words. Returns its exit code and the screen.
    pub(crate) async fn interrupted_at(&self, arguments: &str, words: &str) -> (i32, String) {
        let (mut child, mut terminal) = self.start_on_terminal(arguments, &[], 120);
        let words = words.to_owned();
        let shown = tokio::task::spawn_blocking(move || {
            let (mut seen, mut some) = (String::new(), [0; 4096]);
            while !seen.contains(&words) {
                let read = terminal.read(&mut some).unwrap();
                seen.push_str(&String::from_utf8_lossy(&some[..read]));
            }
            (seen, terminal)
        });
        // A terminal that is closed would end the command, too.
        let (screen, _terminal) = shown.await.unwrap();
        interrupt(child.id().unwrap()).await;
        let ended = tokio::time::timeout(Duration::from_secs(20), child.wait()).await;
        (ended.unwrap().unwrap().code().unwrap(), screen)
    }

    fn start_on_terminal(
        &self,
        arguments: &str,
        variables: &[(&str, &Path)],
        columns: u16,
    ) -> (Child, File) {
        let (terminal, line) = pty(columns);
        let child = self
            .command(arguments)
            .envs(variables.iter().copied())
            .stdin(line.try_clone().unwrap())
            .stdout(line.try_clone().unwrap())
            .stderr(line)
            .kill_on_drop(true)
            .spawn();
        (child.unwrap(), terminal)
    }
}

/// Both sides of a terminal.
fn pty(columns: u16) -> (File, File) {
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let size = Winsize {
        ws_row: 50,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&terminal, size).unwrap();
    let path = ptsname(&terminal, Vec::new()).unwrap();
    let line = File::options()
        .read(true)
        .write(true)
        .open(path.to_str().unwrap())
        .unwrap();
    (File::from(terminal), line)
}

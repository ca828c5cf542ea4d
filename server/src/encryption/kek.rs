//! The keys that wrap data keys. They come from a file or from a command, and are never written.

use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aws_lc_rs::aead::{AES_256_GCM_SIV, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustix::process::{Pid, Signal, kill_process_group};
use zeroize::Zeroizing;

use super::file::{KeyOwner, RingFile};
use crate::config::Config;
use crate::host::hide_memory;
use crate::reload::{Fault, read_key_file};

/// Bytes of each key.
pub(super) const KEY_BYTES: usize = 32;

/// Maximum bytes of the text with the keys: some hundred keys.
const MOST_TEXT: u64 = 64 << 10;

/// Maximum time that the command may take.
const MOST_TIME: Duration = Duration::from_secs(10);

/// Pause between two looks whether the command has ended.
const LOOK: Duration = Duration::from_millis(5);

/// The setting with the file.
pub(super) const FILE: &str = "encryption_key_file";

/// The text of the file with the keys.
///
/// # Errors
/// If it cannot be read, is too large, or is not secret.
pub(super) fn read_text(path: &Path) -> Result<Zeroizing<Vec<u8>>, Fault> {
    read_key_file(FILE, path, MOST_TEXT)
}

/// A key without its secret: half of its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KekId(pub(super) String);

/// A key that wraps data keys.
struct Kek {
    id: KekId,
    key: LessSafeKey,
}

/// The wrapping keys, the newest last.
pub(crate) struct Keks {
    /// Setting and path, or the command, for messages.
    source: String,
    keys: Vec<Kek>,
}

impl std::fmt::Debug for Keks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keks")
            .field("source", &self.source)
            .finish()
    }
}

/// A data key in its wrapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wrapped {
    pub(super) kek: KekId,
    /// Nonce, encrypted key, tag.
    pub(super) bytes: Vec<u8>,
}

impl Keks {
    /// The keys that the settings name; `None` if they name none.
    ///
    /// # Errors
    /// In a sentence with the file or the command, if a key is missing or malformed.
    pub(super) fn of(config: &Config) -> Result<Option<Self>, String> {
        let (file, command) = (
            &*config.encryption_key_file,
            &*config.encryption_key_command,
        );
        if (file, command) == ("", "") {
            return Ok(None);
        }
        hide_memory();
        let (source, text) = match (file, command) {
            ("", command) => (
                format!("encryption_key_command: {command}"),
                output_of(command, MOST_TIME)
                    .map_err(|why| format!("encryption_key_command: {command}: {why}"))?,
            ),
            (file, _) => {
                let text = read_text(Path::new(file)).map_err(|fault| fault.to_string())?;
                (format!("{FILE}: {file}"), text)
            }
        };
        Self::parse(source, &text).map(Some)
    }

    /// The keys in a text: one a line, as 64 hexadecimal digits or in base64. Empty lines and lines that begin with
    /// `#` count for nothing.
    pub(super) fn parse(source: String, text: &[u8]) -> Result<Self, String> {
        let wrong = |why: &str| format!("{source}: {why}");
        let text = std::str::from_utf8(text).map_err(|_| wrong("it is not text"))?;
        let mut keys = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let bytes = key_in(line).ok_or_else(|| {
                wrong(&format!(
                    "line {number} is no key: a key has 32 bytes, as 64 hexadecimal digits or in base64; make one with `wald key new`"
                ))
            })?;
            let kek = Kek::new(&bytes);
            if keys.iter().any(|other: &Kek| other.id == kek.id) {
                return Err(wrong(&format!("line {number} repeats a key")));
            }
            keys.push(kek);
        }
        match keys.is_empty() {
            true => Err(wrong("it has no key; make one with `wald key new`")),
            false => Ok(Self { source, keys }),
        }
    }

    /// The key that wraps new data keys.
    fn newest(&self) -> &KekId {
        &self.keys[self.keys.len() - 1].id
    }

    /// Wraps a data key with the newest key. `about` is bound to it.
    pub(super) fn wrap(&self, key: &[u8; KEY_BYTES], about: &[u8]) -> Wrapped {
        let kek = &self.keys[self.keys.len() - 1];
        let mut nonce = [0; NONCE_LEN];
        fill(&mut nonce);
        let mut bytes = nonce.to_vec();
        let mut secret = Zeroizing::new(key.to_vec());
        let sealing = Nonce::assume_unique_for_key(nonce);
        let tag = kek
            .key
            .seal_in_place_separate_tag(sealing, Aad::from(about), &mut secret);
        bytes.extend_from_slice(&secret);
        bytes.extend_from_slice(tag.expect("a key is short").as_ref());
        Wrapped {
            kek: kek.id.clone(),
            bytes,
        }
    }

    /// The data key in a wrapping. `None`: none of the keys has wrapped it, or it was changed.
    fn unwrap(&self, wrapped: &Wrapped, about: &[u8]) -> Option<Zeroizing<[u8; KEY_BYTES]>> {
        let kek = self.keys.iter().find(|kek| kek.id == wrapped.kek)?;
        let (nonce, rest) = wrapped.bytes.split_first_chunk::<NONCE_LEN>()?;
        let mut rest = Zeroizing::new(rest.to_vec());
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let opened = kek.key.open_in_place(nonce, Aad::from(about), &mut rest);
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        let opened = opened.ok().filter(|opened| opened.len() == KEY_BYTES)?;
        key.copy_from_slice(opened);
        Some(key)
    }

    /// Opens all data keys of a ring, and passes their secrets to `each`. Returns the ring with all of them wrapped by
    /// the newest key: the same one if they are already.
    ///
    /// # Errors
    /// In a sentence about the first key that does not open.
    pub(super) fn wrap_anew(
        &self,
        ring: &RingFile,
        mut each: impl FnMut(u64, &KeyOwner, &[u8; KEY_BYTES]),
    ) -> Result<RingFile, String> {
        let mut anew = ring.clone();
        for (number, key) in &mut anew.keys {
            let about = ring.about(*number, &key.owner);
            let opened = self.unwrap(&key.wrapped, &about);
            let secret = opened.ok_or_else(|| match self.has(&key.wrapped.kek) {
                true => format!(
                    "data key {number} was changed after it was wrapped; put the newest copy of the key ring back with `wald key import FILE`"
                ),
                false => format!(
                    "data key {number} is wrapped with the key {}, which {} does not have",
                    key.wrapped.kek.0, self.source
                ),
            })?;
            each(*number, &key.owner, &secret);
            if key.wrapped.kek != *self.newest() {
                Arc::make_mut(key).wrapped = self.wrap(&secret, &about);
            }
        }
        Ok(anew)
    }

    /// Whether these are the same keys, the same one last.
    pub(super) fn are_of(&self, others: &Self) -> bool {
        let ids = |keks: &Self| {
            keks.keys
                .iter()
                .map(|kek| kek.id.clone())
                .collect::<Vec<_>>()
        };
        ids(self) == ids(others)
    }

    /// Whether one of the keys has this id.
    pub(super) fn has(&self, id: &KekId) -> bool {
        self.keys.iter().any(|kek| kek.id == *id)
    }
}

impl Kek {
    fn new(bytes: &[u8; KEY_BYTES]) -> Self {
        let mut named = Zeroizing::new(b"wald wrapping key ".to_vec());
        named.extend_from_slice(bytes);
        let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &named);
        let id = digest.as_ref()[..8].iter();
        Self {
            id: KekId(id.map(|byte| format!("{byte:02x}")).collect()),
            key: data_key(bytes),
        }
    }
}

/// The cipher with this key.
pub(super) fn data_key(bytes: &[u8; KEY_BYTES]) -> LessSafeKey {
    let key = UnboundKey::new(&AES_256_GCM_SIV, bytes);
    LessSafeKey::new(key.expect("the key has the right length"))
}

/// Fills bytes from the system's source of random numbers.
pub(super) fn fill(bytes: &mut [u8]) {
    // A system without that source cannot keep a secret: nothing may be encrypted there.
    aws_lc_rs::rand::fill(bytes).expect("the system has random numbers");
}

/// A new key, as text.
pub(super) fn new_text() -> Zeroizing<String> {
    hide_memory();
    let mut bytes = Zeroizing::new([0; KEY_BYTES]);
    fill(&mut *bytes);
    let mut text = Zeroizing::new(String::with_capacity(2 * KEY_BYTES + 1));
    for byte in bytes.iter() {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from_digit(u32::from(digit), 16).unwrap_or_default());
        }
    }
    text
}

fn key_in(line: &str) -> Option<Zeroizing<[u8; KEY_BYTES]>> {
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    if line.len() == 2 * KEY_BYTES {
        let digit = |byte: u8| char::from(byte).to_digit(16);
        for (byte, pair) in key.iter_mut().zip(line.as_bytes().chunks(2)) {
            let value = digit(pair[0])? * 16 + digit(pair[1])?;
            *byte = u8::try_from(value).ok()?;
        }
        return Some(key);
    }
    let bytes = Zeroizing::new(STANDARD.decode(line).ok()?);
    if bytes.len() != KEY_BYTES {
        return None;
    }
    key.copy_from_slice(&bytes);
    Some(key)
}

/// The output of a command. It is not given to a shell; its parts are separated by spaces. After `most` all its processes
/// are killed.
fn output_of(command: &str, most: Duration) -> Result<Zeroizing<Vec<u8>>, String> {
    let mut parts = command.split_whitespace();
    let program = parts.next().ok_or("it is empty")?;
    let mut child = Command::new(program)
        .args(parts)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        // A group of its own, which ends together.
        .process_group(0)
        .spawn()
        .map_err(|error| format!("cannot be started: {error}"))?;
    let mut output = child
        .stdout
        .take()
        .ok_or("it has no output")?
        .take(MOST_TEXT + 1);
    // A buffer that grows leaves its earlier bytes behind.
    let room = usize::try_from(MOST_TEXT + 1).unwrap_or(usize::MAX);
    // A command may end and leave its output open in a child, so its end alone is no end of the read.
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Zeroizing::new(Vec::with_capacity(room));
        let read = output.read_to_end(&mut bytes).map(|_| bytes);
        // Nobody waits any more after the time is over.
        let _ = sender.send(read);
    });
    let until = Instant::now() + most;
    let left = || until.saturating_duration_since(Instant::now());
    let read = receiver.recv_timeout(left());
    let mut status = None;
    while status.is_none() && read.is_ok() && !left().is_zero() {
        status = child.try_wait().map_err(|error| error.to_string())?;
        if status.is_none() {
            std::thread::sleep(LOOK);
        }
    }
    let Some(status) = status else {
        // Nobody waited for the child yet, so the number of its group belongs to no other.
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
        let _ = child.wait();
        return Err(format!("it takes longer than {} s", most.as_secs()));
    };
    let bytes = read
        .map_err(|_| "its output cannot be read")?
        .map_err(|error| format!("its output cannot be read: {error}"))?;
    // The command fails, too, once nobody reads the rest.
    if bytes.len() as u64 > MOST_TEXT {
        return Err("it prints more than 64 KiB".to_owned());
    }
    match status.success() {
        true => Ok(bytes),
        false => Err(format!("it failed ({status})")),
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec};
    use rustix::fs::{Mode, OFlags};

    use super::*;

    fn parse(text: &str) -> Result<Keks, String> {
        Keks::parse("keys".to_owned(), text.as_bytes())
    }

    #[test]
    fn keys_are_read_in_both_forms_and_the_last_one_wraps() {
        let hex = "00".repeat(31) + "07";
        let base64 = STANDARD.encode([9; 32]);
        let keks = parse(&format!("# old\n{hex}\n\n  {base64}\n")).unwrap();
        let first = parse(&hex).unwrap();
        let last = parse(&base64).unwrap();
        assert_eq!(keks.newest(), last.newest());
        assert!(keks.has(first.newest()) && !first.has(last.newest()));
        let old = first.wrap(&[3; 32], b"a");
        assert_eq!(*keks.unwrap(&old, b"a").unwrap(), [3; 32]);
        assert!(keks.unwrap(&old, b"b").is_none());
        assert!(last.unwrap(&old, b"a").is_none());
        let mut changed = old.clone();
        changed.bytes[20] ^= 1;
        assert!(keks.unwrap(&changed, b"a").is_none());
        assert!(parse(&new_text()).is_ok());
        assert_ne!(new_text(), new_text());
    }

    #[test]
    fn malformed_keys_are_named_with_their_line_and_never_shown() {
        let hex = "00".repeat(32);
        for (text, said) in [
            ("", "has no key"),
            ("# nothing\n", "has no key"),
            (&hex[1..], "line 1 is no key"),
            (&format!("{hex}\n{}x", &hex[1..]), "line 2 is no key"),
            (&format!("{hex}\n{hex}"), "line 2 repeats"),
            (&STANDARD.encode([1; 31]), "line 1 is no key"),
        ] {
            let error = parse(text).map(drop).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
            assert!(!error.contains("0000"), "{error}");
        }
    }

    #[test]
    fn output_of_a_command_is_bounded_and_its_failure_is_named() {
        assert_eq!(&*output_of("echo abc", MOST_TIME).unwrap(), b"abc\n");
        for (command, said) in [
            ("false", "failed"),
            ("/no/such/program", "cannot be started"),
            ("head -c 70000 /dev/zero", "more than 64 KiB"),
        ] {
            let error = output_of(command, MOST_TIME).unwrap_err();
            assert!(error.contains(said), "{command}: {error}");
        }
    }

    #[test]
    fn command_that_hangs_ends_with_all_its_processes() {
        let scratch = tempfile::tempdir().unwrap();
        let (pipe, script) = (scratch.path().join("pipe"), scratch.path().join("script"));
        let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        // The child of the shell holds the pipe, too. In the second script it outlives the shell.
        for rest in ["sleep 60\necho", "sleep 60 &"] {
            let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let reader = rustix::fs::open(&pipe, flags, Mode::empty()).unwrap();
            let text = format!("exec 3> {}\necho ready >&3\n{rest}\n", pipe.display());
            std::fs::write(&script, text).unwrap();
            let command = format!("sh {}", script.display());
            let error = output_of(&command, Duration::from_secs(2)).unwrap_err();
            assert_eq!(error, "it takes longer than 2 s");
            let mut said = [0; 6];
            let read = rustix::io::read(&reader, &mut said);
            assert_eq!(read, Ok(6), "{rest}: it ran");
            // The pipe hangs up once no process has it.
            let mut ends = [PollFd::new(&reader, PollFlags::empty())];
            let most = Timespec::try_from(MOST_TIME).unwrap();
            let ended = rustix::event::poll(&mut ends, Some(&most));
            assert_eq!(ended, Ok(1), "{rest}");
            assert_eq!(ends[0].revents(), PollFlags::HUP, "{rest}");
        }
    }
}

//! Calls of a simulated disk: what each was, which of them fail, and the trace of all.

use std::hash::{DefaultHasher, Hash, Hasher};

/// What a call was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names of the methods")]
pub enum CallKind {
    Lock,
    CreateDirectory,
    List,
    Create,
    Open,
    ReadFromDevice,
    Rename,
    Remove,
    SyncDirectory,
    FreeBytes,
    Identity,
    Draw,
    Size,
    Read,
    Write,
    SetSize,
    Sync,
}

impl CallKind {
    /// Whether something may be different after it: where the power can go.
    pub fn changes(self) -> bool {
        matches!(
            self,
            Self::Create
                | Self::Rename
                | Self::Remove
                | Self::SyncDirectory
                | Self::Write
                | Self::SetSize
                | Self::Sync
        )
    }

    /// Whether it needs a file descriptor of its own, so that it may find none (EMFILE).
    pub fn takes_descriptor(self) -> bool {
        let opens = matches!(self, Self::Lock | Self::Create | Self::Open);
        let walks = matches!(self, Self::List | Self::SyncDirectory | Self::FreeBytes);
        opens || walks || self == Self::ReadFromDevice
    }

    /// Whether it may find no space.
    pub fn takes_space(self) -> bool {
        let takes = matches!(self, Self::Lock | Self::CreateDirectory | Self::Sync);
        takes || matches!(self, Self::Create | Self::Rename | Self::Write)
    }
}

/// One call, as a [`Filter`] sees it.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// What it is for.
    pub kind: CallKind,
    /// The file or directory. Of an open file the name that it has now.
    pub path: &'a str,
    /// Where it is moved to.
    pub to: Option<&'a str>,
    /// Where it reads or writes; for a change of size the new one.
    pub offset: u64,
    /// What is written.
    pub bytes: &'a [u8],
    /// How much is read.
    pub length: u64,
}

impl<'a> Call<'a> {
    pub(super) fn of(kind: CallKind, path: &'a str) -> Self {
        Self {
            kind,
            path,
            to: None,
            offset: 0,
            bytes: &[],
            length: 0,
        }
    }
}

/// Chooses calls.
pub type Filter = fn(&Call<'_>) -> bool;

/// The call during which the power went.
#[derive(Debug, Clone)]
pub struct CutPoint {
    /// What it was for.
    pub kind: CallKind,
    /// The file or directory.
    pub path: String,
    /// What was written, or was to be flushed: offset and bytes of each write.
    pub writes: Vec<(u64, Vec<u8>)>,
    /// Names that were changed, or to be flushed: from, to.
    pub names: Vec<(Option<String>, Option<String>)>,
}

/// A write about which the device lied: it was acknowledged and flushed, and is not where it
/// should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lie {
    /// The file that was written to.
    pub path: String,
    /// Which sectors of it the device did not get: offset, bytes.
    pub sectors: (u64, u64),
    /// How many writes there had been to any file.
    pub write: u64,
    /// Where they landed instead: file and offset.
    pub landed: Option<(String, u64)>,
}

/// All calls so far, and optionally what they were.
#[derive(Clone, Default)]
pub(super) struct Trace {
    hash: u64,
    list: Option<Vec<String>>,
}

impl Trace {
    pub(super) fn listed() -> Self {
        Self {
            hash: 0,
            list: Some(Vec::new()),
        }
    }

    pub(super) fn add(&mut self, call: &Call<'_>) {
        let mut hasher = DefaultHasher::new();
        let Call {
            kind,
            path,
            to,
            offset,
            bytes,
            length,
        } = call;
        bytes.hash(&mut hasher);
        let written = hasher.finish();
        (self.hash, kind, path, to, offset, length).hash(&mut hasher);
        self.hash = hasher.finish();
        if let Some(list) = &mut self.list {
            let to = to.unwrap_or_default();
            list.push(format!(
                "{kind:?} {path} {to} {offset} {length} {} {written:016x}",
                bytes.len()
            ));
        }
    }

    pub(super) fn told(&self) -> (u64, Vec<String>) {
        (self.hash, self.list.clone().unwrap_or_default())
    }
}

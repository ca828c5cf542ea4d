//! Calls of a simulated disk: the kind of each, the calls that fail, and the trace of all.

use std::hash::{DefaultHasher, Hash, Hasher};

/// The kind of a call.
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
    /// Whether the call may change the disk. The power can be cut only during such calls.
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

    /// Whether the call needs its own file descriptor, so that it may fail with EMFILE.
    pub fn takes_descriptor(self) -> bool {
        let opens = matches!(self, Self::Lock | Self::Create | Self::Open);
        let walks = matches!(self, Self::List | Self::SyncDirectory | Self::FreeBytes);
        opens || walks || self == Self::ReadFromDevice
    }

    /// Whether the call may fail for lack of space.
    pub fn takes_space(self) -> bool {
        let takes = matches!(self, Self::Lock | Self::CreateDirectory | Self::Sync);
        takes || matches!(self, Self::Create | Self::Rename | Self::Write)
    }
}

/// One call, as a [`Filter`] sees it.
#[derive(Debug, Clone, Copy)]
pub struct DiskCall<'a> {
    /// The kind of the call.
    pub kind: CallKind,
    /// The file or directory; for an open file, its current name.
    pub path: &'a str,
    /// The new path of a move.
    pub to: Option<&'a str>,
    /// Offset of a read or write; for a change of size, the new size, in bytes.
    pub offset: u64,
    /// Bytes of a write.
    pub bytes: &'a [u8],
    /// Length of a read, in bytes.
    pub length: u64,
}

impl<'a> DiskCall<'a> {
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
pub type Filter = fn(&DiskCall<'_>) -> bool;

/// The call during which the power was cut.
#[derive(Debug, Clone)]
pub struct CutPoint {
    /// Kind of the call.
    pub kind: CallKind,
    /// The file or directory.
    pub path: String,
    /// Writes of the call, or to be flushed by it: offset and bytes of each.
    pub writes: Vec<(u64, Vec<u8>)>,
    /// Names that the call changed, or that it should have flushed: from, to.
    pub names: Vec<(Option<String>, Option<String>)>,
}

/// A write about which the device lied: it was acknowledged and flushed, but is not in its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lie {
    /// The file that was written to.
    pub path: String,
    /// Sectors of the file that the device did not get: offset, bytes.
    pub sectors: (u64, u64),
    /// Number of writes to all files so far, including this write.
    pub write: u64,
    /// Place at which the sectors landed instead: file and offset in bytes.
    pub landed: Option<(String, u64)>,
}

/// A hash of all calls so far, and optionally their list.
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

    pub(super) fn add(&mut self, call: &DiskCall<'_>) {
        let mut hasher = DefaultHasher::new();
        let DiskCall {
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

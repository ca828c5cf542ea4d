//! Names of simulated files: created, moved and removed in memory first.

use std::collections::BTreeMap;

/// A change of names that no flush of a directory has made durable.
#[derive(Debug, Clone)]
pub(super) struct NameChange {
    /// New path and the inode that it names; `None`: the old name is only removed.
    pub(super) set: Option<(String, u64)>,
    pub(super) removed: Option<String>,
}

impl NameChange {
    pub(super) fn touches(&self, directory: &str) -> bool {
        let within = |path: &String| parent(path) == directory;
        self.set.as_ref().is_some_and(|(path, _)| within(path))
            || self.removed.as_ref().is_some_and(within)
    }

    pub(super) fn apply(&self, names: &mut BTreeMap<String, u64>) {
        if let Some(path) = &self.removed {
            names.remove(path);
        }
        if let Some((path, inode)) = &self.set {
            names.insert(path.clone(), *inode);
        }
    }

    /// The old and the new path.
    pub(super) fn told(&self) -> (Option<String>, Option<String>) {
        let to = self.set.as_ref().map(|(path, _)| path.clone());
        (self.removed.clone(), to)
    }
}

pub(super) fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(directory, _)| directory)
}

//! Resources that the host gives to this process.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Memory to assume where the system does not tell.
const UNKNOWN_MEMORY: u64 = 1 << 30;

/// Descriptors to assume where the system has no limit.
const UNLIMITED_DESCRIPTORS: u64 = 1 << 20;

/// Descriptors to assume that were open before the start, where the system does not tell.
const UNKNOWN_INHERITED: u64 = 8;

/// Limits of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// Descriptors that may be open.
    pub(super) descriptors: u64,
    /// Descriptors that are open now: standard streams, and those that the parent left open.
    pub(super) inherited: u64,
    /// The cgroup's limit of memory or half of RAM, whichever is less, in bytes.
    pub(super) memory: u64,
    /// Whether that is the cgroup's.
    pub(super) by_cgroup: bool,
}

impl Host {
    /// A host that limits nothing, for rules of settings among themselves.
    pub(super) fn unlimited() -> Self {
        Self {
            descriptors: UNLIMITED_DESCRIPTORS,
            inherited: 0,
            memory: u64::MAX,
            by_cgroup: false,
        }
    }

    /// Raises the soft limit of descriptors to the hard one, and reads all limits.
    pub(crate) fn prepare() -> Self {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        if current != maximum {
            let raised = Rlimit {
                current: maximum,
                maximum,
            };
            // If the system refuses, the soft limit stays in force.
            let _ = setrlimit(Resource::Nofile, raised);
        }
        let limit = getrlimit(Resource::Nofile).current;
        let inherited = fs::read_dir("/proc/self/fd").map_or(UNKNOWN_INHERITED, |entries| {
            // Without the one that the look itself takes.
            (entries.count() as u64).saturating_sub(1)
        });
        let half = ram().map(|bytes| bytes / 2);
        let cgroup = cgroup_limit(Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"));
        let by_cgroup = cgroup.is_some_and(|limit| ram().is_none_or(|ram| limit < ram));
        let memory = match cgroup.filter(|_| by_cgroup) {
            Some(limit) => limit,
            None => half.unwrap_or(UNKNOWN_MEMORY),
        };
        Self {
            descriptors: limit.unwrap_or(UNLIMITED_DESCRIPTORS),
            inherited,
            memory,
            by_cgroup,
        }
    }

    /// Source of the limit of memory, for messages. `configured`: the setting, in bytes.
    pub(super) fn memory_origin(&self, configured: u64) -> &'static str {
        match (configured, self.by_cgroup) {
            (0, true) => "the cgroup's limit",
            (0, false) => "half of RAM",
            _ => "configured",
        }
    }
}

/// RAM in bytes, `None` where the system does not tell.
fn ram() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// The least limit of memory of the cgroups that this process is in, in bytes; `None` if none has
/// one. `own` lists the cgroups of the process, `root` is where they are mounted.
fn cgroup_limit(own: &Path, root: &Path) -> Option<u64> {
    let text = fs::read_to_string(own).ok()?;
    let mut least = None;
    for line in text.lines() {
        // number:controllers:path, with no controllers in version 2.
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let (mount, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            names if names.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => continue,
        };
        // Inside of a container the path may be that outside of it: then only the root is there.
        let group = PathBuf::from(path.trim_start_matches('/'));
        for ancestor in group.ancestors() {
            let limit = fs::read_to_string(mount.join(ancestor).join(file));
            let limit = limit.ok().and_then(|text| text.trim().parse().ok());
            least = [least, limit].into_iter().flatten().min();
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn cgroup_limit_is_the_least_of_the_group_and_its_parents() {
        let directory = tempfile::tempdir().unwrap();
        let (own, root) = (directory.path().join("own"), directory.path().join("root"));
        assert_eq!(cgroup_limit(&own, &root), None);
        write(&own, "0::/kube/pod\n");
        assert_eq!(cgroup_limit(&own, &root), None);
        write(&root.join("kube/pod/memory.max"), "max\n");
        assert_eq!(cgroup_limit(&own, &root), None);
        write(&root.join("kube/memory.max"), "536870912\n");
        assert_eq!(cgroup_limit(&own, &root), Some(512 << 20));
        write(&root.join("kube/pod/memory.max"), "268435456\n");
        assert_eq!(cgroup_limit(&own, &root), Some(256 << 20));
        // A container sees its own group as the root.
        write(&own, "0::/../outside\n");
        write(&root.join("memory.max"), "1048576\n");
        assert_eq!(cgroup_limit(&own, &root), Some(1 << 20));
    }

    #[test]
    fn cgroup_limit_of_version_1_is_read_too() {
        let directory = tempfile::tempdir().unwrap();
        let (own, root) = (directory.path().join("own"), directory.path().join("root"));
        write(&own, "5:cpu,cpuacct:/a\n4:memory:/a/b\nbroken\n");
        write(&root.join("memory/a/b/memory.limit_in_bytes"), "4096\n");
        write(&root.join("cpu/a/memory.limit_in_bytes"), "1\n");
        assert_eq!(cgroup_limit(&own, &root), Some(4096));
    }

    #[test]
    fn host_tells_limits_that_hold_here() {
        let host = Host::prepare();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum, "the soft limit is raised");
        assert!(host.inherited >= 3 && host.inherited < host.descriptors);
        assert!(host.memory >= 1 << 20);
    }
}

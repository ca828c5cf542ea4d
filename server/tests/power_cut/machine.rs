//! A machine whose power can be cut: a file system in an image, on a loop device, whose
//! image in turn is a file of an ext4 that stands for the device.
//!
//! The cut is the ioctl FS_IOC_SHUTDOWN, which `xfs_io` sends: from that moment no data in the
//! memory of a file system reaches its image any more. Then it is unmounted, which throws its
//! caches away, and mounted again, which replays its journal, as after a power cut. Data that
//! the file system wrote is in the memory of the one below until a flush, as in the volatile
//! cache of a disk; it is lost as well if the power of the device goes. The device lies in
//! memory: the host's own caching is not under test, and its flush costs little.
//!
//! A device can be made to stall: that is a freeze (FIFREEZE) of the file system below.
//!
//! Everything is mounted in a name space of the test's own. When the test ends, however
//! it does, its processes, mounts and loop devices go with it.

use std::fs::File;
use std::io::Write as _;
use std::num::NonZeroU64;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rand::RngExt;
use rand::rngs::StdRng;
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};
use rustix::process::Pid;
use tempfile::TempDir;

use crate::frozen::Frozen;

/// XFS takes no less than 300 MiB.
const IMAGE_BYTES: u64 = 320 << 20;
const DEVICE_BYTES: u64 = 400 << 20;
const PAGE: u64 = 4096;
/// Set in the name space.
const INSIDE: &str = "WALD_CUTS_INSIDE";

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum FileSystem {
    Ext4,
    Xfs,
}

/// The extent of the loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Cut {
    /// Flag 2: the memory of the file system is lost, as by a power cut. Names, sizes and
    /// blocks of files are as of its last commit.
    Nothing,
    /// Flag 1: it is committed first, so that names and sizes are as of now, and the
    /// contents are not: a power cut just after a commit.
    Journal,
    /// Flag 2, and all data since the device's last flush is lost too.
    Device,
}

pub(crate) struct Machine {
    mount: PathBuf,
    /// Image of the file system, a file of the device.
    image: PathBuf,
    device: PathBuf,
    memory: PathBuf,
    /// Switches of the file system and of the device.
    switches: Option<(Child, Child)>,
    mounted: bool,
    _directory: TempDir,
}

/// A device that does nothing until this is dropped. A process that waits for it cannot be
/// killed.
pub(crate) struct Stall {
    device: PathBuf,
}

/// Goes on in a name space of its own, where the mounts are nobody else's business and
/// everything ends with this process; needs root. The shell is there to be the first
/// process in it, which could not be interrupted.
pub(crate) fn enter_name_space() {
    if std::env::var_os(INSIDE).is_some() {
        return;
    }
    let error = Command::new("unshare")
        .args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"])
        .args(["sh", "-c", "\"$@\"; exit $?", "sh"])
        .args(std::env::args_os())
        .env(INSIDE, "1")
        .exec();
    panic!("unshare: {error}");
}

fn run(command: &mut Command) {
    let done = command
        .output()
        .unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{command:?}: {said}");
}

fn mount_image(image: &Path, mount: &Path) {
    run(Command::new("mount")
        .args(["-o", "loop"])
        .args([image, mount]));
}

/// Waits for a line with the fate of this file system.
fn switch(mount: &Path) -> Child {
    Command::new("xfs_io")
        .arg("-x")
        .arg(mount)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("xfs_io (of xfsprogs)")
}

impl Machine {
    /// A new one, switched on.
    pub(crate) fn new(kind: FileSystem) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let memory = directory.path().join("memory");
        std::fs::create_dir(&memory).unwrap();
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1g", "wald-power-cuts"])
            .arg(&memory));
        let (mount, device) = (memory.join("mount"), memory.join("device"));
        std::fs::create_dir(&mount).unwrap();
        std::fs::create_dir(&device).unwrap();
        let mut machine = Self {
            mount,
            image: device.join("image"),
            device,
            memory,
            switches: None,
            mounted: false,
            _directory: directory,
        };
        // Nothing kept for root, and nothing done later in the background.
        let ext4 = [
            "mkfs.ext4",
            "-q",
            "-m",
            "0",
            "-E",
            "lazy_itable_init=0,lazy_journal_init=0",
        ];
        let make = |command: &[&str], image: &Path, bytes: u64| {
            File::create(image).unwrap().set_len(bytes).unwrap();
            run(Command::new(command[0]).args(&command[1..]).arg(image));
        };
        make(&ext4, &machine.device_image(), DEVICE_BYTES);
        mount_image(&machine.device_image(), &machine.device);
        match kind {
            FileSystem::Ext4 => make(&ext4, &machine.image, IMAGE_BYTES),
            FileSystem::Xfs => make(&["mkfs.xfs", "-q"], &machine.image, IMAGE_BYTES),
        }
        run(Command::new("umount").arg(&machine.device));
        machine.on();
        machine
    }

    pub(crate) fn disk(&self) -> &Path {
        &self.mount
    }

    /// Mounts the file system: its journal is replayed.
    pub(crate) fn on(&mut self) {
        mount_image(&self.device_image(), &self.device);
        mount_image(&self.image, &self.mount);
        self.mounted = true;
        // Started now, so that a cut is one line to it.
        self.switches = Some((switch(&self.mount), switch(&self.device)));
    }

    /// Stops the device: a flush that begins now is under way until the power is cut.
    pub(crate) fn stall(&self) -> Stall {
        run(Command::new("fsfreeze").arg("-f").arg(&self.device));
        Stall {
            device: self.device.clone(),
        }
    }

    /// Cuts the power of the file system, and of a process, which must not continue. A device
    /// that stalls has lost its unfinished writes.
    pub(crate) fn cut(&mut self, cut: Cut, process: Pid, stall: Option<Stall>) -> Frozen {
        let frozen = Frozen::stop(process);
        let (file_system, device) = self.switches.take().unwrap();
        let (mut used, mut other, line, place): (_, _, &[u8], _) = match cut {
            Cut::Nothing => (file_system, device, b"shutdown\n", &self.mount),
            Cut::Journal => (file_system, device, b"shutdown -f\n", &self.mount),
            Cut::Device => (device, file_system, b"shutdown\n", &self.device),
        };
        used.stdin.take().unwrap().write_all(line).unwrap();
        assert!(used.wait().unwrap().success());
        drop(stall);
        other.kill().unwrap();
        other.wait().unwrap();
        let probe = File::create(place.join("probe"));
        assert!(probe.is_err(), "the file system goes on after the cut");
        frozen
    }

    /// Unmounts it. Nobody may have a file open.
    pub(crate) fn off(&mut self) {
        run(Command::new("umount").args([&self.mount, &self.device]));
        self.mounted = false;
    }

    /// Takes all space but so much, in a file.
    pub(crate) fn fill(&self, leave: u64) {
        let disk = rustix::fs::statvfs(&self.mount).unwrap();
        let bytes = (disk.f_bavail * disk.f_frsize).saturating_sub(leave);
        let file = File::create(self.ballast()).unwrap();
        if let Some(bytes) = NonZeroU64::new(bytes) {
            // It may be that the daemon was faster.
            let _ = fallocate(&file, FallocateFlags::empty(), 0, bytes.get());
        }
    }

    /// Gives that space back, if it is taken.
    pub(crate) fn empty(&self) -> bool {
        std::fs::remove_file(self.ballast()).is_ok()
    }

    /// Leaves the image in a directory, with whatever reached it.
    pub(crate) fn keep(&self, directory: &Path) {
        std::fs::copy(&self.image, directory.join("image")).unwrap();
    }

    fn device_image(&self) -> PathBuf {
        self.memory.join("device.image")
    }

    fn ballast(&self) -> PathBuf {
        self.mount.join("ballast")
    }
}

/// Writes back pages here and there of the newest segments, as the kernel may do at any time:
/// unflushed data survives in parts, and out of order.
pub(crate) fn write_back_some(data: &Path, random: &mut StdRng) {
    let mut segments: Vec<PathBuf> = std::fs::read_dir(data.join("journal"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    segments.sort();
    let share = random.random_range(0.1..0.9);
    for path in segments.iter().rev().take(4) {
        // It may have been given another name just now.
        let Ok(file) = File::open(path) else { continue };
        let pages = file.metadata().unwrap().len() / PAGE;
        for page in 0..pages {
            if random.random_bool(share) {
                fadvise(&file, page * PAGE, NonZeroU64::new(PAGE), Advice::DontNeed).unwrap();
            }
        }
    }
}

impl Drop for Stall {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze")
            .arg("-u")
            .arg(&self.device)
            .status();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some((file_system, device)) = self.switches.take() {
            for mut switch in [file_system, device] {
                let _ = switch.kill();
                let _ = switch.wait();
            }
        }
        let mounts = [&self.mount, &self.device];
        let mounted = if self.mounted { &mounts[..] } else { &[] };
        let _ = Command::new("umount")
            .arg("--lazy")
            .args(mounted)
            .arg(&self.memory)
            .status();
    }
}

//! The machine around the store: whose the data directory is, who else can open it, and where
//! memory would end up if the process crashed.

use std::path::Path;

use rustix::process::{Resource, Rlimit, setrlimit};
use wald_storage::Owner;

use crate::config::Config;
use crate::serve::Exit;

/// Refuses to make files as root in a directory of another user, who could not read them.
///
/// # Errors
/// If the directory is such a one and the setting does not allow it.
pub(crate) fn check_owner(config: &Config, directory: &Path) -> Result<(), Exit> {
    match wald_storage::owner(directory) {
        Ok(Owner::OtherThanRoot(user)) if !config.allow_foreign_owner => Err(Exit::new(
            Exit::CONFIG,
            format!(
                "{} belongs to user {user}, and this process is root: the files it makes there \
                 would be root's; run it as that user (sudo -u '#{user}' wald ...), or pass \
                 --allow-foreign-owner",
                directory.display()
            ),
        )),
        // Whatever else is wrong with the directory, opening it reports it.
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Warns if users other than the owner can open the data directory. Its mode stays: an operator
/// may have chosen it, and a volume may need it.
pub(crate) fn warn_of_strangers(directory: &Path) {
    let Ok(Some(strangers)) = wald_storage::strangers(directory) else {
        return;
    };
    let own = matches!(wald_storage::owner(directory), Ok(Owner::Own));
    if !own && !strangers.others {
        // A volume for a group: Kubernetes mounts them so for `fsGroup`.
        return;
    }
    let who = match strangers.others {
        true => "every user of this machine",
        false => "its group",
    };
    let path = directory.display();
    let remedy = match own {
        true => format!("close it with: chmod 700 {path}"),
        false => format!("let its owner close it with: chmod o-rwx {path}"),
    };
    tracing::warn!(
        data_dir = %path,
        mode = format!("{:04o}", strangers.mode),
        "the data directory is open to {who}; {remedy}"
    );
}

/// Lets no crash write memory to a file: it holds records, and core files lie anywhere.
pub(crate) fn write_no_core() {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    if let Err(error) = setrlimit(Resource::Core, none) {
        tracing::warn!(
            %error,
            "core files cannot be switched off, so a crash may write records to one; set LimitCORE=0 or ulimit -c 0"
        );
    }
}

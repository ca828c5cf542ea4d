//! Changes of the file with the contexts. Each change replaces the file in one step, and keeps comments and order.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use toml_edit::{DocumentMut, Item, Table, value};

use crate::ConnectionFault;
use crate::contexts::{Context, ContextFile, text};

/// Longest name of a context, bytes.
const LONGEST_NAME: usize = 64;

const HEADER: &str = "# Contexts of walctl, written by `walctl context`. Secrets stay in the files whose paths it has.\n";

/// Adds a context, and returns whether it is the current one. The first context becomes current.
///
/// # Errors
/// If the name cannot be one or is taken (unless `replace`), a path is no text, or the file cannot be changed.
pub fn add(
    path: &Path,
    name: &str,
    context: &Context,
    replace: bool,
) -> Result<bool, ConnectionFault> {
    check_name(name)?;
    let table = table(context)?;
    change(path, |file, document| {
        if file.contexts.contains_key(name) && !replace {
            return Err(ConnectionFault::new(format!(
                "there is a context {name:?} already; --replace replaces it"
            )));
        }
        let contexts = document.entry("context").or_insert_with(|| {
            let mut contexts = Table::new();
            contexts.set_implicit(true);
            Item::Table(contexts)
        });
        contexts[name] = Item::Table(table);
        if file.contexts.is_empty() {
            document["current"] = value(name);
        }
        Ok(file.contexts.is_empty() || file.current.as_deref() == Some(name))
    })
}

/// Makes a context the current one.
///
/// # Errors
/// If there is none of this name, or the file cannot be changed.
pub fn select(path: &Path, name: &str) -> Result<(), ConnectionFault> {
    change(path, |file, document| {
        file.context(name, path)?;
        document["current"] = value(name);
        Ok(())
    })
}

/// Removes a context, and returns whether it was the current one.
///
/// # Errors
/// If there is none of this name, or the file cannot be changed.
pub fn remove(path: &Path, name: &str) -> Result<bool, ConnectionFault> {
    change(path, |file, document| {
        file.context(name, path)?;
        if let Some(contexts) = document
            .get_mut("context")
            .and_then(Item::as_table_like_mut)
        {
            contexts.remove(name);
        }
        let was_current = file.current.as_deref() == Some(name);
        if was_current {
            document.remove("current");
        }
        Ok(was_current)
    })
}

fn check_name(name: &str) -> Result<(), ConnectionFault> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    match (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(plain) {
        true => Ok(()),
        false => Err(ConnectionFault::new(format!(
            "{name:?} is no name of a context: use 1 to {LONGEST_NAME} letters, digits, dots, dashes and underscores"
        ))),
    }
}

fn table(context: &Context) -> Result<Table, ConnectionFault> {
    let mut table = Table::new();
    table["endpoint"] = value(&context.endpoint);
    for (key, path) in [
        ("tls_ca", &context.tls_ca),
        ("tls_cert", &context.tls_cert),
        ("tls_key", &context.tls_key),
        ("token_file", &context.token_file),
    ] {
        let Some(path) = path else { continue };
        let text = path.to_str().ok_or_else(|| {
            ConnectionFault::new(format!(
                "{} is not UTF-8, as a context needs",
                path.display()
            ))
        })?;
        table[key] = value(text);
    }
    if let Some(name) = &context.tls_server_name {
        table["tls_server_name"] = value(name);
    }
    Ok(table)
}

/// Reads the file, changes it, and puts the new one into its place. Other processes wait meanwhile.
fn change<T>(
    path: &Path,
    change: impl FnOnce(&ContextFile, &mut DocumentMut) -> Result<T, ConnectionFault>,
) -> Result<T, ConnectionFault> {
    let failed = |error: io::Error| {
        ConnectionFault::new(format!("cannot write {}: {error}", path.display()))
    };
    // A link keeps its place, and the file behind it changes.
    let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let directory = real.parent().map(Path::to_owned).unwrap_or_default();
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder.create(&directory).map_err(failed)?;
    let lock = File::open(&directory).map_err(failed)?;
    lock.lock().map_err(failed)?;

    let before = text(path)?;
    let before = before.as_deref().unwrap_or(HEADER);
    let file = ContextFile::parse(before, path)?;
    let mut document: DocumentMut = before
        .parse()
        .map_err(|error| ConnectionFault::new(format!("{}: {error}", path.display())))?;
    let done = change(&file, &mut document)?;
    replace(&real, &directory, &document.to_string()).map_err(failed)?;
    Ok(done)
}

fn replace(path: &Path, directory: &Path, text: &str) -> io::Result<()> {
    let new: PathBuf = directory.join(".config.toml.new");
    // The lock is ours, so such a file is the rest of a process that was killed.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)?;
    // A umask only removes bits.
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(endpoint: &str) -> Context {
        Context {
            endpoint: endpoint.to_owned(),
            token_file: Some("/run/token".into()),
            ..Context::default()
        }
    }

    #[test]
    fn change_keeps_comments_and_leaves_one_private_file() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("new/wald/config.toml");
        assert!(add(&path, "one", &context("a:1"), false).unwrap());
        assert!(!add(&path, "two.x", &context("b:2"), false).unwrap());
        let commented = format!("{}# mine\n", fs::read_to_string(&path).unwrap());
        fs::write(&path, commented).unwrap();
        select(&path, "two.x").unwrap();
        let file = ContextFile::read(&path).unwrap();
        assert_eq!(file.current.as_deref(), Some("two.x"));
        assert_eq!(file.contexts["one"], context("a:1"));
        assert_eq!(file.contexts["two.x"], context("b:2"));
        assert!(!remove(&path, "one").unwrap());
        assert!(remove(&path, "two.x").unwrap());
        assert_eq!(ContextFile::read(&path).unwrap(), ContextFile::default());
        let text = fs::read_to_string(&path).unwrap();
        assert!(
            text.starts_with(HEADER) && text.contains("# mine"),
            "{text}"
        );

        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let directory = path.parent().unwrap();
        assert_eq!((mode(&path), mode(directory)), (0o600, 0o700));
        assert_eq!(fs::read_dir(directory).unwrap().count(), 1);
    }

    #[test]
    fn change_that_cannot_be_made_leaves_the_file() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("wald/config.toml");
        add(&path, "one", &context("a:1"), false).unwrap();
        let before = fs::read(&path).unwrap();
        for (error, words) in [
            (add(&path, "one", &context("b:2"), false).err(), "--replace"),
            (
                add(&path, "a/b", &context("b:2"), false).err(),
                "name of a context",
            ),
            (
                add(&path, "", &context("b:2"), false).err(),
                "name of a context",
            ),
            (select(&path, "two").err(), "no context \"two\""),
            (remove(&path, "two").err(), "no context \"two\""),
        ] {
            let error = error.unwrap().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(fs::read(&path).unwrap(), before);
        assert!(add(&path, "one", &context("b:2"), true).unwrap());
        assert_eq!(
            ContextFile::read(&path).unwrap().contexts["one"],
            context("b:2")
        );
    }

    #[test]
    fn concurrent_changes_are_all_kept() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("wald/config.toml");
        std::thread::scope(|scope| {
            for number in 0..16 {
                let path = &path;
                scope.spawn(move || {
                    add(path, &format!("c{number}"), &context("a:1"), false).unwrap()
                });
            }
        });
        assert_eq!(ContextFile::read(&path).unwrap().contexts.len(), 16);
    }
}

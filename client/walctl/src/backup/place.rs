//! The seam between a shelf of backups and the place that stores it: a directory or a bucket. Both have the same two parts,
//! `backups/` and `files/`, with the same names and bytes.

use std::collections::BTreeMap;

use anyhow::Result;
use bytes::Bytes;
use futures_util::future::LocalBoxFuture;

/// The result of a call, when it is there.
pub(crate) type Doing<'a, T> = LocalBoxFuture<'a, Result<T>>;

/// A place with backups. Only one writer at a time has it open for changes.
pub(crate) trait BackupPlace {
    /// Text for messages: a path or a URL.
    fn name(&self) -> String;

    /// Text for messages about one manifest.
    fn manifest_name(&self, file: &str) -> String;

    /// Digests and sizes of the content that is there.
    fn content(&self) -> Doing<'_, BTreeMap<Bytes, u64>>;

    /// Names of the files in `backups/`, sorted.
    fn manifests(&self) -> Doing<'_, Vec<String>>;

    /// Reads a manifest. The inner error is a fault of this file alone.
    fn read_manifest<'a>(&'a self, file: &'a str) -> Doing<'a, Result<Vec<u8>, String>>;

    /// Begins a file of content. The one before must have ended.
    fn begin(&mut self, digest: Bytes, bytes: u64) -> Doing<'_, ()>;

    /// Takes the next bytes of the file.
    fn write<'a>(&'a mut self, data: &'a [u8]) -> Doing<'a, ()>;

    /// Ends the file. It gets its name only if its bytes match the digest.
    fn end(&mut self) -> Doing<'_, ()>;

    /// Returns once all content is stored for good.
    fn settle(&mut self) -> Doing<'_, ()>;

    /// Stores a manifest that is not there.
    fn create_manifest<'a>(&'a mut self, file: &'a str, manifest: Vec<u8>) -> Doing<'a, ()>;

    /// Removes manifests for good.
    fn remove_manifests<'a>(&'a self, files: &'a [String]) -> Doing<'a, ()>;

    /// Removes content.
    fn remove_content<'a>(&'a self, digests: &'a [Bytes]) -> Doing<'a, ()>;

    /// Lets the next writer in.
    fn close(self: Box<Self>) -> Doing<'static, ()>;
}

/// The error for content that does not match its digest.
pub(crate) const NO_MATCH: &str = "the received bytes do not match the manifest; try again";

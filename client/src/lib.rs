//! The Rust client of Wald: append records to logs, read them back, follow them.
//!
//! ```no_run
//! use wald_client::{Client, Durability, ScanEvent};
//!
//! # async fn example() -> Result<(), wald_client::Error> {
//! let client = Client::connect("http://127.0.0.1:6925").await?;
//!
//! // Answers when the record is as durable as asked.
//! let ack = client.append("orders", "first").durability(Durability::Durable).await?;
//! // Safe to repeat: it goes exactly after the first, or fails.
//! client.append("orders", "second").expected_lsn(ack.lsn.next()).await?;
//!
//! // Resumes by itself after a lost connection; nothing comes twice, nothing is skipped.
//! let mut orders = client.follow("orders").open();
//! while let Some(event) = orders.next().await {
//!     if let ScanEvent::Batch(batch) = event? {
//!         for record in batch.records {
//!             println!("{} {:?}", record.lsn, record.data);
//!         }
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! [`Client`] describes which calls are repeated automatically; [`Error`] describes how to read
//! errors. Administration uses the messages of the contract ([`proto`]).

mod append;
mod appender;
mod batch;
mod client;
mod connect;
mod cursor;
mod dialer;
mod durable_follower;
mod durable_producer;
mod endpoint;
mod error;
mod lsn;
mod nodes;
mod ops;
mod pipeline;
mod producer;
mod producers;
mod read;
mod record;
mod retry;
mod scan;
mod scan_stream;
mod sent;
mod shared;
mod small_file;
mod state;
#[cfg(feature = "testing")]
pub mod testing;
mod tls;
mod token;
mod transport;
mod verify;

pub use append::{Ack, Append};
pub use appender::{Appender, AppenderBuilder};
pub use batch::{AppendBatch, BatchAck, Check, Condition, LogAck};
pub use client::{Client, ClientBuilder, DEFAULT_TIMEOUT};
pub use cursor::{CursorCommit, CursorPage, NamedCursor};
pub use dialer::Dialer;
pub use durable_follower::DurableFollower;
pub use durable_producer::DurableProducer;
pub use endpoint::{DEFAULT_ENDPOINT, complete_endpoints};
pub use error::{Error, ErrorKind, FailedCheck, Outcome, Retry, ServerError};
pub use lsn::Lsn;
pub use ops::{BackupStream, Fenced, Health, LogPage, SegmentPage, Tail};
pub use pipeline::{
    DEFAULT_BATCHES_IN_FLIGHT, DEFAULT_BYTES_IN_FLIGHT, DEFAULT_LINGER, DEFAULT_RETRY_FOR, Pending,
    RecordAck,
};
pub use producer::{Producer, ProducerBuilder};
pub use producers::{LogProducer, ProducerPage};
pub use read::{Page, Read};
pub use record::{Batch, Record, StoredRecord};
pub use retry::RetryPolicy;
pub use scan::{Cursor, Gap, Progress, Scan, ScanEvent, Selector};
pub use scan_stream::{Follower, ScanStream};
pub use state::{FileState, State};
pub use tls::{TlsFailure, TlsOptions};
pub use verify::VerifyStream;

/// The messages of the contract.
pub use wald_proto::v1 as proto;
pub use wald_proto::v1::{Durability, GapReason, Header, Reason, SyncTarget, Visibility};

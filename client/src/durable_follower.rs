//! A follower that goes on after a restart of its program.

use std::fmt;

use bytes::Bytes;
use wald_proto::v1;
use wald_proto::v1::StateKind;

use crate::error::{Error, ErrorKind};
use crate::record::Batch;
use crate::scan::{Cursor, Scan, ScanEvent};
use crate::scan_stream::ScanStream;
use crate::state::{KeptState, State, failed};

impl Scan {
    /// Opens the scan behind the cursor in `state`, or where it begins if there is no state yet.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if the state cannot be read.
    pub async fn open_durable(mut self, state: impl State) -> Result<DurableFollower, Error> {
        let state = KeptState::new(state);
        let found: Option<v1::FollowerState> = state.load().await?;
        let (mut effects, mut start) = (None, None);
        if let Some(found) = found {
            if found.kind() != StateKind::Follower {
                return Err(failed("it is not the state of a follower".to_owned()));
            }
            effects = Some(found.effects);
            if !found.cursor.is_empty() {
                let cursor = Cursor::from(found.cursor);
                start = Some(cursor.clone());
                self = self.after(cursor);
            }
        }
        Ok(DurableFollower {
            stream: self.open(),
            state,
            effects,
            start,
            gathered: Vec::new(),
        })
    }
}

/// Follows logs over restarts of the server **and of the program**. It keeps the effects of records together with the cursor
/// behind them, so each record takes effect once.
///
/// ```no_run
/// # async fn example(client: wald_client::Client) -> Result<(), wald_client::Error> {
/// use wald_client::FileState;
///
/// let mut orders = client.follow("orders").open_durable(FileState::new("count.state")).await?;
/// let mut count: u64 = orders.effects().map_or(0, |text| {
///     String::from_utf8_lossy(text).parse().expect("a number was kept")
/// });
/// while let Some(batches) = orders.next().await? {
///     count += batches.iter().map(|batch| batch.records.len() as u64).sum::<u64>();
///     orders.keep(count.to_string()).await?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// A scan that begins at the tail ([`Scan::last`], [`Scan::from_now`]) begins there again until the first `keep`.
///
/// The effects are bytes in a form of the program's own, and each [`keep`](Self::keep) writes all of them. A program whose effects are in a
/// database stores [`cursor`](Self::cursor) in the same transaction instead, and begins with [`Scan::after`].
pub struct DurableFollower {
    stream: ScanStream,
    state: KeptState,
    effects: Option<Bytes>,
    /// The cursor with which it has begun.
    start: Option<Cursor>,
    /// Records behind the last cursor.
    gathered: Vec<Batch>,
}

impl fmt::Debug for DurableFollower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DurableFollower")
            .field("cursor", &self.cursor())
            .finish_non_exhaustive()
    }
}

impl DurableFollower {
    /// The effects that were kept last; `None` if there are none yet.
    pub fn effects(&self) -> Option<&[u8]> {
        self.effects.as_deref()
    }

    /// Resumes behind the last record that [`next`](Self::next) has returned, or where it has begun. `None` before the
    /// first record of all.
    pub fn cursor(&self) -> Option<&Cursor> {
        self.stream.cursor().or(self.start.as_ref())
    }

    /// The next records, all up to a cursor; `None` behind the last of a scan that does not follow.
    ///
    /// # Errors
    /// The error that ends the scan. [`ErrorKind::Missing`] names records that are missing, because retention or a loss took them;
    /// the next call goes on.
    pub async fn next(&mut self) -> Result<Option<Vec<Batch>>, Error> {
        while let Some(event) = self.stream.next().await {
            match event? {
                ScanEvent::Batch(batch) => self.gathered.push(batch),
                ScanEvent::Gap(gap) => return Err(Error::new(ErrorKind::Missing(gap))),
                ScanEvent::Interrupted(_) => {}
                ScanEvent::Progress(_) if self.gathered.is_empty() => {}
                ScanEvent::Progress(_) => return Ok(Some(std::mem::take(&mut self.gathered))),
            }
        }
        Ok(None)
    }

    /// Keeps the effects of all records that were returned, together with their cursor.
    ///
    /// # Errors
    /// [`ErrorKind::State`]. The state before may be in force then, or this one.
    pub async fn keep(&mut self, effects: impl Into<Bytes>) -> Result<(), Error> {
        let effects = effects.into();
        let cursor = self.cursor().map(|cursor| cursor.as_bytes().clone());
        let state = v1::FollowerState {
            cursor: cursor.unwrap_or_default(),
            effects: effects.clone(),
            kind: StateKind::Follower.into(),
        };
        self.state.save(&state).await?;
        self.effects = Some(effects);
        Ok(())
    }
}

//! A verification of a running engine, as its caller sees it.
//!
//! Findings wait in memory for the caller. If too many wait, the verification pauses.

use std::io;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use crate::api::pace::{Control, VerifyProgress};
use crate::base::sync::Mutex;

/// A verification on its own thread. Dropping it ends the verification.
pub struct Verification {
    control: Arc<Control>,
    reports: Arc<Reports>,
}

/// Number of findings in memory, not yet read by the caller, from which on a verification waits.
pub(crate) const MOST_UNHEARD: usize = 10_000;

/// Pause between two checks whether the caller has read them.
pub(crate) const UNHEARD: Duration = Duration::from_millis(50);

/// Reports of the thread that verifies, for the caller.
#[derive(Default)]
pub struct Reports(Mutex<Reported>);

#[derive(Default)]
struct Reported {
    progress: VerifyProgress,
    changed: bool,
    ended: Option<io::Result<()>>,
    waker: Option<Waker>,
}

impl Reports {
    /// Adds new progress. Waits while the caller has too many unread findings.
    pub fn say(&self, progress: &mut VerifyProgress, control: &Control) {
        let mut said = self.0.lock();
        while said.progress.findings.len() >= MOST_UNHEARD && !control.is_stopped() {
            drop(said);
            control.wait(UNHEARD);
            said = self.0.lock();
        }
        said.progress.checked_bytes = progress.checked_bytes;
        said.progress.total_bytes = progress.total_bytes;
        said.progress.findings.append(&mut progress.findings);
        said.changed = true;
        if let Some(waker) = said.waker.take() {
            drop(said);
            waker.wake();
        }
    }

    /// Whether the thread has ended.
    pub fn has_ended(&self) -> bool {
        self.0.lock().ended.is_some()
    }

    /// Ends the reports: the whole store was checked, or could not be read.
    pub fn end(&self, result: io::Result<()>) {
        let mut said = self.0.lock();
        said.ended = Some(result);
        if let Some(waker) = said.waker.take() {
            drop(said);
            waker.wake();
        }
    }
}

impl Verification {
    /// A verification whose thread obeys `control` and writes to `reports`.
    pub fn new(control: Arc<Control>, reports: Arc<Reports>) -> Self {
        Self { control, reports }
    }

    /// Returns the progress as soon as it has changed; `None` = the verification has ended.
    ///
    /// # Errors
    /// If the store could not be read. Damage is no error.
    pub async fn next(&mut self) -> Option<io::Result<VerifyProgress>> {
        std::future::poll_fn(|context| {
            let mut said = self.reports.0.lock();
            if std::mem::take(&mut said.changed) {
                let findings = std::mem::take(&mut said.progress.findings);
                return Poll::Ready(Some(Ok(VerifyProgress {
                    findings,
                    ..said.progress.clone()
                })));
            }
            match said.ended.take() {
                Some(Err(error)) => {
                    said.ended = Some(Ok(()));
                    Poll::Ready(Some(Err(error)))
                }
                Some(Ok(())) => {
                    said.ended = Some(Ok(()));
                    Poll::Ready(None)
                }
                None => {
                    said.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

impl Drop for Verification {
    fn drop(&mut self) {
        self.control.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::finding::{Finding, FindingKind, Severity};
    use crate::api::ticket::block_on;

    fn findings(count: usize) -> VerifyProgress {
        let finding = Finding {
            kind: FindingKind::Checksum,
            severity: Severity::Damage,
            file: None,
            segment: None,
            positions: None,
            log: None,
            log_id: None,
            lsns: None,
            detail: String::new(),
            advice: "",
        };
        VerifyProgress {
            findings: vec![finding; count],
            ..VerifyProgress::default()
        }
    }

    #[test]
    fn verification_waits_while_nobody_hears_its_findings() {
        let control = Arc::new(Control::new(0));
        let reports = Arc::new(Reports::default());
        let mut verification = Verification::new(Arc::clone(&control), Arc::clone(&reports));
        let (says, steered) = (Arc::clone(&reports), Arc::clone(&control));
        let thread = crate::base::threads::start("says", move || {
            for _ in 0..3 {
                says.say(&mut findings(MOST_UNHEARD), &steered);
            }
            says.end(Ok(()));
        })
        .unwrap();
        for _ in 0..3 {
            let progress = block_on(verification.next()).unwrap().unwrap();
            assert_eq!(progress.findings.len(), MOST_UNHEARD);
        }
        assert!(block_on(verification.next()).is_none());
        thread.join().unwrap();
        // A thread that must end does not wait.
        reports.say(&mut findings(MOST_UNHEARD), &control);
        drop(verification);
        reports.say(&mut findings(1), &control);
    }
}

//! Calls that a stand-by forwards to the owner of the store.

use prometheus::{Error, IntCounter, IntCounterVec, Opts};
use wald_proto::Method;

use super::Maker;
use crate::methods::{self, Rpc};

/// The result of a forwarded call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ForwardResult {
    /// The owner has answered, whatever it said.
    Answered,
    /// The owner has got nothing: the caller was sent to it.
    Unreachable,
    /// The owner may have got the call, and the connection to it broke before the answer.
    Broken,
    /// The call ended before the owner answered: its caller gave up, or its time was over.
    GivenUp,
}

impl ForwardResult {
    const ALL: [Self; 4] = [
        Self::Answered,
        Self::Unreachable,
        Self::Broken,
        Self::GivenUp,
    ];

    fn label(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Unreachable => "unreachable",
            Self::Broken => "broken",
            Self::GivenUp => "given_up",
        }
    }
}

/// The metric of forwarded calls.
#[derive(Clone)]
pub(crate) struct ForwardMetrics(IntCounterVec);

impl ForwardMetrics {
    pub(super) fn new(make: &Maker<'_>) -> Result<Self, Error> {
        let forwarded = make.register(IntCounterVec::new(
            Opts::new(
                "wald_forwarded_total",
                "Calls that this stand-by has forwarded to the owner of the store, by method and result: answered, unreachable (the owner got nothing, and the caller was sent to it), broken (the connection broke before the answer), given_up (the caller or its deadline ended the call).",
            ),
            &["method", "result"],
        )?)?;
        for method in Method::ALL {
            let rpc = methods::of(*method);
            for result in ForwardResult::ALL.into_iter().filter(|_| rpc.is_of_store) {
                let labels = [short(rpc), result.label()];
                forwarded.get_metric_with_label_values(&labels)?;
            }
        }
        Ok(Self(forwarded))
    }

    /// Counts a call that is forwarded once it has ended.
    pub(crate) fn begin(&self, rpc: Rpc) -> ForwardedCall {
        ForwardedCall {
            metrics: self.clone(),
            method: short(rpc),
            result: ForwardResult::GivenUp,
        }
    }

    fn counter(&self, method: &str, result: ForwardResult) -> IntCounter {
        self.0.with_label_values(&[method, result.label()])
    }
}

/// The name of a method without its service.
fn short(rpc: Rpc) -> &'static str {
    rpc.name.rsplit('/').next().unwrap_or_default()
}

/// A forwarded call, counted when it is dropped.
pub(crate) struct ForwardedCall {
    metrics: ForwardMetrics,
    method: &'static str,
    result: ForwardResult,
}

impl ForwardedCall {
    /// Keeps the result.
    pub(crate) fn ended(&mut self, result: ForwardResult) {
        self.result = result;
    }
}

impl Drop for ForwardedCall {
    fn drop(&mut self) {
        self.metrics.counter(self.method, self.result).inc();
    }
}

//! Compares errors with the comments of `errors.proto`.

use std::sync::LazyLock;

use tonic::Status;
use tonic_types::StatusExt as _;
use wald_proto::reasons::{Answer, Section, catalogue};

/// Facts that any reason may have.
const GENERAL: [&str; 4] = ["outcome", "retry", "failed_checks", "request_id"];

/// Fails unless the comment of the reason lists the code with the outcome and retry of the status,
/// and its facts.
pub(crate) fn assert_in_contract(status: &Status) {
    static CATALOGUE: LazyLock<Vec<Section>> = LazyLock::new(|| catalogue().unwrap());
    let details = status.get_error_details();
    let info = details.error_info().unwrap();
    let code = format!("{:?}", status.code());
    let said = |fact: &str| info.metadata.get(fact).map(String::as_str);
    let effect = said("outcome").zip(said("retry"));
    let allowed = |answer: &Answer| {
        answer.code.replace('_', "").eq_ignore_ascii_case(&code)
            // Errors of reads have neither.
            && effect.is_none_or(|effect| effect == (&*answer.outcome, &*answer.retry))
    };
    let mut entries = CATALOGUE.iter().flat_map(|section| &section.entries);
    let entry = entries.find(|entry| entry.reason.as_str() == info.reason);
    let entry = entry.unwrap_or_else(|| panic!("errors.proto has no {}", info.reason));
    assert!(
        entry.answers.iter().any(allowed),
        "errors.proto does not list {} with {code} and {effect:?}",
        info.reason
    );
    for fact in info.metadata.keys() {
        assert!(
            GENERAL.contains(&&**fact) || entry.facts.contains(&format!("`{fact}`")),
            "errors.proto does not list the fact {fact} of {}",
            info.reason
        );
    }
}

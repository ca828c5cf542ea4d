//! The owner of a store that is gone for good, as a person says.

use std::str::FromStr;

/// The owner that a node may fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakeOver {
    /// Every one.
    Any,
    /// The owner of the term with this number alone. The option may stay in a command: once another node owns the store,
    /// it has no effect.
    Term(u64),
}

/// A text that names no owner.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected the number of the term to take over, which the refused start names, or any")]
pub struct BadTakeOver;

impl FromStr for TakeOver {
    type Err = BadTakeOver;

    fn from_str(text: &str) -> Result<Self, BadTakeOver> {
        match (text, text.parse()) {
            ("any", _) => Ok(Self::Any),
            (_, Ok(term)) if term > 0 => Ok(Self::Term(term)),
            _ => Err(BadTakeOver),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_names_a_term_or_every_owner_and_never_nothing() {
        assert_eq!("any".parse(), Ok(TakeOver::Any));
        assert_eq!("7".parse(), Ok(TakeOver::Term(7)));
        // A variable of a script that is not set.
        for bad in ["", "0", "-1", "true", "7 "] {
            assert_eq!(bad.parse::<TakeOver>(), Err(BadTakeOver), "{bad:?}");
        }
    }
}

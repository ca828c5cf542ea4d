//! Tokens: `wald1_<id, 8><secret, 43>_<check, 6>`, digits of base 62.
//!
//! The id is public: files, logs and answers show it. The secret has 256 random bits, so one SHA-256 protects it: no
//! guess is feasible, and a slow hash would cost each call time. The check is a CRC-32 of id and secret, with which
//! people and scanners for leaked secrets recognise a token that was copied whole.

use std::fmt;
use std::io;

use aws_lc_rs::{constant_time, digest, rand};
use crc_fast::CrcAlgorithm;

/// Beginning of every token. A scanner for leaked secrets looks for it.
pub(super) const START: &str = "wald1_";
const ID_DIGITS: usize = 8;
const SECRET_DIGITS: usize = 43;
const CHECK_DIGITS: usize = 6;
/// Length of a token in bytes.
const TOKEN_BYTES: usize = START.len() + ID_DIGITS + SECRET_DIGITS + 1 + CHECK_DIGITS;

const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// The public part of a token.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TokenId([u8; ID_DIGITS]);

impl TokenId {
    /// Reads an id.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let id = text.as_bytes().try_into().ok()?;
        text.bytes()
            .all(|byte| DIGITS.contains(&byte))
            .then_some(Self(id))
    }

    pub(crate) fn as_str(&self) -> &str {
        // It has digits alone.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// SHA-256 of a secret. Shown nowhere but in `auth_file`.
#[derive(Clone, Copy)]
pub(super) struct SecretDigest([u8; 32]);

impl SecretDigest {
    /// A digest that belongs to no secret. An unknown id is compared with it, so that the answer takes as long as for a
    /// wrong secret.
    pub(super) const OF_NOBODY: Self = Self([0; 32]);

    fn of(secret: &[u8]) -> Self {
        let digest = digest::digest(&digest::SHA256, secret);
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest.as_ref());
        Self(bytes)
    }

    /// Compares in constant time.
    pub(super) fn matches(&self, other: &Self) -> bool {
        constant_time::verify_slices_are_equal(&self.0, &other.0).is_ok()
    }

    /// Reads 64 hexadecimal digits.
    pub(super) fn parse(text: &str) -> Option<Self> {
        if text.len() != 64 || !text.is_ascii() {
            return None;
        }
        let mut bytes = [0; 32];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(text.get(2 * index..2 * index + 2)?, 16).ok()?;
        }
        Some(Self(bytes))
    }

    /// 64 hexadecimal digits.
    pub(super) fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// A token that a caller sent: its id, and the digest of its secret.
#[derive(Clone, Copy)]
pub(super) struct PresentedToken {
    pub(super) id: TokenId,
    pub(super) digest: SecretDigest,
}

impl PresentedToken {
    /// `None` if the text has not the form of a token.
    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        if text.len() != TOKEN_BYTES {
            return None;
        }
        let rest = text.strip_prefix(START.as_bytes())?;
        let (body, check) = rest.split_at(ID_DIGITS + SECRET_DIGITS);
        let check = check.strip_prefix(b"_")?;
        if *check != check_digits(body) {
            return None;
        }
        let (id, secret) = body.split_at(ID_DIGITS);
        Some(Self {
            id: TokenId::parse(std::str::from_utf8(id).ok()?)?,
            digest: SecretDigest::of(secret),
        })
    }
}

/// A new token: the only place that has its secret.
pub(super) struct NewToken {
    pub(super) id: TokenId,
    pub(super) digest: SecretDigest,
    pub(super) text: String,
}

impl NewToken {
    /// Draws a token.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub(super) fn draw() -> io::Result<Self> {
        let mut body = Vec::with_capacity(ID_DIGITS + SECRET_DIGITS);
        while body.len() < ID_DIGITS + SECRET_DIGITS {
            let mut bytes = [0; 64];
            rand::fill(&mut bytes).map_err(|_| io::Error::other("no random numbers"))?;
            // 248 is the largest multiple of 62: the rest would favour some digits.
            let fair = bytes.iter().filter(|byte| **byte < 248);
            let digits = fair.map(|byte| DIGITS[usize::from(*byte) % DIGITS.len()]);
            body.extend(digits.take(ID_DIGITS + SECRET_DIGITS - body.len()));
        }
        let mut text = START.to_owned();
        text.extend(body.iter().map(|digit| char::from(*digit)));
        text.push('_');
        text.extend(check_digits(&body).map(char::from));
        let (id, secret) = body.split_at(ID_DIGITS);
        let id = id
            .try_into()
            .map_err(|_| io::Error::other("an id is too short"))?;
        Ok(Self {
            id: TokenId(id),
            digest: SecretDigest::of(secret),
            text,
        })
    }
}

/// The check of id and secret.
fn check_digits(body: &[u8]) -> [u8; CHECK_DIGITS] {
    let mut rest = crc_fast::checksum(CrcAlgorithm::Crc32IsoHdlc, body);
    let mut digits = [b'0'; CHECK_DIGITS];
    for digit in digits.iter_mut().rev() {
        *digit = DIGITS[usize::try_from(rest % 62).unwrap_or(0)];
        rest /= 62;
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_token_is_read_with_its_id_and_digest() {
        let token = NewToken::draw().unwrap();
        assert_eq!(token.text.len(), TOKEN_BYTES);
        let read = PresentedToken::parse(token.text.as_bytes()).unwrap();
        assert_eq!(read.id, token.id);
        assert!(read.digest.matches(&token.digest));
        assert!(!read.digest.matches(&SecretDigest::OF_NOBODY));
        let again = NewToken::draw().unwrap();
        assert!(again.text != token.text && !again.digest.matches(&token.digest));
    }

    #[test]
    fn text_that_is_no_whole_token_is_refused() {
        let token = NewToken::draw().unwrap().text;
        let mut wrong = token.clone().into_bytes();
        wrong[20] = if wrong[20] == b'0' { b'1' } else { b'0' };
        assert!(
            PresentedToken::parse(&wrong).is_none(),
            "one digit was mistyped"
        );
        for bad in [
            "",
            "wald1_",
            &token[1..],
            &token[..token.len() - 1],
            &format!("{token} "),
            &token.replace("wald1_", "wald2_"),
        ] {
            assert!(PresentedToken::parse(bad.as_bytes()).is_none(), "{bad}");
        }
        assert!(PresentedToken::parse(&[0xff; TOKEN_BYTES]).is_none());
    }

    #[test]
    fn digest_is_read_as_it_is_written() {
        let token = NewToken::draw().unwrap();
        let read = SecretDigest::parse(&token.digest.hex()).unwrap();
        assert!(read.matches(&token.digest));
        for bad in ["", "00", &"g".repeat(64), &"é".repeat(32)] {
            assert!(SecretDigest::parse(bad).is_none(), "{bad}");
        }
    }
}

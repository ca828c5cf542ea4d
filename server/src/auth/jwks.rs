//! The public keys of an issuer of JWTs: a JSON Web Key Set (RFC 7517).
//!
//! A key that Wald cannot use is left out, because issuers also publish keys for other purposes: keys for encryption, of
//! other algorithms, RSA below 2,048 bits. A set without a usable key, or with one `kid` twice, is refused.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use aws_lc_rs::signature::{self, EcdsaVerificationAlgorithm, RsaParameters};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Maximum size of a key set, bytes.
pub(super) const KEY_SET_BYTES: u64 = 1 << 20;
/// Maximum number of keys in a set.
const MOST_KEYS: usize = 100;
/// Sizes of RSA keys that are used, bits.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;
/// Maximum length of an RSA exponent, bytes. The usual one, 65,537, has 3.
const EXPONENT_BYTES: usize = 8;

/// An algorithm of signatures with a public key. There is none for `none` and HS256: with HS256 the key that checks a
/// signature can also make one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    Rs256,
    Rs384,
    Rs512,
    Es256,
    Es384,
    Es512,
}

impl Algorithm {
    pub(super) const ALL: [Self; 6] = [
        Self::Rs256,
        Self::Rs384,
        Self::Rs512,
        Self::Es256,
        Self::Es384,
        Self::Es512,
    ];

    /// Its name in JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rs256 => "RS256",
            Self::Rs384 => "RS384",
            Self::Rs512 => "RS512",
            Self::Es256 => "ES256",
            Self::Es384 => "ES384",
            Self::Es512 => "ES512",
        }
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }

    /// How a signature is verified.
    fn scheme(self) -> SignatureScheme {
        match self {
            Self::Rs256 => SignatureScheme::Rsa(&signature::RSA_PKCS1_2048_8192_SHA256),
            Self::Rs384 => SignatureScheme::Rsa(&signature::RSA_PKCS1_2048_8192_SHA384),
            Self::Rs512 => SignatureScheme::Rsa(&signature::RSA_PKCS1_2048_8192_SHA512),
            Self::Es256 => SignatureScheme::Ec("P-256", &signature::ECDSA_P256_SHA256_FIXED),
            Self::Es384 => SignatureScheme::Ec("P-384", &signature::ECDSA_P384_SHA384_FIXED),
            Self::Es512 => SignatureScheme::Ec("P-521", &signature::ECDSA_P521_SHA512_FIXED),
        }
    }
}

enum SignatureScheme {
    Rsa(&'static RsaParameters),
    /// With the name of the curve.
    Ec(&'static str, &'static EcdsaVerificationAlgorithm),
}

/// A public key that can verify signatures.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Key {
    kid: Option<String>,
    /// The one algorithm that its issuer uses it for, if the issuer says so.
    algorithm: Option<Algorithm>,
    numbers: Numbers,
}

#[derive(Debug, PartialEq, Eq)]
enum Numbers {
    Rsa {
        n: Vec<u8>,
        e: Vec<u8>,
    },
    Ec {
        curve: &'static str,
        /// Uncompressed.
        point: Vec<u8>,
    },
}

impl Key {
    /// Whether the key is for this algorithm.
    fn is_for(&self, algorithm: Algorithm) -> bool {
        let fits = match (algorithm.scheme(), &self.numbers) {
            (SignatureScheme::Rsa(_), Numbers::Rsa { .. }) => true,
            (SignatureScheme::Ec(wanted, _), Numbers::Ec { curve, .. }) => wanted == *curve,
            _ => false,
        };
        fits && self.algorithm.is_none_or(|only| only == algorithm)
    }

    /// Whether the signature of the message is right.
    pub(super) fn verifies(&self, algorithm: Algorithm, message: &[u8], signature: &[u8]) -> bool {
        let verified = match (algorithm.scheme(), &self.numbers) {
            (SignatureScheme::Rsa(parameters), Numbers::Rsa { n, e }) => {
                signature::RsaPublicKeyComponents { n, e }.verify(parameters, message, signature)
            }
            (SignatureScheme::Ec(_, algorithm), Numbers::Ec { point, .. }) => {
                signature::UnparsedPublicKey::new(algorithm, point).verify(message, signature)
            }
            _ => return false,
        };
        verified.is_ok()
    }
}

/// The usable keys of an issuer. The default is an issuer whose keys were not fetched yet.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct KeySet(Vec<Arc<Key>>);

/// A key set that passed.
#[derive(Debug)]
pub(super) struct ParsedKeys {
    pub(super) keys: KeySet,
    /// Sentences about keys that were left out.
    pub(super) left_out: Vec<String>,
}

#[derive(Deserialize)]
struct KeySetText {
    /// At most one key more than a set may have.
    #[serde(deserialize_with = "first_keys")]
    keys: Vec<KeyText>,
}

/// Reads a list of keys without memory for more than a set may have: a key of two bytes of text takes 250.
fn first_keys<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<KeyText>, D::Error> {
    struct FirstKeys;

    impl<'de> Visitor<'de> for FirstKeys {
        type Value = Vec<KeyText>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of keys")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut keys = Vec::new();
            while keys.len() <= MOST_KEYS {
                match list.next_element()? {
                    Some(key) => keys.push(key),
                    None => return Ok(keys),
                }
            }
            while list.next_element::<IgnoredAny>()?.is_some() {}
            Ok(keys)
        }
    }

    input.deserialize_seq(FirstKeys)
}

/// A key as its issuer writes it. Each field may be absent, because a key of another kind has other fields.
#[derive(Deserialize)]
struct KeyText {
    kty: Option<String>,
    kid: Option<String>,
    alg: Option<String>,
    r#use: Option<String>,
    key_ops: Option<Vec<String>>,
    n: Option<String>,
    e: Option<String>,
    crv: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

impl KeySet {
    /// Reads a key set.
    ///
    /// # Errors
    /// A sentence without the text of the set.
    pub(super) fn parse(json: &[u8]) -> Result<ParsedKeys, String> {
        let text: KeySetText = serde_json::from_slice(json).map_err(|error| {
            format!(
                "it is no key set ({{\"keys\": [...]}}): the JSON has a fault at line {}, column {}",
                error.line(),
                error.column()
            )
        })?;
        if text.keys.len() > MOST_KEYS {
            return Err(format!("the key set has more than {MOST_KEYS} keys"));
        }
        let mut kids = HashSet::new();
        let twice = text.keys.iter().filter_map(|key| key.kid.as_deref());
        if let Some(kid) = twice.into_iter().find(|kid| !kids.insert(*kid)) {
            return Err(format!(
                "two keys have the kid {kid:?}; a token could mean either"
            ));
        }
        let mut parsed = ParsedKeys {
            keys: Self::default(),
            left_out: Vec::new(),
        };
        for (number, key) in (1..).zip(&text.keys) {
            match key.usable() {
                Ok(key) => parsed.keys.0.push(Arc::new(key)),
                Err(why) => parsed
                    .left_out
                    .push(format!("key {number} is not used: {why}")),
            }
        }
        match (parsed.keys.0.is_empty(), parsed.left_out.first()) {
            (false, _) => Ok(parsed),
            (true, Some(first)) => Err(format!("the key set has no usable key: {first}")),
            (true, None) => Err("the key set is empty".to_owned()),
        }
    }

    /// Whether there is no key.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The key for a token: the one that its `kid` names. Without `kid`, the only key for the algorithm.
    pub(super) fn find(&self, kid: Option<&str>, algorithm: Algorithm) -> Option<&Arc<Key>> {
        let mut fitting = self
            .0
            .iter()
            .filter(|key| key.is_for(algorithm) && (kid.is_none() || key.kid.as_deref() == kid));
        let found = fitting.next()?;
        fitting.next().is_none().then_some(found)
    }

    /// Whether the key is in force.
    pub(super) fn contains(&self, key: &Arc<Key>) -> bool {
        self.0.iter().any(|own| Arc::ptr_eq(own, key) || own == key)
    }
}

impl KeyText {
    /// The key.
    ///
    /// # Errors
    /// The reason why it cannot verify signatures.
    fn usable(&self) -> Result<Key, String> {
        if self.r#use.as_deref().is_some_and(|used| used != "sig") {
            return Err("it is not for signatures (use)".to_owned());
        }
        if (self.key_ops.as_ref()).is_some_and(|ops| ops.iter().all(|op| op != "verify")) {
            return Err("it is not for verification (key_ops)".to_owned());
        }
        let algorithm = match &self.alg {
            None => None,
            Some(name) => {
                Some(Algorithm::parse(name).ok_or_else(|| format!("its algorithm is {name:?}"))?)
            }
        };
        let numbers = match self.kty.as_deref() {
            Some("RSA") => self.rsa()?,
            Some("EC") => self.ec()?,
            other => return Err(format!("its type (kty) is {:?}", other.unwrap_or_default())),
        };
        let key = Key {
            kid: self.kid.clone(),
            algorithm,
            numbers,
        };
        match Algorithm::ALL.into_iter().any(|any| key.is_for(any)) {
            true => Ok(key),
            false => Err("its algorithm does not belong to its type".to_owned()),
        }
    }

    fn rsa(&self) -> Result<Numbers, String> {
        let (n, e) = (
            number("n", self.n.as_deref())?,
            number("e", self.e.as_deref())?,
        );
        let bits = n.len() * 8 - n.first().map_or(0, |first| first.leading_zeros() as usize);
        if !RSA_BITS.contains(&bits) {
            return Err(format!(
                "an RSA key has {} to {} bits, and this one {bits}",
                RSA_BITS.start(),
                RSA_BITS.end()
            ));
        }
        if e.len() > EXPONENT_BYTES {
            return Err("its exponent (e) is too long".to_owned());
        }
        Ok(Numbers::Rsa { n, e })
    }

    fn ec(&self) -> Result<Numbers, String> {
        let curves = Algorithm::ALL.map(Algorithm::scheme).into_iter();
        let found = curves.into_iter().find_map(|scheme| match scheme {
            SignatureScheme::Ec(curve, algorithm) if self.crv.as_deref() == Some(curve) => {
                Some((curve, algorithm))
            }
            _ => None,
        });
        let Some((curve, algorithm)) = found else {
            let named = self.crv.as_deref().unwrap_or_default();
            return Err(format!("its curve (crv) is {named:?}"));
        };
        let mut point = vec![4];
        for (name, text) in [("x", &self.x), ("y", &self.y)] {
            point.extend(bytes(name, text.as_deref())?);
        }
        // It checks that the point is on the curve.
        signature::ParsedPublicKey::new(algorithm, &point)
            .map_err(|_| format!("x and y are no point of {curve}"))?;
        Ok(Numbers::Ec { curve, point })
    }
}

/// The bytes of a field in base64url.
fn bytes(name: &str, text: Option<&str>) -> Result<Vec<u8>, String> {
    let text = text.ok_or_else(|| format!("{name} is missing"))?;
    let bytes = URL_SAFE_NO_PAD.decode(text);
    bytes.map_err(|_| format!("{name} is not base64url"))
}

/// The bytes of a positive number, without leading zeros.
fn number(name: &str, text: Option<&str>) -> Result<Vec<u8>, String> {
    let bytes = bytes(name, text)?;
    let first = bytes.iter().position(|byte| *byte != 0);
    let first = first.ok_or_else(|| format!("{name} is 0"))?;
    Ok(bytes[first..].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_of_very_many_keys_takes_no_memory_for_them() {
        let json = format!("{{\"keys\":[{}{{}}]}}", "{},".repeat(340_000));
        let text: KeySetText = serde_json::from_str(&json).unwrap();
        assert_eq!(text.keys.len(), MOST_KEYS + 1);
        let fault = KeySet::parse(json.as_bytes()).unwrap_err();
        assert_eq!(fault, "the key set has more than 100 keys");
    }
}

//! An issuer of JWTs: keys that are made at run time, and tokens signed with them.

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{self, EcdsaKeyPair, KeyPair as _, RsaKeyPair};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

/// A key pair, and its place in a key set.
pub(crate) struct Signer {
    pub(crate) kid: String,
    pub(crate) algorithm: &'static str,
    pair: Pair,
}

enum Pair {
    Rsa(RsaKeyPair),
    Ec(EcdsaKeyPair),
}

/// Bytes in base64url.
pub(crate) fn encoded(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// The two parts of a token that are signed.
pub(crate) fn unsigned(header: &Value, claims: &Value) -> String {
    format!(
        "{}.{}",
        encoded(header.to_string()),
        encoded(claims.to_string())
    )
}

/// A token with other claims: null removes one.
pub(crate) fn with(base: &Value, changes: &Value) -> Value {
    let mut changed = base.clone();
    for (name, value) in changes.as_object().unwrap() {
        let all = changed.as_object_mut().unwrap();
        match value {
            Value::Null => all.remove(name),
            value => all.insert(name.clone(), value.clone()),
        };
    }
    changed
}

impl Signer {
    /// A new key for the algorithm.
    pub(crate) fn new(kid: &str, algorithm: &'static str) -> Self {
        let pair = match algorithm {
            "ES256" => Pair::Ec(
                EcdsaKeyPair::generate(&signature::ECDSA_P256_SHA256_FIXED_SIGNING).unwrap(),
            ),
            "ES384" => Pair::Ec(
                EcdsaKeyPair::generate(&signature::ECDSA_P384_SHA384_FIXED_SIGNING).unwrap(),
            ),
            "ES512" => Pair::Ec(
                EcdsaKeyPair::generate(&signature::ECDSA_P521_SHA512_FIXED_SIGNING).unwrap(),
            ),
            _ => Pair::Rsa(RsaKeyPair::generate(KeySize::Rsa2048).unwrap()),
        };
        Self {
            kid: kid.to_owned(),
            algorithm,
            pair,
        }
    }

    /// The public key.
    pub(crate) fn jwk(&self) -> Value {
        let common = json!({ "kid": self.kid, "use": "sig" });
        match &self.pair {
            Pair::Rsa(pair) => {
                // A sequence of the numbers n and e, in DER.
                let der = pair.public_key().as_ref();
                let n = &der[der.len() - 5 - 256..der.len() - 5];
                let e = &der[der.len() - 3..];
                with(
                    &common,
                    &json!({ "kty": "RSA", "n": encoded(n), "e": encoded(e) }),
                )
            }
            Pair::Ec(pair) => {
                let point = &pair.public_key().as_ref()[1..];
                let (x, y) = point.split_at(point.len() / 2);
                let curve = match self.algorithm {
                    "ES256" => "P-256",
                    "ES384" => "P-384",
                    _ => "P-521",
                };
                let numbers =
                    json!({ "kty": "EC", "crv": curve, "x": encoded(x), "y": encoded(y) });
                with(&common, &numbers)
            }
        }
    }

    /// The usual head of its tokens.
    pub(crate) fn header(&self) -> Value {
        json!({ "alg": self.algorithm, "kid": self.kid, "typ": "JWT" })
    }

    /// A token with the usual head.
    pub(crate) fn token(&self, claims: &Value) -> String {
        self.sign(&self.header(), claims)
    }

    /// A token whose signature is right for the algorithm of the key.
    pub(crate) fn sign(&self, header: &Value, claims: &Value) -> String {
        let text = unsigned(header, claims);
        let random = SystemRandom::new();
        let signature = match &self.pair {
            Pair::Rsa(pair) => {
                let padding: &'static dyn signature::RsaEncoding = match self.algorithm {
                    "RS384" => &signature::RSA_PKCS1_SHA384,
                    "RS512" => &signature::RSA_PKCS1_SHA512,
                    _ => &signature::RSA_PKCS1_SHA256,
                };
                let mut signature = vec![0; pair.public_modulus_len()];
                (pair.sign(padding, &random, text.as_bytes(), &mut signature)).unwrap();
                signature
            }
            Pair::Ec(pair) => {
                let signature = pair.sign(&random, text.as_bytes()).unwrap();
                signature.as_ref().to_vec()
            }
        };
        format!("{text}.{}", encoded(signature))
    }
}

/// A key set.
pub(crate) fn key_set(signers: &[&Signer]) -> String {
    let keys: Vec<Value> = signers.iter().map(|signer| signer.jwk()).collect();
    json!({ "keys": keys }).to_string()
}

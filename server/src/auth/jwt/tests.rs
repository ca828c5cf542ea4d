#[path = "../../../tests/daemon/auth/signer.rs"]
mod signer;

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use super::*;
use crate::auth::jwks::KeySet;
use crate::auth::rules::FileRules;
use signer::{Signer, encoded, key_set, unsigned, with};

const ISSUER: &str = "https://issuer";
/// Seconds of now in these tests.
const NOW: i64 = 1_790_000_000;

/// The reason why a token does not count, in a word.
#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    Form,
    Signature(SignatureFault),
    Claims(TokenFault),
}

/// The words that the audit log has for a refused token.
fn why(rules: &Rules, token: &str) -> String {
    let presented = match PresentedJwt::parse(token.as_bytes()) {
        Ok(presented) => presented,
        Err(why) => return why.into_owned(),
    };
    let verified = match presented.verify(rules) {
        Ok(verified) => verified,
        Err((_, why)) => return why.into_owned(),
    };
    match verified.judge(rules, Timestamp::from_micros(NOW * 1_000_000)) {
        Ok(_) => panic!("it counts: {token}"),
        Err((_, why)) => why.into_owned(),
    }
}

fn rules(keys: &str, algorithms: &str) -> Rules {
    let text = format!(
        "[jwt.k8s]\nissuer = \"{ISSUER}\"\naudience = \"wald\"\njwks_file = \"keys\"\nalgorithms = {algorithms}\n\
         [principal.writer]\njwt = {{ issuer = \"k8s\", sub = \"writer\" }}\n"
    );
    let keys = Arc::new(KeySet::parse(keys.as_bytes()).unwrap().keys);
    Rules {
        file: Arc::new(FileRules::of(&text)),
        keys: BTreeMap::from([(ISSUER.to_owned(), keys)]),
        generation: 0,
    }
}

fn known(keys: &str) -> Rules {
    rules(keys, r#"["RS256", "ES256"]"#)
}

fn good() -> Value {
    json!({ "iss": ISSUER, "aud": "wald", "sub": "writer", "exp": NOW + 600, "nbf": NOW })
}

/// The principal of a token.
fn judge(rules: &Rules, token: &str) -> Result<String, Refusal> {
    let presented = PresentedJwt::parse(token.as_bytes()).map_err(|_| Refusal::Form)?;
    let verified = presented
        .verify(rules)
        .map_err(|(fault, _)| Refusal::Signature(fault))?;
    let judged = verified.judge(rules, Timestamp::from_micros(NOW * 1_000_000));
    let (principal, expires) = judged.map_err(|(fault, _)| Refusal::Claims(fault))?;
    assert!(expires.micros() > NOW * 1_000_000);
    Ok(principal.name.clone())
}

/// One key of each kind, and the rules that know both.
fn issuer() -> (Signer, Signer, Rules) {
    let (rsa, ec) = (Signer::new("rsa", "RS256"), Signer::new("ec", "ES256"));
    let rules = known(&key_set(&[&rsa, &ec]));
    (rsa, ec, rules)
}

const BAD: Result<String, Refusal> = Err(Refusal::Signature(SignatureFault::Bad));
const UNKNOWN_KEY: Result<String, Refusal> = Err(Refusal::Signature(SignatureFault::UnknownKey));
const WRONG_CLAIM: Result<String, Refusal> = Err(Refusal::Claims(TokenFault::Bad));

#[test]
fn good_token_of_each_algorithm_has_its_principal() {
    for algorithm in Algorithm::ALL.map(Algorithm::name) {
        let signer = Signer::new("key", algorithm);
        let rules = rules(&key_set(&[&signer]), &format!("[\"{algorithm}\"]"));
        let token = signer.token(&good());
        assert_eq!(
            judge(&rules, &token).as_deref(),
            Ok("writer"),
            "{algorithm}"
        );
        // One bit of the signature, and one of the claims.
        for at in [token.len() - 20, token.len() / 2] {
            let mut changed = token.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).unwrap();
            assert!(judge(&rules, &changed).is_err(), "{algorithm}, byte {at}");
        }
    }
}

#[test]
fn token_without_signature_is_refused() {
    let (rsa, _, rules) = issuer();
    for alg in ["none", "None", ""] {
        let header = json!({ "alg": alg, "kid": "rsa" });
        let text = unsigned(&header, &good());
        assert_eq!(judge(&rules, &format!("{text}.")), Err(Refusal::Form));
        assert_eq!(
            judge(&rules, &rsa.sign(&header, &good())),
            Err(Refusal::Form)
        );
    }
    // The algorithm is right, and the signature is missing.
    let text = unsigned(&rsa.header(), &good());
    assert_eq!(judge(&rules, &format!("{text}.")), BAD);
}

#[test]
fn public_key_as_secret_of_hs256_is_refused() {
    let (rsa, _, rules) = issuer();
    let text = unsigned(&json!({ "alg": "HS256", "kid": "rsa" }), &good());
    let secret = rsa.jwk().to_string();
    let secret = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, secret.as_bytes());
    let signature = encoded(aws_lc_rs::hmac::sign(&secret, text.as_bytes()));
    assert_eq!(
        judge(&rules, &format!("{text}.{signature}")),
        Err(Refusal::Form)
    );
}

#[test]
fn algorithm_that_is_not_listed_is_refused() {
    let signer = Signer::new("key", "ES256");
    let rules = rules(&key_set(&[&signer]), r#"["RS256"]"#);
    assert_eq!(judge(&rules, &signer.token(&good())), BAD);
}

#[test]
fn key_of_another_kind_than_the_algorithm_is_refused() {
    let (rsa, ec, rules) = issuer();
    let header = json!({ "alg": "RS256", "kid": "ec" });
    assert_eq!(judge(&rules, &ec.sign(&header, &good())), UNKNOWN_KEY);
    // The issuer says that the key is for another algorithm.
    let jwk = with(&rsa.jwk(), &json!({ "alg": "RS512" }));
    let rules = known(&json!({ "keys": [jwk] }).to_string());
    assert_eq!(judge(&rules, &rsa.token(&good())), UNKNOWN_KEY);
}

#[test]
fn wrong_audience_is_refused() {
    let (rsa, _, rules) = issuer();
    for aud in [json!("vault"), json!([]), json!(["vault", "Wald"])] {
        let claims = with(&good(), &json!({ "aud": aud }));
        assert_eq!(judge(&rules, &rsa.token(&claims)), WRONG_CLAIM, "{claims}");
    }
    for aud in [json!("wald"), json!(["vault", "wald"])] {
        let claims = with(&good(), &json!({ "aud": aud }));
        assert!(judge(&rules, &rsa.token(&claims)).is_ok(), "{claims}");
    }
}

#[test]
fn wrong_issuer_is_refused() {
    let (rsa, _, rules) = issuer();
    for iss in ["https://issuer/", "https://other", ""] {
        let claims = with(&good(), &json!({ "iss": iss }));
        assert_eq!(judge(&rules, &rsa.token(&claims)), BAD, "{claims}");
    }
}

#[test]
fn unknown_subject_is_refused() {
    let (rsa, _, rules) = issuer();
    for sub in ["reader", "Writer", "writer ", "writ*"] {
        let claims = with(&good(), &json!({ "sub": sub }));
        assert_eq!(judge(&rules, &rsa.token(&claims)), WRONG_CLAIM, "{claims}");
    }
}

#[test]
fn token_of_the_future_is_refused_beyond_the_leeway() {
    let (rsa, _, rules) = issuer();
    let at = |nbf: i64| judge(&rules, &rsa.token(&with(&good(), &json!({ "nbf": nbf }))));
    assert!(at(NOW + 30).is_ok());
    assert_eq!(at(NOW + 31), WRONG_CLAIM);
}

#[test]
fn token_without_expiry_or_other_claims_is_refused() {
    let (rsa, _, rules) = issuer();
    for claim in ["exp", "iss", "sub", "aud"] {
        let claims = with(&good(), &json!({ claim: null }));
        assert_eq!(judge(&rules, &rsa.token(&claims)), Err(Refusal::Form));
    }
    for exp in [json!("soon"), json!(-1), json!(1e300), json!(null)] {
        let mut claims = good();
        claims["exp"] = exp;
        assert_eq!(judge(&rules, &rsa.token(&claims)), Err(Refusal::Form));
    }
}

#[test]
fn token_that_expires_in_ten_years_is_refused() {
    let (rsa, _, rules) = issuer();
    let until = |exp: i64| judge(&rules, &rsa.token(&with(&good(), &json!({ "exp": exp }))));
    assert!(until(NOW + LONGEST_LIFE).is_ok());
    assert_eq!(until(NOW + LONGEST_LIFE + LEEWAY + 1), WRONG_CLAIM);
    assert_eq!(until(NOW + 10 * 365 * 86_400), WRONG_CLAIM);
}

#[test]
fn right_token_that_has_expired_is_known_as_such() {
    let (rsa, _, rules) = issuer();
    let claims = with(&good(), &json!({ "exp": NOW }));
    let expired = Err(Refusal::Claims(TokenFault::Expired(
        Timestamp::from_micros(NOW * 1_000_000),
    )));
    assert_eq!(judge(&rules, &rsa.token(&claims)), expired);
    // Nobody else learns that.
    let other = Signer::new("rsa", "RS256");
    assert_eq!(judge(&rules, &other.token(&claims)), BAD);
    let claims = with(&claims, &json!({ "aud": "vault" }));
    assert_eq!(judge(&rules, &rsa.token(&claims)), WRONG_CLAIM);
}

#[test]
fn kid_that_is_a_path_or_a_query_is_an_unknown_key() {
    let (rsa, _, rules) = issuer();
    for kid in ["../../../dev/null", "/etc/passwd", "' or 1=1", "", "RSA"] {
        let header = with(&rsa.header(), &json!({ "kid": kid }));
        assert_eq!(judge(&rules, &rsa.sign(&header, &good())), UNKNOWN_KEY);
    }
}

#[test]
fn token_without_kid_counts_if_one_key_fits() {
    let (rsa, ec, rules) = issuer();
    let header = with(&rsa.header(), &json!({ "kid": null }));
    let token = rsa.sign(&header, &good());
    assert!(judge(&rules, &token).is_ok());
    let next = Signer::new("next", "RS256");
    let two = known(&key_set(&[&rsa, &ec, &next]));
    assert_eq!(judge(&two, &token), UNKNOWN_KEY);
}

#[test]
fn key_set_with_one_kid_twice_is_refused() {
    let (rsa, ec) = (Signer::new("same", "RS256"), Signer::new("same", "ES256"));
    let fault = KeySet::parse(key_set(&[&rsa, &ec]).as_bytes()).unwrap_err();
    assert!(fault.contains("two keys have the kid \"same\""), "{fault}");
}

#[test]
fn token_of_64_kib_is_refused() {
    let (rsa, _, rules) = issuer();
    let of = |bytes: usize| with(&good(), &json!({ "padding": "x".repeat(bytes) }));
    assert!(judge(&rules, &rsa.token(&of(5_000))).is_ok());
    for bytes in [8 << 10, 64 << 10] {
        assert_eq!(judge(&rules, &rsa.token(&of(bytes))), Err(Refusal::Form));
    }
}

/// Signed once with a key of 1,024 bits that nobody has any more. It expires in 2027.
const WEAK_TOKEN: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6IndlYWsifQ.eyJpc3MiOiJodHRwczovL2lzc3VlciIsImF1ZCI6IndhbGQiLCJzdWIiOiJ3cml0ZXIiLCJleHAiOjE4MDAwMDAwMDB9.LMimyKAX8E2l6cDPgfDZPpm-A9bgn4SzEmV5tQSmSJmDdH9xMwTAFaAIMKhmXkYrBaXBtTkXER6i688PtehEa3KlbMtzFqNTMCTg1eTHMNXV36XoxhPXdU-i9qGCgnk28Tj3jV2w2v48KQjhN16ul8oYIk6u2MbGN5G7B0V6I8Y";
const WEAK_N: &str = "ywtU-aZQzBChthyyuwEVTlcKTPeW26GWotwbhqV29I2gBZjzkJmq08BkPS6ezl5WyxdcZS1_I0oab784ARJQAOa_mOpoWqX7soNoa9d88-3WId4JaWSxEtg4l0l4k7Yr154mUahO1K3Mbzx4NOvNxZ0H4s_WM1wQYrNfLPIIzns";

#[test]
fn rsa_key_of_1024_bits_is_not_used() {
    let weak = json!({ "kty": "RSA", "kid": "weak", "n": WEAK_N, "e": "AQAB" });
    // The signature is right: the size of the key alone is refused.
    let (text, signature) = WEAK_TOKEN.rsplit_once('.').unwrap();
    let bytes = |text: &str| URL_SAFE_NO_PAD.decode(text).unwrap();
    let key = aws_lc_rs::signature::RsaPublicKeyComponents {
        n: bytes(WEAK_N),
        e: bytes("AQAB"),
    };
    let legacy = &aws_lc_rs::signature::RSA_PKCS1_1024_8192_SHA256_FOR_LEGACY_USE_ONLY;
    key.verify(legacy, text.as_bytes(), &bytes(signature))
        .unwrap();
    let alone = json!({ "keys": [weak] }).to_string();
    let fault = KeySet::parse(alone.as_bytes()).unwrap_err();
    assert!(
        fault.contains("2048 to 8192 bits, and this one 1024"),
        "{fault}"
    );
    let good = Signer::new("good", "RS256");
    let keys = json!({ "keys": [weak, good.jwk()] }).to_string();
    assert_eq!(KeySet::parse(keys.as_bytes()).unwrap().left_out.len(), 1);
    assert_eq!(judge(&known(&keys), WEAK_TOKEN), UNKNOWN_KEY);
}

#[test]
fn token_of_another_type_or_with_an_extension_is_refused() {
    let (rsa, _, rules) = issuer();
    let of = |changes: Value| judge(&rules, &rsa.sign(&with(&rsa.header(), &changes), &good()));
    for typ in ["dpop+jwt", "logout+jwt", "jwe", ""] {
        assert_eq!(of(json!({ "typ": typ })), Err(Refusal::Form), "{typ}");
    }
    for typ in ["JWT", "jwt", "at+jwt", "application/at+jwt"] {
        assert!(of(json!({ "typ": typ })).is_ok(), "{typ}");
    }
    assert!(of(json!({ "typ": null })).is_ok());
    assert_eq!(
        of(json!({ "crit": ["b64"], "b64": false })),
        Err(Refusal::Form)
    );
    // Links to keys are ignored.
    assert!(of(json!({ "jku": "https://evil/keys", "jwk": {} })).is_ok());
}

#[test]
fn token_whose_key_was_withdrawn_does_not_count_any_more() {
    let (rsa, ec, rules) = issuer();
    let token = rsa.token(&good());
    let presented = PresentedJwt::parse(token.as_bytes()).unwrap();
    let verified = presented.verify(&rules).unwrap();
    let now = Timestamp::from_micros(NOW * 1_000_000);
    let fault = |rules: &Rules| verified.judge(rules, now).err().map(|(fault, _)| fault);
    // The same key in another set, with others.
    let next = Signer::new("next", "RS256");
    let with_key = known(&key_set(&[&next, &rsa]));
    assert!(verified.judge(&with_key, now).is_ok());
    let without = known(&key_set(&[&next, &ec]));
    assert_eq!(fault(&without), Some(TokenFault::Bad));
    let reused = Signer::new("rsa", "RS256");
    let of_another = known(&key_set(&[&reused]));
    assert_eq!(fault(&of_another), Some(TokenFault::Bad));
}

#[test]
fn id_of_a_token_has_no_characters_that_act() {
    let (rsa, _, rules) = issuer();
    let id = |jti: &str| {
        let token = rsa.token(&with(&good(), &json!({ "jti": jti })));
        let presented = PresentedJwt::parse(token.as_bytes()).unwrap();
        presented.verify(&rules).unwrap().id().to_owned()
    };
    assert_eq!(id("5f1c-9"), "k8s/5f1c-9");
    for odd in ["", "a b", "\u{1b}[2J", "é", &"x".repeat(101)] {
        assert_eq!(id(odd), "k8s");
    }
}

#[test]
fn random_bytes_and_changed_tokens_never_count_and_never_panic() {
    let (rsa, ec, rules) = issuer();
    let mut random = StdRng::seed_from_u64(25);
    for _ in 0..2_000 {
        let mut bytes = vec![0; random.random_range(0..200)];
        random.fill(&mut bytes[..]);
        assert!(PresentedJwt::parse(&bytes).is_err());
        // Dots at random places, and JSON that is not the expected one.
        let parts: Vec<String> = bytes.chunks(40).map(encoded).collect();
        assert!(PresentedJwt::parse(parts.join(".").as_bytes()).is_err());
    }
    for token in [rsa.token(&good()), ec.token(&good())] {
        for _ in 0..500 {
            let mut changed = token.clone().into_bytes();
            let at = random.random_range(0..changed.len());
            match random.random_range(0..3) {
                0 => changed[at] ^= 1 << random.random_range(0..8),
                1 => changed.truncate(at),
                _ => changed.insert(at, random.random()),
            }
            let Ok(presented) = PresentedJwt::parse(&changed) else {
                continue;
            };
            assert!(
                presented.verify(&rules).is_err(),
                "{:?}",
                String::from_utf8_lossy(&changed)
            );
        }
    }
}

#[test]
fn operators_are_told_what_is_wrong_with_a_token() {
    let (rsa, _, rules) = issuer();
    for (changes, words) in [
        (
            json!({ "aud": "api" }),
            r#"aud of the JWT is "api"; [jwt.k8s] wants "wald""#,
        ),
        (
            json!({ "aud": ["a", "b"] }),
            r#"aud of the JWT is ["a", "b"]"#,
        ),
        (
            json!({ "iss": "https://x" }),
            r#"no [jwt.NAME] has the issuer "https://x""#,
        ),
        (
            json!({ "sub": "reader" }),
            r#"no principal has jwt with issuer "k8s" and sub "reader""#,
        ),
        (
            json!({ "exp": NOW + 90_000 }),
            "more than 24 hours from now",
        ),
        (json!({ "exp": NOW - 1 }), "the JWT expired at 2026-"),
        (json!({ "exp": null }), "exp as a number"),
        (
            json!({ "nbf": NOW + 60 }),
            "the JWT is not valid before 2026-",
        ),
    ] {
        let told = why(&rules, &rsa.token(&with(&good(), &changes)));
        assert!(told.contains(words), "{changes}: {told}");
    }
    let stranger = Signer::new("other", "RS256");
    let told = why(&rules, &stranger.token(&good()));
    assert_eq!(told, r#"[jwt.k8s] has no key for RS256 with kid "other""#);
    let forged = Signer::new("rsa", "RS256").token(&good());
    assert_eq!(
        why(&rules, &forged),
        "the signature is not of the key of [jwt.k8s]"
    );
    assert_eq!(why(&rules, "hello"), NO_JWT);
}

/// A stranger sends one token again and again. Its signature costs the event loop of others.
#[test]
fn refused_token_is_verified_once_on_a_connection() {
    use crate::auth::{Authority, ExpiryClock, FileAuthority, LastCaller, Trail};
    let (rsa, _, rules) = issuer();
    let (sender, receiver) = tokio::sync::watch::channel(Arc::new(rules));
    let metrics = crate::metrics::Metrics::new().unwrap();
    let authority = Authority::File(Arc::new(FileAuthority {
        rules: receiver,
        clock: ExpiryClock::default(),
        metrics: metrics.auth.clone(),
        keys: Arc::default(),
    }));
    let forged = {
        let mut token = rsa.token(&good());
        let kept = token.rfind('.').unwrap() + 1;
        let signature = token.split_off(kept);
        token + &signature.replace(['A', 'B'], "C")
    };
    // Its signature is right, and nobody has its name.
    let stranger = rsa.token(&with(&good(), &json!({ "sub": "stranger" })));
    let mut last = LastCaller::default();
    let mut call = |token: &str| {
        let mut headers = http::HeaderMap::new();
        let value = format!("Bearer {token}").parse().unwrap();
        headers.insert(http::header::AUTHORIZATION, value);
        let rpc = crate::methods::of(wald_proto::Method::Append);
        let refused = authority
            .identify_next(&mut last, &headers, None, rpc, Trail::default())
            .map(drop)
            .unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Unauthenticated);
        last.has_checked()
    };
    for token in [&forged, &stranger] {
        let checked: Vec<_> = (0..4).map(|_| call(token)).collect();
        assert_eq!(checked, [true, false, false, false]);
        sender.send_modify(|rules| Arc::make_mut(rules).generation += 1);
        assert!(call(token) && !call(token));
    }
}

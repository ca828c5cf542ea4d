//! Files that a start refuses: it exits with 78 and one sentence that has the path, and nothing listens.

use std::path::Path;

use rustix::process::Signal;

use super::certificates::{Files, ca, crl, expired_ca, intermediate, server_until, set_mode};
use super::start;
use crate::support::{output, wald};

/// A CA whose RSA key has 1024 bits, until 2126: openssl req -x509 -newkey rsa:1024 -days 36500 -subj "/CN=Weak CA".
const WEAK_CA: &str = include_str!("weak_ca.pem");

/// The fault of a file: its name, the change, and words of the sentence.
type Fault = (&'static str, fn(&Files, &Path), &'static str);

const SERVER_FAULTS: &[Fault] = &[
    ("server.key", |_, path| set_mode(path, 0o644), "chmod o-rwx"),
    (
        "server.key",
        |files, _| {
            let key = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
            files.write("server.key", key);
        },
        "is encrypted",
    ),
    (
        "server.key",
        |files, _| files.write("server.key", &server_until(&files.ca, 2045).key),
        "does not belong to the first certificate",
    ),
    (
        "server.key",
        |files, _| files.write("server.key", ""),
        "holds no private key",
    ),
    (
        "server.key",
        |_, path| std::fs::remove_file(path).unwrap(),
        "No such file",
    ),
    (
        "server.pem",
        |files, _| files.write("server.pem", &"#".repeat(1 << 20)),
        "larger than 512KiB",
    ),
    (
        "server.pem",
        |files, _| files.write_server(&server_until(&files.ca, 2021)),
        "expired at 2021-01-01",
    ),
    (
        "server.pem",
        |files, _| files.write("server.pem", ""),
        "holds no certificate",
    ),
    (
        "server.pem",
        |files, _| {
            let mut identity = server_until(&files.ca, 2045);
            identity.chain.push_str(&ca("A stranger").pem());
            files.write_server(&identity);
        },
        "was not issued by certificate 2",
    ),
    (
        "server.pem",
        |_, path| {
            std::fs::remove_file(path).unwrap();
            std::fs::create_dir(path).unwrap();
        },
        "not a regular file",
    ),
    (
        "server.pem",
        |files, _| files.write("server.pem", WEAK_CA),
        "certificate 1 of the file (CN=Weak CA) has an RSA key of 1024 bits, and at least 2048",
    ),
    (
        "server.pem",
        |files, path| {
            let good = std::fs::read_to_string(path).unwrap();
            files.write("server.pem", &format!("{good}{}", &WEAK_CA[..300]));
        },
        "CERTIFICATE) is cut off: it has no line -----END CERTIFICATE-----; copy the whole file",
    ),
    (
        "server.pem",
        |files, path| {
            let good = std::fs::read_to_string(path).unwrap();
            let note = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
            files.write("server.pem", &format!("{note}{good}"));
        },
        "block 1 of the file (line 1: CERTIFICATE) is PEM, and no certificate: ",
    ),
    (
        "server.pem",
        |files, path| std::fs::write(path, files.ca.der()).unwrap(),
        "is DER, and must be PEM; convert it: openssl x509 -inform DER",
    ),
    (
        "server.key",
        |files, _| {
            let key = "-----BEGIN PRIVATE KEY-----\nAAAA\nAA!A\n-----END PRIVATE KEY-----\n";
            files.write("server.key", key);
        },
        "block 1 of the file (line 1: PRIVATE KEY) is damaged: line 3 has characters that are not base64",
    ),
    (
        "server.key",
        |files, _| {
            let key = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
            files.write("server.key", key);
        },
        "the key is damaged or of another kind than RSA (2048 to 8192 bits), ECDSA",
    ),
    (
        "ca.pem",
        |files, _| files.write("ca.pem", WEAK_CA),
        "no CA certificate of the file is of use; replace them: certificate 1 of the file (CN=Weak CA) has an RSA key",
    ),
    (
        "crl.pem",
        |files, _| files.write("crl.pem", &crl(&files.ca, &[])[..200]),
        "block 1 of the file (line 1: X509 CRL) is cut off",
    ),
    (
        "ca.pem",
        |files, _| files.write("ca.pem", ""),
        "holds no certificate",
    ),
    (
        "crl.pem",
        |files, _| files.write("crl.pem", &files.ca.pem()),
        "holds no revocation list",
    ),
    (
        "crl.pem",
        // A CA of the same name with another key.
        |files, _| files.write("crl.pem", &crl(&ca("Wald test CA"), &[])),
        "the signature of the revocation list of CN=Wald test CA is not valid",
    ),
    (
        "crl.pem",
        |files, _| files.write("crl.pem", include_str!("crl_v1.pem")),
        "of version 1",
    ),
    (
        "crl.pem",
        |files, _| {
            let middle = intermediate("Middle CA", &files.ca);
            files.write("crl.pem", &(crl(&middle, &[]) + &crl(&middle, &[7])));
        },
        "two revocation lists of CN=Middle CA are for the same certificates, and only the first would count; keep the newest",
    ),
];

#[test]
fn fault_of_a_file_ends_the_start_with_its_path() {
    for (name, change, words) in SERVER_FAULTS {
        let files = Files::new();
        files.write("crl.pem", &crl(&files.ca, &[]));
        let path = files.path(name);
        change(&files, &path);
        let data = tempfile::tempdir().unwrap();
        let mut arguments = files.arguments_with_clients("require");
        arguments.push(files.argument("tls-client-crl", "crl.pem"));
        let ended = output(
            wald()
                .arg("--data-dir")
                .arg(data.path().join("store"))
                .args(["--listen", ":0", "--http-listen", ":0"])
                .args(["--log-format", "text"])
                .args(arguments),
        );
        let text = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(78), "{name}, {words}: {text}");
        assert!(text.contains(words), "{name}, {words}: {text}");
        assert!(text.contains(path.to_str().unwrap()), "{words}: {text}");
        let lines = text.lines().filter(|line| !line.contains("WARN")).count();
        assert_eq!(lines, 1, "{text}");
        assert!(!data.path().join("store").exists(), "{words}");
    }
}

#[test]
fn short_key_of_a_ca_is_a_warning() {
    // The chain of the server, and a CA of clients next to a good one. Names alone join the chain.
    let files = Files::new();
    let mut identity = server_until(&ca("Weak CA"), 2045);
    identity.chain.push_str(WEAK_CA);
    let daemon = start(&files.arguments_with_clients("require"));
    files.write_server(&identity);
    files.write("ca.pem", &format!("{}{WEAK_CA}", files.ca.pem()));
    daemon.signal(Signal::HUP);
    // A reload of its own accord may come between the two files.
    let line = daemon.wait_for_log("tls_client_ca: certificate 2 of the file (CN=Weak CA)");
    for (setting, effect) in [
        ("tls_cert", "clients may refuse the chain"),
        (
            "tls_client_ca",
            "clients with certificates of this CA are refused",
        ),
    ] {
        let fault = format!(
            "{setting}: certificate 2 of the file (CN=Weak CA) has an RSA key of 1024 bits"
        );
        assert!(
            line.contains("WARN") && line.contains(&fault) && line.contains(effect),
            "{line}"
        );
    }
}

#[test]
fn expired_ca_beside_a_good_one_is_a_warning() {
    let files = Files::new();
    let both = format!("{}{}", files.ca.pem(), expired_ca("Old CA").pem());
    let daemon = start(&files.arguments_with_clients("require"));
    files.write("ca.pem", &both);
    daemon.signal(Signal::HUP);
    let line = daemon.wait_for_log("certificate 2 of the file (CN=Old CA) expired at 2021-01-01");
    assert!(line.contains("WARN"), "{line}");
}

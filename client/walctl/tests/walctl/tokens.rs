//! Tokens of walctl: file, variables, and refusals with the next step.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;

use crate::command::{Fixture, write_with_mode};

async fn ran(fixture: &Fixture, arguments: &str, variables: &[(&str, &str)]) -> (i32, String) {
    let mut command = fixture.command(arguments);
    let output = command.envs(variables.iter().copied()).output().await;
    let output = output.unwrap();
    let said = [output.stdout, output.stderr].concat();
    (
        output.status.code().unwrap(),
        String::from_utf8(said).unwrap(),
    )
}

#[tokio::test]
async fn token_of_a_file_or_a_variable_goes_with_every_call() {
    let fixture = Fixture::new().await;
    *fixture.memory.door.lock().unwrap() = Some(("k7Qp2mXa", "BAD_CREDENTIAL"));
    let files = tempfile::tempdir().unwrap();
    let good = files.path().join("good");
    write_with_mode(&good, " k7Qp2mXa\n", 0o600);
    let (good, missing) = (good.to_str().unwrap(), files.path().join("missing"));
    let missing = missing.to_str().unwrap();
    let append = "append log --text x";
    let by_option = format!("{append} --token-file {good}");
    for (arguments, variables) in [
        (by_option.as_str(), vec![]),
        (append, vec![("WALD_TOKEN_FILE", good)]),
        (append, vec![("WALD_TOKEN", "k7Qp2mXa")]),
        (
            append,
            vec![("WALD_TOKEN_FILE", good), ("WALD_TOKEN", "other")],
        ),
    ] {
        let (code, said) = ran(&fixture, arguments, &variables).await;
        assert_eq!(code, 0, "{said}");
    }
    let (code, said) = ran(&fixture, append, &[("WALD_TOKEN_FILE", missing)]).await;
    assert!(code == 2 && said.contains(missing), "{code} {said}");
}

#[tokio::test]
async fn file_of_a_secret_that_every_user_can_use_is_refused() {
    let fixture = Fixture::new().await;
    *fixture.memory.door.lock().unwrap() = Some(("k7Qp2mXa", "BAD_CREDENTIAL"));
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("token");
    let token = path.to_str().unwrap();
    let advice = format!("run: chmod o-rwx {token}");
    for mode in [0o644, 0o604, 0o602, 0o601, 0o666] {
        write_with_mode(&path, "k7Qp2mXa\n", mode);
        let option = format!("append log --text x --token-file {token}");
        for (source, ran) in [
            ("--token-file", ran(&fixture, &option, &[]).await),
            (
                "WALD_TOKEN_FILE",
                ran(&fixture, "logs", &[("WALD_TOKEN_FILE", token)]).await,
            ),
        ] {
            let (code, said) = ran;
            let words = format!(
                "{source}: {token}: every user of this machine can use it (mode {mode:04o})"
            );
            assert!(
                code == 2 && said.contains(&words) && said.contains(&advice),
                "{mode:o}: {code} {said}"
            );
            assert!(!said.contains("k7Qp"), "{said}");
        }
    }
    // Kubernetes gives files to the group of the pod, behind a link.
    let link = files.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let link = format!("append log --text x --token-file {}", link.display());
    for mode in [0o600, 0o640, 0o660, 0o440, 0o400] {
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let (code, said) = ran(&fixture, &link, &[]).await;
        assert_eq!(code, 0, "{mode:o}: {said}");
    }
}

#[tokio::test]
async fn refusal_of_a_caller_exits_with_6_and_names_the_next_step() {
    let fixture = Fixture::new().await;
    for (reason, words) in [
        ("NO_CREDENTIAL", "--token-file or WALD_TOKEN_FILE"),
        ("BAD_CREDENTIAL", "--token-file or WALD_TOKEN_FILE"),
        ("CREDENTIAL_EXPIRED", "refused by the server in memory"),
    ] {
        *fixture.memory.door.lock().unwrap() = Some(("k7Qp2mXa", reason));
        let (code, said) = ran(&fixture, "logs", &[("WALD_TOKEN", "zzWrongzz")]).await;
        assert!(code == 6 && said.contains(words), "{code} {said}");
        assert!(!said.contains("zzWrongzz"), "{said}");
    }
}

#[tokio::test]
async fn token_does_not_cross_plaintext_to_another_machine() {
    let fixture = Fixture::new().await;
    let token = [("WALD_TOKEN", "k7Qp2mXa")];
    let arguments = "logs --endpoint http://192.0.2.1:1";
    let (code, said) = ran(&fixture, arguments, &token).await;
    assert!(
        code == 2 && said.contains("--allow-insecure-token"),
        "{code} {said}"
    );
    assert!(!said.contains("k7Qp"), "{said}");
}

#[tokio::test]
async fn whoami_shows_principal_credential_and_rights() {
    let fixture = Fixture::new().await;
    let (code, said) = ran(&fixture, "whoami", &[]).await;
    assert_eq!(code, 0, "{said}");
    for words in [
        "writer",
        "payments",
        "token k7Qp2mXa",
        "2027-01-15",
        "append, create on logs that begin with payments/billing/",
        "append_bytes_per_second 20MiB",
        "connections 200",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let (_, said) = ran(&fixture, "whoami --output json", &[]).await;
    let shown: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(shown["principal"], "writer");
    assert_eq!(shown["grants"][0]["prefix"], "payments/billing/");
    assert_eq!(
        shown["limits"],
        serde_json::json!({ "append_bytes_per_second": 20 << 20, "connections": 200 })
    );
}

//! Files that a start refuses, settings that do not fit together, and `wald token`.

use std::os::unix::fs::PermissionsExt as _;

use super::principals::{AuthFile, COMPANY};
use crate::support::{full, output, unread, wald};

/// Code and stderr of a start that must fail.
fn refused(arguments: &[&str]) -> (i32, String) {
    let directory = tempfile::tempdir().unwrap();
    let ended = output(
        wald()
            .arg("--data-dir")
            .arg(directory.path().join("data"))
            .args(["--http-listen", ":0"])
            .args(arguments),
    );
    let text = String::from_utf8(ended.stderr).unwrap();
    (ended.status.code().unwrap(), text)
}

#[test]
fn faulty_file_is_refused_in_one_sentence_by_start_and_check_alike() {
    let digest = "0".repeat(64);
    let cases = [
        ("x = 1", "line 1: unknown field `x`"),
        ("[principal.a]\nroles = []", "unknown field `roles`"),
        (
            "[principal.a]\nallow = [{ do = [\"read\"], logs = \"\", deny = true }]",
            "unknown field `deny`",
        ),
        ("[principal.a]\n[principal.a]", "line 2"),
        ("[principal.\"a b\"]", "a name has 1 to 100"),
        (
            "[principal.a]\nallow = [{ do = [\"admin\"], logs = \"\" }]",
            "\"admin\" is no right",
        ),
        (
            "[principal.a]\nallow = [{ do = [], logs = \"\" }]",
            "do names no right",
        ),
        (
            "[principal.a]\nallow = [{ do = [\"read\"] }]",
            "it names no logs",
        ),
        (
            "[principal.a]\nallow = [{ do = [\"read\"], logs = \"a/\", log = \"a\" }]",
            "give logs or log, not both",
        ),
        (
            "[principal.a]\nallow = [{ do = [\"ops\"], logs = \"\" }]",
            "ops holds for the server",
        ),
        ("[principal.a]\ntenant = \"t\"", "there is no tenant \"t\""),
        ("[tenant.t]\nprefix = \"t\"", "must end with a slash"),
        (
            "[tenant.t]\nprefix = \"t/\"\n[tenant.u]\nprefix = \"t/u/\"",
            "lies in the prefix",
        ),
        (
            "[tenant.t]\nprefix = \"t/\"\n[principal.a]\ntenant = \"t\"\nallow = [{ do = [\"read\"], logs = \"u/\" }]",
            "does not lie in the prefix \"t/\"",
        ),
        (
            "[tenant.t]\nprefix = \"t/\"\n[principal.a]\ntenant = \"t\"\nallow = [{ do = [\"read\"], logs = \"t/u\" }]",
            "must end with a slash",
        ),
        (
            "[tenant.t]\nprefix = \"t/\"\nlimits = { stored_byte = 1 }",
            "tenant t: limits: \"stored_byte\" is no limit; the limits are append_bytes_per_second, ",
        ),
        (
            "[tenant.t]\nprefix = \"t/\"\nlimits = { logs = 0 }",
            "tenant t: limits: logs: it must be at least 1",
        ),
        ("[principal.a]\ncert = [\"writer\"]", "expected a URI"),
        (
            "[principal.a]\ncert = [\"spiffe://a/*/b\"]",
            "expected a URI",
        ),
        (
            "[principal.a]\ncert = [\"dns:a\"]\n[principal.b]\ncert = [\"dns:A\"]",
            "another principal has it",
        ),
        ("[principal.a]\ntoken = [\"abc\"]", "token 1: expected"),
        (
            "[principal.a]\ntoken = [\"abcdefgh sha256:00 2027-01-01\"]",
            "64 hexadecimal digits",
        ),
    ];
    let mut all: Vec<(String, &str)> = cases.map(|(text, why)| (text.to_owned(), why)).to_vec();
    all.push((
        format!("[principal.a]\ntoken = [\"abcdefgh sha256:{digest} soon\"]"),
        "the expiry must be a day",
    ));
    all.push((
        format!(
            "[principal.a]\ntoken = [\"aaaaaaaa sha256:{digest} 2027-01-01\"]\n[principal.b]\ntoken = [\"aaaaaaaa \
             sha256:{digest} 2027-01-01\"]"
        ),
        "another token has the id aaaaaaaa",
    ));
    let three = ["aaaaaaaa", "bbbbbbbb", "cccccccc"]
        .map(|id| format!("\"{id} sha256:{digest} 2099-01-01\""))
        .join(", ");
    all.push((
        format!("[principal.a]\ntoken = [{three}]"),
        "it has 3 live tokens",
    ));
    for (text, why) in &all {
        let file = AuthFile::new(text);
        let checked = output(wald().args(["token", "check"]).arg(file.path()));
        let said = String::from_utf8(checked.stderr).unwrap();
        assert_eq!(checked.status.code(), Some(78), "{text}: {said}");
        assert!(
            said.contains(why) && said.contains("auth.toml"),
            "{text}: {said}"
        );
    }
    // A start says the same.
    let file = AuthFile::new(&all[0].0);
    let (code, said) = refused(&["--listen", ":0", &file.argument()]);
    assert!(
        code == 78 && said.contains(all[0].1) && said.lines().count() == 1,
        "{said}"
    );
}

#[test]
fn token_put_in_place_of_its_digest_is_not_repeated() {
    let token = AuthFile::new(COMPANY).token("root");
    let issuer = "[jwt.a]\nissuer = \"https://issuer.test\"\naudience = \"wald\"\nalgorithms = [\"RS256\"]\n";
    for text in [
        format!("[principal.a]\ncert = [\"{token}\"]"),
        format!("[principal.a]\nallow = [{{ do = [\"{token}\"], logs = \"\" }}]"),
        format!("{issuer}jwks_url = \"https://user:{token}@issuer.test/keys\""),
        format!("{issuer}jwks_url = \"https://issuer.test/keys\"\njwks_token_file = \"{token}\""),
        format!("[principal.a]\ntoken = [\"{token}\"]"),
        format!("[principal.a]\ntoken = [\"abcdefgh {token} 2027-01-01\"]"),
        format!("[principal.a]\ntoken = \"{token}\""),
        format!("[principal.a]\n{token} = 1"),
    ] {
        let file = AuthFile::new(&text);
        let checked = output(wald().args(["token", "check"]).arg(file.path()));
        let said = String::from_utf8(checked.stderr).unwrap();
        assert_eq!(checked.status.code(), Some(78), "{said}");
        assert!(!said.contains("wald1_"), "{said}");
    }
    // A warning may have it, too.
    let text = format!("[principal.a]\nallow = [{{ do = [\"read\"], logs = \"{token}\" }}]");
    let checked = output(
        wald()
            .args(["token", "check"])
            .arg(AuthFile::new(&text).path()),
    );
    let said = String::from_utf8(checked.stderr).unwrap();
    assert!(said.contains("logs = \"(a token)\""), "{said}");
    assert!(!said.contains("wald1_"), "{said}");
}

#[test]
fn password_in_a_url_is_not_repeated() {
    let file = AuthFile::new(
        "[jwt.a]\nissuer = \"a\"\naudience = \"wald\"\nalgorithms = [\"RS256\"]\n\
         jwks_url = \"https://user:secret@issuer.test/keys\"\n",
    );
    let checked = output(wald().args(["token", "check"]).arg(file.path()));
    let said = String::from_utf8(checked.stderr).unwrap();
    assert_eq!(checked.status.code(), Some(78), "{said}");
    assert!(
        said.contains("jwks_token_file") && !said.contains("secret"),
        "{said}"
    );
}

#[test]
fn check_skips_files_of_another_machine_and_no_fault_of_the_file() {
    let issuer =
        "issuer = \"https://issuer.test\"\naudience = \"wald\"\nalgorithms = [\"RS256\"]\n";
    let by_file = format!("{COMPANY}\n[jwt.a]\n{issuer}jwks_file = \"/elsewhere/jwks.json\"\n");
    let by_url = format!(
        "{COMPANY}\n[jwt.a]\n{issuer}jwks_url = \"https://issuer.test/keys\"\njwks_ca = \"/elsewhere/ca.pem\"\n"
    );
    let faulty = format!("{by_file}x = 1\n");
    for (text, missing) in [
        (&by_file, "/elsewhere/jwks.json"),
        (&by_url, "/elsewhere/ca.pem"),
    ] {
        let file = AuthFile::new(text);
        let check = |options: &[&str]| {
            let mut command = wald();
            let ran = output(
                command
                    .args(["token", "check"])
                    .args(options)
                    .arg(file.path()),
            );
            (
                ran.status.code().unwrap(),
                String::from_utf8(ran.stderr).unwrap(),
            )
        };
        let (code, said) = check(&[]);
        assert!(code == 78 && said.contains(missing), "{code} {said}");
        let (code, said) = check(&["--skip-named-files"]);
        assert!(code == 0 && !said.contains("/elsewhere"), "{code} {said}");
        file.write(&faulty);
        let (code, said) = check(&["--skip-named-files"]);
        assert!(
            code == 78 && said.contains("unknown field `x`"),
            "{code} {said}"
        );
    }
    // Warnings about the file itself stay.
    let file = AuthFile::new("[principal.a]\nallow = [{ do = [\"read\"], logs = \"payments\" }]\n");
    let check = |option: &[&str]| {
        output(
            wald()
                .args(["token", "check"])
                .args(option)
                .arg(file.path()),
        )
        .stderr
    };
    let warned = check(&["--skip-named-files"]);
    assert!(!warned.is_empty() && warned == check(&[]));
}

#[test]
fn file_that_every_user_can_read_is_refused() {
    let file = AuthFile::new(COMPANY);
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
    let (code, said) = refused(&["--listen", ":0", &file.argument()]);
    assert!(code == 78 && said.contains("chmod o-rwx"), "{said}");
}

#[test]
fn settings_that_leave_a_port_open_by_mistake_are_refused() {
    let file = AuthFile::new(COMPANY);
    let argument = file.argument();
    for (arguments, why) in [
        (
            vec!["--listen", "0.0.0.0:0"],
            "the service speaks plaintext",
        ),
        (
            vec!["--listen", "0.0.0.0:0", "--insecure-listen", &argument],
            "tokens would cross the network",
        ),
        (
            vec!["--listen", ":0", "--echo", &argument],
            "the echo service has no limits",
        ),
        (
            vec!["--listen", ":0", "--metrics-open"],
            "it has no effect without auth_file",
        ),
        (
            vec![
                "--listen",
                ":0",
                "--http-listen",
                "0.0.0.0:0",
                "--console=on",
            ],
            "everyone who reaches that port could read",
        ),
        (
            vec![
                "--listen",
                ":0",
                "--http-listen",
                "0.0.0.0:0",
                "--console=on",
                &argument,
            ],
            "tokens and logins would cross the network in plaintext",
        ),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let ended = output(
            wald()
                .arg("--data-dir")
                .arg(directory.path().join("data"))
                .args(&arguments),
        );
        let said = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(78), "{arguments:?}: {said}");
        assert!(said.contains(why), "{arguments:?}: {said}");
    }
}

#[test]
fn token_command_keeps_comments_and_the_mode_of_the_file() {
    let file = AuthFile::new(&format!("# Ours.\n{COMPANY}"));
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o640)).unwrap();
    let to = file.path().with_file_name("token");
    let to = to.to_str().unwrap();
    let made = file.command(&[
        "create",
        "--principal",
        "writer",
        "--expires",
        "1d",
        "--to",
        to,
    ]);
    assert!(made.status.success() && made.stdout.is_empty(), "{made:?}");
    let token = std::fs::read_to_string(to).unwrap();
    assert!(token.starts_with("wald1_") && token.ends_with('\n'));
    assert_eq!(
        std::fs::metadata(to).unwrap().permissions().mode() & 0o777,
        0o600
    );
    assert_eq!(
        std::fs::metadata(file.path()).unwrap().permissions().mode() & 0o777,
        0o640
    );
    let again = file.command(&["create", "--principal", "writer", "--to", to]);
    let said = String::from_utf8(again.stderr).unwrap();
    assert!(
        again.status.code() == Some(78) && said.contains("the file exists"),
        "{said}"
    );
    assert_eq!(std::fs::read_to_string(to).unwrap(), token);
    let text = file.text();
    assert!(text.starts_with("# Ours.\n") && !text.contains(&token[14..57]));
    let id = &token[6..14];
    let listed = file.command(&["list", "--output", "json"]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(
        (&listed["id"], &listed["principal"]),
        (&id.into(), &"writer".into())
    );
    assert_eq!(listed["expired"], false);
    assert!(file.command(&["revoke", id]).status.success());
    assert!(file.command(&["list"]).stdout.is_empty());
    assert_eq!(file.command(&["revoke", id]).status.code(), Some(78));
}

#[test]
fn token_that_is_not_delivered_is_not_in_the_file() {
    let file = AuthFile::new(COMPANY);
    for stdout in [full(), unread()] {
        let mut create = wald();
        create.args(["token", "create", "--principal", "writer"]);
        let made = create.arg(file.argument()).stdout(stdout).output().unwrap();
        assert_eq!(made.status.code(), Some(74), "{made:?}");
        let said = String::from_utf8(made.stderr).unwrap();
        assert!(said.contains("was not delivered, and is revoked"), "{said}");
        assert!(file.command(&["list"]).stdout.is_empty());
    }
}

#[test]
fn token_is_delivered_where_nobody_reads_about_it() {
    let file = AuthFile::new(COMPANY);
    let mut create = wald();
    create.args(["token", "create", "--principal", "writer"]);
    let made = create
        .arg(file.argument())
        .stderr(unread())
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    assert!(made.stdout.starts_with(b"wald1_"), "{made:?}");
}

#[test]
fn third_token_of_a_principal_is_refused_and_the_file_stays() {
    let file = AuthFile::new(COMPANY);
    file.token("writer");
    file.token("writer");
    let before = file.text();
    let refused = file.command(&["create", "--principal", "writer"]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(78));
    assert!(
        said.contains("at most 2 are allowed") && refused.stdout.is_empty(),
        "{said}"
    );
    assert_eq!(file.text(), before);
    let unknown = file.command(&["create", "--principal", "nobody"]);
    let said = String::from_utf8(unknown.stderr).unwrap();
    assert!(said.contains("there is no principal \"nobody\""), "{said}");
}

#[test]
fn reload_with_a_fault_keeps_the_rules_in_force() {
    let file = AuthFile::new(COMPANY);
    let root = file.token("root");
    let good = file.text();
    let daemon = file.start(&[]);
    file.write("x = 1");
    daemon.signal(rustix::process::Signal::HUP);
    let line = daemon.wait_for_log("auth_file cannot be used; the earlier one stays in force");
    assert!(line.contains("unknown field"), "{line}");
    assert_eq!(daemon.http_as("/metrics", &root).0, 200);
    assert_eq!(
        daemon.metric_as("wald_reload_failures_total{kind=\"auth\"}", &root),
        1.0
    );
    file.put_in_force(&daemon, &good);
    assert_eq!(daemon.http_as("/metrics", &root).0, 200);
}

#[test]
fn commands_at_the_same_time_lose_no_token() {
    const PRINCIPALS: usize = 8;
    let rules: String = (0..PRINCIPALS)
        .map(|number| format!("[principal.p{number}]\n"))
        .collect();
    let file = AuthFile::new(&rules);
    std::thread::scope(|scope| {
        for number in 0..PRINCIPALS {
            let file = &file;
            scope.spawn(move || file.token(&format!("p{number}")));
        }
    });
    let listed = file.command(&["list"]);
    let text = String::from_utf8(listed.stdout).unwrap();
    assert_eq!(text.lines().count(), PRINCIPALS, "{text}");
}

#[test]
fn control_characters_of_the_file_reach_no_terminal() {
    for text in [
        "\"\\u001b]0;evil\\u0007\" = 1",
        "[principal.a]\ntenant = \"x\\u001b[31m\"",
        "[principal.a]\nallow = [{ do = [\"\\u009b31m\"], logs = \"\" }]",
    ] {
        let file = AuthFile::new(text);
        let checked = output(wald().args(["token", "check"]).arg(file.path()));
        let said = String::from_utf8(checked.stderr).unwrap();
        assert_eq!(checked.status.code(), Some(78), "{said}");
        let is_bad = |character: char| character.is_control() && character != '\n';
        assert!(!said.contains(is_bad), "{said:?}");
    }
}

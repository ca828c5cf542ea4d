//! Contexts of walctl: kept, used, shown, overridden, removed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use crate::command::{Fixture, Ran, write_with_mode};
use tempfile::TempDir;

/// A server that requires a token, and a home directory with a file of the token.
struct Home {
    fixture: Fixture,
    directory: TempDir,
}

const TOKEN: &str = "k7Qp2mXa";

impl Home {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        *fixture.memory.door.lock().unwrap() = Some((TOKEN, "BAD_CREDENTIAL"));
        let directory = tempfile::tempdir().unwrap();
        write_with_mode(&directory.path().join("token"), TOKEN, 0o600);
        Self { fixture, directory }
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join(".config/wald/config.toml")
    }

    /// Runs walctl in the home directory, with no variables but these. SERVER in the arguments is the endpoint.
    async fn walctl(&self, arguments: &str, variables: &[(&str, &str)]) -> Ran {
        let arguments = arguments.replace("SERVER", &self.fixture.endpoint);
        let mut command = self.fixture.command(&arguments);
        command
            .env_remove("WALD_ENDPOINT")
            .env_remove("XDG_CONFIG_HOME")
            .env("HOME", self.directory.path())
            .current_dir(self.directory.path())
            .envs(variables.iter().copied());
        let output = command.output().await.unwrap();
        Ran {
            code: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    async fn good(&self, arguments: &str) -> String {
        let ran = self.walctl(arguments, &[]).await;
        assert_eq!(ran.code, 0, "{arguments}: {}", ran.stderr);
        ran.stdout
    }

    /// The row of `context show` with this name, for commands with these arguments and variables.
    async fn shown(&self, arguments: &str, variables: &[(&str, &str)], row: &str) -> Vec<String> {
        let arguments = format!("context show --output json {arguments}");
        let ran = self.walctl(&arguments, variables).await;
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let document: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        let text = |key: &str| document[row][key].as_str().unwrap_or("none").to_owned();
        vec![text("value"), text("from")]
    }
}

#[tokio::test]
async fn context_gives_endpoint_and_token_file_by_paths() {
    let home = Home::new().await;
    home.good("context add shop --endpoint SERVER --token-file token")
        .await;
    home.good("append log --text x").await;
    assert_eq!(home.good("read log --output raw").await, "x\n");
    let said = home.good("whoami").await;
    assert!(said.starts_with(" context     shop\n"), "{said}");
    let said = home.good("whoami --output json").await;
    assert!(
        said.contains("\"context\":\"shop\"") || said.contains("\"context\": \"shop\""),
        "{said}"
    );

    let text = fs::read_to_string(home.file()).unwrap();
    let path = home.directory.path().canonicalize().unwrap().join("token");
    assert!(
        text.contains(path.to_str().unwrap()) && !text.contains(TOKEN),
        "{text}"
    );
    let mode = fs::metadata(home.file()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn option_beats_variable_beats_context_beats_default() {
    let home = Home::new().await;
    let server = home.fixture.endpoint.clone();
    home.good("context add one --endpoint SERVER --token-file token")
        .await;
    home.good("context add two --endpoint localhost:2").await;
    let endpoint = [("WALD_ENDPOINT", "localhost:3")];
    let token = [("WALD_TOKEN_FILE", "other")];
    let context = [("WALD_CONTEXT", "two")];
    for (arguments, variables, row, value, from) in [
        ("", &[][..], "context", "one", "current"),
        ("", &[], "endpoint", server.as_str(), "context one"),
        ("", &context, "context", "two", "WALD_CONTEXT"),
        ("--context one", &context, "context", "one", "--context"),
        ("two", &[], "endpoint", "localhost:2", "context two"),
        ("", &endpoint, "endpoint", "localhost:3", "WALD_ENDPOINT"),
        (
            "--endpoint localhost:4",
            &endpoint,
            "endpoint",
            "localhost:4",
            "--endpoint",
        ),
        (
            "--context one",
            &endpoint,
            "endpoint",
            "localhost:3",
            "WALD_ENDPOINT",
        ),
        ("", &token, "token-file", "other", "WALD_TOKEN_FILE"),
        (
            "--token-file mine",
            &token,
            "token-file",
            "mine",
            "--token-file",
        ),
    ] {
        let shown = home.shown(arguments, variables, row).await;
        assert_eq!(shown, [value, from], "{arguments} {variables:?}");
    }
    home.good("context remove one").await;
    let shown = home.shown("", &[], "endpoint").await;
    assert_eq!(shown, ["http://127.0.0.1:6925", "default"]);
}

#[tokio::test]
async fn token_of_a_context_goes_to_no_other_server() {
    let home = Home::new().await;
    home.good("context add here --endpoint localhost:1 --token-file token")
        .await;
    for (arguments, said) in [
        ("logs --endpoint SERVER", ""),
        ("logs --context here --endpoint SERVER", "another server"),
    ] {
        let ran = home.walctl(arguments, &[]).await;
        assert_eq!(ran.code, 6, "{arguments}: {}", ran.stderr);
        assert!(ran.stderr.contains(said), "{}", ran.stderr);
    }
    // A context for the same server, written in another way.
    home.good("context add there --endpoint SERVER --token-file token")
        .await;
    let bare = home.fixture.endpoint.replace("http://", "");
    home.good(&format!("logs --context there --endpoint {bare}"))
        .await;
}

#[tokio::test]
async fn context_of_several_servers_is_for_each_of_them_and_no_other() {
    let home = Home::new().await;
    home.good("context add shop --endpoint 127.0.0.1:1,SERVER --token-file token")
        .await;
    home.good("append log --text x").await;
    home.good("read log --context shop --endpoint SERVER").await;
    let list = home.good("context list").await;
    let server = &home.fixture.endpoint;
    assert_eq!(list, format!(" *  shop  127.0.0.1:1,{server}\n"));
    // One server of the list is not in the context.
    let other = "logs --context shop --endpoint SERVER,127.0.0.1:2";
    let ran = home.walctl(other, &[]).await;
    assert_eq!(ran.code, 6, "{}", ran.stderr);
    assert!(ran.stderr.contains("another server"), "{}", ran.stderr);
}

#[tokio::test]
async fn broken_file_stops_only_commands_that_need_it() {
    let home = Home::new().await;
    home.good("context add one --endpoint SERVER --token-file token")
        .await;
    let text = fs::read_to_string(home.file()).unwrap();
    fs::write(home.file(), format!("{text}what = 1\n")).unwrap();
    let line = format!("config.toml, line {}: ", text.lines().count() + 1);
    for arguments in [
        "logs",
        "context list",
        "context use one",
        "logs --endpoint SERVER --context one",
    ] {
        let ran = home.walctl(arguments, &[]).await;
        assert!(
            ran.code == 2 && ran.stderr.contains(&line),
            "{arguments}: {}",
            ran.stderr
        );
    }
    home.good("logs --endpoint SERVER --token-file token").await;
    home.good("completion bash").await;

    fs::write(home.file(), &text).unwrap();
    fs::set_permissions(home.file(), fs::Permissions::from_mode(0o644)).unwrap();
    let ran = home.walctl("logs", &[]).await;
    assert!(
        ran.code == 2 && ran.stderr.contains("chmod 600"),
        "{}",
        ran.stderr
    );
}

#[tokio::test]
async fn list_marks_the_current_context() {
    let home = Home::new().await;
    home.good("context add one --endpoint localhost:1").await;
    home.good("context add two --endpoint localhost:2").await;
    assert_eq!(
        home.good("context list").await,
        " *  one  localhost:1\n    two  localhost:2\n"
    );
    home.good("context use two").await;
    assert_eq!(
        home.good("context list").await,
        "    one  localhost:1\n *  two  localhost:2\n"
    );
    home.good("context remove two").await;
    assert_eq!(home.good("context list").await, "    one  localhost:1\n");
}

#[tokio::test]
async fn context_that_cannot_work_is_not_kept() {
    let home = Home::new().await;
    for (arguments, words) in [
        ("context add a", "give --endpoint"),
        ("context add a/b --endpoint SERVER", "no name of a context"),
        (
            "context add a --endpoint SERVER --token-file missing",
            "missing",
        ),
        (
            "context add a --endpoint SERVER --tls-ca token",
            "https://HOST:PORT",
        ),
        (
            "context add a --endpoint 192.0.2.1:1 --token-file token",
            "--allow-insecure-token",
        ),
        ("context use a", "no context \"a\""),
        ("logs --context a", "no context \"a\""),
    ] {
        let ran = home.walctl(arguments, &[]).await;
        assert!(
            ran.code == 2 && ran.stderr.contains(words),
            "{arguments}: {}",
            ran.stderr
        );
    }
    assert!(!home.file().exists());
}

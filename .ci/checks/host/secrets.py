"""Searches for tokens and private keys in everything that the daemon and walctl print, keep or show: the log at level trace,
the output of a crash, /metrics, the audit log of all calls, `wald config show`, arguments and environments in /proc. Searches
for records of an encrypted store in all that, and in the files of the store, its backup and its archive.
"""

import resource

from certificates import *

PATTERNS = (rb"wald1_", rb"Bearer (?!TOKEN)", rb"BEGIN [A-Z ]*PRIVATE")
# Part of each record. No other byte of a store is like it by chance.
MARK = b"for-nobody-else"
RECORDS = 20_000


def of_process(pid):
    """Arguments and environment of a process, as `ps` and /proc show them."""
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


@check("Tokens and keys are in no log, metric, audit line, setting, process or crash output")
def hidden(directory):
    directory = Path(directory)
    authority = Authority(directory / "ca")
    pem, key = authority.issue(directory / "tls", "server")
    client_pem, client_key = authority.issue(directory / "tls", "client", san="DNS:client.test")
    auth, audit, config = directory / "auth.toml", directory / "audit.log", directory / "wald.toml"
    auth.write_text('[principal.app]\nallow = [{ do = ["append", "create", "read", "list"], logs = "" }, { do = ["metrics", "ops", "console"] }]\n'
                    '[principal.cert]\ncert = ["dns:client.test"]\nallow = [{ do = ["read"], logs = "" }]\n')
    auth.chmod(0o600)

    def create(name):
        run(WALD, "token", "create", "--principal", "app", "--expires", "1d", "--to", directory / name, "--auth-file", auth, check=True)
        return (directory / name).read_text().strip()

    token, revoked = create("token"), create("revoked")
    run(WALD, "token", "revoke", revoked[6:14], "--auth-file", auth, check=True)
    config.write_text("".join(f'{name} = "{value}"\n' for name, value in {
        "tls_cert": pem, "tls_key": key, "tls_client_ca": authority.pem, "tls_client_auth": "optional", "auth_file": auth,
        "audit_log": audit, "audit": "all", "log_filter": "trace", "console": "on"}.items()))
    shown = {"config show": run(WALD, "config", "show", "--config", config).stdout}
    with Daemon(directory / "data", "--config", config, variables={"RUST_BACKTRACE": "full"}) as daemon:
        daemon.endpoint = f"https://{daemon.grpc}"

        def walctl(*arguments, input=b"x\n", **variables):
            environment = clean_environment(WALD_ENDPOINT=daemon.endpoint, WALD_TLS_CA=str(authority.pem), **variables)
            done = run(WALCTL, *arguments, "--timeout", "5s", input=input, env=environment)
            shown.setdefault("walctl", b"")
            shown["walctl"] += done.stdout + done.stderr
            return done.returncode

        good, bad = {"WALD_TOKEN_FILE": str(directory / "token")}, {"WALD_TOKEN_FILE": str(directory / "revoked")}
        codes = [walctl("append", "log", "-", **good), walctl("read", "log", **good), walctl("status", "--output", "json", **good),
                 walctl("whoami", **good), walctl("append", "log", "-", **bad),
                 walctl("append", "log", "-", WALD_TOKEN=token[:-1] + ("y" if token[-1] == "x" else "x")),
                 walctl("read", "log", "--tls-cert", client_pem, "--tls-key", client_key)]
        expect("good credentials are served and bad ones refused", codes == [0, 0, 0, 0, 6, 6, 0], codes)

        # A follower, whose process others can look at while it runs.
        follower = subprocess.Popen([WALCTL, "tail", "log"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                    env=clean_environment(WALD_ENDPOINT=daemon.endpoint, WALD_TLS_CA=str(authority.pem), **good))
        expect("a follower reads", bool(follower.stdout.readline()))
        shown["ps and environment of walctl"] = of_process(follower.pid)
        shown["ps and environment of wald"] = of_process(daemon.pid)

        def http(path, credential, body=None):
            request = urllib.request.Request(f"http://{daemon.http}{path}", data=body, headers={
                "Authorization": f"Bearer {credential}", "Content-Type": "application/json", "Origin": f"http://{daemon.http}"})
            try:
                with urllib.request.urlopen(request) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()

        status, shown["metrics"] = http("/metrics", token)
        asked = [status, http("/metrics", revoked)[0], http("/console/api/logs", token)[0],
                 http("/console/api/session", token, json.dumps({"token": token}).encode())[0],
                 http("/console/api/session", revoked, json.dumps({"token": revoked}).encode())[0]]
        expect("the HTTP port answers both tokens", asked[0] == 200 and asked[1] == 401 and asked[4] >= 400, asked)
        wait_until(lambda: '"rpc":"wald.v1.OpsService/GetCaller"' in audit.read_text(), 10)
        shown["audit log"] = audit.read_bytes()
        daemon.process.send_signal(signal.SIGABRT)
        expect("the daemon crashes", daemon.process.wait(timeout=20) == -signal.SIGABRT)
        follower.kill()
        follower.communicate()
        wait_until(lambda: False, 0.5)
        shown["log at level trace and output of the crash"] = "".join(daemon.lines).encode()
    expect("the log has level trace", b'"TRACE"' in shown["log at level trace and output of the crash"])
    secrets = [token[14:57].encode(), revoked[14:57].encode(), *(path.read_bytes().splitlines()[3] for path in (key, client_key))]
    for name, text in shown.items():
        found = [match[0] for pattern in PATTERNS for match in re.finditer(pattern + rb".{0,20}", text)]
        found += [secret[:6] + b"..." for secret in secrets if secret in text]
        expect(f"{name}: no secret", not found and text, f"{len(text)} bytes; {found[:3]}")


def places_of_records(directory, *keys):
    """Fills a store, kills its daemon while it appends, lets it sort, archive and back up, and crashes it. Returns the places
    that have plain records."""
    directory.mkdir()
    data, archive, backup, audit, lines = (directory / name for name in ("data", "archive", "backup", "audit.log", "lines"))
    archive.mkdir()
    lines.write_bytes(b"".join(b"%d %s %s\n" % (number, MARK, b"x" * 40) for number in range(RECORDS)))
    settings = ["--segment-bytes", "64KiB", "--sorter-step-bytes", "512KiB", "--retention-max-records", "2000", "--retention-interval", "100ms",
                "--archive-dir", archive, "--audit-log", audit, "--audit", "all", "--log-filter", "trace", *keys]
    # A core file lies in the directory of its process.
    here, printed = ("env", "-C", directory), []
    with Daemon(data, *settings, under=here) as daemon:
        append = subprocess.Popen([WALCTL, "append", "a", "-", "--format", "lines", "--endpoint", daemon.endpoint], stdin=lines.open(),
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=clean_environment())
        has_begun = wait_until(lambda: daemon.metric("wald_appended_records_total") > 0)
        daemon.kill()
        append.wait()
        printed += daemon.lines
    expect("the daemon is killed while a client appends", has_begun)
    with Daemon(data, *settings, under=here) as daemon:
        done = daemon.walctl("append", "a", "-", "--format", "lines", stdin=lines.open())
        expect("the client appends after the start", done.returncode == 0, done.stderr.decode()[-200:])
        expect("the sorter makes runs and archives records", wait_until(
            lambda: daemon.metric("wald_sorted_runs") and daemon.metric("wald_archive_written_bytes_total")))
        expect("a backup is made", daemon.walctl("backup", backup).returncode == 0)
        expect("a reader has the records", MARK in daemon.walctl("read", "a").stdout)
        with urllib.request.urlopen(f"http://{daemon.http}/metrics") as page:
            metrics = page.read()
        daemon.process.send_signal(signal.SIGABRT)
        expect("the daemon crashes", daemon.process.wait(timeout=20) == -signal.SIGABRT)
        printed += daemon.lines
    expect("the log has level trace", any('"TRACE"' in line for line in printed))
    found = {path.relative_to(directory).parts[0] for path in directory.rglob("*") if path.is_file() and MARK in path.read_bytes()}
    shown = {name for name, text in (("metrics", metrics), ("log", "".join(printed).encode())) if MARK in text}
    return sorted(found - {lines.name} | shown)


@check("Records of an encrypted store are plain in no file, backup, archive, core file, log or metric")
def records(directory):
    directory = Path(directory)
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    run(WALD, "key", "new", "--to", directory / "key", check=True)
    found = places_of_records(directory / "encrypted", "--encryption-key-file", directory / "key")
    expect("an encrypted store has no plain record anywhere", not found, found)
    expect("its crash wrote no core file", not list((directory / "encrypted").glob("*core*")))
    # Without a key the same search finds them.
    found = places_of_records(directory / "plain")
    expect("a plain store has plain records in data, archive and backup only", found == ["archive", "backup", "data"], found)

"""Typical uses of walctl on the released binaries: copies of a whole store between servers, repeated loads after
the server was killed, common kinds of files, names with invisible characters, consumers
that never return.
"""

import base64
import gzip
import random

from common import *

LARGE = ["--max-record-bytes", "5MiB", "--max-batch-bytes", "6MiB", "--segment-bytes", "32MiB"]
ODD = ["pay\u202ella", "zero\u200bwidth", "a\u00a0b", "\ufeffmarked"]


def records(daemon, *arguments):
    """Records as --output json prints them, without their lsns: a copy begins again at 0."""
    lines = daemon.walctl("scan", *arguments, "--output", "json").stdout.splitlines()
    found = {}
    for line in lines:
        record = json.loads(line)
        del record["lsn"]
        found.setdefault(record.pop("log"), []).append(record)
    return found


def odd_records():
    """Payloads that text represents badly, with their own headers and times."""
    drawn = random.Random(7)
    payloads = [b"", b"\0", b"\xff\xfe\0", b' {"n": 1}\n', b'{"n":\r\n1.50, "s": "\\ud800"}', b'"text"', b"a\nb\rc\td\x1b[2J",
                "\u202e\u200b\u009b".encode(), b"x" * (4 << 20), drawn.randbytes(4 << 20), drawn.randbytes(100)]
    for number, payload in enumerate(payloads):
        record = {"log": f"odd/{number % 3}", "data": base64.b64encode(payload).decode(),
                  "time": f"2026-01-01T00:00:{number:02}.000001Z"}
        if number % 2:
            record["headers"] = [{"key": "trace", "value": "a b"}, {"key": "raw", "data": base64.b64encode(b"\xff\0").decode()}]
        yield json.dumps(record) + "\n"


@check("A pipe of walctl copies a whole store")
def a_store_is_copied_by_a_pipe():
    with scratch() as directory, Daemon(f"{directory}/a", *LARGE) as one:
        done = one.walctl("append", "--format", "json", input="".join(odd_records()).encode())
        expect("records of all kinds are appended", done.returncode == 0, done.stderr.decode().strip()[-200:])
        one.walctl("append", "plain/lines", "-", input=b"a\0b\n\xff\n\n")
        expected = records(one, "--all")
        for form in ("delimited", "json"):
            with Daemon(f"{directory}/{form}", *LARGE) as other:
                line = (f"{WALCTL} --endpoint {one.grpc} scan --all --output {form} | "
                        f"{WALCTL} --endpoint {other.grpc} append --format {form}")
                done = run("bash", "-o", "pipefail", "-c", line)
                expect(f"a store is copied in the form {form}", done.returncode == 0, done.stderr.decode().strip()[-200:])
                found = records(other, "--all")
                expect("payloads, headers and times are equal", found == expected, {k: len(v) for k, v in found.items()})


@check("A load whose server or client was killed goes on without duplicates")
def loads_go_on():
    lines = "".join(f"{number} {'y' * 200}\n" for number in range(300_000))
    with scratch() as directory:
        file = Path(directory) / "load.txt"
        file.write_text(lines)

        def content(daemon):
            return daemon.walctl("scan", "load", "--output", "raw").stdout == lines.encode()

        with Daemon(f"{directory}/data", listen="127.0.0.1:0") as daemon:
            load = subprocess.Popen([str(WALCTL), "append", "load", str(file), "--producer", "load-1"], stderr=subprocess.PIPE,
                                    stdout=subprocess.DEVNULL, env=clean_environment(WALD_ENDPOINT=daemon.endpoint))
            wait_until(lambda: daemon.metric("wald_appended_records_total") > 50_000)
            daemon.kill()
            address = daemon.grpc
        with Daemon(f"{directory}/data", listen=address) as daemon:
            _, said = load.communicate(timeout=120)
            expect("a load continues after its server was killed", load.returncode == 0, said.decode().strip()[-200:])
            expect("no record is duplicated or missing", content(daemon))
            again = daemon.walctl("append", "load", str(file), "--producer", "load-1")
            expect("run again, it appends nothing", again.returncode == 0 and b"300,000 records were there already" in again.stderr
                   and content(daemon), again.stderr.decode().strip()[-200:])
        with Daemon(f"{directory}/killed") as daemon:
            load = subprocess.Popen([str(WALCTL), "append", "load", str(file), "--producer", "load-2"], stderr=subprocess.DEVNULL,
                                    stdout=subprocess.DEVNULL, env=clean_environment(WALD_ENDPOINT=daemon.endpoint))
            wait_until(lambda: daemon.metric("wald_appended_records_total") > 50_000)
            load.kill()
            load.wait()
            done = daemon.walctl("append", "load", str(file), "--producer", "load-2")
            expect("a load that was killed is run again from the start", done.returncode == 0 and content(daemon),
                   done.stderr.decode().strip()[-200:])
        # The server remembers fewer batches than there are: older ones are known to exist.
        with Daemon(f"{directory}/few", "--producer-window", "10") as daemon:
            for _ in range(2):
                done = daemon.walctl("append", "load", str(file), "--producer", "load-3")
            expect("a load is run again beyond the batches that the server remembers", done.returncode == 0 and content(daemon),
                   done.stderr.decode().strip()[-200:])


@check("Common kinds of files load, or are refused with a reason")
def files_as_people_have_them():
    text = '{"n":1}\r\n{"n":2}\r\n\r\n{"n":3}'.encode()
    cases = [
        ("bom.jsonl", b'\xef\xbb\xbf{"n":1}\r\n{"n":2}\r\n', [b'{"n":1}', b'{"n":2}']),
        ("bom.json", b'\xef\xbb\xbf[{"n":1},{"n":2}]', [b'{"n":1}', b'{"n":2}']),
        ("upper.JSON", b'[\n  {"n": 1},\n  {"n": 2}\n]\n', [b'{"n": 1}', b'{"n": 2}']),
        ("pretty.json", b'{\n  "a": 1,\n  "b": [1]\n}', [b'{\n  "a": 1,\n  "b": [1]\n}']),
        ("crlf.ndjson", text, [b'{"n":1}', b'{"n":2}', b'{"n":3}']),
        ("surrogate.jsonl", b'{"s":"\\ud800"}\n', [b'{"s":"\\ud800"}']),
        ("nul.txt", b"a\0b\n\0\n\xff\xfe\ncr\ronly\n", [b"a\0b", b"\0", b"\xff\xfe", b"cr\ronly"]),
        ("utf16.json", b"\xff\xfe" + "[1]".encode("utf-16-le"), ["byte 0", "iconv"]),
        ("badutf8.jsonl", b'{"s":"ok"}\n{"s":"\xff"}\n', ["line 2, byte 7", "--format lines"]),
        ("crlf.ndjson.gz", gzip.compress(text), ["gzip", "gunzip -c"]),
    ]
    with scratch() as directory, Daemon(f"{directory}/data") as daemon:
        for name, content, expected in cases:
            (Path(directory) / name).write_bytes(content)
            done = daemon.walctl("append", f"files/{name}", f"{directory}/{name}")
            if isinstance(expected[0], str):
                said = done.stderr.decode()
                expect(f"{name} is refused with the place and the remedy", done.returncode == 1 and all(e in said for e in expected), said.strip()[-200:])
                continue
            answer = daemon.call("wald.v1.WalService/Read", {"log": f"files/{name}"})[1]
            found = [base64.b64decode(record.get("data", "")) for record in answer["batch"]["records"]]
            expect(f"{name} is loaded as it is meant", done.returncode == 0 and found == expected, found)
        field = Path(directory) / "bom-field.jsonl"
        field.write_bytes(b'\xef\xbb\xbf{"log":"a","n":1}\n{"log":"b","n":2}\n')
        done = daemon.walctl("append", "--log-from-field", "log", field)
        logs = daemon.walctl("logs", "--output", "raw").stdout.split()
        expect("a byte order mark is no part of the first field", done.returncode == 0 and {b"a", b"b"} <= set(logs), logs)


@check("Invisible characters in names are shown or refused")
def names_that_nobody_sees():
    with scratch() as directory:
        with Daemon(f"{directory}/data") as daemon:
            for name in ODD:
                done = daemon.walctl("append", name, "--text", "x")
                expect(f"the name {name!a} is refused", done.returncode == 1 and b"INVALID_LOG_NAME" in done.stderr, done.stderr.decode().strip())
        with Daemon(f"{directory}/data", "--allow-invisible-names") as daemon:
            done = daemon.walctl("append", ODD[0], "--text", "x")
            expect("a setting permits it", done.returncode == 0, done.stderr.decode().strip())
            daemon.stop()
        with Daemon(f"{directory}/data") as daemon:
            read = daemon.walctl("read", ODD[0], "--output", "raw")
            deleted = daemon.walctl("log", "delete", ODD[0])
            expect("a log that has such a name is read and deleted", (read.stdout, deleted.returncode) == (b"x\n", 0), deleted.stderr.decode())


@check("A cursor that nobody moves is found and removed")
def a_consumer_that_never_comes_back():
    with scratch() as directory:
        bounds = ["--retention-interval", "100ms", "--cursor-lag-logs", "q, other/*"]
        with Daemon(f"{directory}/data", *bounds) as daemon:
            daemon.walctl("log", "create", "q", "--max-records", "100", "--respect-cursors")
            # Before the records: without a cursor retention drops them at once.
            daemon.walctl("cursor", "set", "q", "abandoned", "0")
            daemon.walctl("append", "q", "-", input=(b"x" * 100 + b"\n") * 5000)
            daemon.walctl("cursor", "set", "q", "billing", "5000")
            daemon.walctl("cursor", "set", "q", "abandoned", "10")
            held = wait_until(lambda: daemon.metric("wald_retention_held_bytes") > 1000 and daemon.metric("wald_retention_held_logs") == 1, 20)
            expect("metrics report the bytes that a cursor holds back", held, daemon.metric("wald_retention_held_bytes"))
            lags = {name: value for name, value in daemon.metrics().items() if name.startswith("wald_cursor_lag_records")}
            expect("its lag has a metric, where a setting asks for it",
                   lags == {'wald_cursor_lag_records{cursor="abandoned",log="q"}': 4990, 'wald_cursor_lag_records{cursor="billing",log="q"}': 0}, lags)
            for arguments in (["q"], []):
                rows = json.loads(daemon.walctl("cursor", "list", *arguments, "--output", "json").stdout)
                expect(f"walctl cursor list {' '.join(arguments)}has the lag", {row["cursor"]: row["lag"] for row in rows}
                       == {"abandoned": 4990, "billing": 0}, rows)
            with urllib.request.urlopen(f"http://{daemon.http}/console/api/log?log=q") as page:
                shown = json.load(page)
            expect("the console has cursors, retention and the writer's epoch", {c["name"]: c["lag"] for c in shown["cursors"]}
                   == {"abandoned": 4990, "billing": 0} and shown["retention"]["respect_cursors"] and shown["writer_epoch"] == 0, shown)
            daemon.stop()
        with Daemon(f"{directory}/data", *bounds, "--cursor-hold-bytes", "50KB") as daemon:
            first = lambda: json.loads(daemon.walctl("log", "get", "q", "--output", "json").stdout)[0]["first_lsn"]
            daemon.walctl("append", "q", "-", input=(b"z" * 100 + b"\n") * 1000)
            expect("a setting bounds it", wait_until(lambda: first() > 10, 20), first())


@check("Logs of a prefix are followed from now on, and a shell completes their names")
def many_logs():
    with scratch() as directory, Daemon(f"{directory}/data") as daemon:
        for log in ("shop/de", "shop/fr", "other"):
            daemon.walctl("append", log, "--text", "before")
        follower = subprocess.Popen([WALCTL, "--endpoint", daemon.grpc, "tail", "--prefix", "shop/", "--output", "json"], stdout=subprocess.PIPE)
        seen = []
        reader = threading.Thread(target=lambda: seen.extend(json.loads(line) for line in follower.stdout))
        reader.start()
        expect("it begins", wait_until(lambda: daemon.metric("wald_followers") == 1, 20), daemon.metric("wald_followers"))
        for log in ("other", "shop/de", "shop/new"):
            daemon.walctl("append", log, "--text", "after")
        wait_until(lambda: len(seen) == 2, 20)
        follower.kill()
        reader.join()
        follower.wait()
        found = [(record["log"], record["text"]) for record in seen]
        expect("records that come later are printed with their logs", found == [("shop/de", "after"), ("shop/new", "after")], found)
        line = (f'export PATH="{Path(WALCTL).parent}:$PATH"; source <(walctl completion bash); COMP_WORDS=(walctl read shop/); COMP_CWORD=2; COMP_TYPE=9; '
                '_clap_complete_walctl walctl shop/; printf "%s\\n" "${COMPREPLY[@]}"')
        shell = run("bash", "-c", line, env={**os.environ, "WALD_ENDPOINT": daemon.grpc})
        expect("bash completes names of logs", shell.stdout.split() == [b"shop/de", b"shop/fr", b"shop/new"], shell.stdout + shell.stderr)
        looks = [json.loads(line) for line in daemon.walctl("top", "shop/*", "--count", "2", "--interval", "200ms", "--output", "json").stdout.splitlines()]
        expect("walctl top has the logs of a pattern", [sorted(log["log"] for log in look["logs"]) for look in looks] == [["shop/de", "shop/fr", "shop/new"]] * 2, looks)

"""Names stay distinct: `a/b`, `a:b`, `a_b`, `ü` and names of 255 bytes are separate logs, before
and after a restart. Two daemons never share a directory.
"""


from common import *

# The last two differ in their last byte only; `u` with a combining mark is not `ü`.
NAMES = ["a/b", "a:b", "a_b", "a.b", "A/B", "a/b/", "ü", "u\u0308", "x" * 254 + "y", "x" * 255]


@check("Names that look alike are separate logs; two daemons never share a directory")
def names(data):
    for turn in ("before", "after a stop", "after kill -9"):
        with Daemon(data) as daemon:
            if turn == "before":
                for name in NAMES:
                    code, answer, text = daemon.call("wald.v1.WalService/Append",
                                                     {"log": name, "record": {"text": f"only in {name}"}})
                    expect(f"{name[:20]} is a new log", code == 0 and answer["lsn"] == "0", text if code else "")
            for name in NAMES:
                code, answer, text = daemon.call("wald.v1.WalService/Read", {"log": name, "view": "RECORD_VIEW_TEXT"})
                records = [record["text"] for record in answer["batch"]["records"]] if code == 0 else text
                expect(f"{name[:20]} holds its own record {turn}", records == [f"only in {name}"])
            _, answer, _ = daemon.call("wald.v1.LogService/ListLogs", {})
            expect(f"exactly these logs are listed {turn}",
                   sorted(log["name"] for log in answer["logs"]) == sorted(NAMES), len(answer["logs"]))
            if turn == "before":
                for name, what in (("x" * 256, "256 bytes"), ("a\nb", "a control character"), ("", "no name"),
                                   ("$a", "a reserved name")):
                    code, _, text = daemon.call("wald.v1.WalService/Append", {"log": name, "record": {"text": "x"}})
                    expect(f"{what} is refused", code != 0 and "INVALID_LOG_NAME" in text)
                second = run(WALD, "--data-dir", data, "--listen", ":0", "--http-listen", ":0")
                said = second.stderr.decode().strip()
                expect("a second daemon on the directory does not start", second.returncode != 0,
                       f"exit code {second.returncode}")
                expect("it names the holder", str(daemon.pid) in said, said.splitlines()[-1] if said else "")
                code, _, text = daemon.call("wald.v1.WalService/GetTail", {"log": "a/b"})
                expect("the first one still serves", code == 0)
            if turn == "after a stop":
                daemon.kill()
            else:
                expect("SIGTERM ends it with 0", daemon.stop() == 0)

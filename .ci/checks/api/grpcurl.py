"""Wald with nothing but grpcurl: reflection lists and describes everything with its comments, text
goes in and comes out, batches with conditions, scans that follow, errors in clear text.
"""

import base64
import json
import re

from common import *

WAL = "wald.v1.WalService"


class Following:
    """A scan that follows, and its messages until now."""

    def __init__(self, daemon, request):
        command = [grpcurl(), "-plaintext", "-d", json.dumps(request), daemon.grpc, f"{WAL}/Scan"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.messages = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        text = ""
        for line in self.process.stdout:
            text += line
            if line.rstrip() == "}":
                self.messages.put(json.loads(text))
                text = ""

    def wait_for(self, wanted, seconds=20):
        """Waits for a matching message; None if none comes in time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                message = self.messages.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                return None
            if wanted(message):
                return message
        return None


def texts(message):
    return [(batch["log"], record["lsn"], record["text"])
            for batch in message.get("batches", []) for record in batch["records"]]


def described(daemon):
    """Every service, method, message and field has a comment."""
    missing, seen = [], 0
    todo, done = ["wald.v1.WalService", "wald.v1.LogService", "wald.v1.CursorService", "wald.v1.OpsService"], set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        text = daemon.grpcurl(daemon.grpc, "describe", name).stdout.decode()
        comment = False
        for line in text.splitlines()[1:]:
            line = line.strip()
            if line.startswith("//"):
                comment = True
            elif re.match(r"(service|message|enum|rpc|oneof|option|repeated|[\w.]+ \w+ = |[A-Z_0-9]+ = )", line):
                seen += 1
                if not comment and not line.startswith("option"):
                    missing.append(f"{name}: {line}")
                comment = False
            todo += re.findall(r"\.(wald\.v1\.\w+)", line) if not line.startswith("//") else []
    return seen, missing


@check("Reflection with comments, text in and out, conditions, following scans, errors in clear text")
def grpcurl_alone(directory):
    with Daemon(directory / "data") as daemon:
        services = daemon.grpcurl(daemon.grpc, "list").stdout.decode().split()
        expect("list names every service", set(services) >= {
            "wald.v1.WalService", "wald.v1.LogService", "wald.v1.CursorService", "wald.v1.OpsService",
            "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"}, " ".join(services))
        text = daemon.grpcurl(daemon.grpc, "describe", f"{WAL}.Append").stdout.decode()
        expect("describe shows comments", "// Appends one record to one log." in text)
        seen, missing = described(daemon)
        expect("everything reachable from the services is commented", not missing and seen > 150,
               f"{seen} items{'; without: ' + str(missing[:5]) if missing else ''}")
        # Requests of current and of older clients; the part of the schema that matters.
        for version in ("v1", "v1alpha"):
            (Path(directory) / "reflection.proto").write_text(
                f'syntax = "proto3"; package grpc.reflection.{version};'
                "service ServerReflection { rpc ServerReflectionInfo(stream Ask) returns (stream Answer); }"
                "message Ask { string list_services = 7; } message Answer { List list_services_response = 6; }"
                "message List { repeated Service service = 1; } message Service { string name = 1; }")
            done = daemon.grpcurl("-import-path", directory, "-proto", "reflection.proto", "-d", '{"listServices": "*"}',
                                  daemon.grpc, f"grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
            expect(f"reflection {version} answers", b"wald.v1.WalService" in done.stdout, done.stderr.decode())

        _, answer, text = daemon.call(f"{WAL}/Append", {"log": "greetings", "record": {"text": "hällo"}})
        expect('Append answers the first lsn as "0"', '"lsn": "0"' in text)
        expect("it is durable", answer["durability"] == "DURABILITY_DURABLE" and answer["durableLsn"] == "1")

        batch = {"batches": [{"log": "orders/1", "records": [{"text": "one"}, {"text": "two"}],
                              "condition": {"must_not_exist": True}},
                             {"log": "orders/2", "records": [{"text": "three"}]}],
                 "checks": [{"log": "greetings", "expected_lsn": 1}]}
        _, answer, text = daemon.call(f"{WAL}/AppendBatch", batch)
        expect("AppendBatch over two logs with conditions", answer and [
            (a["log"], a["firstLsn"], a["nextLsn"]) for a in answer["appends"]] == [
            ("orders/1", "0", "2"), ("orders/2", "0", "1")])
        code, _, text = daemon.call(f"{WAL}/AppendBatch", batch)
        expect("the same again is refused", code != 0 and "LOG_EXISTS" in text)
        _, answer, _ = daemon.call(f"{WAL}/GetTail", {"log": "orders/2"})
        expect("and nothing of it was written", answer["tailLsn"] == "1")

        _, answer, _ = daemon.call(f"{WAL}/Read", {"log": "greetings", "view": "RECORD_VIEW_TEXT"})
        record = answer["batch"]["records"][0]
        expect("Read in the TEXT view gives text, lsn and time", record["text"] == "hällo" and record["lsn"] == "0"
               and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", record["time"]), json.dumps(record))
        _, answer, _ = daemon.call(f"{WAL}/Read", {"log": "greetings"})
        expect("Read otherwise gives bytes", base64.b64decode(answer["batch"]["records"][0]["data"]) == "hällo".encode())

        scan = Following(daemon, {"prefix": "orders/", "follow": True, "view": "RECORD_VIEW_TEXT"})
        first = scan.wait_for(lambda message: message.get("batches"))
        expect("Scan by prefix shows the records", first and texts(first)[:3] == [
            ("orders/1", "0", "one"), ("orders/1", "1", "two"), ("orders/2", "0", "three")])
        daemon.call(f"{WAL}/Append", {"log": "greetings", "record": {"text": "not this one"}})
        daemon.call(f"{WAL}/Append", {"log": "orders/3", "record": {"text": "later"}})
        later = scan.wait_for(lambda message: message.get("batches"))
        expect("it follows: a later append to a new log, and no other", later and texts(later) == [("orders/3", "0", "later")])
        cursor = later["cursor"] if later else ""
        scan.process.kill()
        scan.process.wait()
        daemon.call(f"{WAL}/Append", {"log": "orders/1", "record": {"text": "meanwhile"}})
        resumed = Following(daemon, {"prefix": "orders/", "cursor": cursor, "view": "RECORD_VIEW_TEXT"})
        message = resumed.wait_for(lambda message: message.get("batches"))
        expect("its cursor resumes exactly there", message and texts(message) == [("orders/1", "2", "meanwhile")])
        resumed.process.wait()

        code, _, text = daemon.call(f"{WAL}/Append", {"log": "greetings", "record": {"text": "x"},
                                                      "condition": {"expected_lsn": 7}})
        for fact in ("FailedPrecondition", '"reason": "POSITION_MISMATCH"', '"actual_lsn": "2"', '"expected_lsn": "7"',
                     '"outcome": "NOT_APPLIED"', '"retry": "NEVER"', '"domain": "wald.dev"', '"subject": "greetings"'):
            expect(f"an error says in clear text: {fact}", fact in text)
        expect("and nothing in base64", '"value"' not in text and "@value" not in text)
        for method, request, reason in (
                ("WalService/Read", {"log": "nothing"}, "LOG_NOT_FOUND"),
                ("WalService/Read", {"log": "greetings", "lsn": 9}, "BEYOND_TAIL"),
                ("WalService/AppendBatch", {"batches": [{"log": "a", "records": []}]}, "EMPTY_BATCH"),
                ("WalService/AppendBatch", {"batches": [{"log": "a", "records": [{}]}] * 2}, "DUPLICATE_LOG"),
                ("WalService/Append", {"log": "a", "record": {"text": "x"}, "durability": "DURABILITY_REPLICATED"},
                 "NOT_SUPPORTED"),
                ("WalService/Append", {"log": "a", "record": {"text": "x"}, "condition": {"producer": {"id": ""}}},
                 "INVALID_PRODUCER"),
                ("WalService/Fence", {"log": "greetings", "writer_epoch": 0}, "FENCED"),
                ("WalService/AppendSession", {"request_id": 7, "batch": {}}, "EMPTY_BATCH"),
                ("WalService/Append", {"log": "a", "record": {"text": "x", "crc32c": 1}}, "CHECKSUM_MISMATCH"),
                ("CursorService/GetCursor", {"log": "greetings", "cursor": "c"}, "CURSOR_NOT_FOUND")):
            code, _, text = daemon.call(f"wald.v1.{method}", request)
            expect(f"{reason} is said to {method}", code != 0 and f'"reason": "{reason}"' in text,
                   "" if f'"{reason}"' in text else text[:300])
        code, answer, _ = daemon.call("grpc.health.v1.Health/Check", {"service": "wald.v1.WalService"})
        expect("health answers", answer == {"status": "SERVING"})
        code, answer, _ = daemon.call("wald.v1.OpsService/GetServerInfo", {})
        expect("GetServerInfo reports the system call of a flush", answer["durability"]["syncPrimitive"] == "fdatasync",
               json.dumps(answer["durability"]))
        expect("SIGTERM ends it with 0", daemon.stop() == 0)

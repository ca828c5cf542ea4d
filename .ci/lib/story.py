"""A fixed sequence of calls that tests a daemon during a fault, and a ledger of its answers.

It appends at every level, and uses a batch over logs, a producer's repeat, trim, fence, cursor, deletion, Sync and
reads. It rolls through enough segments that a checkpoint is due. The ledger is outside the daemon: it has acked,
refused and unknown writes. Needs the Python client's stubs: run it with the interpreter that has them.
"""

import os
import time

# Otherwise gRPC takes part in every fork of this program.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import grpc
from google.rpc import error_details_pb2, status_pb2
from wald.v1 import cursor_pb2, cursor_pb2_grpc, log_pb2, log_pb2_grpc, record_pb2, types_pb2, wal_pb2, wal_pb2_grpc

STRICT, WRITTEN = types_pb2.DURABILITY_DURABLE, types_pb2.DURABILITY_WRITTEN
# Two to a segment of 64 KiB; a record can hardly be larger there.
LARGE = 24_000
SECONDS = 20
ACKED, REFUSED, UNKNOWN = "acked", "refused", "unknown"


class Refused(Exception):
    """A scan was refused."""

    def __init__(self, refusal):
        super().__init__(str(refusal))
        self.refusal = refusal


class Refusal:
    """An answer that is not an ack."""

    def __init__(self, what, error, sent):
        self.what, self.sent = what, sent
        self.code, self.message = error.code().name, error.details()
        self.reason, self.outcome, self.retry_after = "", "", None
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                for detail in status_pb2.Status.FromString(value).details:
                    self._read(detail)

    def _read(self, detail):
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            self.reason, self.outcome = info.reason, info.metadata.get("outcome", "")
        elif detail.Unpack(retry):
            self.retry_after = retry.retry_delay.ToTimedelta().total_seconds()

    def __str__(self):
        return " ".join(word for word in (self.code, self.reason or "-", self.outcome or "-") if word)

    def is_told(self):
        """Whether the answer came from the daemon, not from the transport."""
        return bool(self.reason)


class Change:
    """A value after changes with unknown outcome: all the values it may have now."""

    def __init__(self, value):
        self.may = [value]

    def to(self, value, state):
        if state == ACKED:
            self.may = [value]
        elif state == UNKNOWN:
            self.may.append(value)


class Ledger:
    """Requests to the daemon, and its answers."""

    def __init__(self):
        self.acked = {}  # (log, lsn) -> payload
        self.levels = {}  # (log, lsn) -> durability of the ack
        self.refused, self.unknown = set(), set()  # (log, payload)
        self.batches = []  # of each batch that nobody knows of: its parts
        self.first, self.epoch, self.exists, self.cursor = {}, {}, {}, {}  # log -> Change
        self.number = 0

    def payload(self, log, size=40):
        """A unique record."""
        self.number += 1
        return f"{log}:{self.number}:".ljust(size, "x").encode()

    def applied(self, log, payload, state, lsn=None, level=None):
        self.exists.setdefault(log, Change(False)).to(True, state)
        if state == ACKED:
            self.acked[log, lsn] = payload
            self.levels[log, lsn] = level
        else:
            (self.refused if state == REFUSED else self.unknown).add((log, payload))


class Story:
    """Sends the calls to a daemon, and keeps the ledger. A context."""

    def __init__(self, address, ledger, alive=lambda: True):
        self.ledger, self.alive = ledger, alive
        self.channel = grpc.insecure_channel(address, options=[("grpc.enable_retries", 0),
                                                               ("grpc.use_local_subchannel_pool", 1)])
        self.wal = wal_pb2_grpc.WalServiceStub(self.channel)
        self.log = log_pb2_grpc.LogServiceStub(self.channel)
        self.cursors = cursor_pb2_grpc.CursorServiceStub(self.channel)
        self.refusals, self.acks, self.wrong = [], [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()

    def settle(self, what, sent, future, note):
        """The answer, or None; `note` writes the outcome of a write into the ledger."""
        try:
            answer = future.result()
        except grpc.RpcError as error:
            refusal = Refusal(what, error, sent)
            self.refusals.append(refusal)
            if refusal.code == "DEADLINE_EXCEEDED":
                self.wrong.append(f"{what} was not answered")
            if note:
                note(REFUSED if refusal.outcome == "NOT_APPLIED" else UNKNOWN, None)
            return None
        if note:
            self.acks.append((what, sent))
            note(ACKED, answer)
        return answer

    def call(self, what, method, request, note=None):
        return self.settle(what, time.time(), method.future(request, timeout=SECONDS), note)

    def appends(self, wanted):
        """Appends in flight at the same time: (log, size, level)."""
        started = []
        for log, size, level in wanted:
            payload = self.ledger.payload(log, size)
            request = wal_pb2.AppendRequest(log=log, record=record_pb2.Record(data=payload), durability=level)
            if log == "fenced" and max(self.ledger.epoch["fenced"].may) > 0:
                request.condition.writer_epoch = 1
            started.append((log, payload, time.time(), self.wal.Append.future(request, timeout=SECONDS)))
        for log, payload, sent, future in started:
            def note(state, answer, log=log, payload=payload):
                self.ledger.applied(log, payload, state, answer and answer.lsn, answer and answer.durability)
            self.settle(f"append to {log}", sent, future, note)

    def append(self, log, size=40, level=STRICT):
        self.appends([(log, size, level)])

    def batch(self, *logs):
        """One record for each, and a cursor, atomically."""
        parts = [(log, self.ledger.payload(log)) for log in logs]
        request = wal_pb2.AppendBatchRequest(
            batches=[wal_pb2.LogBatch(log=log, records=[record_pb2.Record(data=payload)]) for log, payload in parts],
            durability=STRICT, cursors=[cursor_pb2.CursorCommit(log=logs[0], cursor="read", lsn=1)])

        def note(state, answer):
            for number, (log, payload) in enumerate(parts):
                self.ledger.applied(log, payload, state, answer and answer.appends[number].first_lsn,
                                    answer and answer.durability)
            self.ledger.cursor.setdefault(logs[0], Change(None)).to(1, state)
            if state == UNKNOWN:
                self.ledger.batches.append(parts)
        self.call(f"batch to {', '.join(logs)}", self.wal.AppendBatch, request, note)

    def produce(self, log):
        """An append of a producer, twice: the second must get the first one's answer."""
        payload = self.ledger.payload(log)
        producer = wal_pb2.Producer(id="p", epoch=1, sequence=0)
        request = wal_pb2.AppendRequest(log=log, record=record_pb2.Record(data=payload), durability=STRICT,
                                        condition=wal_pb2.AppendCondition(producer=producer))
        for _ in range(2):
            def note(state, answer):
                if state == ACKED and (log, answer.lsn) in self.ledger.acked and not answer.deduplicated:
                    self.wrong.append(f"a repeat to {log} is not known as one")
                # A refused repeat proves nothing about the first.
                if (log, payload) not in set((key[0], value) for key, value in self.ledger.acked.items()):
                    if state == ACKED:
                        self.ledger.refused.discard((log, payload))
                        self.ledger.unknown.discard((log, payload))
                    elif (log, payload) in self.ledger.unknown:
                        return
                    self.ledger.applied(log, payload, state, answer and answer.lsn, answer and answer.durability)
            self.call(f"producer's append to {log}", self.wal.Append, request, note)

    def trim(self, log, before):
        change = self.ledger.first.setdefault(log, Change(0))
        self.call(f"trim of {log}", self.wal.Trim, wal_pb2.TrimRequest(log=log, before_lsn=before),
                  lambda state, _: change.to(before, state))

    def fence(self, log):
        change = self.ledger.epoch.setdefault(log, Change(0))
        exists = self.ledger.exists.setdefault(log, Change(False))

        def note(state, answer):
            change.to(1, state)
            exists.to(True, state)
        self.call(f"fence of {log}", self.wal.Fence, wal_pb2.FenceRequest(log=log, writer_epoch=1), note)

    def cursor(self, log, lsn):
        change = self.ledger.cursor.setdefault(log, Change(None))
        commit = cursor_pb2.CursorCommit(log=log, cursor="read", lsn=lsn)
        self.call(f"cursor of {log}", self.cursors.CommitCursor, cursor_pb2.CommitCursorRequest(commit=commit),
                  lambda state, _: change.to(lsn, state))

    def create(self, log):
        change = self.ledger.exists.setdefault(log, Change(False))
        self.call(f"creation of {log}", self.log.CreateLog, log_pb2.CreateLogRequest(log=log),
                  lambda state, _: change.to(True, state))

    def delete(self, log):
        change = self.ledger.exists.setdefault(log, Change(False))
        self.call(f"deletion of {log}", self.log.DeleteLog, log_pb2.DeleteLogRequest(log=log),
                  lambda state, _: change.to(False, state))

    def sync(self):
        self.call("sync", self.wal.Sync, wal_pb2.SyncRequest(), lambda state, _: None)

    def found(self, visibility=types_pb2.VISIBILITY_DURABLE):
        """Records of a scan of everything: (log, lsn) -> payload. Raises Refused."""
        sent, records = time.time(), {}
        request = wal_pb2.ScanRequest(all=wal_pb2.AllLogs(), visibility=visibility)
        try:
            for message in self.wal.Scan(request, timeout=SECONDS):
                for batch in message.batches:
                    for number, record in enumerate(batch.records):
                        if (batch.log, batch.first_lsn + number) in records:
                            self.wrong.append(f"a scan gives {batch.log} {batch.first_lsn + number} twice")
                        records[batch.log, batch.first_lsn + number] = record.data
                for gap in message.gaps:
                    if gap.reason not in (types_pb2.GAP_REASON_TRIMMED, types_pb2.GAP_REASON_DELETED):
                        self.wrong.append(f"a scan tells of a gap: {gap}")
        except grpc.RpcError as error:
            raise Refused(Refusal("scan", error, sent)) from None
        return records

    def look(self):
        """Reads everything. A failed read is noted like any refusal; a wrong answer is a fault."""
        try:
            records = self.found()
        except Refused as refused:
            self.refusals.append(refused.refusal)
            return
        for place, payload in records.items():
            acked = self.ledger.acked.get(place)
            if acked not in (None, payload):
                self.wrong.append(f"a scan gives other bytes for {place}")
        for log, change in list(self.ledger.exists.items()):
            if change.may == [True] and log != "fenced":
                self.call(f"read of {log}", self.wal.Read, wal_pb2.ReadRequest(log=log, tail_offset=1))

    def resumes(self, seconds=10):
        """Whether appends succeed again within `seconds`, and only a lack of space stopped them."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            before = len(self.refusals)
            self.append("large", LARGE)
            if len(self.refusals) == before:
                return True
            if self.refusals[-1].reason != "DISK_FULL":
                return False
            time.sleep(0.02)
        return False

    def misses(self):
        """Durable records that a scan of durable records lacks."""
        records = self.found()
        return [place for place, payload in self.ledger.acked.items()
                if self.ledger.levels[place] == STRICT and records.get(place) != payload
                and place[1] >= max(self.ledger.first.get(place[0], Change(0)).may)
                and False not in self.ledger.exists[place[0]].may]

    def begin(self, checkpointed=lambda: True):
        """The long part: every kind of call once, and enough to seal at least eight segments."""
        self.appends([("a", 40, STRICT), ("b", 40, STRICT), ("w", 40, WRITTEN)])
        self.append("w", level=WRITTEN)
        self.batch("a", "b", "c")
        self.produce("p")
        self.create("gone")
        self.append("gone")
        self.delete("gone")
        self.fence("fenced")
        self.append("fenced")
        self.appends([("trimmed", 40, STRICT)] * 3)
        self.trim("trimmed", 2)
        self.cursor("b", 1)
        for number in range(10):
            self.appends([("large", LARGE, STRICT), ("large", LARGE, WRITTEN), ("w", 40, WRITTEN)])
            if not self.alive():
                return
        self.sync()
        self.look()
        # The index of the last segment and the checkpoint are still being written.
        until = time.monotonic() + 1.5
        while self.alive() and not checkpointed() and time.monotonic() < until:
            time.sleep(0.005)
        self.batch("b", "c", "a")

    def go_on(self):
        """The short part, on an existing store."""
        self.look()
        self.appends([("a", 40, STRICT), ("w", 40, WRITTEN), ("later", 40, STRICT)])
        self.batch("a", "b", "c")
        self.trim("large", 5)
        self.cursor("b", 2)
        self.appends([("large", LARGE, STRICT), ("large", LARGE, STRICT), ("large", LARGE, WRITTEN)])
        self.delete("later")
        self.look()

    def verify(self):
        """After a restart: nothing lost, no refused record, no duplicate, no gap; changed state stays."""
        wrong, ledger = self.wrong, self.ledger
        records = self.found()
        tails = {}
        for log in sorted(ledger.exists):
            change = ledger.exists[log]
            try:
                tails[log] = self.wal.GetTail(wal_pb2.GetTailRequest(log=log), timeout=SECONDS)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND:
                    raise
            if (log in tails) not in change.may:
                wrong.append(f"log {log} is {'there' if log in tails else 'gone'}")
        for log, tail in tails.items():
            if tail.first_lsn not in ledger.first.get(log, Change(0)).may:
                wrong.append(f"{log} begins at {tail.first_lsn}, not {ledger.first.get(log, Change(0)).may}")
            if tail.writer_epoch not in ledger.epoch.get(log, Change(0)).may:
                wrong.append(f"{log} has writer epoch {tail.writer_epoch}")
            lsns = sorted(lsn for name, lsn in records if name == log)
            if lsns != list(range(tail.first_lsn, tail.tail_lsn)):
                wrong.append(f"{log} has lsns {lsns}, and says {tail.first_lsn} to {tail.tail_lsn}")
        for (log, lsn), payload in ledger.acked.items():
            if log in tails and lsn >= tails[log].first_lsn and records.get((log, lsn)) != payload:
                wrong.append(f"lost: {log} {lsn}, acked {types_pb2.Durability.Name(ledger.levels[log, lsn])}")
        acked = {(log, payload) for (log, _), payload in ledger.acked.items()}
        there = [(log, payload) for (log, _), payload in records.items()]
        if len(set(there)) != len(there):
            wrong.append("a record is there twice")
        for entry in there:
            if entry not in acked and entry not in ledger.unknown:
                wrong.append(f"{entry[0]} holds a record that was {'refused' if entry in ledger.refused else 'never sent'}")
        for parts in ledger.batches:
            kept = [part in there for part in parts]
            if any(kept) != all(kept):
                wrong.append(f"half of a batch is there: {[part[0] for part in parts]}")
        for log, change in ledger.cursor.items():
            if log in tails:
                self._verify_cursor(log, change)
        self._verify_goes_on(tails)

    def _verify_cursor(self, log, change):
        try:
            answer = self.cursors.GetCursor(cursor_pb2.GetCursorRequest(log=log, cursor="read"), timeout=SECONDS)
            lsn = answer.cursor.lsn
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise
            lsn = None
        if lsn not in change.may:
            self.wrong.append(f"the cursor of {log} is at {lsn}, not {change.may}")

    def _verify_goes_on(self, tails):
        """Every log takes the next lsn; a fenced one refuses a writer without the epoch."""
        for log, tail in tails.items():
            request = wal_pb2.AppendRequest(log=log, record=record_pb2.Record(data=b"after"))
            if tail.writer_epoch:
                answered = None
                try:
                    answered = self.wal.Append(request, timeout=SECONDS)
                except grpc.RpcError as error:
                    if Refusal("append", error, 0).reason != "FENCED":
                        self.wrong.append(f"an append without the epoch is told {error.details()}")
                if answered:
                    self.wrong.append(f"{log} takes an append without the epoch")
                request.condition.writer_epoch = tail.writer_epoch
            try:
                lsn = self.wal.Append(request, timeout=SECONDS).lsn
            except grpc.RpcError as error:
                self.wrong.append(f"{log} does not go on: {error.details()}")
                continue
            if lsn != tail.tail_lsn:
                self.wrong.append(f"{log} goes on at {lsn}, not {tail.tail_lsn}")


__all__ = [name for name in dir() if not name.startswith("_")]

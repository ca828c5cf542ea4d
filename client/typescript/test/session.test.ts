import assert from "node:assert/strict";
import test, { beforeEach, afterEach } from "node:test";

import { Code, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { AppendStream } from "../src/append-stream.js";
import { WalService } from "../src/gen/wald/v1/wal_pb.js";
import type { BatchInput, Client } from "../src/index.js";
import { Fake, gate, refusal } from "./fake.js";

let fake: Fake;
let client: Client;

beforeEach(async () => {
  fake = await Fake.start();
  client = fake.client();
});

afterEach(async () => {
  await client.close();
  await fake.stop();
});

const one = (record: string): BatchInput => ({ batches: [{ log: "log", records: [record] }] });

test("acks come in order, and closing drains", async () => {
  const session = client.session();
  const sent = [];
  for (let index = 0; index < 500; index++) {
    sent.push(await session.send(one(`${index}`)));
  }
  await session.close();
  const acks = await Promise.all(sent.map(({ ack }) => ack));
  assert.deepEqual(acks.map(({ appends }) => appends[0]?.firstLsn), acks.map((_, index) => BigInt(index)));
  await assert.rejects(session.send(one("late")), { kind: "USAGE" });
});

test("send waits while the window is full", async () => {
  const { opened, open } = gate();
  fake.before = () => opened;
  const session = client.session({ windowBytes: 3_000 });
  const order: string[] = [];
  const sends = ["a", "b", "c", "d"].map(async (name) => {
    await session.send(one(name.repeat(1_000)));
    order.push(name);
  });
  await Promise.all(sends.slice(0, 2));
  // Whatever else could still happen by itself has happened.
  await new Promise((resolve) => setImmediate(resolve));
  assert.deepEqual(order, ["a", "b"]);
  open();
  await Promise.all(sends);
  assert.deepEqual(order, ["a", "b", "c", "d"]);
  await session.close();
});

test("what is larger than the window goes alone", async () => {
  const session = client.session({ windowBytes: 10 });
  const { ack } = await session.send(one("x".repeat(5_000)));
  assert.equal((await ack).appends[0]?.firstLsn, 0n);
  await session.close();
});

test("first failure ends it: earlier batches acked, later ones not applied", async () => {
  fake.before = ([record]) => {
    if (record === "bad") {
      throw refusal(Code.FailedPrecondition, "FENCED", "NOT_APPLIED", "NEVER");
    }
  };
  const session = client.session();
  const [a, bad, after] = await Promise.all([one("a"), one("bad"), one("after")].map((each) => session.send(each)));
  assert.equal((await a?.ack)?.appends[0]?.firstLsn, 0n);
  await assert.rejects(bad?.ack ?? Promise.resolve(), { kind: "SERVER", reason: "FENCED", outcome: "NOT_APPLIED" });
  await assert.rejects(after?.ack ?? Promise.resolve(), {
    kind: "EARLIER_FAILED",
    reason: "FENCED",
    outcome: "NOT_APPLIED",
    retry: "SAFE",
  });
  await assert.rejects(session.send(one("later")), { kind: "EARLIER_FAILED", outcome: "NOT_APPLIED" });
  await assert.rejects(session.close(), { reason: "FENCED", facts: { request_id: "1", outcome: "NOT_APPLIED", retry: "NEVER" } });
  assert.deepEqual(fake.records, ["a"]);
});

test("later batches are unknown after a failure of unknown outcome", async () => {
  const { opened, open } = gate();
  const arrived = gate();
  fake.before = async ([record]) => {
    if (record === "bad") {
      arrived.open();
      await opened;
      throw refusal(Code.Internal, "JOURNAL_FAILED", "UNKNOWN", "SAFE_WITH_CONDITION");
    }
  };
  const session = client.session();
  const [bad, after] = await Promise.all([one("bad"), one("after")].map((each) => session.send(each)));
  await arrived.opened;
  // There and back: the second is on its way too.
  await client.tail("log");
  open();
  await assert.rejects(bad?.ack ?? Promise.resolve(), { reason: "JOURNAL_FAILED", outcome: "UNKNOWN" });
  await assert.rejects(after?.ack ?? Promise.resolve(), { kind: "EARLIER_FAILED", outcome: "UNKNOWN" });
});

test("lost connection leaves unacked batches unknown and repeats nothing", async () => {
  fake.after = ([record]) => {
    if (record === "b") {
      fake.drop();
    }
  };
  const session = client.session();
  const { ack: a } = await session.send(one("a"));
  assert.equal((await a).appends[0]?.firstLsn, 0n);
  const { ack: b } = await session.send(one("b"));
  await assert.rejects(b, { kind: "CONNECTION_LOST", outcome: "UNKNOWN" });
  await assert.rejects(session.close(), { kind: "CONNECTION_LOST" });
  assert.deepEqual(fake.records, ["a", "b"]);
});

test("end by the other side fails the session, also while it is idle", { timeout: 10_000 }, async () => {
  fake.endsAfter = 1;
  const session = client.session();
  const { ack } = await session.send(one("a"));
  await ack;
  // There and back: the end has come, too.
  await client.tail("log");
  await assert.rejects(session.send(one("b")).then(({ ack }) => ack), { outcome: "NOT_APPLIED" });
  await assert.rejects(session.close(), { kind: "CONNECTION_LOST" });
  assert.deepEqual(fake.records, ["a"]);
});

test("signal ends it", async () => {
  const { opened, open } = gate();
  const end = new AbortController();
  fake.before = () => {
    end.abort();
    return opened;
  };
  const session = client.session({ signal: end.signal });
  const { ack } = await session.send(one("a"));
  await assert.rejects(ack, { kind: "CANCELLED", outcome: "UNKNOWN" });
  open();
});

test("batch that fits no field is refused by send, and the session goes on", async () => {
  const { opened, open } = gate();
  fake.before = () => opened;
  const session = client.session();
  const before = await session.send(one("before"));
  const bad: BatchInput[] = [
    { batches: [{ log: "log", records: [{ data: "a", crc32c: -5 }] }] },
    { batches: [{ log: "log", records: [{ data: "a", timestampUs: 1n << 63n }] }] },
    { batches: [{ log: "log", records: ["a"], expectedLsn: -1n }] },
    { checks: [{ log: "log", logId: 1n << 64n }] },
    { cursors: [{ log: "log", cursor: "c", lsn: -1n }] },
  ];
  for (const batch of bad) {
    await assert.rejects(session.send(batch), { kind: "USAGE", code: "INVALID_ARGUMENT", outcome: "NOT_APPLIED" });
  }
  const after = await session.send(one("after"));
  open();
  await session.close();
  assert.deepEqual((await Promise.all([before.ack, after.ack])).map(({ appends }) => appends[0]?.firstLsn), [0n, 1n]);
  assert.deepEqual(fake.records, ["before", "after"]);
});

test("record keeps its content while its buffer is used again", async () => {
  const { opened, open } = gate();
  fake.before = () => opened;
  const session = client.session({ windowBytes: 10 });
  const data = Buffer.from("first");
  const headers = [["key", data]] as const;
  await session.send({ batches: [{ log: "log", records: [{ data, headers }] }] });
  // The window is full, so this one waits.
  data.write("other");
  const batch = { log: "log", records: [data] as (Buffer | string)[] };
  const waiting = session.send({ batches: [batch] });
  data.write("wrong");
  batch.records.push("more");
  open();
  await (await waiting).ack;
  await session.close();
  assert.deepEqual(fake.records, ["first", "other"]);
});

test("headers may be an iterator that yields its pairs once", async () => {
  function* headers(): Generator<readonly [string, string]> {
    yield ["key", "value"];
  }
  const session = client.session();
  await (await session.send({ batches: [{ log: "log", records: [{ data: "a", headers: headers() }] }] })).ack;
  await session.close();
  assert.deepEqual(fake.headerKeys, ["key"]);
});

test("request that cannot be encoded leaves those before it unknown", async () => {
  const { opened, open } = gate();
  const arrived = gate();
  fake.before = () => {
    arrived.open();
    return opened;
  };
  const wal = createClient(WalService, createGrpcTransport({ baseUrl: `http://${fake.endpoint}` }));
  const stream = new AppendStream((requests, options) => wal.appendSession(requests, options), () => {});
  stream.push({ batches: [{ log: "log", records: [{ payload: { case: "data", value: Buffer.from("a") } }] }] });
  await arrived.opened;
  stream.push({ batches: [{ log: "log", condition: { expectedLsn: -1n } }] });
  const error = await stream.ended;
  assert.deepEqual([error?.kind, error?.outcome, stream.sent, stream.acked], ["USAGE", "UNKNOWN", 2, 0]);
  open();
});

import assert from "node:assert/strict";
import test, { beforeEach, afterEach } from "node:test";

import { Code } from "@connectrpc/connect";

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

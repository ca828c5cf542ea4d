import assert from "node:assert/strict";
import { once } from "node:events";
import * as http2 from "node:http2";
import { createServer, type AddressInfo, type Socket } from "node:net";
import test from "node:test";

import { Code, ConnectError } from "@connectrpc/connect";

import { toWaldError } from "../src/errors.js";
import { Client, WaldError } from "../src/index.js";
import { failed, Fake, refusal, retryAfter } from "./fake.js";

test("answer of Wald gives code, reason, facts, checks and delay", () => {
  const status = refusal(Code.FailedPrecondition, "POSITION_MISMATCH", "NOT_APPLIED", "NEVER").status({ actual_lsn: "12" });
  failed(status, [{ type: "POSITION_MISMATCH", subject: "orders", description: "expected lsn 3, next is 12" }]);
  const error = toWaldError(retryAfter(status, 1_030), "WRITE");
  assert.equal(error.kind, "SERVER");
  assert.equal(error.code, "FAILED_PRECONDITION");
  assert.equal(error.reason, "POSITION_MISMATCH");
  assert.equal(error.outcome, "NOT_APPLIED");
  assert.equal(error.retry, "NEVER");
  assert.equal(error.facts["actual_lsn"], "12");
  assert.equal(error.retryAfterMs, 1_030);
  assert.deepEqual(error.failedChecks, [
    { reason: "POSITION_MISMATCH", log: "orders", description: "expected lsn 3, next is 12" },
  ]);
});

test("details arrive over the wire", async () => {
  const fake = await Fake.start();
  const client = fake.client({ retry: { maxAttempts: 1 } });
  fake.before = () => {
    throw retryAfter(refusal(Code.ResourceExhausted, "BUSY", "NOT_APPLIED", "SAFE"), 50);
  };
  const error = await client.append("log", "a").catch((thrown: unknown) => thrown);
  assert.ok(error instanceof WaldError);
  assert.deepEqual(
    [error.code, error.reason, error.outcome, error.retry, error.retryAfterMs],
    ["RESOURCE_EXHAUSTED", "BUSY", "NOT_APPLIED", "SAFE", 50],
  );
  await client.close();
  await fake.stop();
});

test("error info of another domain is not believed", () => {
  const status = new ConnectError("", Code.Unavailable, { "grpc-status": "14" });
  status.details.push(...refusal(Code.Unavailable, "STARTING", "NOT_APPLIED", "SAFE").details);
  const wald = toWaldError(status, "WRITE");
  assert.equal(wald.outcome, "NOT_APPLIED");
  const [detail] = status.details;
  assert.ok(detail !== undefined && "type" in detail);
  // The domain's eight letters, one changed.
  detail.value = new Uint8Array(Buffer.from(Buffer.from(detail.value).toString("latin1").replace("wald.dev", "mesh.dev"), "latin1"));
  const foreign = toWaldError(status, "WRITE");
  assert.equal(foreign.kind, "FOREIGN");
  assert.equal(foreign.reason, undefined);
  assert.equal(foreign.outcome, "UNKNOWN");
  assert.equal(foreign.retry, "SAFE_WITH_CONDITION");
});

test("failed journal is unknown if internal, not applied if unavailable", () => {
  const underway = toWaldError(refusal(Code.Internal, "JOURNAL_FAILED", "UNKNOWN", "SAFE_WITH_CONDITION"), "WRITE");
  assert.deepEqual([underway.outcome, underway.retry], ["UNKNOWN", "SAFE_WITH_CONDITION"]);
  const before = toWaldError(refusal(Code.Unavailable, "JOURNAL_FAILED"), "WRITE");
  assert.deepEqual([before.outcome, before.retry], ["NOT_APPLIED", "SAFE"]);
});

test("reason of a newer server is kept, without an outcome it is unknown", () => {
  const error = toWaldError(refusal(Code.Aborted, "MOON_PHASE"), "WRITE");
  assert.deepEqual([error.reason, error.outcome, error.retry], ["MOON_PHASE", "UNKNOWN", "NEVER"]);
  assert.equal(toWaldError(refusal(Code.OutOfRange, "TRIMMED"), "READ").outcome, "NOT_APPLIED");
});

test("status from in between says nothing about the write", () => {
  const between = (code: Code): WaldError => toWaldError(new ConnectError("", code, { "grpc-status": "x" }), "WRITE");
  assert.deepEqual([between(Code.Unavailable).outcome, between(Code.Unavailable).retry], ["UNKNOWN", "SAFE_WITH_CONDITION"]);
  assert.deepEqual([between(Code.Internal).outcome, between(Code.Internal).retry], ["UNKNOWN", "NEVER"]);
  assert.deepEqual([between(Code.Unimplemented).outcome, between(Code.Unimplemented).retry], ["NOT_APPLIED", "NEVER"]);
  assert.equal(between(Code.DeadlineExceeded).kind, "TIMEOUT");
});

test("call without a server was not sent", async () => {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  await new Promise((resolve) => server.close(resolve));
  await assert.rejects(Client.connect(`127.0.0.1:${port}`), { kind: "NOT_SENT", code: "UNAVAILABLE", retry: "SAFE" });
  const client = Client.lazy(`127.0.0.1:${port}`, { retry: { maxAttempts: 1 } });
  await assert.rejects(client.append("log", "a"), { kind: "NOT_SENT", outcome: "NOT_APPLIED" });
});

test("server that takes no connection is given up", async () => {
  // Only pings can tell after its SETTINGS, and before them the time to connect.
  const sockets: Socket[] = [];
  const server = createServer((socket) => {
    sockets.push(socket);
    if (sockets.length === 1) {
      socket.write(Buffer.from([0, 0, 0, 4, 0, 0, 0, 0, 0]));
    }
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  const client = Client.lazy(`127.0.0.1:${port}`, {
    keepaliveIntervalMs: 10,
    keepaliveTimeoutMs: 10,
    connectTimeoutMs: 100,
    retry: { maxAttempts: 1 },
  });
  await assert.rejects(client.append("log", "a"), { kind: "CONNECTION_LOST", outcome: "UNKNOWN" });
  await assert.rejects(client.append("log", "a"), { kind: "NOT_SENT", outcome: "NOT_APPLIED" });
  sockets.forEach((socket) => socket.destroy());
  await new Promise((resolve) => server.close(resolve));
});

test("refused stream was not sent, broken one may have been applied", async () => {
  const codes: [number | undefined, string, string][] = [
    [http2.constants.NGHTTP2_REFUSED_STREAM, "NOT_SENT", "NOT_APPLIED"],
    [http2.constants.NGHTTP2_CANCEL, "CONNECTION_LOST", "UNKNOWN"],
    [http2.constants.NGHTTP2_INTERNAL_ERROR, "CONNECTION_LOST", "UNKNOWN"],
    [http2.constants.NGHTTP2_NO_ERROR, "CONNECTION_LOST", "UNKNOWN"],
    [undefined, "CONNECTION_LOST", "UNKNOWN"],
  ];
  for (const [code, kind, outcome] of codes) {
    const sockets: Socket[] = [];
    const server = http2.createServer().listen(0, "127.0.0.1");
    server.on("connection", (socket) => sockets.push(socket));
    server.on("stream", (stream) => {
      stream.on("error", () => {});
      if (code === undefined) {
        sockets.forEach((socket) => socket.destroy());
      } else {
        stream.close(code);
      }
    });
    await once(server, "listening");
    const client = Client.lazy(`127.0.0.1:${(server.address() as AddressInfo).port}`, { retry: { maxAttempts: 1 } });
    await assert.rejects(client.append("log", "a", { timeoutMs: 5_000 }), { kind, outcome }, `code ${code}`);
    await client.close();
    sockets.forEach((socket) => socket.destroy());
    await new Promise((resolve) => server.close(resolve));
  }
});

test("endpoints are checked before anything is sent", () => {
  for (const endpoint of ["ftp://127.0.0.1", "http://", "::", "127.0.0.1:179250", "localhost:0", "me:x@localhost"]) {
    assert.throws(() => Client.lazy(endpoint), { kind: "USAGE", outcome: "NOT_APPLIED" });
  }
});

test("value that fits no field was not sent", async () => {
  const fake = await Fake.start();
  const client = fake.client();
  await assert.rejects(client.append("log", "a", { expectedLsn: -1n }), { kind: "USAGE", outcome: "NOT_APPLIED" });
  assert.deepEqual(fake.records, []);
  await client.close();
  await fake.stop();
});

/** Connections that break while they are made. */
import assert from "node:assert/strict";
import http2 from "node:http2";
import { syncBuiltinESMExports } from "node:module";
import net from "node:net";
import test, { type TestContext } from "node:test";

import { Code } from "@connectrpc/connect";

import { Client, WaldError } from "../src/index.js";
import { Fake, refusal } from "./fake.js";

/**
 * Destroys the sessions of the first connections right after their sockets have connected. Node emits
 * "connect" of such a session nevertheless. Returns the number of connections so far.
 */
function breakFirst(count: number, context: TestContext): () => number {
  const connect = http2.connect;
  let made = 0;
  const breaking = (authority: string | URL, options?: http2.ClientSessionOptions): http2.ClientHttp2Session => {
    const { hostname, port } = new URL(authority);
    const socket = net.connect(Number(port), hostname);
    const session = connect(authority, { ...options, createConnection: () => socket });
    if (made++ < count) {
      socket.once("connect", () => session.destroy(new Error("broken as it was made")));
    }
    return session;
  };
  context.mock.method(http2, "connect", breaking as typeof http2.connect);
  syncBuiltinESMExports();
  context.after(() => {
    context.mock.restoreAll();
    syncBuiltinESMExports();
  });
  return () => made;
}

test("a connection that breaks as it is made is made again", async (context) => {
  const fake = await Fake.start();
  const made = breakFirst(2, context);
  const client = fake.client();
  const { lsn } = await client.append("log", "x");
  assert.equal(lsn, 0n);
  assert.equal(made(), 3);
  assert.deepEqual(fake.records, ["x"]);
  await client.close();
  await fake.stop();
});

test("a call whose connection breaks as it is made was not sent", async (context) => {
  const fake = await Fake.start();
  breakFirst(1, context);
  const client = fake.client({ retry: { maxAttempts: 1 } });
  await assert.rejects(client.append("log", "x"), (error) => {
    assert.ok(error instanceof WaldError);
    assert.deepEqual([error.kind, error.outcome, error.retry], ["NOT_SENT", "NOT_APPLIED", "SAFE"]);
    return true;
  });
  assert.deepEqual(fake.records, []);
  await client.append("log", "x");
  await client.close();
  await fake.stop();
});

test("a call that the server ends before its requests end does not stay open", { timeout: 10_000 }, async (context) => {
  const fake = await Fake.start();
  context.after(() => fake.stop());
  const client = fake.client();
  fake.before = () => {
    if (fake.records.length === 250) {
      throw refusal(Code.Unavailable, "DRAINING", "NOT_APPLIED", "SAFE");
    }
  };
  const session = client.session();
  const sends = Array.from({ length: 400 }, (_, index) => session.send({ batches: [{ log: "log", records: [`${index}`] }] }));
  await Promise.allSettled(sends);
  await assert.rejects(session.close(), { reason: "DRAINING" });
  assert.equal(fake.records.length, 250);
  // Waits for all calls of the connection.
  await client.close();
});

test("followers that nobody reads do not stop the acks of appends", { timeout: 60_000 }, async (context) => {
  const fake = await Fake.start();
  context.after(() => fake.stop());
  const payload = { case: "data" as const, value: new Uint8Array(64 << 10) };
  let sent = 0;
  let wake = (): void => {};
  fake.scan = async function* (_, signal) {
    for (let lsn = 0n; !signal.aborted; lsn++) {
      yield { batches: [{ log: "log", firstLsn: lsn, records: [{ payload }] }], cursor: Uint8Array.of(1) };
      sent += payload.value.length;
      wake();
    }
  };
  const client = fake.client();
  const followers = Array.from({ length: 5 }, () => client.follow("log"));
  await Promise.all(followers.map((follower) => follower.next()));
  // More than the window of the connection, so that unread bytes do not count against it.
  while (sent < 18 << 20) {
    await new Promise<void>((resolve) => (wake = resolve));
  }
  await client.append("log", "x", { timeoutMs: 10_000 });
  await Promise.all(followers.map((follower) => follower.close()));
  await client.close();
});

test("the default ports of HTTP can be named", async () => {
  for (const endpoint of ["http://127.0.0.1:80", "https://127.0.0.1:443"]) {
    const client = Client.lazy(endpoint, { retry: { maxAttempts: 1 }, connectTimeoutMs: 1_000 });
    // Nobody listens there, or at least no server of Wald: the call was not sent.
    await assert.rejects(client.append("log", "x"), { outcome: "NOT_APPLIED", message: /^(?!.*cannot make a request)/ });
    await client.close();
  }
});

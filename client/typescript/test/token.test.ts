import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test, { after, afterEach, beforeEach, mock } from "node:test";
import { inspect } from "node:util";

import { Code, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { Client, type ClientOptions } from "../src/index.js";
import { TokenSource } from "../src/token.js";
import { Fake, gate, refusal } from "./fake.js";

const directory = mkdtempSync(join(tmpdir(), "wald-token-"));
after(() => rmSync(directory, { recursive: true }));

function tokenFile(text: string): string {
  const path = join(directory, `token-${Math.random()}`);
  writeFileSync(path, text);
  return path;
}

let fake: Fake;
/** The token that the server takes, the reason of its refusals, and the tokens that came. */
let valid = "first";
let reason = "BAD_CREDENTIAL";
let seen: (string | null)[] = [];

beforeEach(async () => {
  [valid, reason, seen] = ["first", "BAD_CREDENTIAL", []];
  fake = await Fake.start();
  fake.authorize = (authorization) => {
    seen.push(authorization);
    if (authorization !== `Bearer ${valid}`) {
      throw refused();
    }
  };
});

afterEach(() => fake.stop());

const refused = () =>
  refusal(Code.Unauthenticated, reason, "NOT_APPLIED", reason === "CREDENTIAL_EXPIRED" ? "SAFE" : "NEVER");

async function using(options: ClientOptions, run: (client: Client) => Promise<void>): Promise<void> {
  const client = fake.client(options);
  try {
    await run(client);
  } finally {
    await client.close();
  }
}

const batch = { batches: [{ log: "log", records: ["x"] }] };

async function useAll(client: Client): Promise<void> {
  await client.append("log", "x");
  const session = client.session();
  await session.send(batch);
  await session.close();
  const producer = await client.producer("log", { id: "p", logId: 7n });
  await producer.append("y");
  await producer.close();
  await client.stubs.wal.getTail({ log: "log" });
}

test("every call carries the token", async () => {
  await using({ token: " first\n" }, async (client) => {
    await useAll(client);
    assert.deepEqual(seen, Array(4).fill("Bearer first"));
  });
});

for (const why of ["BAD_CREDENTIAL", "CREDENTIAL_EXPIRED"]) {
  test(`token that got ${why} is read again and the call repeated`, async () => {
    reason = why;
    const path = tokenFile("first");
    await using({ tokenFile: path }, async (client) => {
      await client.append("log", "x");
      valid = "second";
      writeFileSync(path, "second\n");
      // A plain append: nothing was applied, so that it is repeated.
      await client.append("log", "y");
      assert.deepEqual([seen.length, fake.records], [3, ["x", "y"]]);
    });
  });

  test(`token that got ${why} and stays is not sent again`, async () => {
    [reason, valid] = [why, "second"];
    for (const options of [{ tokenFile: tokenFile("first") }, { token: "first" }]) {
      seen = [];
      await using(options, async (client) => {
        await assert.rejects(client.append("log", "x"), { reason: why, message: /^(?!.*first)/ });
        assert.equal(seen.length, 1);
      });
    }
  });
}

test("producer goes on across an expired token", async () => {
  reason = "CREDENTIAL_EXPIRED";
  const path = tokenFile("first");
  const { opened, open } = gate();
  await using({ tokenFile: path }, async (client) => {
    const producer = await client.producer("log", { id: "p", logId: 7n });
    await producer.append("0");
    valid = "second";
    let expires = true;
    fake.before = () => {
      if (expires) {
        expires = false;
        open();
        throw refused();
      }
    };
    const { ack } = await producer.send("1");
    await opened;
    // The file comes later than the end of the token.
    const before = seen.length;
    while (seen.length < before + 2) {
      await new Promise((resolve) => setImmediate(resolve));
    }
    writeFileSync(path, "second");
    assert.equal((await ack).firstLsn, 1n);
    await producer.close();
    assert.deepEqual(fake.records, ["0", "1"]);
  });
});

test("producer with a fixed token ends when it expires", async () => {
  [reason, valid] = ["CREDENTIAL_EXPIRED", "second"];
  await using({ token: "first" }, async (client) => {
    const producer = await client.producer("log", { id: "p", logId: 7n });
    await assert.rejects(producer.append("x"), { reason: "CREDENTIAL_EXPIRED" });
    assert.equal(seen.length, 1);
    await producer.close().catch(() => {});
  });
});

test("follower goes on across an expired token", async () => {
  reason = "CREDENTIAL_EXPIRED";
  const path = tokenFile("first");
  const starts: (string | undefined)[] = [];
  fake.scan = async function* ({ start }) {
    starts.push(start.case);
    const gap = { log: "log", fromLsn: 0n, reason: 1 };
    yield { gaps: [gap], cursor: new Uint8Array([starts.length]) };
    if (start.case === undefined) {
      valid = "second";
      writeFileSync(path, "second");
      throw refused();
    }
  };
  await using({ tokenFile: path }, async (client) => {
    const follower = client.follow("log");
    assert.deepEqual((await follower.next()).value.cursor, new Uint8Array([1]));
    assert.deepEqual((await follower.next()).value.cursor, new Uint8Array([2]));
    assert.deepEqual(starts, [undefined, "cursor"]);
    await follower.close();
  });
});

test("token crosses plaintext only to loopback", async () => {
  for (const endpoint of ["wald.internal", "http://10.0.0.1", "0.0.0.0", "127.0.0.1.nip.io"]) {
    assert.throws(() => Client.lazy(endpoint, { token: "k7Qp2mXa" }), { kind: "TOKEN", message: /^(?!.*k7Qp).*plaintext/ });
    await Client.lazy(endpoint, { token: "k7Qp2mXa", allowInsecureToken: true }).close();
  }
  for (const endpoint of ["127.0.0.1", "localhost", "[::1]", "http://127.1.2.3:80", "https://wald.internal"]) {
    const client = Client.lazy(endpoint, { token: "k7Qp2mXa" });
    const shown = inspect(client, { depth: 10, showHidden: true }) + JSON.stringify(client) + String(client);
    assert.ok(!shown.includes("k7Qp"));
    await client.close();
  }
});

test("token that cannot be used is named", () => {
  const cases: [string, RegExp][] = [
    ["", /is empty/],
    [" \n", /is empty/],
    ["k7Qp\n2mXa", /characters/],
    ["k7Qpé", /characters/],
    ["a".repeat(20_000), /larger than/],
  ];
  for (const [text, words] of cases) {
    const path = tokenFile(text);
    assert.throws(
      () => Client.lazy("localhost", { tokenFile: path }),
      (error: Error) => words.test(error.message) && error.message.includes(path) && !error.message.includes("k7Qp"),
    );
  }
  assert.throws(() => Client.lazy("localhost", { tokenFile: "/missing" }), { kind: "TOKEN", message: /\/missing: ENOENT/ });
  assert.throws(() => Client.lazy("localhost", { token: "a", tokenFile: "/missing" }), { kind: "TOKEN", message: /exclude/ });
});

test("file is read at most once a second", () => {
  let now = 100_000;
  mock.method(performance, "now", () => now);
  const path = tokenFile("first");
  const source = new TokenSource({ tokenFile: path });
  writeFileSync(path, "second");
  assert.equal(source.current(), "first");
  now += 1_000;
  assert.equal(source.current(), "second");
  writeFileSync(path, "");
  now += 1_000;
  assert.equal(source.current(), "second");
  mock.reset();
});

test("environment names the server and the token", async () => {
  const names = ["ENDPOINT", "TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_SERVER_NAME", "TOKEN_FILE", "TOKEN"];
  const before = names.map((name) => process.env[`WALD_${name}`]);
  try {
    names.forEach((name) => (process.env[`WALD_${name}`] = ""));
    process.env["WALD_ENDPOINT"] = fake.endpoint;
    process.env["WALD_TOKEN"] = "first";
    const found = await Client.fromEnv();
    await found.append("log", "x");
    await found.close();
    process.env["WALD_TOKEN_FILE"] = tokenFile("second");
    const other = await Client.fromEnv();
    await assert.rejects(other.append("log", "x"), { reason: "BAD_CREDENTIAL" });
    await other.close();
    const given = await Client.fromEnv({ token: "first" });
    await given.append("log", "x");
    await given.close();
    process.env["WALD_ENDPOINT"] = "https://localhost";
    process.env["WALD_TLS_CA"] = "/missing";
    await assert.rejects(Client.fromEnv(), { tlsFailure: "SETTINGS", message: /\/missing/ });
  } finally {
    names.forEach((name, index) => {
      const value = before[index];
      if (value === undefined) {
        delete process.env[`WALD_${name}`];
      } else {
        process.env[`WALD_${name}`] = value;
      }
    });
  }
});

test("interceptors, headers and a transport of one's own see every call", async () => {
  fake.authorize = () => {};
  const methods: string[] = [];
  const noting: Interceptor = (next) => (request) => {
    methods.push(`${request.method.name} ${request.header.get("x-team")}`);
    return next(request);
  };
  await using({ interceptors: [noting], headers: { "x-team": "a" } }, useAll);
  const expected = ["Append a", "AppendSession a", "AppendSession a", "GetTail a"];
  assert.deepEqual(methods, expected);
  const transport = createGrpcTransport({ baseUrl: `http://${fake.endpoint}`, interceptors: [noting] });
  await using({ transport, headers: { "x-team": "a" } }, async (client) => {
    await client.append("log", "x");
    await client.stubs.wal.getTail({ log: "log" });
  });
  assert.deepEqual(methods.slice(4), ["Append a", "GetTail a"]);
  assert.throws(() => fake.client({ transport, token: "a" }), { kind: "TOKEN", message: /not known/ });
  assert.throws(() => fake.client({ transport, tlsCa: "a" }), { kind: "USAGE", message: /excludes/ });
});

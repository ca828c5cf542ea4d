import assert from "node:assert/strict";
import { once } from "node:events";
import { copyFileSync, writeFileSync } from "node:fs";
import { createServer, type AddressInfo, type Server, type Socket } from "node:net";
import test, { after } from "node:test";

import { Client, WaldError, type ClientOptions, type TlsFailure } from "../src/index.js";
import { Authority } from "./authority.js";
import { Fake } from "./fake.js";

const authority = new Authority("good");
const other = new Authority("other");
after(() => {
  authority.remove();
  other.remove();
});
const tlsCa = authority.ca;
const ONCE = { retry: { maxAttempts: 1 } };

/** Runs a test with a fake, and a client of it with these settings. */
async function served(fake: Fake, options: ClientOptions, run: (client: Client) => Promise<void>): Promise<void> {
  const client = fake.client(options);
  try {
    await run(client);
  } finally {
    await client.close();
    await fake.stop();
  }
}

/** A call of a client with these settings must fail for this reason. */
async function refused(endpoint: string, failure: TlsFailure, words: RegExp, options: ClientOptions): Promise<void> {
  const client = Client.lazy(endpoint, { ...ONCE, ...options });
  const expected = { kind: "TLS", tlsFailure: failure, outcome: "NOT_APPLIED", retry: "SAFE", message: words };
  await assert.rejects(client.append("log", "x"), expected);
  assert.equal(client.tlsFailure?.tlsFailure, failure);
  await assert.rejects(Client.connect(endpoint, { ...ONCE, ...options }), expected);
  await client.close();
}

test("server of the given CA is trusted", async () => {
  await served(await Fake.start(authority.server(authority.issue("server"))), { tlsCa }, async (client) => {
    assert.equal((await client.append("log", "x")).lsn, 0n);
    assert.equal(client.tlsFailure, undefined);
    const session = client.session();
    await session.send({ batches: [{ log: "log", records: ["y"] }] });
    await session.close();
  });
});

test("server of an unknown CA or another name is refused", async () => {
  const fake = await Fake.start(authority.server(authority.issue("server")));
  await served(fake, { tlsCa }, async () => {
    const { endpoint } = fake;
    await refused(endpoint, "UNKNOWN_CA", /not from a trusted CA/, { tlsCa: other.ca });
    await refused(endpoint, "UNKNOWN_CA", /not from a trusted CA/, {});
    await refused(endpoint, "WRONG_NAME", /for localhost, 127.0.0.1, not for wald.internal/, { tlsCa, serverName: "wald.internal" });
    const named = Client.lazy(endpoint, { tlsCa, serverName: "localhost" });
    await named.append("log", "x");
    await named.close();
    assert.deepEqual(fake.records, ["x"]);
  });
});

test("expired server is refused with the day", async () => {
  const fake = await Fake.start(authority.server(authority.issue("expired", { expired: true })));
  await served(fake, { tlsCa }, async () => {
    const day = new Date(Date.now() - 2 * 86_400_000).toISOString().slice(0, 10);
    await refused(fake.endpoint, "EXPIRED", new RegExp(`expired on ${day}`), { tlsCa });
  });
});

test("server of the other kind is named", async () => {
  const fake = await Fake.start();
  await served(fake, {}, async () => {
    await refused(`https://${fake.endpoint}`, "SERVER_WITHOUT_TLS", /must begin with http:/, { tlsCa });
  });
  const answering = await listening((socket) => {
    socket.once("data", () => socket.end("HTTP/1.1 400 Bad Request\r\n\r\nuse https://"));
  });
  await refused(answering.endpoint, "SERVER_WITH_TLS", /must begin with https:/, {});
  await answering.stop();
});

test("missing certificate of the client is named, and a replaced one is used", async () => {
  const fake = await Fake.start({ ...authority.server(authority.issue("server")), requestCert: true });
  await served(fake, { tlsCa, ...authority.issue("client") }, async (client) => {
    await client.append("log", "x");
    await refused(fake.endpoint, "CLIENT_CERTIFICATE_REQUIRED", /none was sent/, { tlsCa });
    const replaced = Client.lazy(fake.endpoint, { tlsCa, ...authority.issue("replaced", { expired: true }) });
    // A server of Node closes the connection then, without an alert; Wald sends one (client/conformance).
    await assert.rejects(replaced.append("log", "x", { timeoutMs: 500 }), { outcome: "NOT_APPLIED" });
    authority.issue("replaced");
    await replaced.append("log", "y");
    await replaced.close();
  });
});

/** A port whose connections `answer` gets. */
async function listening(answer: (socket: Socket) => void): Promise<{ endpoint: string; stop: () => Promise<void> }> {
  const sockets = new Set<Socket>();
  const server: Server = createServer((socket) => {
    sockets.add(socket);
    socket.on("error", () => {});
    answer(socket);
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  return {
    endpoint: `127.0.0.1:${(server.address() as AddressInfo).port}`,
    stop: async () => {
      sockets.forEach((socket) => socket.destroy());
      await new Promise((resolve) => server.close(resolve));
    },
  };
}

test("all calls together make one attempt a second", async () => {
  let connections = 0;
  // A frame of HTTP/2, not a record of TLS.
  const plain = await listening((socket) => {
    connections++;
    socket.once("data", () => socket.end(Buffer.from([0, 0, 0, 4, 0, 0, 0, 0, 0])));
  });
  const client = Client.lazy(`https://${plain.endpoint}`, { tlsCa, timeoutMs: 2_500 });
  const calls = await Promise.allSettled(Array.from({ length: 20 }, () => client.append("log", "x")));
  for (const call of calls) {
    assert.ok(call.status === "rejected" && call.reason instanceof WaldError);
    assert.equal(call.reason.tlsFailure, "SERVER_WITHOUT_TLS");
  }
  assert.ok(connections >= 2 && connections <= 3, `${connections}`);
  await client.close();
  await plain.stop();
});

test("calls in the second after a failure do not spoil later ones", async () => {
  const trusted = authority.path("trusted.pem");
  copyFileSync(other.ca, trusted);
  await served(await Fake.start(authority.server(authority.issue("server"))), { tlsCa: trusted }, async (client) => {
    for (let call = 0; call < 3; call++) {
      await assert.rejects(client.append("log", "x", { timeoutMs: 300 }), { tlsFailure: "UNKNOWN_CA" });
    }
    copyFileSync(tlsCa, trusted);
    await client.append("log", "y");
  });
});

test("files that cannot be used are named", () => {
  const { tlsCert, tlsKey } = authority.issue("client");
  const foreign = authority.issue("foreign").tlsKey;
  const empty = authority.path("empty");
  writeFileSync(empty, "");
  const cases: [ClientOptions, RegExp][] = [
    [{ tlsCa: authority.path("missing") }, /missing: ENOENT/],
    [{ tlsCa: empty }, /empty: no certificate in PEM/],
    [{ tlsCert, tlsKey: foreign }, /foreign.key is not the key of/],
    [{ tlsCert, tlsKey: empty }, /empty: no private key in PEM/],
    [{ tlsCert: empty, tlsKey }, /empty: no certificate in PEM/],
    [{ tlsCert }, /needs both/],
  ];
  for (const [options, message] of cases) {
    assert.throws(() => Client.lazy("https://localhost", options), { kind: "TLS", tlsFailure: "SETTINGS", retry: "NEVER", message });
  }
  assert.throws(() => Client.lazy("localhost", { tlsCa }), { kind: "USAGE", message: /must begin with https:/ });
});

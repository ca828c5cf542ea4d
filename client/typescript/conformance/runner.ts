/** Carries out the conformance cases with this package. The contract is client/conformance/README.md. */
import { randomBytes } from "node:crypto";
import { readFile } from "node:fs/promises";

import { Client } from "../src/index.js";
import { Run } from "./case.js";
import { follow, produce } from "./chaos.js";
import type { Step } from "./values.js";

const CASE_MS = 60_000;

interface Case {
  name: string;
  steps: Step[];
}

const [mode, ...rest] = process.argv.slice(2);
if (mode === "chaos-producer") {
  await produce(variable("WALD_STOP"), rest);
} else if (mode === "chaos-follower") {
  await follow(rest);
} else {
  process.exit(await cases());
}

async function cases(): Promise<number> {
  const file = JSON.parse(await readFile(variable("WALD_CASES"), "utf8")) as { cases: Case[] };
  const only = process.env["WALD_ONLY"]?.split(",");
  const drawn = randomBytes(4).toString("hex");
  let passed = 0;
  let failed = 0;
  for (const each of file.cases.filter(({ name }) => only?.includes(name) ?? true)) {
    const wrong = await carryOut(each, drawn);
    if (wrong === undefined) {
      passed++;
      console.log(`ok ${each.name}`);
    } else {
      failed++;
      console.log(`FAIL ${each.name}: ${wrong.replaceAll("\n", " ")}`);
    }
  }
  console.log(`${passed} passed, ${failed} failed`);
  return failed === 0 && passed > 0 ? 0 : 1;
}

/** The description of a failure, if there was one. */
async function carryOut({ name, steps }: Case, drawn: string): Promise<string | undefined> {
  const end = new AbortController();
  let run: Run | undefined;
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`it took more than ${CASE_MS} ms; began last: ${run?.last ?? "connect"}`)), CASE_MS);
  });
  // A client that cannot connect or close fails its case, too.
  const whole = async (): Promise<void> => {
    const client = await Client.fromEnv();
    run = new Run(client, variable("WALD_CONTROL"), `conformance/${name}/${drawn}/`, end.signal);
    try {
      await run.steps(steps);
    } finally {
      end.abort();
      await client.close();
    }
  };
  try {
    await Promise.race([whole(), late]);
    return undefined;
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  } finally {
    clearTimeout(timer);
    end.abort();
  }
}

function variable(name: string): string {
  const value = process.env[name];
  if (value === undefined) {
    console.error(`${name} is not set`);
    process.exit(2);
  }
  return value;
}

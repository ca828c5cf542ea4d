/**
 * Converts arguments of steps to arguments of the package, and its results to results of
 * steps.
 */
import type {
  BatchAck,
  BatchInput,
  Condition,
  Durability,
  Gap,
  LogCheck,
  RecordInput,
  Start,
  StoredRecord,
  WaldError,
} from "../src/index.js";
import { integer, isObject, list, maybeInteger, members, text, type Members, type Value } from "./values.js";

/** Leaves out undefined members. */
export function defined<T extends object>(object: T): { [K in keyof T]: Exclude<T[K], undefined> } {
  return Object.fromEntries(Object.entries(object).filter(([, value]) => value !== undefined)) as never;
}

export function record(value: Value): RecordInput {
  if (typeof value === "string") {
    return value;
  }
  const { data, headers, timestamp_us, crc32c } = members(value);
  return defined({
    data: text(data),
    headers: headers === undefined ? undefined : list(headers).map((pair) => list(pair).map(text) as [string, string]),
    timestampUs: maybeInteger(timestamp_us),
    crc32c: crc32c === undefined ? undefined : Number(crc32c),
  }) as RecordInput;
}

export function records(value: Value): RecordInput[] {
  return list(value).flatMap((each) => {
    if (!isObject(each) || each["repeat"] === undefined) {
      return [record(each)];
    }
    const size = Number(each["bytes"]);
    return Array.from({ length: Number(each["repeat"]) }, (_, index) => String(index).padEnd(size, "."));
  });
}

export function condition(value: Value): Condition {
  const { expected_lsn, must_exist, must_not_exist, writer_epoch, log_id, producer } = members(value);
  const { id, epoch, sequence } = members(producer);
  return defined({
    expectedLsn: maybeInteger(expected_lsn),
    mustExist: must_exist as boolean | undefined,
    mustNotExist: must_not_exist as boolean | undefined,
    writerEpoch: maybeInteger(writer_epoch),
    logId: maybeInteger(log_id),
    producer:
      producer === undefined ? undefined : { id: text(id), epoch: integer(epoch), sequence: integer(sequence) },
  }) as Condition;
}

export function durability(value: Value): { durability?: Durability } {
  return value === undefined ? {} : { durability: text(value) as Durability };
}

export function batch(step: Members): BatchInput {
  return {
    batches: list(step["batches"]).map((each) => {
      const { log, records: given, condition: must } = members(each);
      return { log: text(log), records: records(given), ...condition(must) };
    }),
    checks: list(step["checks"]).map((each) => {
      const { log, ...must } = members(each);
      return { log: text(log), ...condition(must) } as LogCheck;
    }),
    cursors: list(step["cursors"]).map((each) => move(members(each))),
    ...durability(step["durability"]),
  };
}

export function move({ log, cursor, lsn, expected_lsn, log_id }: Members) {
  return {
    log: text(log),
    cursor: text(cursor),
    lsn: integer(lsn),
    ...(expected_lsn !== undefined && { expectedLsn: integer(expected_lsn) }),
    ...logId(log_id),
  };
}

export function logId(value: Value): { logId?: bigint } {
  return value === undefined ? {} : { logId: integer(value) };
}

export function start({ lsn, timestamp_us, tail_offset }: Members): Start {
  return {
    ...(lsn !== undefined && { lsn: integer(lsn) }),
    ...(timestamp_us !== undefined && { timestampUs: integer(timestamp_us) }),
    ...(tail_offset !== undefined && { last: integer(tail_offset) }),
  };
}

export function batchResult(ack: BatchAck): Members {
  return {
    appends: ack.appends.map((append) => ({
      log: append.log,
      first_lsn: append.firstLsn,
      next_lsn: append.nextLsn,
      deduplicated: append.deduplicated,
      log_id: append.logId,
    })),
    durability: ack.durability,
  };
}

export function recordResult(stored: StoredRecord): Members {
  return {
    lsn: stored.lsn,
    data: stored.text(),
    headers: stored.headers.map(({ key, value }) => [key, new TextDecoder().decode(value)]),
    timestamp_us: stored.timestampUs,
  };
}

export function gapResult({ log, fromLsn, toLsn, reason }: Gap): Members {
  return { log, from_lsn: fromLsn, to_lsn: toLsn, reason };
}

export function errorResult(error: WaldError): Members {
  return {
    code: error.code,
    reason: error.reason ?? "",
    outcome: error.outcome ?? "",
    // Errors of reads do not say; the package decides by the code.
    retry: error.reason !== undefined && error.facts["retry"] === undefined ? "" : error.retry,
    facts: { ...error.facts },
    problem: error.kind === "TOKEN" ? "TOKEN" : (error.tlsFailure ?? ""),
    failed: error.failedChecks.map((check) => ({ ...check })),
  };
}

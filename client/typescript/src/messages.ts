/**
 * Arguments and results as programs see them, and their conversion to and from the contract's
 * messages.
 */
import { create, fromBinary, toBinary, type DescMessage, type MessageInitShape, type MessageShape } from "@bufbuild/protobuf";

import { contractError, usageError } from "./errors.js";
import type { Record as ProtoRecord, RecordBatch, RecordSchema } from "./gen/wald/v1/record_pb.js";
import { Durability as ProtoDurability, Visibility as ProtoVisibility } from "./gen/wald/v1/types_pb.js";
import type {
  AppendBatchRequestSchema,
  AppendBatchResponse,
  AppendConditionSchema,
} from "./gen/wald/v1/wal_pb.js";

/**
 * Safety of records: in the daemon's memory; in the operating system (survives a kill -9);
 * flushed to the device (survives a power cut); on more than one machine.
 */
export type Durability = Exclude<keyof typeof ProtoDurability, "UNSPECIFIED">;

/** Which records a reader sees. */
export type Visibility = Exclude<keyof typeof ProtoVisibility, "UNSPECIFIED">;

/** Options of every call. */
export interface CallOptions {
  /** Deadline over all attempts, in milliseconds. Default: the client's. */
  timeoutMs?: number;
  /** Gives the call up. */
  signal?: AbortSignal;
}

/** A record with more than data. */
export interface NewRecord {
  /** The payload; text becomes UTF-8. */
  data: string | Uint8Array;
  /** Facts in addition to the payload, in order. */
  headers?: Iterable<readonly [key: string, value: string | Uint8Array]>;
  /** The record's time, in microseconds since the Unix epoch, UTC. Default: the server's clock. */
  timestampUs?: bigint;
  /** The record's time in whole milliseconds, instead of `timestampUs`. Never 1970-01-01T00:00:00Z, which means the server's clock. */
  time?: Date;
  /** CRC-32C of the payload: the server verifies it, stores it, and returns it to readers. */
  crc32c?: number;
}

/** A record to append: text, bytes, or more. */
export type RecordInput = string | Uint8Array | NewRecord;

/** Identifies the producer and the sequence number of a batch. */
export interface ProducerCondition {
  id: string;
  epoch: bigint;
  sequence: bigint;
}

/** Conditions of an append. */
export interface Condition {
  /**
   * The lsn that the first record must get. With it a repeat cannot append twice, so the
   * client repeats automatically.
   */
  expectedLsn?: bigint;
  /** The log must exist. */
  mustExist?: boolean;
  /** The log must not exist. */
  mustNotExist?: boolean;
  /** Equals the log's writer epoch; required once the log was fenced. */
  writerEpoch?: bigint;
  /** Makes retries exactly-once. {@link Producer} does that for you. */
  producer?: ProducerCondition;
  /** The log must have this number. */
  logId?: bigint;
}

/** Records for one log, and their conditions. */
export interface LogBatch extends Condition {
  log: string;
  records: readonly RecordInput[];
}

/** A condition on a log that is not written. */
export interface LogCheck {
  log: string;
  expectedLsn?: bigint;
  mustExist?: boolean;
  mustNotExist?: boolean;
  logId?: bigint;
}

/** A wish to move a cursor. */
export interface CursorMove {
  log: string;
  cursor: string;
  /** The next lsn to read. */
  lsn: bigint;
  /** The position that the cursor must have now; 0 also matches one that does not exist yet. */
  expectedLsn?: bigint;
  /** The log must have this number. */
  logId?: bigint;
}

/** An append to one or more logs, all or nothing. */
export interface BatchInput {
  /** The records; each log at most once. */
  batches?: readonly LogBatch[];
  /** Conditions on logs that are not written. */
  checks?: readonly LogCheck[];
  /** Cursors to move in the same step. */
  cursors?: readonly CursorMove[];
  /**
   * Durability that the records must reach before the answer. Default: set by the logs' sync
   * modes.
   */
  durability?: Durability;
}

/**
 * A result that `JSON.stringify` takes. Numbers of 64 bits become strings, because a number of JSON loses digits above 2^53;
 * bytes become base64. Copies, such as `{ ...ack }`, do not have this method.
 */
export interface JsonSafe {
  toJSON?(): object;
}

/** The record is appended. */
export interface Ack extends JsonSafe {
  lsn: bigint;
  timestampUs: bigint;
  /** Every lsn of the log below it is flushed to the device. */
  durableLsn: bigint | undefined;
  /** Every lsn of the log below it is in the bucket of a replica; undefined without a replica. */
  replicatedLsn: bigint | undefined;
  /** The durability reached. */
  durability: Durability;
  /** A repeat of an append that was applied before. */
  deduplicated: boolean;
  /** The record's position in the journal; undefined while it is in the daemon's memory only.
   * */
  position: bigint | undefined;
  recoveryEpoch: bigint;
  logId: bigint;
}

/** The result of one log's batch. */
export interface LogAck extends JsonSafe {
  log: string;
  firstLsn: bigint;
  nextLsn: bigint;
  timestampUs: bigint;
  durableLsn: bigint | undefined;
  replicatedLsn: bigint | undefined;
  deduplicated: boolean;
  logId: bigint;
}

/** Everything in the request is applied. */
export interface BatchAck extends JsonSafe {
  /** The result of each log, in the order of the request. */
  appends: LogAck[];
  durability: Durability;
  position: bigint | undefined;
  recoveryEpoch: bigint;
}

/** A record that was read. */
export class StoredRecord {
  constructor(
    /** Its number in the log. */
    readonly lsn: bigint,
    /** Its time, in microseconds since the Unix epoch, UTC; never goes back within a log. */
    readonly timestampUs: bigint,
    /** The payload. */
    readonly data: Uint8Array,
    /** Facts in addition to the payload, in order. */
    readonly headers: readonly { key: string; value: Uint8Array }[],
    /** CRC-32C of the payload, if its writer gave it. */
    readonly crc32c: number | undefined,
  ) {}

  /** The payload as UTF-8. */
  text(): string {
    return new TextDecoder().decode(this.data);
  }

  /** The record's time. A Date has milliseconds, so microseconds are lost; `timestampUs` has them. */
  time(): Date {
    return dateOf(this.timestampUs);
  }

  /** For `JSON.stringify`; see {@link JsonSafe}. */
  toJSON(): object {
    return jsonOf({ ...this }) as object;
  }
}

/** Consecutive records of one log. */
export interface Batch extends JsonSafe {
  log: string;
  logId: bigint;
  records: StoredRecord[];
}

/** A page of one log. */
export interface Page extends JsonSafe {
  records: StoredRecord[];
  /** The lsn to read next. */
  nextLsn: bigint;
  tailLsn: bigint;
  durableLsn: bigint | undefined;
  /** Every lsn of the log below it is in the bucket of a replica; undefined without a replica. */
  replicatedLsn: bigint | undefined;
  firstLsn: bigint | undefined;
  recoveryEpoch: bigint;
}

/** State of a log. */
export interface Tail extends JsonSafe {
  firstLsn: bigint;
  /** The next lsn, at the requested visibility. */
  tailLsn: bigint;
  durableLsn: bigint;
  /** Every lsn of the log below it is in the bucket of a replica; undefined without a replica. */
  replicatedLsn: bigint | undefined;
  /** 0 until the first fence. */
  writerEpoch: bigint;
  recoveryEpoch: bigint;
  logId: bigint;
  /**
   * End of the survivors of the requested recovery epoch: an append acked in it survived if
   * and only if its position is below this.
   */
  survivedPosition: bigint | undefined;
}

/** Begin of a read or a scan; at most one. None: the first record kept. */
export interface Start {
  /** At this lsn. */
  lsn?: bigint;
  /** At the first record with this time or a later one, in microseconds since the Unix epoch. */
  timestampUs?: bigint;
  /** At the first record with this time or a later one, in whole milliseconds. */
  time?: Date;
  /** This number of records before the tail. */
  last?: number | bigint;
}

type Init<S extends Parameters<typeof import("@bufbuild/protobuf").create>[0]> = MessageInitShape<S>;

/** A record in the contract's form. */
export type RecordInit = Init<typeof RecordSchema>;

export function protoRecord(input: RecordInput): RecordInit {
  if (typeof input === "string" || input instanceof Uint8Array) {
    return { payload: { case: "data", value: bytes(input) } };
  }
  return {
    payload: { case: "data", value: bytes(input.data) },
    headers: [...(input.headers ?? [])].map(([key, value]) => ({ key, value: bytes(value) })),
    timestampUs: recordTime(input),
    ...(input.crc32c !== undefined && { crc32c: input.crc32c }),
  };
}

export function protoCondition(condition: Condition): Init<typeof AppendConditionSchema> {
  const { expectedLsn, mustExist, mustNotExist, writerEpoch, producer, logId } = condition;
  return {
    mustExist: mustExist ?? false,
    mustNotExist: mustNotExist ?? false,
    ...(expectedLsn !== undefined && { expectedLsn }),
    ...(writerEpoch !== undefined && { writerEpoch }),
    ...(producer !== undefined && { producer }),
    ...(logId !== undefined && { logId }),
  };
}

export function protoBatch(input: BatchInput): Init<typeof AppendBatchRequestSchema> {
  return {
    batches: (input.batches ?? []).map((batch) => ({
      log: batch.log,
      records: batch.records.map(protoRecord),
      condition: protoCondition(batch),
    })),
    checks: (input.checks ?? []).map((check) => ({ ...check })),
    cursors: (input.cursors ?? []).map((cursor) => ({ ...cursor })),
    durability: protoDurability(input.durability),
  };
}

export function protoDurability(durability: Durability | undefined): ProtoDurability {
  return ProtoDurability[durability ?? "UNSPECIFIED"];
}

export function protoVisibility(visibility: Visibility | undefined): ProtoVisibility {
  return ProtoVisibility[visibility ?? "UNSPECIFIED"];
}

export function protoStart(start: Start) {
  const { lsn, time, last } = start;
  if ([lsn, start.timestampUs, time, last].filter((place) => place !== undefined).length > 1) {
    throw usageError("at most one of lsn, timestampUs, time and last");
  }
  const timestampUs = time === undefined ? start.timestampUs : microsecondsOf(time);
  if (lsn !== undefined) {
    return { case: "lsn" as const, value: lsn };
  }
  if (timestampUs !== undefined) {
    return { case: "timestampUs" as const, value: timestampUs };
  }
  if (last !== undefined) {
    return { case: "tailOffset" as const, value: BigInt(last) };
  }
  return { case: undefined };
}

/** Whether an append with this condition cannot be applied twice. */
export function guards(condition: Condition): boolean {
  const { expectedLsn, mustNotExist, producer } = condition;
  return expectedLsn !== undefined || mustNotExist === true || producer !== undefined;
}

/** All or nothing: if one log's records cannot be applied twice, no log's records can. */
export function batchGuards(input: BatchInput): boolean {
  return (
    (input.batches ?? []).some(guards) ||
    (input.cursors ?? []).some(({ lsn, expectedLsn }) => expectedLsn !== undefined && expectedLsn !== lsn)
  );
}

/** Approximate bytes that a request takes in memory in addition to its content. */
const OVERHEAD_BYTES = 64;

/**
 * A copy of a message, and the approximate bytes that it takes in memory. connect encodes a message later: the caller could
 * have changed its buffers by then, and a value that fits no field would end the stream of all other requests.
 *
 * @throws WaldError of kind USAGE if a value fits no field.
 */
export function owned<S extends DescMessage>(schema: S, init: MessageInitShape<S>): { message: MessageShape<S>; bytes: number } {
  try {
    const encoded = toBinary(schema, create(schema, init));
    return { message: fromBinary(schema, encoded), bytes: encoded.length + OVERHEAD_BYTES };
  } catch (thrown) {
    throw usageError(thrown instanceof Error ? thrown.message : String(thrown));
  }
}

export function batchAck(answer: AppendBatchResponse): BatchAck {
  return jsonSafe({
    appends: answer.appends.map((append) => jsonSafe({
      log: append.log,
      firstLsn: append.firstLsn ?? missing("WRITE", "LogAppend.first_lsn"),
      nextLsn: append.nextLsn ?? missing("WRITE", "LogAppend.next_lsn"),
      timestampUs: append.timestampUs,
      durableLsn: append.durableLsn,
      replicatedLsn: append.replicatedLsn,
      deduplicated: append.deduplicated,
      logId: append.logId,
    })),
    durability: durability(answer.durability),
    position: answer.position,
    recoveryEpoch: answer.recoveryEpoch,
  });
}

export function durability(reached: ProtoDurability): Durability {
  // An answer never holds UNSPECIFIED.
  return ProtoDurability[reached] as Durability;
}

export function storedBatch(batch: RecordBatch): Batch {
  const first = batch.firstLsn ?? (batch.records.length === 0 ? 0n : missing("READ", "RecordBatch.first_lsn"));
  return jsonSafe({
    log: batch.log,
    logId: batch.logId,
    records: batch.records.map((record, index) =>
      storedRecord(record, first + BigInt(index), batch.timestampUs),
    ),
  });
}

function storedRecord(record: ProtoRecord, lsn: bigint, batchTimestampUs: bigint): StoredRecord {
  const { payload, headers, timestampUs, crc32c } = record;
  return new StoredRecord(
    lsn,
    timestampUs === 0n ? batchTimestampUs : timestampUs,
    payload.case === undefined ? new Uint8Array() : bytes(payload.value),
    headers.map(({ key, value }) => ({ key, value })),
    crc32c,
  );
}

/** The time of these microseconds since the Unix epoch, rounded down to the milliseconds of a Date. */
export function dateOf(timestampUs: bigint): Date {
  const rest = ((timestampUs % 1000n) + 1000n) % 1000n;
  return new Date(Number((timestampUs - rest) / 1000n));
}

/**
 * The microseconds from the Unix epoch to a time.
 *
 * @throws WaldError of kind USAGE if the Date is invalid.
 */
export function microsecondsOf(time: Date): bigint {
  const milliseconds = time.getTime();
  if (Number.isNaN(milliseconds)) {
    throw usageError("the time is an invalid Date");
  }
  return BigInt(milliseconds) * 1000n;
}

function recordTime({ timestampUs, time }: NewRecord): bigint {
  if (time === undefined) {
    return timestampUs ?? 0n;
  }
  if (timestampUs !== undefined) {
    throw usageError("a record has at most one of timestampUs and time");
  }
  const given = microsecondsOf(time);
  if (given === 0n) {
    throw usageError("a record cannot have the time 1970-01-01T00:00:00Z: 0 asks for the server's clock");
  }
  return given;
}

/** Gives a result the method `toJSON`. It is not enumerable, so that the result has the members of its interface. */
export function jsonSafe<T extends object>(result: T): T & JsonSafe {
  return Object.defineProperty(result, "toJSON", { value: () => jsonOf({ ...result }) });
}

/** A value that JSON has: bigint as text, bytes as base64. */
function jsonOf(value: unknown): unknown {
  if (typeof value === "bigint") {
    return value.toString();
  }
  if (value instanceof Uint8Array) {
    return Buffer.from(value.buffer, value.byteOffset, value.byteLength).toString("base64");
  }
  if (Array.isArray(value)) {
    return value.map(jsonOf);
  }
  if (typeof value !== "object" || value === null) {
    return value;
  }
  const own = value instanceof StoredRecord ? { ...value } : value;
  return Object.fromEntries(Object.entries(own).map(([name, member]) => [name, jsonOf(member)]));
}

export function missing(access: "READ" | "WRITE", field: string): never {
  throw contractError(access, field);
}

function bytes(data: string | Uint8Array): Uint8Array {
  return typeof data === "string" ? new TextEncoder().encode(data) : data;
}

/** Client of Wald, write-ahead logs as a service. */
export {
  Client,
  type AppendOptions,
  type ClientOptions,
  type LogConfigInput,
  type ReadOptions,
  type Stubs,
} from "./client.js";
export { DurableFollower, type DurableFollowerOptions } from "./durable-follower.js";
export { DurableProducer, type DurableProducerOptions } from "./durable-producer.js";
export { DEFAULT_ENDPOINT } from "./endpoint.js";
export { WaldError, type FailedCheck, type FailureKind, type Outcome, type ReasonName, type Retry } from "./errors.js";
export type { Cursor } from "./gen/wald/v1/cursor_pb.js";
export type { Log, LogConfig, LogProducer } from "./gen/wald/v1/log_pb.js";
export { FollowerStateSchema, ProducerStateSchema, StateKind, type FollowerState, type ProducerState } from "./gen/wald/v1/state_pb.js";
export { Compression, SyncMode } from "./gen/wald/v1/types_pb.js";
export {
  dateOf,
  microsecondsOf,
  StoredRecord,
  type Ack,
  type Batch,
  type BatchAck,
  type BatchInput,
  type CallOptions,
  type Condition,
  type CursorMove,
  type Durability,
  type JsonSafe,
  type LogAck,
  type LogBatch,
  type LogCheck,
  type NewRecord,
  type Page,
  type ProducerCondition,
  type RecordInput,
  type Start,
  type Tail,
  type Visibility,
} from "./messages.js";
export { Producer, PRODUCER_DEFAULTS, type ProduceOptions, type ProducerAck, type ProducerOptions } from "./producer.js";
export { DEFAULT_RETRY, DEFAULT_TIMEOUT_MS, type RetryPolicy } from "./retry.js";
export { Follower, type Gap, type GapReason, type ScanEvent, type ScanOptions, type Selector } from "./scan.js";
export { FileState, type State } from "./state.js";
export type { TlsFailure, TlsOptions } from "./tls.js";
export type { TokenOptions } from "./token.js";
export { Session, type Sent, type SessionOptions } from "./session.js";

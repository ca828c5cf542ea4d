package dev.wald;

/** The place at which a call failed. */
public enum FailureKind {
  /** The server answered with an error. */
  SERVER,
  /** There was no connection, or it ended before the call went out on it. */
  NOT_SENT,
  /** The connection broke underway. */
  CONNECTION_LOST,
  /** The deadline passed. */
  TIMEOUT,
  /** The caller gave the call up: its thread was interrupted, or a scope of gRPC was cancelled. */
  CANCELLED,
  /** The client, session, producer or scan was closed. */
  CLOSED,
  /** Something between client and server answered, or the server is not Wald. */
  FOREIGN,
  /** The answer lacks a field that the contract promises. */
  CONTRACT,
  /** There is no TLS connection, or the server wants one; {@link WaldException#tlsFailure()} has the reason. */
  TLS,
  /** The token cannot be used, or must not be sent over plaintext. */
  TOKEN,
  /** The state of a durable producer or follower cannot be read, belongs to another log, or cannot be saved. */
  STATE,
  /** A durable follower has reached a gap; {@link WaldException#gap()} names the missing records. */
  MISSING,
  /** The call itself was wrong; nothing was sent. */
  USAGE,
  /** An earlier batch of the same session or producer failed. */
  EARLIER_FAILED
}

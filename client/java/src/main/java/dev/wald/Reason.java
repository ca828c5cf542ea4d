package dev.wald;

import java.util.Map;
import java.util.function.Function;
import java.util.stream.Collectors;
import java.util.stream.Stream;

/**
 * The server's reason for an error. The contract ({@code wald/v1/errors.proto}) has the facts and the remedy of each reason.
 */
public enum Reason {
  /** The server did not answer, or it is not Wald. */
  NONE,
  /** A newer server sent a reason that this package does not name; {@link WaldException#reasonText()} has it. */
  OTHER,
  /** The tail of the log, or the cursor, is not at the expected lsn. */
  POSITION_MISMATCH,
  /** The condition {@code must_exist} fails: the log does not exist. */
  LOG_MISSING,
  /** The log exists already. */
  LOG_EXISTS,
  /** The name belongs to another log than the given {@code log_id}, or to none. */
  LOG_REPLACED,
  /** A newer writer has taken over, or the append names no writer epoch. */
  FENCED,
  /** The producer left out a sequence number. */
  PRODUCER_GAP,
  /** A higher epoch of the producer has appended. */
  PRODUCER_FENCED,
  /**
   * The batch is too old to check for duplicates (fact {@code oldest}), or the log does not know the producer
   * (fact {@code first_epoch}). Nothing was appended now; the batch may have been appended before.
   */
  PRODUCER_EXPIRED,
  /** The producer used the sequence number before, with other content. */
  PRODUCER_CONFLICT,
  /** An earlier request of the session failed. */
  SESSION_ENDED,
  /**
   * The log was to be shredded, and its records are or were under a key of other logs, or plain. Nothing was deleted.
   */
  NO_OWN_KEY,
  /**
   * The name of the log is empty, longer than 255 bytes, reserved, or has control characters. A new name may have
   * no invisible characters either.
   */
  INVALID_LOG_NAME,
  /** The id of the producer breaks the rules of log names, or only some batches of the request name a producer. */
  INVALID_PRODUCER,
  /** The name of the cursor breaks the rules of log names. */
  INVALID_CURSOR_NAME,
  /** A batch has no records. */
  EMPTY_BATCH,
  /** A log appears twice in one request. */
  DUPLICATE_LOG,
  /** A cursor appears twice in one request. */
  DUPLICATE_CURSOR,
  /** The data or the headers of a record exceed a limit. */
  RECORD_TOO_LARGE,
  /** The request exceeds the limit of bytes, records, checks or cursors. */
  REQUEST_TOO_LARGE,
  /** The request breaks the framing of gRPC, or cannot be decoded. */
  MALFORMED_REQUEST,
  /** The data that arrived does not have the given CRC-32C. */
  CHECKSUM_MISMATCH,
  /** The time of a record is too far ahead of the server's clock. */
  TIMESTAMP_IN_FUTURE,
  /** The epoch of a writer or a producer is more than 2^32 above the current one. */
  EPOCH_JUMP,
  /** Selector, start and bounds of a scan do not fit together, or the cursor belongs to another scan. */
  INVALID_SCAN,
  /** The page token does not belong to this list. */
  INVALID_PAGE_TOKEN,
  /** The update mask names a path that LogConfig does not have. */
  INVALID_UPDATE_MASK,
  /** A value of a log's configuration is outside the bounds of the contract or of the server. */
  INVALID_LOG_CONFIG,
  /** This version has not built the field, value or method. */
  NOT_SUPPORTED,
  /** The log does not exist, and the request does not create it. */
  LOG_NOT_FOUND,
  /** The log has no cursor of this name. */
  CURSOR_NOT_FOUND,
  /** The log does not know the producer. */
  PRODUCER_NOT_FOUND,
  /** The segment does not exist, or a sorted run has replaced it (fact {@code run_id}). */
  SEGMENT_NOT_FOUND,
  /** The lsn is below the first record kept. */
  TRIMMED,
  /** The lsn is above the tail. */
  BEYOND_TAIL,
  /**
   * Damage. A read: these records are damaged. An append: the tail of the log cannot be proven. A backup: a file
   * is damaged (fact {@code path}).
   */
  QUARANTINED,
  /** The records are encrypted, and the key ring of the server lacks their key, or they were changed. */
  KEY_MISSING,
  /**
   * A memory budget, {@code max_calls} or the file descriptors are in use, or four verifications or four backups run
   * already. Or 2,048 calls that need no credential are open, such as streams of health. Or the caller of a stream has
   * another tenant since a reload: a new stream continues. Or a replica is too far behind.
   */
  BUSY,
  /**
   * The log or the store has reached a limit of logs, producers, cursors or names. Or a tenant has reached a limit
   * of logs, producers, cursors, stored bytes, followers or connections: then {@code tenant} names it, and {@code
   * setting} is the key of its limits.
   */
  QUOTA,
  /**
   * The tenant of the caller has used up a rate of its {@code limits}. RetryInfo has the exact wait. Scans wait
   * instead, and so do sessions whose requests are not independent.
   */
  RATE,
  /** The data directory has no space for another segment. Reads, trims and deletions continue. */
  DISK_FULL,
  /** The server recovers its store, or has no keys of the issuer of a JWT yet. */
  STARTING,
  /** The server shuts down. */
  DRAINING,
  /** The audit log cannot be written, and {@code audit_on_failure} is refuse. Appends, reads and cursors still work. */
  AUDIT_FAILED,
  /** A write or flush of the journal failed. Appends need a restart. */
  JOURNAL_FAILED,
  /**
   * The replica was lost while the request was in flight: another node took over, or the bucket became
   * unreachable. The request is durable on this node, and may or may not be replicated.
   */
  REPLICATION_UNKNOWN,
  /** Another node owns the store. */
  MOVED,
  /** The bucket of the replica is unreachable, so nothing can be REPLICATED. */
  BUCKET_DOWN,
  /** A read of the disk failed. Writes never get this reason. */
  READ_FAILED,
  /** The request did not arrive within 10 s and 1 s for each 64 KiB, or the client of a backup read too slowly. */
  REQUEST_TOO_SLOW,
  /** The deadline of the call passed. */
  DEADLINE_EXCEEDED,
  /**
   * The server requires a credential, and the call has none: no client certificate with a principal and no
   * metadata {@code authorization: Bearer TOKEN}.
   */
  NO_CREDENTIAL,
  /**
   * The server does not know the credential: it is malformed, wrong or revoked. Or the call has a token and a
   * client certificate, and the certificate is not of the token's principal.
   */
  BAD_CREDENTIAL,
  /** The credential was valid until {@code expire_time}. */
  CREDENTIAL_EXPIRED,
  /** The principal of the caller lacks a right on a log, or a right to operate the server. */
  NOT_ALLOWED;

  private static final Map<String, Reason> KNOWN =
      Stream.of(values()).filter(reason -> reason != NONE && reason != OTHER).collect(Collectors.toMap(Reason::name, Function.identity()));

  /** The reason with this text; {@link #OTHER} if this package does not name it. */
  static Reason of(String text) {
    return text.isEmpty() ? NONE : KNOWN.getOrDefault(text, OTHER);
  }
}

package dev.wald;

import io.grpc.Status;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalLong;

/**
 * Why a call failed, and the fate of the data.
 *
 * <pre>{@code
 * try {
 *   client.append("orders", NewRecord.of("mine"), AppendOptions.DEFAULT.expectLsn(7));
 * } catch (WaldException failure) {
 *   if (failure.reason() != Reason.POSITION_MISMATCH) {
 *     throw failure;
 *   }
 * }
 * }</pre>
 */
public final class WaldException extends RuntimeException {
  private static final long serialVersionUID = 1L;

  private final Failure failure;

  WaldException(Failure failure, Throwable cause) {
    super(failure.text(), cause);
    this.failure = failure;
  }

  /** The place at which the call failed. */
  public FailureKind kind() {
    return failure.kind;
  }

  /** The status code of gRPC; of failures that never left this process, the one that fits. */
  public Status.Code code() {
    return failure.code;
  }

  /** The server's reason. */
  public Reason reason() {
    return failure.reason;
  }

  /** The reason as the server spells it, also if this package does not name it. Empty: the server did not answer, or is not Wald. */
  public String reasonText() {
    return failure.reasonText;
  }

  /** The text of the server or the transport, for people. */
  public String detail() {
    return failure.message;
  }

  /**
   * Whether a write was applied. A read has nothing to apply: {@link Outcome#NOT_APPLIED}.
   *
   * <p>If an earlier attempt of the same call may have been applied, the outcome is unknown even if the last attempt was
   * refused: a POSITION_MISMATCH after a lost connection can be the echo of one's own success.
   */
  public Outcome outcome() {
    return failure.outcome;
  }

  /** Whether the same request may be sent again. */
  public Retry retry() {
    return failure.retry;
  }

  /** Every fact that the server gave, by name, such as {@code first_lsn}. */
  public Map<String, String> facts() {
    return failure.facts;
  }

  /** One fact that is a number, such as {@code first_lsn}; unsigned. */
  public OptionalLong number(String fact) {
    return failure.number(fact);
  }

  /** All checks that failed, if the request had conditions. */
  public List<FailedCheck> failedChecks() {
    return failure.failedChecks;
  }

  /** The time that the server asks to wait before the next attempt. */
  public Optional<Duration> retryAfter() {
    return Optional.of(failure.retryAfter).filter(pause -> !pause.isZero());
  }

  /** Why there is no TLS connection; empty for other failures. */
  public Optional<TlsFailure> tlsFailure() {
    return Optional.ofNullable(failure.tls);
  }

  /** The server that answered, or was not reached: HOST:PORT. Empty: the client knows only one. */
  public Optional<String> server() {
    return Optional.ofNullable(failure.server);
  }

  /** Records that are missing, if a durable follower has reached a gap. */
  public Optional<Gap> gap() {
    return Optional.ofNullable(failure.gap);
  }

  /** The failure, for this package. */
  Failure failure() {
    return failure;
  }
}

package dev.wald;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import com.google.rpc.PreconditionFailure;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.io.IOException;
import java.io.Serializable;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;

/**
 * A failure of one attempt or of a whole call. It becomes a {@link WaldException} where the caller sees it.
 *
 * <p>Failures have three sources. An answer of Wald carries ErrorInfo, and its facts are believed. A status without it comes
 * from a proxy or the transport, and does not report the server's work. Other failures never left this process.
 */
final class Failure implements Serializable {
  private static final long serialVersionUID = 1L;

  /** The domain of ErrorInfo that is believed. */
  private static final String DOMAIN = "wald.dev";

  FailureKind kind;
  Status.Code code;
  Reason reason = Reason.NONE;
  String reasonText = "";
  String message;
  Outcome outcome;
  Retry retry;
  Map<String, String> facts = Map.of();
  List<FailedCheck> failedChecks = List.of();
  Duration retryAfter = Duration.ZERO;
  /** Null: another failure. */
  TlsFailure tls;
  /** Null: the client knows only one server. */
  String server;
  /** Null: another failure. */
  Gap gap;
  /** Null: there is none. */
  Throwable cause;

  Failure(FailureKind kind, Status.Code code, String message, Outcome outcome, Retry retry) {
    this.kind = kind;
    this.code = code;
    this.message = message;
    this.outcome = outcome;
    this.retry = retry;
  }

  Failure copy() {
    Failure copy = new Failure(kind, code, message, outcome, retry);
    copy.reason = reason;
    copy.reasonText = reasonText;
    copy.facts = facts;
    copy.failedChecks = failedChecks;
    copy.retryAfter = retryAfter;
    copy.tls = tls;
    copy.server = server;
    copy.gap = gap;
    copy.cause = cause;
    return copy;
  }

  WaldException exception() {
    return new WaldException(this, cause);
  }

  /** The failure for people, with the outcome if it is unknown. */
  String text() {
    String name = reasonText.isEmpty() ? code.name() : reasonText;
    String text = (server == null ? "" : server + ": ") + name + ": " + message;
    return outcome == Outcome.UNKNOWN ? text + " (it may have been applied)" : text;
  }

  OptionalLong number(String fact) {
    String text = facts.get(fact);
    try {
      return text == null ? OptionalLong.empty() : OptionalLong.of(Long.parseUnsignedLong(text));
    } catch (NumberFormatException noNumber) {
      return OptionalLong.empty();
    }
  }

  /** The failure of a call whose earlier attempt may have been applied. */
  Failure afterUnknown() {
    Failure changed = copy();
    changed.outcome = Outcome.UNKNOWN;
    if (changed.retry == Retry.SAFE) {
      changed.retry = Retry.SAFE_WITH_CONDITION;
    }
    return changed;
  }

  /** The failure of a call that writes nothing, so that there is nothing to be unsure of. */
  Failure ofRead() {
    Failure changed = copy();
    changed.outcome = Outcome.NOT_APPLIED;
    return changed;
  }

  /** Reads the status of an attempt. {@code sent}: the request left this process. {@code givenUp}: this side ended the call. */
  static Failure of(Status status, Metadata trailers, boolean sent, boolean givenUp) {
    String message = status.getDescription() == null ? "" : status.getDescription();
    Failure failure = new Failure(FailureKind.SERVER, status.getCode(), message, Outcome.UNKNOWN, Retry.NEVER);
    failure.cause = status.getCause();
    ErrorInfo info = null;
    List<FailedCheck> checks = new ArrayList<>();
    for (Any detail : details(status, trailers)) {
      try {
        if (detail.is(ErrorInfo.class)) {
          ErrorInfo given = detail.unpack(ErrorInfo.class);
          info = given.getDomain().equals(DOMAIN) ? given : info;
        } else if (detail.is(RetryInfo.class)) {
          com.google.protobuf.Duration delay = detail.unpack(RetryInfo.class).getRetryDelay();
          failure.retryAfter = Duration.ofSeconds(delay.getSeconds(), delay.getNanos());
        } else if (detail.is(PreconditionFailure.class)) {
          for (PreconditionFailure.Violation violation : detail.unpack(PreconditionFailure.class).getViolationsList()) {
            String type = violation.getType();
            checks.add(new FailedCheck(Reason.of(type), type, violation.getSubject(), violation.getDescription()));
          }
        }
      } catch (InvalidProtocolBufferException damaged) {
        // Details that cannot be read are not there.
        continue;
      }
    }
    if (info == null) {
      failure.retryAfter = Duration.ZERO;
      return foreign(failure, sent, givenUp);
    }
    failure.failedChecks = List.copyOf(checks);
    failure.reasonText = info.getReason();
    failure.reason = Reason.of(info.getReason());
    failure.facts = Map.copyOf(info.getMetadataMap());
    failure.outcome = statedOutcome(failure);
    failure.retry = statedRetry(failure);
    return failure;
  }

  private static List<Any> details(Status status, Metadata trailers) {
    if (trailers == null) {
      return List.of();
    }
    com.google.rpc.Status answer;
    try {
      answer = StatusProto.fromStatusAndTrailers(status, trailers);
    } catch (IllegalArgumentException damaged) {
      return List.of();
    }
    return answer == null ? List.of() : answer.getDetailsList();
  }

  /** The outcome that Wald's error states. */
  private static Outcome statedOutcome(Failure failure) {
    String outcome = failure.facts.getOrDefault("outcome", "");
    // UNAVAILABLE of the server is its promise, whatever the facts say.
    boolean promised = outcome.isEmpty() && failure.code == Status.Code.UNAVAILABLE;
    return promised || outcome.equals(Outcome.NOT_APPLIED.name()) ? Outcome.NOT_APPLIED : Outcome.UNKNOWN;
  }

  /** The retry that Wald's error states. */
  private static Retry statedRetry(Failure failure) {
    String retry = failure.facts.getOrDefault("retry", "");
    if (retry.equals(Retry.SAFE.name())) {
      return Retry.SAFE;
    }
    if (retry.equals(Retry.SAFE_WITH_CONDITION.name())) {
      return Retry.SAFE_WITH_CONDITION;
    }
    // Errors of reads do not say; these two pass by themselves.
    boolean passes = failure.code == Status.Code.UNAVAILABLE || failure.code == Status.Code.RESOURCE_EXHAUSTED;
    return retry.isEmpty() && passes ? Retry.SAFE : Retry.NEVER;
  }

  /** Completes a failure that is not Wald's. */
  private static Failure foreign(Failure failure, boolean sent, boolean givenUp) {
    // The transport on the other side calls its timer's end CANCELLED.
    boolean late = failure.code == Status.Code.DEADLINE_EXCEEDED
        || failure.code == Status.Code.CANCELLED && failure.message.equals("Timeout expired");
    if (late) {
      return deadlineExceeded(sent);
    }
    if (givenUp) {
      return givenUp(sent);
    }
    failure.kind = FailureKind.FOREIGN;
    if (failure.code == Status.Code.UNIMPLEMENTED) {
      // The method was not even found.
      failure.outcome = Outcome.NOT_APPLIED;
      return failure;
    }
    if (failure.code == Status.Code.UNAVAILABLE || isBrokenStream(failure)) {
      Failure lost = lost(reasonOf(failure), sent);
      lost.cause = failure.cause;
      return lost;
    }
    failure.outcome = sent ? Outcome.UNKNOWN : Outcome.NOT_APPLIED;
    return failure;
  }

  /** gRPC keeps the system's own words in the cause. */
  private static String reasonOf(Failure failure) {
    String said = failure.cause == null ? null : failure.cause.getMessage();
    return said == null || failure.message.contains(said) ? failure.message : failure.message + ": " + said;
  }

  /** Whether the transport on this side made the status, of a stream that ended without one. */
  private static boolean isBrokenStream(Failure failure) {
    return switch (failure.code) {
      case CANCELLED, INTERNAL, UNKNOWN -> isOfTransport(failure.cause)
          || failure.message.contains("Received Rst Stream")
          || failure.message.startsWith("Received unexpected EOS")
          || failure.message.startsWith("Encountered end-of-stream mid-frame");
      default -> false;
    };
  }

  /** Whether a connection failed. Only a status of this side has a cause. */
  private static boolean isOfTransport(Throwable reason) {
    for (Throwable cause = reason; cause != null; cause = cause.getCause()) {
      // The transport's classes are not public.
      if (cause instanceof IOException || cause.getClass().getSimpleName().contains("Http2Exception")) {
        return true;
      }
    }
    return false;
  }

  /** The failure of a connection that could not be made, or broke. */
  static Failure lost(String detail, boolean sent) {
    return sent
        ? new Failure(FailureKind.CONNECTION_LOST, Status.Code.UNAVAILABLE, "the connection was lost: " + detail,
            Outcome.UNKNOWN, Retry.SAFE_WITH_CONDITION)
        : new Failure(FailureKind.NOT_SENT, Status.Code.UNAVAILABLE, "not sent: " + detail, Outcome.NOT_APPLIED, Retry.SAFE);
  }

  static Failure deadlineExceeded(boolean sent) {
    return new Failure(FailureKind.TIMEOUT, Status.Code.DEADLINE_EXCEEDED, "no answer before the deadline",
        sent ? Outcome.UNKNOWN : Outcome.NOT_APPLIED, sent ? Retry.SAFE_WITH_CONDITION : Retry.SAFE);
  }

  /** The failure of a call that its caller gave up. */
  static Failure givenUp(boolean sent) {
    return new Failure(FailureKind.CANCELLED, Status.Code.CANCELLED, "given up by the caller",
        sent ? Outcome.UNKNOWN : Outcome.NOT_APPLIED, sent ? Retry.SAFE_WITH_CONDITION : Retry.SAFE);
  }

  /** The failure of a call on something that its owner has closed. */
  static Failure closed(String what) {
    return new Failure(FailureKind.CLOSED, Status.Code.CANCELLED, what + " is closed", Outcome.NOT_APPLIED, Retry.NEVER);
  }

  /** The failure of a request that this package refuses to send. */
  static Failure invalid(String message) {
    return new Failure(FailureKind.USAGE, Status.Code.INVALID_ARGUMENT, message, Outcome.NOT_APPLIED, Retry.NEVER);
  }

  /** The failure of a token that cannot be used or must not be sent. */
  static Failure badToken(String message) {
    return new Failure(FailureKind.TOKEN, Status.Code.INVALID_ARGUMENT, message, Outcome.NOT_APPLIED, Retry.NEVER);
  }

  /** The failure of an answer that lacks a field that the contract promises. */
  static Failure brokenContract(String field) {
    return new Failure(FailureKind.CONTRACT, Status.Code.INTERNAL, "the answer breaks the contract: " + field + " is missing",
        Outcome.UNKNOWN, Retry.NEVER);
  }

  /** The failure of a request that was not applied because one before it failed. */
  static Failure earlier(Failure first, boolean sent) {
    boolean unknown = sent && first.outcome == Outcome.UNKNOWN;
    Failure failure = new Failure(FailureKind.EARLIER_FAILED, first.code,
        (unknown ? "" : "not applied, because ") + "an earlier request failed: " + first.message,
        unknown ? Outcome.UNKNOWN : Outcome.NOT_APPLIED, unknown ? Retry.SAFE_WITH_CONDITION : Retry.SAFE);
    failure.server = first.server;
    return failure;
  }

  /** The failure of one of the requests that were not acked when the stream failed. {@code failing}: the request that the status names. */
  static Failure ofRequest(Failure first, OptionalLong failing, long id, boolean isFirst, boolean sent) {
    if (first.reason == Reason.NONE && sent) {
      // The connection broke, or something in between answered: nothing is said about any.
      return first;
    }
    if (failing.isPresent() && id == failing.getAsLong()) {
      return first;
    }
    if (failing.isPresent() && id < failing.getAsLong()) {
      // Acks come before the failure: one that is missing was due and is lost.
      return lost("no ack came before a later request failed", true);
    }
    return failing.isEmpty() && isFirst && sent ? first : earlier(first, sent);
  }

  /** The request of a stream that the failing status names, if it does. */
  OptionalLong failingRequest() {
    return reason == Reason.NONE ? OptionalLong.empty() : number("request_id");
  }
}

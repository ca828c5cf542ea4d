package dev.wald;

import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.MessageLite;
import com.google.protobuf.Parser;
import dev.wald.v1.StateKind;
import io.grpc.Status;
import java.util.Objects;
import java.util.Optional;
import java.util.function.Function;

/** A state that was loaded. */
final class HeldState<M extends MessageLite> {
  private final State state;
  /** The message that was there; empty if none was. */
  final Optional<M> found;
  private boolean released;

  private HeldState(State state, Optional<M> found) {
    this.state = state;
    this.found = found;
  }

  /** Loads the state of an owner, "a producer" or "a follower". */
  static <M extends MessageLite> HeldState<M> load(State state, Parser<M> parser, Function<M, StateKind> kindOf, StateKind kind,
      String owner) {
    Optional<byte[]> saved;
    try {
      saved = Objects.requireNonNull(state.load(), "the state that was loaded");
    } catch (Exception failure) {
      throw refused(failure).exception();
    }
    try {
      M found = null;
      if (saved.isPresent()) {
        found = parser.parseFrom(saved.get());
        if (kindOf.apply(found) != kind) {
          throw new InvalidProtocolBufferException("its kind is " + kindOf.apply(found));
        }
      }
      return new HeldState<>(state, Optional.ofNullable(found));
    } catch (InvalidProtocolBufferException wrong) {
      new HeldState<>(state, Optional.empty()).release();
      throw refused("it is not the state of " + owner + ": " + wrong.getMessage(), wrong).exception();
    }
  }

  /** Saves a message. Its failure has an unknown outcome, because the next start may find the state that could not be saved. */
  void save(MessageLite message) {
    try {
      state.save(message.toByteArray());
    } catch (Exception failure) {
      throw failure(textOf(failure), failure).exception();
    }
  }

  /** Lets others have the state. Later calls do nothing, since another one may have it by then. */
  synchronized void release() {
    if (released) {
      return;
    }
    released = true;
    try {
      state.release();
    } catch (Exception ignored) {
      // All that counts has been saved.
      restoreInterrupt(ignored);
    }
  }

  /** The failure of a state that cannot be used. Nothing was sent. */
  static Failure refused(String message, Throwable cause) {
    return failure(message, cause).ofRead();
  }

  private static Failure refused(Exception cause) {
    return refused(textOf(cause), cause);
  }

  /** The failure of a state that could not be saved, perhaps. */
  static Failure failure(String message, Throwable cause) {
    Failure failure = new Failure(FailureKind.STATE, Status.Code.INTERNAL, "state: " + message, Outcome.UNKNOWN, Retry.NEVER);
    failure.cause = cause;
    return failure;
  }

  private static String textOf(Exception failure) {
    restoreInterrupt(failure);
    return failure.getMessage() == null ? failure.toString() : failure.getMessage();
  }

  private static void restoreInterrupt(Exception failure) {
    if (failure instanceof InterruptedException) {
      Thread.currentThread().interrupt();
    }
  }
}

package dev.wald;

import com.google.protobuf.ByteString;
import dev.wald.v1.FollowerState;
import dev.wald.v1.StateKind;
import io.grpc.Status;
import java.time.Duration;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.Optional;

/**
 * Follows logs over restarts of the server and of the program. It keeps the effects of records together with the cursor behind them, so
 * each record takes effect once.
 *
 * <pre>{@code
 * for (ScanEvent event : follower) {
 *   event.batches().forEach(batch -> ...);
 *   follower.keep(effects);
 * }
 * }</pre>
 *
 * <p>The effects are bytes in a form of the program's own, and each {@link #keep(ByteString)} writes all of them. A program whose effects
 * are in a database stores the cursor in the same transaction instead, and begins with {@link ScanOptions#after(ByteString)}.
 *
 * <p>A start at the tail holds only from the first {@code keep} of records on: if the program ends before, the next start begins at the
 * tail of its own time, and the records in between are left out.
 *
 * <p>One thread at a time may use it; {@link #close} may come from any thread, and ends a wait for the next event.
 */
public final class DurableFollower implements Iterable<ScanEvent>, AutoCloseable {
  private final Scan scan;
  /** Null: none were kept. */
  private ByteString effects;
  /** Null: before the first record. */
  private ByteString cursor;
  /** The event that comes next, without the gaps that were reported; null: it is not there yet. */
  private ScanEvent waiting;

  /** Guards the state: a close waits for a save underway. */
  private final Object saving = new Object();
  private final HeldState<FollowerState> state;
  private volatile boolean closed;

  static DurableFollower open(WaldClient client, Logs logs, State state, ScanOptions options) {
    HeldState<FollowerState> held =
        HeldState.load(state, FollowerState.parser(), FollowerState::getKind, StateKind.STATE_KIND_FOLLOWER, "a follower");
    try {
      return new DurableFollower(client, logs, held, options);
    } catch (RuntimeException failure) {
      held.release();
      throw failure;
    }
  }

  private DurableFollower(WaldClient client, Logs logs, HeldState<FollowerState> held, ScanOptions options) {
    state = held;
    effects = held.found.map(FollowerState::getEffects).orElse(null);
    cursor = held.found.map(FollowerState::getCursor).filter(bytes -> !bytes.isEmpty()).orElse(null);
    scan = client.follow(logs, cursor == null ? options : options.after(cursor));
  }

  /** The effects that were kept last; empty if none were. */
  public Optional<ByteString> effects() {
    return Optional.ofNullable(effects);
  }

  /** Resumes exactly after the last record that was returned; empty before the first. */
  public Optional<ByteString> cursor() {
    return Optional.ofNullable(cursor);
  }

  /**
   * Waits for the next records. Events without records are skipped, and no event has gaps. Empty: the scan has come to its end, or was
   * closed.
   *
   * @throws WaldException the scan has failed; or records are missing (kind MISSING, {@link WaldException#gap}) or the thread was
   *     interrupted, and a later call continues. A gap is reported again after a restart of the program, unless records behind it were kept
   */
  public Optional<ScanEvent> next() {
    return next(Duration.ofNanos(Long.MAX_VALUE / 2));
  }

  /**
   * Waits for the next records, at most this long, as {@link #next()} does. Empty: none came in time, or the scan has ended; {@link
   * #isEnded} reports which.
   */
  public Optional<ScanEvent> next(Duration timeout) {
    return advance(timeout) ? Optional.of(take()) : Optional.empty();
  }

  /** Whether no more records come: the scan has come to its end, failed, or was closed. */
  public boolean isEnded() {
    return closed || waiting == null && scan.isEnded();
  }

  /** The remaining events. Its {@code hasNext} waits for an event, and fails as {@link #next()} does. */
  @Override
  public Iterator<ScanEvent> iterator() {
    return new Iterator<>() {
      @Override
      public boolean hasNext() {
        // The cursor stays before the event until the event is taken.
        return advance(Duration.ofNanos(Long.MAX_VALUE / 2));
      }

      @Override
      public ScanEvent next() {
        if (!hasNext()) {
          throw new NoSuchElementException();
        }
        return take();
      }
    };
  }

  /** Waits until an event with records, and without gaps, is there. */
  private boolean advance(Duration timeout) {
    long deadline = System.nanoTime() + Math.min(Times.nanos(timeout), Long.MAX_VALUE / 4);
    while (!closed) {
      if (waiting != null) {
        List<Gap> gaps = waiting.gaps();
        if (!gaps.isEmpty()) {
          waiting = withGaps(waiting, gaps.subList(1, gaps.size()));
          throw missing(gaps.get(0)).exception();
        }
        if (!waiting.batches().isEmpty()) {
          return true;
        }
        take();
      }
      Optional<ScanEvent> event = scan.next(Duration.ofNanos(deadline - System.nanoTime()));
      if (event.isEmpty()) {
        return false;
      }
      waiting = event.get();
    }
    return false;
  }

  /** The event that waits. The cursor moves behind it. */
  private ScanEvent take() {
    ScanEvent event = waiting;
    waiting = null;
    if (!event.cursor().isEmpty()) {
      cursor = event.cursor();
    }
    return event;
  }

  private static ScanEvent withGaps(ScanEvent event, List<Gap> gaps) {
    return new ScanEvent(gaps, event.batches(), event.caughtUp(), event.cursor(), event.tailLsn(), event.durableLsn(),
        event.replicatedLsn(), event.recoveryEpoch());
  }

  /** The failure that names a gap. */
  private static Failure missing(Gap gap) {
    Failure failure =
        new Failure(FailureKind.MISSING, Status.Code.DATA_LOSS, gap.toString(), Outcome.NOT_APPLIED, Retry.NEVER);
    failure.gap = gap;
    return failure;
  }

  /** Saves effects that are the UTF-8 of a text. See {@link #keep(ByteString)}. */
  public void keep(String effects) {
    keep(ByteString.copyFromUtf8(effects));
  }

  /** Saves effects. See {@link #keep(ByteString)}. */
  public void keep(byte[] effects) {
    keep(ByteString.copyFrom(effects));
  }

  /**
   * Saves the effects of all records that were returned, together with their cursor.
   *
   * @throws WaldException the kind is STATE if they cannot be saved; the state before may be in force then, or this one. After a close it
   *     is CLOSED, and nothing was saved
   */
  public void keep(ByteString effects) {
    FollowerState.Builder kept = FollowerState.newBuilder().setEffects(effects).setKind(StateKind.STATE_KIND_FOLLOWER);
    if (cursor != null) {
      kept.setCursor(cursor);
    }
    synchronized (saving) {
      if (closed) {
        throw Failure.closed("the follower").exception();
      }
      state.save(kept.build());
    }
    this.effects = effects;
  }

  /** Ends the follower. Another one may use the state from now on. */
  @Override
  public void close() {
    scan.close();
    synchronized (saving) {
      closed = true;
      state.release();
    }
  }
}

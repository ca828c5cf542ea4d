package dev.wald.conformance;

import static dev.wald.conformance.Describe.object;

import com.google.protobuf.ByteString;
import dev.wald.Scan;
import dev.wald.ScanEvent;
import dev.wald.WaldException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/** Collects in the background the events that a follower delivers. */
final class Follower {
  /** Events that a scan has delivered. */
  static final class Seen {
    final List<Object> records = new ArrayList<>();
    final List<Object> gaps = new ArrayList<>();
    private ByteString cursor;
    private boolean caughtUp;

    void add(ScanEvent event) {
      event.gaps().forEach(gap -> gaps.add(Describe.gap(gap)));
      event.batches().forEach(batch -> batch.records().forEach(record -> records.add(Describe.record(batch.log(), record))));
      cursor = event.cursor();
      caughtUp |= event.caughtUp();
    }

    Map<String, Object> describe() {
      return object("records", List.copyOf(records), "gaps", List.copyOf(gaps), "cursor", cursor, "caught_up", caughtUp);
    }
  }

  private final Scan scan;
  private final Thread thread;
  private final Seen seen = new Seen();
  private boolean done;
  private WaldException failure;

  Follower(Scan scan) {
    this.scan = scan;
    thread = new Thread(this::collect, "follower");
    thread.setDaemon(true);
    thread.start();
  }

  private void collect() {
    try {
      for (ScanEvent event : scan) {
        synchronized (this) {
          seen.add(event);
          notifyAll();
        }
      }
    } catch (WaldException failed) {
      synchronized (this) {
        failure = failed;
      }
    } finally {
      synchronized (this) {
        done = true;
        notifyAll();
      }
    }
  }

  /** Waits until it has seen enough. */
  synchronized Map<String, Object> await(long count, long gaps, boolean caughtUp, long seconds) throws InterruptedException {
    long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(seconds);
    while (seen.records.size() < count || seen.gaps.size() < gaps || caughtUp && !seen.caughtUp) {
      if (failure != null) {
        throw failure;
      }
      long left = deadline - System.nanoTime();
      if (done || left <= 0) {
        throw new Wrong((done ? "the follower ended with " : seconds + " s over, and only ") + Json.show(seen.describe()));
      }
      TimeUnit.NANOSECONDS.timedWait(this, left);
    }
    return seen.describe();
  }

  void close() throws InterruptedException {
    scan.close();
    thread.join();
  }
}

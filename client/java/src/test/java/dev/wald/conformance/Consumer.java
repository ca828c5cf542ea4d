package dev.wald.conformance;

import static dev.wald.conformance.Describe.number;
import static dev.wald.conformance.Describe.object;

import com.google.protobuf.ByteString;
import dev.wald.Gap;
import dev.wald.Logs;
import dev.wald.RecordBatch;
import dev.wald.Scan;
import dev.wald.ScanEvent;
import dev.wald.ScanOptions;
import dev.wald.StoredRecord;
import dev.wald.WaldClient;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;

/** A program that stores effects and cursor together, and is killed again and again. */
final class Consumer {
  private final String counting;
  private ByteString cursor;
  private int applied;
  /** The lsn that is due in each log. */
  private final Map<String, Long> next = new HashMap<>();
  private final List<Object> twice = new ArrayList<>();
  private final List<Object> skipped = new ArrayList<>();
  private final List<Object> gaps = new ArrayList<>();

  private Consumer(String counting) {
    this.counting = counting;
  }

  static Map<String, Object> consume(WaldClient client, Logs logs, ScanOptions start, long count, String counting) {
    Consumer stored = new Consumer(counting);
    int length = 1;
    int lives = 0;
    while (stored.applied < count) {
      lives++;
      ByteString before = stored.cursor;
      ScanOptions options = before == null ? start : ScanOptions.DEFAULT.after(before);
      try (Scan follower = client.follow(logs, options)) {
        stored.life(follower, count, length, lives % 2 == 1);
      }
      length = Objects.equals(before, stored.cursor) ? length + 1 : 1;
    }
    return object("applied", number(stored.applied), "twice", stored.twice, "skipped", stored.skipped, "gaps", stored.gaps,
        "lives", number(lives));
  }

  /** Takes a number of events. {@code last}: it also stores the last one. */
  private void life(Scan follower, long count, int length, boolean last) {
    for (int taken = 1; taken <= length && applied < count; taken++) {
      ScanEvent event = follower.next(Duration.ofSeconds(Steps.PATIENCE_SECONDS))
          .orElseThrow(() -> new Wrong(follower.isEnded() ? "the follower has ended" : "no event came"));
      if (taken < length || last) {
        store(event);
      }
    }
  }

  private void store(ScanEvent event) {
    cursor = event.cursor();
    for (Gap gap : event.gaps()) {
      if (gap.log().startsWith(counting)) {
        gaps.add(Describe.gap(gap));
        gap.toLsn().ifPresent(lsn -> next.merge(gap.log(), lsn, Math::max));
      }
    }
    for (RecordBatch batch : event.batches()) {
      if (!batch.log().startsWith(counting)) {
        continue;
      }
      for (StoredRecord record : batch.records()) {
        String name = batch.log() + " " + record.lsn();
        long due = next.getOrDefault(batch.log(), 0L);
        if (record.lsn() < due) {
          twice.add(name);
        } else if (record.lsn() > due) {
          skipped.add(name);
        }
        next.merge(batch.log(), record.lsn() + 1, Math::max);
        applied++;
      }
    }
  }
}

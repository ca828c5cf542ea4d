package dev.wald.conformance;

import dev.wald.BatchAck;
import dev.wald.Cursor;
import dev.wald.FailureKind;
import dev.wald.Gap;
import dev.wald.StoredRecord;
import dev.wald.WaldException;
import java.math.BigInteger;
import java.time.temporal.ChronoUnit;
import java.time.Instant;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Results of the package as cases see them. */
final class Describe {
  private Describe() {}

  /** An unsigned number. */
  static BigInteger number(long number) {
    return new BigInteger(Long.toUnsignedString(number));
  }

  /** An object of pairs of name and value. */
  static Map<String, Object> object(Object... pairs) {
    Map<String, Object> members = new LinkedHashMap<>();
    for (int i = 0; i < pairs.length; i += 2) {
      members.put((String) pairs[i], pairs[i + 1]);
    }
    return members;
  }

  static Map<String, Object> failure(WaldException failure) {
    List<Object> failed = new ArrayList<>();
    failure.failedChecks().forEach(check ->
        failed.add(object("reason", check.reasonText(), "log", check.log(), "description", check.description())));
    return object("code", failure.code().name(), "reason", failure.reasonText(), "outcome", failure.outcome().name(),
        "retry", failure.retry().name(), "facts", failure.facts(), "failed", failed, "problem", problem(failure));
  }

  /** The reason of a failure of TLS or of a token. */
  private static String problem(WaldException failure) {
    return failure.kind() == FailureKind.TOKEN ? "TOKEN" : failure.tlsFailure().map(Enum::name).orElse("");
  }

  static Map<String, Object> ack(BatchAck ack) {
    List<Object> appends = new ArrayList<>();
    ack.appends().forEach(part -> appends.add(object("log", part.log(), "first_lsn", number(part.firstLsn()),
        "next_lsn", number(part.nextLsn()), "deduplicated", part.deduplicated(), "log_id", number(part.logId()))));
    return object("appends", appends, "durability", ack.durability().name());
  }

  /** A record; of a scan with the name of its log. */
  static Map<String, Object> record(String log, StoredRecord record) {
    List<Object> headers = new ArrayList<>();
    record.headers().forEach(header -> headers.add(List.of(header.key(), header.value().toStringUtf8())));
    Map<String, Object> described = object("lsn", number(record.lsn()), "data", record.text(), "headers", headers,
        "timestamp_us", BigInteger.valueOf(ChronoUnit.MICROS.between(Instant.EPOCH, record.time())));
    record.crc32c().ifPresent(sum -> described.put("crc32c", BigInteger.valueOf(Integer.toUnsignedLong(sum))));
    if (log != null) {
      described.put("log", log);
    }
    return described;
  }

  static Map<String, Object> gap(Gap gap) {
    Map<String, Object> described = object("log", gap.log(), "from_lsn", number(gap.fromLsn()), "reason", gap.reason().name());
    gap.toLsn().ifPresent(lsn -> described.put("to_lsn", number(lsn)));
    return described;
  }

  static Map<String, Object> cursor(Cursor cursor) {
    return object("cursor", cursor.name(), "lsn", number(cursor.lsn()), "log_id", number(cursor.logId()));
  }
}

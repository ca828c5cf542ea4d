package dev.wald;

import com.google.protobuf.ByteString;
import java.time.Instant;
import java.util.List;
import java.util.OptionalInt;

/**
 * A record as it was read.
 *
 * @param lsn the record's number in its log: 0 for the first record ever appended, then up by 1 without gaps
 * @param data the payload
 * @param headers facts about the record in addition to its payload, in order
 * @param time the record's time in UTC, to the microsecond; within a log it never goes back
 * @param crc32c the CRC-32C of the payload, if the producer gave one
 */
public record StoredRecord(long lsn, ByteString data, List<Header> headers, Instant time, OptionalInt crc32c) {
  /** The payload as text. Bytes that are not valid UTF-8 become U+FFFD. */
  public String text() {
    return data.toStringUtf8();
  }

  /** A copy of the payload. */
  public byte[] bytes() {
    return data.toByteArray();
  }

  /** Whether the payload matches the producer's checksum. True if the producer gave none. */
  public boolean isIntact() {
    return crc32c.isEmpty() || crc32c.getAsInt() == Checksums.crc32c(data);
  }
}

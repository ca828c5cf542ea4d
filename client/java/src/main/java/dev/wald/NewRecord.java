package dev.wald;

import com.google.protobuf.ByteString;
import dev.wald.v1.Record;
import java.time.Instant;
import java.util.List;

/**
 * A record to append. Immutable: each method that changes something returns another record.
 *
 * <p>Payload and headers together have at most 1 MiB, and a record at most 32 headers of 16 KiB in all, unless the server is
 * configured otherwise (RECORD_TOO_LARGE).
 */
public final class NewRecord {
  private final Record proto;

  private NewRecord(Record proto) {
    this.proto = proto;
  }

  /** A record whose payload is the UTF-8 of a text. */
  public static NewRecord of(String text) {
    return of(ByteString.copyFromUtf8(text));
  }

  /** A record with a copy of these bytes as its payload. */
  public static NewRecord of(byte[] data) {
    return of(ByteString.copyFrom(data));
  }

  /** A record with this payload. */
  public static NewRecord of(ByteString data) {
    return new NewRecord(Record.newBuilder().setData(data).build());
  }

  /** Adds a header. A key may occur more than once. */
  public NewRecord header(String key, String value) {
    return header(Header.of(key, value));
  }

  /** Adds a header. A key may occur more than once. */
  public NewRecord header(Header header) {
    return new NewRecord(proto.toBuilder()
        .addHeaders(dev.wald.v1.Header.newBuilder().setKey(header.key()).setValue(header.value()))
        .build());
  }

  /**
   * Sets the record's time, to the microsecond. Default: the server's clock. Within a log the time never goes back. It may be at
   * most a minute ahead of the server's clock (TIMESTAMP_IN_FUTURE).
   */
  public NewRecord time(Instant time) {
    return new NewRecord(proto.toBuilder().setTimestampUs(Times.micros(time)).build());
  }

  /** Adds the CRC-32C of the payload. The server verifies it (CHECKSUM_MISMATCH), stores it, and returns it to readers. */
  public NewRecord checksum() {
    return checksum(Checksums.crc32c(proto.getData()));
  }

  /** Adds a CRC-32C of the payload that the program has computed before. */
  public NewRecord checksum(int crc32c) {
    return new NewRecord(proto.toBuilder().setCrc32C(crc32c).build());
  }

  /** The payload. */
  public ByteString data() {
    return proto.getData();
  }

  /** The headers, in order. */
  public List<Header> headers() {
    return Protos.headers(proto);
  }

  Record proto() {
    return proto;
  }

  @Override
  public boolean equals(Object other) {
    return other instanceof NewRecord record && proto.equals(record.proto);
  }

  @Override
  public int hashCode() {
    return proto.hashCode();
  }

  @Override
  public String toString() {
    return "NewRecord[" + proto.getData().size() + " bytes, " + proto.getHeadersCount() + " headers]";
  }
}

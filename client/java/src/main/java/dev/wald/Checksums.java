package dev.wald;

import com.google.protobuf.ByteString;
import java.util.zip.CRC32C;

/** Checksums of payloads. */
final class Checksums {
  private Checksums() {}

  static int crc32c(ByteString data) {
    CRC32C sum = new CRC32C();
    data.asReadOnlyByteBufferList().forEach(sum::update);
    return (int) sum.getValue();
  }
}

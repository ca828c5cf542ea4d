package dev.wald;

import com.google.protobuf.ByteString;

/**
 * One fact about a record in addition to its payload.
 *
 * @param key name of the fact, at least one byte of UTF-8
 * @param value its value, any bytes
 */
public record Header(String key, ByteString value) {
  /** A header whose value is the UTF-8 of a text. */
  public static Header of(String key, String value) {
    return new Header(key, ByteString.copyFromUtf8(value));
  }
}

package dev.wald;

import java.util.OptionalLong;

/**
 * Settings of a list of the cursors or producers of a log. Immutable.
 *
 * @param logId the log must have this number, or LOG_REPLACED
 * @param pageSize number of elements that the client requests at a time, at most 1,000; 0: the server's default (100)
 */
public record ListOptions(OptionalLong logId, int pageSize) {
  /** Any log of the name, in pages of the server's default size. */
  public static final ListOptions DEFAULT = new ListOptions(OptionalLong.empty(), 0);

  /** The log must have this number, or LOG_REPLACED. */
  public ListOptions logId(long id) {
    return new ListOptions(OptionalLong.of(id), pageSize);
  }

  /** Number of elements that the client requests at a time, at most 1,000. */
  public ListOptions pageSize(int count) {
    return new ListOptions(logId, count);
  }
}

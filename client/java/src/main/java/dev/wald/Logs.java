package dev.wald;

import dev.wald.v1.AllLogs;
import dev.wald.v1.ScanRequest;

/** The logs to scan. */
public final class Logs {
  private final ScanRequest proto;

  private Logs(ScanRequest.Builder proto) {
    this.proto = proto.build();
  }

  /** The log with this name. */
  public static Logs named(String log) {
    return new Logs(ScanRequest.newBuilder().setLog(log));
  }

  /** All logs whose names start with this, also those that are made later. */
  public static Logs withPrefix(String prefix) {
    return new Logs(ScanRequest.newBuilder().setPrefix(prefix));
  }

  /** All logs. */
  public static Logs all() {
    return new Logs(ScanRequest.newBuilder().setAll(AllLogs.getDefaultInstance()));
  }

  void select(ScanRequest.Builder request) {
    request.mergeFrom(proto);
  }
}

package dev.wald;

/** Which records a reader sees. Never half a batch. */
public enum Visibility {
  /** Records at the level that the log's sync mode acks. */
  UNSPECIFIED(dev.wald.v1.Visibility.VISIBILITY_UNSPECIFIED),
  /** Only records that are flushed to the device. */
  DURABLE(dev.wald.v1.Visibility.VISIBILITY_DURABLE),
  /** Also records that are in the operating system only. */
  WRITTEN(dev.wald.v1.Visibility.VISIBILITY_WRITTEN),
  /** Also records that are in the daemon's memory only. */
  ACCEPTED(dev.wald.v1.Visibility.VISIBILITY_ACCEPTED),
  /** Only records that are in the bucket of a replica. */
  REPLICATED(dev.wald.v1.Visibility.VISIBILITY_REPLICATED);

  private final dev.wald.v1.Visibility proto;

  Visibility(dev.wald.v1.Visibility proto) {
    this.proto = proto;
  }

  dev.wald.v1.Visibility proto() {
    return proto;
  }
}

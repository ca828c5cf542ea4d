package dev.wald;

import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.TimeUnit;

/** The timer of all clients. Its tasks are short, and do not block. */
final class Timer {
  private static final ScheduledThreadPoolExecutor EXECUTOR = new ScheduledThreadPoolExecutor(1, task -> {
    Thread thread = new Thread(task, "wald-timer");
    thread.setDaemon(true);
    return thread;
  });

  static {
    EXECUTOR.setRemoveOnCancelPolicy(true);
  }

  private Timer() {}

  /** Number of tasks whose time has not come. */
  static int waiting() {
    return EXECUTOR.getQueue().size();
  }

  static ScheduledFuture<?> after(long nanos, Runnable task) {
    return EXECUTOR.schedule(task, nanos, TimeUnit.NANOSECONDS);
  }
}

package dev.wald;

import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;

/** Waits for answers. */
final class Futures {
  private Futures() {}

  /** Waits for an answer. Its failure is that of the caller's thread, with the original as its cause. */
  static <A> A await(CompletableFuture<A> answer) {
    try {
      return answer.get();
    } catch (InterruptedException interrupted) {
      Thread.currentThread().interrupt();
      throw Failure.givenUp(true).exception();
    } catch (ExecutionException failed) {
      if (failed.getCause() instanceof WaldException failure) {
        throw new WaldException(failure.failure(), failure);
      }
      throw new IllegalStateException(failed.getCause());
    }
  }
}

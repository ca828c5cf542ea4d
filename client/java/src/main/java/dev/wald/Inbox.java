package dev.wald;

import io.grpc.ClientCall;
import io.grpc.Metadata;
import io.grpc.Status;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;

/** The answers of a stream, for a reader that waits for them. */
final class Inbox<A> extends ClientCall.Listener<A> {
  private final ReentrantLock lock = new ReentrantLock();
  private final Condition changed = lock.newCondition();
  private final Deque<A> messages = new ArrayDeque<>();
  /** The server had begun to answer; a refusal has no headers. */
  private boolean open;
  /** Null: the stream has not ended. */
  private Status status;
  private Metadata trailers;

  @Override
  public void onHeaders(Metadata headers) {
    lock.lock();
    try {
      open = true;
    } finally {
      lock.unlock();
    }
  }

  @Override
  public void onMessage(A message) {
    lock.lock();
    try {
      messages.add(message);
      changed.signalAll();
    } finally {
      lock.unlock();
    }
  }

  @Override
  public void onClose(Status ended, Metadata last) {
    lock.lock();
    try {
      status = ended;
      trailers = last;
      changed.signalAll();
    } finally {
      lock.unlock();
    }
  }

  /** Waits for the next message. Null: none came in time, or the stream has ended. */
  A take(long nanos) throws InterruptedException {
    lock.lockInterruptibly();
    try {
      long left = nanos;
      while (messages.isEmpty() && status == null && left > 0) {
        left = changed.awaitNanos(left);
      }
      return messages.poll();
    } finally {
      lock.unlock();
    }
  }

  boolean wasOpen() {
    lock.lock();
    try {
      return open;
    } finally {
      lock.unlock();
    }
  }

  /** The status of the end; null: all messages were not taken yet, or more may come. */
  Status status() {
    lock.lock();
    try {
      return messages.isEmpty() ? status : null;
    } finally {
      lock.unlock();
    }
  }

  Metadata trailers() {
    lock.lock();
    try {
      return trailers;
    } finally {
      lock.unlock();
    }
  }
}

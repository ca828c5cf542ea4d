package dev.wald;

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ConnectivityState;
import io.grpc.ForwardingClientCallListener.SimpleForwardingClientCallListener;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.locks.ReentrantLock;

/**
 * The servers of a client, as one channel. Every call goes to the current server, at first the first of the list. A failed call may
 * choose another one:
 *
 * <pre>
 * list: a, b, c
 * not reached, starting, stopping, or knows no owner:  a -> b -> c -> a
 * names the owner d, in the list or not:               a -> d
 * answers for the owner d, which can be reached:       a -> d
 * the same failures of an owner outside of the list:   d -> a
 * </pre>
 *
 * <p>The connection to a server that was left is closed when its last call has ended.
 */
final class Nodes extends Channel {
  /** The owner of the store, in the header of an answer that came through another node. */
  private static final Metadata.Key<String> OWNER = Metadata.Key.of("wald-owner", Metadata.ASCII_STRING_MARSHALLER);
  private static final Metadata.Key<String> AUTHORIZATION = Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
  /** The time between two attempts to reach such an owner, if the first one fails. */
  private static final long APPROACH_PAUSE_NANOS = TimeUnit.MINUTES.toNanos(1);

  private final Settings settings;
  private final List<String> list;
  private final ReentrantLock lock = new ReentrantLock();
  /** Changes under the lock. */
  private volatile Node current;
  /** The current server has changed. */
  private boolean moved;
  private boolean closed;
  /** Servers that were left and have calls underway. */
  private final Set<Node> left = new HashSet<>();
  /** The time of the last approach to an owner; 0: none. */
  private long approachedAt;
  private boolean approached;

  /** A server since it became the current one. */
  static final class Node {
    final String target;
    /** Index in the list; -1: outside. */
    private final int place;
    private final ManagedChannel channel;
    /** Number of calls underway. */
    private int calls;
    private final AtomicInteger connections = new AtomicInteger();

    private Node(String target, int place, ManagedChannel channel) {
      this.target = target;
      this.place = place;
      this.channel = channel;
      count(channel.getState(false));
    }

    /**
     * The number of the connection of new calls. It changes when the connection breaks, or when the other side announces its end: then open
     * streams go on, and new calls take another connection.
     */
    int connection() {
      return connections.get();
    }

    private void count(ConnectivityState state) {
      channel.notifyWhenStateChanged(state, () -> {
        if (state == ConnectivityState.READY) {
          connections.incrementAndGet();
        }
        ConnectivityState next = channel.getState(false);
        if (next != ConnectivityState.SHUTDOWN) {
          count(next);
        }
      });
    }
  }

  Nodes(List<String> list, Settings settings) {
    this.list = list;
    this.settings = settings;
    current = new Node(list.get(0), 0, settings.dial(list.get(0)));
  }

  /** The current server. */
  Node current() {
    return current;
  }

  /** The current server. */
  String target() {
    return current.target;
  }

  /**
   * Names the server in the failure of an attempt, and chooses the server of the next one. A late failure of a server that the client
   * has left changes nothing.
   */
  Failure failedAt(Attempt attempt, Failure failure) {
    if (attempt.at == null) {
      return failure;
    }
    Failure named = failure.copy();
    attempt.named = failed(attempt.at, named);
    if (several()) {
      named.server = attempt.at.target;
    }
    return named;
  }

  /** True: the failure named the owner, and the next attempt need not wait. */
  private boolean failed(Node at, Failure failure) {
    String owner = null;
    if (failure.reason == Reason.MOVED) {
      owner = failure.facts.getOrDefault("owner", "");
    } else if (!elsewhere(failure)) {
      return false;
    }
    if (owner != null && !owner.isEmpty()) {
      try {
        owner = settings.vetOwner(owner);
      } catch (WaldException refused) {
        failure.message += "; the client does not follow to \"" + owner + "\": " + refused.detail();
        owner = null;
      }
    }
    // Useless: the server does not know the owner.
    boolean known = owner != null && !owner.isEmpty() && !owner.equals(at.target);
    lock.lock();
    try {
      if (at == current && !closed) {
        int next = (at.place + 1) % list.size();
        if (known) {
          goTo(owner, settings.dial(owner));
        } else if (next != at.place) {
          goTo(list.get(next), settings.dial(list.get(next)));
        }
      }
      return known && current != at;
    } finally {
      lock.unlock();
    }
  }

  /**
   * Whether another server of the list may answer: this one was not reached, is starting or stopping, or has lost its bucket and perhaps
   * the store with it.
   */
  private static boolean elsewhere(Failure failure) {
    return switch (failure.reason) {
      case NONE -> failure.code == Status.Code.UNAVAILABLE;
      case STARTING, DRAINING, BUCKET_DOWN -> true;
      default -> false;
    };
  }

  /**
   * A server has answered for the owner, which it names. Later calls go to the owner itself, once there is a connection to it. Until
   * then they stay: the owner may be out of this client's reach, behind a balancer or a tunnel.
   */
  private void approach(Node through, String named) {
    lock.lock();
    try {
      boolean pauses = approached && System.nanoTime() - approachedAt < APPROACH_PAUSE_NANOS;
      if (through != current || closed || pauses) {
        return;
      }
      approached = true;
      approachedAt = System.nanoTime();
    } finally {
      lock.unlock();
    }
    String target;
    try {
      target = settings.vetOwner(named);
    } catch (WaldException refused) {
      return;
    }
    if (target.equals(through.target)) {
      return;
    }
    ManagedChannel channel = settings.dial(target);
    // Whichever comes first: a connection, its failure, or the end of the time.
    AtomicBoolean done = new AtomicBoolean();
    Timer.after(Times.nanos(settings.connectTimeout), () -> {
      if (done.compareAndSet(false, true)) {
        channel.shutdownNow();
      }
    });
    watch(through, target, channel, done);
  }

  private void watch(Node through, String target, ManagedChannel channel, AtomicBoolean done) {
    ConnectivityState state = channel.getState(true);
    if (state == ConnectivityState.READY && done.compareAndSet(false, true)) {
      lock.lock();
      try {
        approached = false;
        if (through == current && !closed) {
          goTo(target, channel);
          return;
        }
      } finally {
        lock.unlock();
      }
      channel.shutdownNow();
    } else if (state == ConnectivityState.TRANSIENT_FAILURE && done.compareAndSet(false, true)) {
      channel.shutdownNow();
    } else if (!done.get()) {
      channel.notifyWhenStateChanged(state, () -> watch(through, target, channel, done));
    }
  }

  /** Makes the server of a connection the current one. The caller has the lock. */
  private void goTo(String target, ManagedChannel channel) {
    Node old = current;
    current = new Node(target, list.indexOf(target), channel);
    moved = true;
    if (old.calls > 0) {
      left.add(old);
    } else {
      old.channel.shutdown();
    }
  }

  /** Whether the client knows more than one server. */
  private boolean several() {
    lock.lock();
    try {
      return moved || list.size() > 1;
    } finally {
      lock.unlock();
    }
  }

  /** Makes the current server's connection try again now, if it is waiting to. */
  void hasten() {
    if (settings.lastTls.pauses()) {
      return;
    }
    lock.lock();
    try {
      current.channel.resetConnectBackoff();
    } finally {
      lock.unlock();
    }
  }

  private Node begin() {
    lock.lock();
    try {
      current.calls++;
      return current;
    } finally {
      lock.unlock();
    }
  }

  private void end(Node at) {
    lock.lock();
    try {
      at.calls--;
      if (at.calls == 0 && left.remove(at)) {
        at.channel.shutdown();
      }
    } finally {
      lock.unlock();
    }
  }

  /** Closes all connections, and ends the calls on them. */
  void close() {
    lock.lock();
    try {
      closed = true;
      left.forEach(node -> node.channel.shutdownNow());
      left.clear();
      current.channel.shutdownNow();
    } finally {
      lock.unlock();
    }
  }

  @Override
  public String authority() {
    return target();
  }

  @Override
  public <Q, A> ClientCall<Q, A> newCall(MethodDescriptor<Q, A> method, CallOptions options) {
    return new NodeCall<>(method, options);
  }

  /** A call that chooses its server when it begins. */
  private final class NodeCall<Q, A> extends ClientCall<Q, A> {
    private final MethodDescriptor<Q, A> method;
    private final CallOptions options;
    /** Null before the begin. */
    private volatile ClientCall<Q, A> call;

    private NodeCall(MethodDescriptor<Q, A> method, CallOptions options) {
      this.method = method;
      this.options = options;
    }

    @Override
    public void start(Listener<A> listener, Metadata headers) {
      Node at = begin();
      // The call ends once, even if its begin fails.
      AtomicBoolean open = new AtomicBoolean(true);
      AtomicBoolean late = new AtomicBoolean();
      Attempt attempt = options.getOption(Attempt.KEY);
      if (attempt != null) {
        attempt.at = at;
      }
      if (settings.token != null) {
        String token = settings.token.current();
        headers.put(AUTHORIZATION, "Bearer " + token);
        if (attempt != null) {
          attempt.token = token;
        }
      }
      call = at.channel.newCall(method, options);
      ScheduledFuture<?> timer = attempt == null || at.channel.getState(false) == ConnectivityState.READY ? null
          // gRPC would wait for ever for a server that takes the connection and says nothing.
          : Timer.after(Times.nanos(settings.connectTimeout), () -> {
            if (!attempt.sent && at.channel.getState(false) != ConnectivityState.READY) {
              late.set(true);
              call.cancel("no connection in time", null);
              at.channel.enterIdle();
            }
          });
      Listener<A> counting = new SimpleForwardingClientCallListener<A>(listener) {
        @Override
        public void onHeaders(Metadata answer) {
          settings.lastTls.clear();
          String owner = answer.get(OWNER);
          if (owner != null) {
            approach(at, owner);
          }
          super.onHeaders(answer);
        }

        @Override
        public void onClose(Status status, Metadata trailers) {
          if (timer != null) {
            timer.cancel(false);
          }
          if (open.compareAndSet(true, false)) {
            end(at);
          }
          boolean unreached = late.get() && !attempt.sent && status.getCode() == Status.Code.CANCELLED;
          super.onClose(unreached ? Status.UNAVAILABLE.withDescription("no connection within " + settings.connectTimeout) : status, trailers);
        }
      };
      try {
        call.start(counting, headers);
      } catch (RuntimeException failure) {
        if (open.compareAndSet(true, false)) {
          end(at);
        }
        throw failure;
      }
    }

    @Override
    public void request(int messages) {
      call.request(messages);
    }

    @Override
    public void cancel(String message, Throwable cause) {
      ClientCall<Q, A> begun = call;
      if (begun != null) {
        begun.cancel(message, cause);
      }
    }

    @Override
    public void halfClose() {
      call.halfClose();
    }

    @Override
    public void sendMessage(Q message) {
      call.sendMessage(message);
    }

    @Override
    public boolean isReady() {
      return call.isReady();
    }

    @Override
    public void setMessageCompression(boolean enabled) {
      call.setMessageCompression(enabled);
    }
  }
}

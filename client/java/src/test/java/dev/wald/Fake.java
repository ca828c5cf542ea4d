package dev.wald;

import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.Duration;
import com.google.rpc.Code;
import com.google.rpc.ErrorInfo;
import com.google.rpc.PreconditionFailure;
import com.google.rpc.RetryInfo;
import dev.wald.v1.AppendBatchRequest;
import dev.wald.v1.AppendBatchResponse;
import dev.wald.v1.AppendRequest;
import dev.wald.v1.AppendResponse;
import dev.wald.v1.AppendSessionRequest;
import dev.wald.v1.AppendSessionResponse;
import dev.wald.v1.CommitCursorRequest;
import dev.wald.v1.CommitCursorResponse;
import dev.wald.v1.CreateLogRequest;
import dev.wald.v1.CreateLogResponse;
import dev.wald.v1.CursorServiceGrpc;
import dev.wald.v1.FenceRequest;
import dev.wald.v1.FenceResponse;
import dev.wald.v1.ForgetProducerRequest;
import dev.wald.v1.ForgetProducerResponse;
import dev.wald.v1.GetLogRequest;
import dev.wald.v1.GetLogResponse;
import dev.wald.v1.GetTailRequest;
import dev.wald.v1.GetTailResponse;
import dev.wald.v1.LogAppend;
import dev.wald.v1.LogServiceGrpc;
import dev.wald.v1.Record;
import dev.wald.v1.ScanRequest;
import dev.wald.v1.ScanResponse;
import dev.wald.v1.WalServiceGrpc;
import io.grpc.ForwardingServerCall;
import io.grpc.Metadata;
import io.grpc.Server;
import io.grpc.ServerCall;
import io.grpc.ServerCallHandler;
import io.grpc.ServerInterceptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.BlockingDeque;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.LinkedBlockingDeque;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.BiConsumer;
import java.util.function.Function;
import java.util.logging.Level;
import java.util.logging.Logger;

/** A server that follows a test's script, behind a proxy whose connections the test can close. */
final class Fake implements AutoCloseable {
  /** A policy with short pauses. */
  static final RetryPolicy QUICK = new RetryPolicy(5, java.time.Duration.ofMillis(10), java.time.Duration.ofMillis(100));
  /** Lets a call be repeated only without a pause: any would pass the deadline. */
  static final RetryPolicy NO_PAUSES = new RetryPolicy(9, java.time.Duration.ofHours(1), java.time.Duration.ofHours(1));

  static final Metadata.Key<String> AUTHORIZATION = Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
  private static final Metadata.Key<String> OWNER = Metadata.Key.of("wald-owner", Metadata.ASCII_STRING_MARSHALLER);

  /** Connections that break are no news here. A strong reference, or the setting would be lost. */
  private static final Logger GRPC = Logger.getLogger("io.grpc");

  static {
    GRPC.setLevel(Level.OFF);
  }

  /** Calls, and independent requests instead of their stream. */
  final AtomicInteger calls = new AtomicInteger();
  /** The tokens of all calls, in order; "" for none. */
  final List<String> tokens = new CopyOnWriteArrayList<>();
  /** The owner that answers through this server; empty: this server answers. */
  volatile String speaksFor = "";
  /** Fails each call; null: none. */
  volatile Function<Metadata, StatusRuntimeException> door = headers -> null;
  volatile Function<AppendRequest, AppendResponse> append = request -> AppendResponse.newBuilder().setLsn(7).build();
  volatile Function<GetTailRequest, GetTailResponse> tail = request -> GetTailResponse.newBuilder().setFirstLsn(0).setTailLsn(5).build();
  /** A producer of a log that exists needs no right to create it. */
  volatile Function<CreateLogRequest, CreateLogResponse> create = request -> {
    throw refusal(Code.PERMISSION_DENIED, Reason.NOT_ALLOWED, stated(Outcome.NOT_APPLIED, Retry.NEVER));
  };
  volatile Function<GetLogRequest, GetLogResponse> getLog =
      request -> GetLogResponse.newBuilder().setLog(dev.wald.v1.Log.newBuilder().setName(request.getLog()).setLogId(9)).build();
  volatile Function<ForgetProducerRequest, ForgetProducerResponse> forget = request -> ForgetProducerResponse.getDefaultInstance();
  volatile Function<FenceRequest, FenceResponse> fence = request -> FenceResponse.newBuilder().setTailLsn(5).setWriterEpoch(3).build();
  volatile Function<CommitCursorRequest, CommitCursorResponse> commit = request -> CommitCursorResponse.newBuilder()
      .setCursor(dev.wald.v1.Cursor.newBuilder().setLsn(request.getCommit().getLsn())).build();
  volatile BiConsumer<ScanRequest, Stream<ScanRequest, ScanResponse>> scan = (request, stream) -> stream.end();
  volatile Function<AppendBatchRequest, AppendBatchResponse> appendBatch =
      request -> AppendBatchResponse.newBuilder().addAppends(LogAppend.newBuilder().setFirstLsn(7).setNextLsn(8)).build();
  volatile Script session = Fake::ackAll;
  /** The script of streams whose requests are independent: each request is answered by {@code append} or {@code appendBatch}. */
  volatile Script shared = this::answerEach;

  final List<ScanRequest> scans = new CopyOnWriteArrayList<>();
  final AtomicInteger sessions = new AtomicInteger();
  /** Appends that came as calls of their own. */
  final AtomicInteger unary = new AtomicInteger();
  /** Streams of independent requests, and the number of them that the client has half-closed. */
  final AtomicInteger streams = new AtomicInteger();
  final AtomicInteger streamsEnded = new AtomicInteger();
  private final Server server;
  private final Proxy proxy;

  /** The script of a stream of requests. */
  interface Script {
    void run(Stream<AppendSessionRequest, AppendSessionResponse> stream) throws Exception;
  }

  /** One stream at the server. */
  static final class Stream<Q, A> {
    private static final Object END = new Object();

    private final StreamObserver<A> answers;
    private final Metadata headers;
    private final BlockingDeque<Object> requests = new LinkedBlockingDeque<>();

    private Stream(StreamObserver<A> answers) {
      this.answers = answers;
      this.headers = Door.HEADERS.get();
    }

    /** The next request, which stays there. */
    private Object peek() throws InterruptedException {
      Object request = requests.take();
      requests.addFirst(request);
      return request;
    }

    /** The next request; null: the client sends no more. */
    @SuppressWarnings("unchecked")
    Q receive() throws InterruptedException {
      Object request = requests.poll(30, TimeUnit.SECONDS);
      return request == END ? null : (Q) request;
    }

    synchronized void send(A answer) {
      answers.onNext(answer);
    }

    synchronized void fail(StatusRuntimeException status) {
      answers.onError(status);
    }

    synchronized void end() {
      answers.onCompleted();
    }
  }

  Fake() throws IOException {
    this(java.time.Duration.ofDays(1));
  }

  /** A server that announces the end of each connection (GOAWAY) after a time of at least 1 s. */
  Fake(java.time.Duration connectionAge) throws IOException {
    server = NettyServerBuilder.forAddress(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0))
        .addService(new Wal())
        .addService(new Logs())
        .addService(new Cursors())
        .intercept(new Door())
        .maxConnectionAge(connectionAge.toMillis(), TimeUnit.MILLISECONDS)
        .build()
        .start();
    proxy = new Proxy(server.getPort());
  }

  /** HOST:PORT of the server. */
  String address() {
    return "127.0.0.1:" + proxy.port();
  }

  WaldClient client() {
    return builder().build();
  }

  WaldClient.Builder builder() {
    return WaldClient.builder(address()).retry(QUICK);
  }

  /** Closes every connection. */
  void drop() {
    proxy.drop();
  }

  /** Number of calls since the last time. */
  int called() {
    return calls.getAndSet(0);
  }

  @Override
  public void close() throws IOException {
    proxy.close();
    server.shutdownNow();
  }

  /** Acks every request of a session, in order. */
  static void ackAll(Stream<AppendSessionRequest, AppendSessionResponse> stream) throws InterruptedException {
    long lsn = 0;
    for (AppendSessionRequest request = stream.receive(); request != null; request = stream.receive()) {
      stream.send(ackOf(request, lsn++));
    }
    stream.end();
  }

  /** The ack of a request with one batch of one record. */
  static AppendSessionResponse ackOf(AppendSessionRequest request, long lsn) {
    LogAppend.Builder part = LogAppend.newBuilder().setLog(request.getBatch().getBatches(0).getLog()).setFirstLsn(lsn).setNextLsn(lsn + 1);
    return AppendSessionResponse.newBuilder().setRequestId(request.getRequestId()).setAck(AppendBatchResponse.newBuilder().addAppends(part)).build();
  }

  /** Answers independent requests as the calls of their own, each on a thread. The door is asked for each, as a server asks for the token. */
  void answerEach(Stream<AppendSessionRequest, AppendSessionResponse> stream) throws InterruptedException {
    List<Thread> threads = new ArrayList<>();
    for (AppendSessionRequest request = stream.receive(); request != null; request = stream.receive()) {
      AppendSessionRequest next = request;
      calls.incrementAndGet();
      StatusRuntimeException refused = door.apply(stream.headers);
      if (refused != null) {
        stream.fail(refused);
        return;
      }
      Thread thread = new Thread(() -> {
        try {
          stream.send(answerOf(next));
        } catch (StatusRuntimeException | IllegalStateException ended) {
          // The connection was lost.
          return;
        }
      });
      thread.setDaemon(true);
      thread.start();
      threads.add(thread);
    }
    for (Thread thread : threads) {
      thread.join();
    }
    stream.end();
  }

  /** The answer to an independent request. */
  AppendSessionResponse answerOf(AppendSessionRequest request) {
    AppendSessionResponse.Builder answer = AppendSessionResponse.newBuilder().setRequestId(request.getRequestId());
    try {
      if (request.hasAppend()) {
        answer.setAppendAck(append.apply(request.getAppend()));
      } else {
        answer.setAck(appendBatch.apply(request.getBatch()));
      }
    } catch (StatusRuntimeException refused) {
      answer.setError(StatusProto.fromThrowable(refused).toByteString());
    }
    return answer.build();
  }

  /** A message with one record of log "a", and the cursor after it. */
  static ScanResponse messageOf(long lsn, String cursor) {
    return ScanResponse.newBuilder().setCursor(ByteString.copyFromUtf8(cursor))
        .addBatches(dev.wald.v1.RecordBatch.newBuilder().setLog("a").setFirstLsn(lsn).addRecords(Record.getDefaultInstance()))
        .build();
  }

  /** The facts of a failure of a write. */
  static Map<String, String> stated(Outcome outcome, Retry retry) {
    return new TreeMap<>(Map.of("outcome", outcome.name(), "retry", retry.name()));
  }

  static StatusRuntimeException refusal(Code code, Reason reason, Map<String, String> facts) {
    return refusal(code, "wald.dev", reason.name(), facts);
  }

  static StatusRuntimeException refusal(Code code, String domain, String reason, Map<String, String> facts) {
    return status(code, ErrorInfo.newBuilder().setDomain(domain).setReason(reason).putAllMetadata(facts).build());
  }

  static StatusRuntimeException movedTo(String owner) {
    Map<String, String> facts = stated(Outcome.NOT_APPLIED, Retry.SAFE);
    facts.put("owner", owner);
    return refusal(Code.UNAVAILABLE, Reason.MOVED, facts);
  }

  /** A status with details. */
  static StatusRuntimeException status(Code code, com.google.protobuf.Message... details) {
    com.google.rpc.Status.Builder status = com.google.rpc.Status.newBuilder().setCode(code.getNumber()).setMessage("no");
    for (com.google.protobuf.Message detail : details) {
      status.addDetails(Any.pack(detail));
    }
    return StatusProto.toStatusRuntimeException(status.build());
  }

  static RetryInfo delay(int seconds) {
    return RetryInfo.newBuilder().setRetryDelay(Duration.newBuilder().setSeconds(seconds)).build();
  }

  static PreconditionFailure failed(String type, String log, String description) {
    return PreconditionFailure.newBuilder()
        .addViolations(PreconditionFailure.Violation.newBuilder().setType(type).setSubject(log).setDescription(description))
        .build();
  }

  private static <Q, A> void answer(Function<Q, A> script, Q request, StreamObserver<A> answer) {
    try {
      answer.onNext(script.apply(request));
      answer.onCompleted();
    } catch (StatusRuntimeException refused) {
      answer.onError(refused);
    }
  }

  private final class Wal extends WalServiceGrpc.WalServiceImplBase {
    @Override
    public void append(AppendRequest request, StreamObserver<AppendResponse> answer) {
      unary.incrementAndGet();
      Fake.answer(append, request, answer);
    }

    @Override
    public void appendBatch(AppendBatchRequest request, StreamObserver<AppendBatchResponse> answer) {
      unary.incrementAndGet();
      Fake.answer(appendBatch, request, answer);
    }

    @Override
    public void getTail(GetTailRequest request, StreamObserver<GetTailResponse> answer) {
      Fake.answer(tail, request, answer);
    }

    @Override
    public void fence(FenceRequest request, StreamObserver<FenceResponse> answer) {
      Fake.answer(fence, request, answer);
    }

    @Override
    public void scan(ScanRequest request, StreamObserver<ScanResponse> answer) {
      scans.add(request);
      scan.accept(request, new Stream<>(answer));
    }

    @Override
    public StreamObserver<AppendSessionRequest> appendSession(StreamObserver<AppendSessionResponse> answers) {
      Stream<AppendSessionRequest, AppendSessionResponse> stream = new Stream<>(answers);
      AtomicBoolean independent = new AtomicBoolean();
      Thread thread = new Thread(() -> {
        try {
          independent.set(stream.peek() instanceof AppendSessionRequest first && first.getIndependent());
          if (independent.get()) {
            streams.incrementAndGet();
            calls.decrementAndGet();
            shared.run(stream);
          } else {
            sessions.incrementAndGet();
            session.run(stream);
          }
        } catch (StatusRuntimeException gone) {
          // The client has left.
          return;
        } catch (Exception failed) {
          stream.fail(Status.INTERNAL.withCause(failed).asRuntimeException());
        }
      });
      thread.setDaemon(true);
      thread.start();
      return new StreamObserver<>() {
        @Override
        public void onNext(AppendSessionRequest request) {
          stream.requests.add(request);
        }

        @Override
        public void onError(Throwable gone) {
          stream.requests.add(Stream.END);
        }

        @Override
        public void onCompleted() {
          if (independent.get()) {
            streamsEnded.incrementAndGet();
          }
          stream.requests.add(Stream.END);
        }
      };
    }
  }

  private final class Logs extends LogServiceGrpc.LogServiceImplBase {
    @Override
    public void createLog(CreateLogRequest request, StreamObserver<CreateLogResponse> answer) {
      Fake.answer(create, request, answer);
    }

    @Override
    public void getLog(GetLogRequest request, StreamObserver<GetLogResponse> answer) {
      Fake.answer(getLog, request, answer);
    }

    @Override
    public void forgetProducer(ForgetProducerRequest request, StreamObserver<ForgetProducerResponse> answer) {
      Fake.answer(forget, request, answer);
    }
  }

  private final class Cursors extends CursorServiceGrpc.CursorServiceImplBase {
    @Override
    public void commitCursor(CommitCursorRequest request, StreamObserver<CommitCursorResponse> answer) {
      Fake.answer(commit, request, answer);
    }
  }

  /** Counts the calls, refuses some, and names the owner in the headers of answers. */
  private final class Door implements ServerInterceptor {
    /** The headers of the call that begins on this thread. */
    private static final ThreadLocal<Metadata> HEADERS = new ThreadLocal<>();

    @Override
    public <Q, A> ServerCall.Listener<Q> interceptCall(ServerCall<Q, A> call, Metadata headers, ServerCallHandler<Q, A> next) {
      calls.incrementAndGet();
      String token = headers.get(AUTHORIZATION);
      tokens.add(token == null ? "" : token);
      StatusRuntimeException refused = door.apply(headers);
      if (refused != null) {
        call.close(refused.getStatus(), refused.getTrailers() == null ? new Metadata() : refused.getTrailers());
        return new ServerCall.Listener<>() {};
      }
      HEADERS.set(headers);
      return next.startCall(new ForwardingServerCall.SimpleForwardingServerCall<>(call) {
        @Override
        public void sendHeaders(Metadata answer) {
          if (!speaksFor.isEmpty()) {
            answer.put(OWNER, speaksFor);
          }
          super.sendHeaders(answer);
        }
      }, headers);
    }
  }

  /** Passes bytes on between clients and the server. */
  private static final class Proxy implements AutoCloseable {
    private final ServerSocket listener = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
    private final int target;
    private final List<Socket> sockets = new CopyOnWriteArrayList<>();

    private Proxy(int target) throws IOException {
      this.target = target;
      start(() -> {
        for (;;) {
          Socket client = listener.accept();
          Socket server = new Socket(InetAddress.getLoopbackAddress(), target);
          client.setTcpNoDelay(true);
          server.setTcpNoDelay(true);
          sockets.addAll(List.of(client, server));
          start(() -> pass(client, server));
          start(() -> pass(server, client));
        }
      });
    }

    private interface Work {
      void run() throws IOException;
    }

    private static void start(Work work) {
      Thread thread = new Thread(() -> {
        try {
          work.run();
        } catch (IOException closed) {
          // The end of a connection, or of the proxy.
          return;
        }
      });
      thread.setDaemon(true);
      thread.start();
    }

    private static void pass(Socket from, Socket to) throws IOException {
      try (from; to) {
        InputStream in = from.getInputStream();
        OutputStream out = to.getOutputStream();
        in.transferTo(out);
      }
    }

    private int port() {
      return listener.getLocalPort();
    }

    private void drop() {
      for (Socket socket : sockets) {
        try {
          socket.close();
        } catch (IOException already) {
          continue;
        }
      }
      sockets.clear();
    }

    @Override
    public void close() throws IOException {
      listener.close();
      drop();
    }
  }
}

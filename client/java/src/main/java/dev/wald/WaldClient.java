package dev.wald;

import dev.wald.v1.AppendRequest;
import dev.wald.v1.CommitCursorRequest;
import dev.wald.v1.CreateLogRequest;
import dev.wald.v1.CursorServiceGrpc;
import dev.wald.v1.DeleteCursorRequest;
import dev.wald.v1.DeleteLogRequest;
import dev.wald.v1.FenceRequest;
import dev.wald.v1.FenceResponse;
import dev.wald.v1.ForgetProducerRequest;
import dev.wald.v1.GetCursorRequest;
import dev.wald.v1.GetLogRequest;
import dev.wald.v1.GetTailRequest;
import dev.wald.v1.GetTailResponse;
import dev.wald.v1.ListCursorsRequest;
import dev.wald.v1.ListCursorsResponse;
import dev.wald.v1.ListLogsRequest;
import dev.wald.v1.ListLogsResponse;
import dev.wald.v1.ListProducersRequest;
import dev.wald.v1.ListProducersResponse;
import dev.wald.v1.LogConfig;
import dev.wald.v1.LogServiceGrpc;
import dev.wald.v1.ReadRequest;
import dev.wald.v1.ReadResponse;
import dev.wald.v1.SyncRequest;
import dev.wald.v1.TrimRequest;
import dev.wald.v1.TrimResponse;
import dev.wald.v1.UpdateLogRequest;
import dev.wald.v1.WalServiceGrpc;
import com.google.protobuf.FieldMask;
import io.grpc.Channel;
import io.grpc.ClientInterceptor;
import io.grpc.MethodDescriptor;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Optional;
import java.util.function.Function;
import java.util.stream.Stream;

/**
 * A client of one Wald server, or of several nodes that share a store.
 *
 * <pre>{@code
 * try (WaldClient client = WaldClient.fromEnv()) {
 *   Ack ack = client.append("orders", "first");
 * }
 * }</pre>
 *
 * <p>Many threads may use a client at once. They share one connection, which is made again when it breaks. Every failure is a
 * {@link WaldException}. The client repeats automatically, within its {@link RetryPolicy} and the timeout: reads, after any passing
 * failure; appends, when the server or the transport reports that nothing was applied; appends with an expected lsn or a producer also
 * when the connection broke underway, because they cannot be applied twice. A plain append whose connection broke is not repeated: its
 * outcome is unknown.
 *
 * <p>Calls block until the answer, and at most for the timeout. An interrupt of the thread gives a call up.
 */
public final class WaldClient implements AutoCloseable {
  /** The endpoint of a server that is not configured otherwise. */
  public static final String DEFAULT_ENDPOINT = "127.0.0.1:6925";
  /** The port of an endpoint that names none. */
  public static final int DEFAULT_PORT = 6925;
  /** The timeout of calls, over all their attempts: 10 s. */
  public static final Duration DEFAULT_TIMEOUT = Duration.ofSeconds(10);

  private final Core core;
  private final Duration timeout;

  private WaldClient(Core core, Duration timeout) {
    this.core = core;
    this.timeout = timeout;
  }

  /**
   * Makes a client of the server at an endpoint, with default settings. See {@link #builder}.
   *
   * @throws WaldException if the endpoint has a fault
   */
  public static WaldClient connect(String endpoint) {
    return builder(endpoint).build();
  }

  /**
   * Makes a client of the server that the environment names. See {@link #builderFromEnv}.
   *
   * @throws WaldException if a variable or a file has a fault
   */
  public static WaldClient fromEnv() {
    return builderFromEnv().build();
  }

  /**
   * Settings of a client of the server at an endpoint, such as {@code 127.0.0.1:6925}, {@code http://localhost} or {@code
   * https://wald.internal}. The port is {@link #DEFAULT_PORT} unless the endpoint names another.
   *
   * <p>The endpoint may list several nodes that share a store, with commas: {@code a:6925,b:6925} or {@code https://a,https://b}. All have
   * the same scheme. Calls go to one of them, first to the first. When it is not reached, starts or stops, the next attempt goes to the
   * next of the list. When a node names another as the owner of the store (MOVED), the client goes there at once, whether the owner is in
   * the list or not. When a node answers for the owner, the client goes there as soon as it has a connection. It sends its token to the
   * owner, too, and checks the owner's certificate as always: without {@link Builder#serverName} it must name the owner's host.
   */
  public static Builder builder(String endpoint) {
    return new Builder(endpoint);
  }

  /**
   * Settings of the environment. An empty variable counts as absent, and later settings replace it.
   *
   * <ul>
   *   <li>{@code WALD_ENDPOINT}: the endpoint, or several with commas. Default: {@link #DEFAULT_ENDPOINT}.
   *   <li>{@code WALD_TLS_CA}, {@code WALD_TLS_CERT}, {@code WALD_TLS_KEY}, {@code WALD_TLS_SERVER_NAME}: as {@link Builder#tlsCa},
   *       {@link Builder#tlsCertificate}, {@link Builder#serverName}.
   *   <li>{@code WALD_TOKEN_FILE}, {@code WALD_TOKEN}: as {@link Builder#tokenFile}, {@link Builder#token}; the file comes first.
   * </ul>
   */
  public static Builder builderFromEnv() {
    return builderFromEnv(System.getenv());
  }

  static Builder builderFromEnv(Map<String, String> environment) {
    Function<String, Optional<String>> variable = name -> Optional.ofNullable(environment.get(name)).filter(text -> !text.isEmpty());
    Builder builder = builder(variable.apply("WALD_ENDPOINT").orElse(DEFAULT_ENDPOINT));
    builder.ca = variable.apply("WALD_TLS_CA").map(Path::of).orElse(null);
    builder.certificate = variable.apply("WALD_TLS_CERT").map(Path::of).orElse(null);
    builder.key = variable.apply("WALD_TLS_KEY").map(Path::of).orElse(null);
    builder.serverName = variable.apply("WALD_TLS_SERVER_NAME").orElse(null);
    builder.tokenFile = variable.apply("WALD_TOKEN_FILE").map(Path::of).orElse(null);
    builder.token = builder.tokenFile != null ? null : variable.apply("WALD_TOKEN").orElse(null);
    return builder;
  }

  /** Settings of a client. */
  public static final class Builder {
    private final String endpoint;
    private final Settings settings = new Settings();
    private final List<ClientInterceptor> interceptors = new ArrayList<>();
    private Duration timeout = DEFAULT_TIMEOUT;
    private Path ca;
    private Path certificate;
    private Path key;
    private String serverName;
    private String token;
    private Path tokenFile;

    private Builder(String endpoint) {
      this.endpoint = Objects.requireNonNull(endpoint, "endpoint");
    }

    /** Bounds the time to make a connection. Default: 5 s. */
    public Builder connectTimeout(Duration timeout) {
      settings.connectTimeout = timeout;
      return this;
    }

    /**
     * Pings the server this often, also when idle, and gives the connection up if no answer comes within the timeout. Default: 10 s (the
     * least that gRPC allows), 5 s. Without it a client would never notice that the network is gone.
     */
    public Builder keepalive(Duration interval, Duration timeout) {
      settings.keepaliveInterval = interval;
      settings.keepaliveTimeout = timeout;
      return this;
    }

    /** Bounds a call, over all its attempts. Default: 10 s. Scans, sessions and producers have no such bound. */
    public Builder timeout(Duration timeout) {
      this.timeout = timeout;
      return this;
    }

    /** The time for which a scan may be silent before it counts as lost. Default: 60 s; the server sends a heartbeat after 15 s. */
    public Builder silenceTimeout(Duration timeout) {
      settings.silenceTimeout = timeout;
      return this;
    }

    /** How calls are repeated. Default: {@link RetryPolicy#DEFAULT}. */
    public Builder retry(RetryPolicy policy) {
      settings.retry = policy;
      return this;
    }

    /** The file with the CAs to trust instead of the system's, in PEM. */
    public Builder tlsCa(Path file) {
      ca = file;
      return this;
    }

    /**
     * The files with the client's certificate, followed by its issuers, and with its key, in PEM. Each new connection reads them again;
     * files with a fault are ignored then.
     */
    public Builder tlsCertificate(Path certificateFile, Path keyFile) {
      certificate = certificateFile;
      key = keyFile;
      return this;
    }

    /** The name or address that the server's certificate must have, instead of the host of the endpoint or of a named owner. */
    public Builder serverName(String name) {
      serverName = name;
      return this;
    }

    /** The token that every call carries. */
    public Builder token(String token) {
      this.token = token;
      tokenFile = null;
      return this;
    }

    /**
     * The file with the token that every call carries; white space around the token does not count. The client reads the file again at
     * most once a second, and once when the server refuses the token. Then it repeats a call if the file has another token.
     */
    public Builder tokenFile(Path file) {
      tokenFile = file;
      token = null;
      return this;
    }

    /**
     * Lets the token cross a connection without TLS to another machine, where anybody in between can take it. Default: without TLS only
     * to loopback.
     */
    public Builder allowInsecureToken() {
      settings.allowInsecureToken = true;
      return this;
    }

    /**
     * Whether {@link WaldClient#append} and {@link WaldClient#appendBatch} share one stream to the server. Default: true. With false each is a unary call: for
     * proxies that do not pass streams on, and for instrumentation from outside that must see each call. The appends of a client with
     * interceptors never share.
     */
    public Builder shareAppends(boolean share) {
      settings.shareAppends = share;
      return this;
    }

    /** Adds interceptors of gRPC, such as the ones of OpenTelemetry. They see each attempt of a call. The last one added sees it first. */
    public Builder intercept(ClientInterceptor... interceptors) {
      this.interceptors.addAll(Arrays.asList(interceptors));
      return this;
    }

    /**
     * Makes the client. It reads the files of TLS and of the token now, and connects with the first call.
     *
     * @throws WaldException if a setting or a file has a fault
     */
    public WaldClient build() {
      List<String> targets = Endpoints.parse(endpoint);
      boolean overTls = Endpoints.isHttps(endpoint);
      boolean tls = ca != null || certificate != null || key != null || serverName != null;
      if (tls && !overTls) {
        throw Failure.invalid("\"" + endpoint + "\" is not an endpoint for TLS: with settings of TLS it must begin with https://").exception();
      }
      if (overTls) {
        try {
          settings.tls = new TlsFiles(ca, certificate, key).context();
        } catch (TlsProblem fault) {
          throw fault.asFailure().exception();
        }
      }
      settings.serverName = serverName;
      settings.interceptors = List.copyOf(interceptors);
      if (tokenFile != null) {
        settings.token = TokenSource.file(tokenFile, System::nanoTime);
      } else if (token != null) {
        settings.token = TokenSource.fixed(token);
      }
      targets.forEach(settings::mayCarryToken);
      return new WaldClient(new Core(settings, targets), timeout);
    }
  }

  /** A view of this client with another timeout. It shares the connection: to close either one closes both. */
  public WaldClient withTimeout(Duration timeout) {
    return new WaldClient(core, timeout);
  }

  /** The current server: HOST:PORT. */
  public String server() {
    return core.nodes.target();
  }

  /**
   * The connection, for stubs of {@code dev.wald.v1}, health and reflection that this class does not wrap. Each call on it goes to the
   * server that is the current one when the call begins. Nothing is repeated on it, and its failures do not choose another server.
   */
  public Channel channel() {
    return core.nodes;
  }

  /**
   * The last failure of TLS, unless a server has answered since. Calls repeat such failures silently within their timeout.
   */
  public Optional<WaldException> lastTlsFailure() {
    return Optional.ofNullable(core.settings.lastTls.get()).map(problem -> problem.asFailure().exception());
  }

  /**
   * Ends reads, scans, followers, sessions and producers, waits for the other calls under way, and closes the connection. Close producers
   * and sessions before: their unsent batches fail otherwise.
   */
  @Override
  public void close() {
    core.close();
  }

  Core core() {
    return core;
  }

  Duration timeout() {
    return timeout;
  }

  private <Q, A> A write(Repeat repeat, MethodDescriptor<Q, A> method, Q request) {
    return core.call(CallKind.writing(repeat), timeout, method, request);
  }

  private <Q, A> A readOnly(MethodDescriptor<Q, A> method, Q request) {
    return core.call(CallKind.READING, timeout, method, request);
  }

  /** Appends one record, the UTF-8 of a text. See {@link #append(String, NewRecord, AppendOptions)}. */
  public Ack append(String log, String text) {
    return append(log, NewRecord.of(text));
  }

  /** Appends one record. See {@link #append(String, NewRecord, AppendOptions)}. */
  public Ack append(String log, NewRecord record) {
    return append(log, record, AppendOptions.DEFAULT);
  }

  /**
   * Appends one record to a log. It answers when the record is as durable as asked; the default is: flushed to the device.
   *
   * @throws WaldException FENCED, POSITION_MISMATCH and other conditions, RECORD_TOO_LARGE, LOG_NOT_FOUND where logs are not created
   *     automatically; its outcome is unknown if the connection broke
   */
  public Ack append(String log, NewRecord record, AppendOptions options) {
    AppendRequest.Builder request = AppendRequest.newBuilder().setLog(log).setRecord(record.proto()).setDurability(options.durability().proto());
    if (!options.condition().equals(Condition.NONE)) {
      request.setCondition(options.condition().proto());
    }
    Repeat repeat = options.condition().guards() ? Repeat.GUARDED : Repeat.HARMFUL;
    return Protos.ack(core.appends.append(repeat, timeout, request.build()));
  }

  /**
   * Appends to one or more logs, all or nothing, with conditions; may move cursors in the same step. Readers see each log's part whole or
   * not at all.
   *
   * @throws WaldException as for an append; {@link WaldException#failedChecks} has all conditions that did not hold
   */
  public BatchAck appendBatch(Batch batch) {
    return Protos.batchAck(core.appends.appendBatch(batch.repeat(), timeout, batch.proto()));
  }

  /** Reads from the first record kept. See {@link #read(String, ReadOptions)}. */
  public Page read(String log) {
    return read(log, ReadOptions.DEFAULT);
  }

  /**
   * Reads a page of one log.
   *
   * @throws WaldException TRIMMED below the first lsn kept, BEYOND_TAIL above the tail, QUARANTINED at damage, LOG_NOT_FOUND
   */
  public Page read(String log, ReadOptions options) {
    ReadRequest request = options.request(log);
    CallKind kind = new CallKind(Repeat.HARMLESS, true, Times.of(request.getWait()), false);
    ReadResponse answer = core.call(kind, timeout, WalServiceGrpc.getReadMethod(), request);
    if (!answer.hasNextLsn() || !answer.hasTailLsn()) {
      throw Failure.brokenContract("ReadResponse.next_lsn or tail_lsn").ofRead().exception();
    }
    List<StoredRecord> records = answer.hasBatch() ? Protos.batch(answer.getBatch()).records() : List.of();
    return new Page(records, answer.getNextLsn(), answer.getTailLsn(), answer.getDurableLsn(),
        Protos.optional(answer.hasReplicatedLsn(), answer.getReplicatedLsn()), answer.getFirstLsn(), answer.getRecoveryEpoch());
  }

  /** Scans one log from its first record kept. See {@link #scan(Logs, ScanOptions)}. */
  public Scan scan(String log) {
    return scan(Logs.named(log), ScanOptions.DEFAULT);
  }

  /** Scans one log. See {@link #scan(Logs, ScanOptions)}. */
  public Scan scan(String log, ScanOptions options) {
    return scan(Logs.named(log), options);
  }

  /** Scans the records that exist now, of one log or of several. Close the scan. */
  public Scan scan(Logs logs, ScanOptions options) {
    return new Scan(this, logs, options, false);
  }

  /** Follows one log from its first record kept. See {@link #follow(Logs, ScanOptions)}. */
  public Scan follow(String log) {
    return follow(Logs.named(log), ScanOptions.DEFAULT);
  }

  /** Follows one log. See {@link #follow(Logs, ScanOptions)}. */
  public Scan follow(String log, ScanOptions options) {
    return follow(Logs.named(log), options);
  }

  /**
   * Delivers existing records, and then records that are appended later, over lost connections and restarts of the server. It waits for a
   * log that does not exist. Close the scan.
   */
  public Scan follow(Logs logs, ScanOptions options) {
    return new Scan(this, logs, options, true);
  }

  /** Follows one log over restarts of the program. See {@link #durableFollower(Logs, State, ScanOptions)}. */
  public DurableFollower durableFollower(String log, State state) {
    return durableFollower(Logs.named(log), state, ScanOptions.DEFAULT);
  }

  /** Follows one log over restarts of the program. See {@link #durableFollower(Logs, State, ScanOptions)}. */
  public DurableFollower durableFollower(String log, State state, ScanOptions options) {
    return durableFollower(Logs.named(log), state, options);
  }

  /**
   * Opens a follower, as {@link #follow(Logs, ScanOptions)} does, behind the cursor in the state; if there is none, at the start that the
   * options name. Close the follower: the state is in use until then.
   *
   * @throws WaldException the kind is STATE if the state cannot be loaded, is in use, or is not the state of a follower
   */
  public DurableFollower durableFollower(Logs logs, State state, ScanOptions options) {
    return DurableFollower.open(this, logs, state, options);
  }

  /** Opens a session with a window of 8 MiB. See {@link #session(int)}. */
  public Session session() {
    return session(Session.DEFAULT_WINDOW_BYTES);
  }

  /**
   * Opens a session. Its window is the maximum number of bytes that are sent and not acked before {@link Session#send} blocks. One batch is
   * let through even if it alone is larger.
   *
   * @throws WaldException no server takes the session
   */
  public Session session(int windowBytes) {
    return new Session(core, windowBytes);
  }

  /** Opens a producer with an id that is drawn at random. See {@link #producer(String, ProducerOptions)}. */
  public Producer producer(String log) {
    return producer(log, ProducerOptions.DEFAULT);
  }

  /**
   * Opens a producer of a log, which is created if there is none. It needs the rights append and list, and create only if there is no log.
   * It keeps to that log: if it is deleted, appends fail with LOG_REPLACED or LOG_MISSING, and create no other. Waits for a server for as
   * long as the delivery timeout. Close the producer.
   *
   * @throws WaldException no server answers in time, or the server refuses to show or to create the log
   */
  public Producer producer(String log, ProducerOptions options) {
    return Producer.open(this, log, options);
  }

  /** Opens a producer over restarts of the program. See {@link #durableProducer(String, State, ProducerOptions)}. */
  public DurableProducer durableProducer(String log, State state) {
    return durableProducer(log, state, ProducerOptions.DEFAULT);
  }

  /**
   * Opens a producer of a log, as {@link #producer(String, ProducerOptions)} does, and keeps its state. If there is a state, the producer
   * of that state goes on, and batches whose acks it has not seen are sent again. Id, epoch, first sequence and log id of the options count
   * only if there is no state. At most 64 batches are kept and not acked, whatever {@link ProducerOptions#inFlight} says. Close the
   * producer, after a failure too: the state is in use until then.
   *
   * @throws WaldException the kind is STATE if the state cannot be loaded or saved, is in use, or is not the state of a producer of this
   *     log
   */
  public DurableProducer durableProducer(String log, State state, ProducerOptions options) {
    return DurableProducer.open(this, log, state, options);
  }

  /** Returns the state of a log. See {@link #tail(String, TailOptions)}. */
  public TailInfo tail(String log) {
    return tail(log, TailOptions.DEFAULT);
  }

  /**
   * Returns the state of a log: first, next and durable lsn, writer epoch.
   *
   * @throws WaldException LOG_NOT_FOUND, LOG_REPLACED
   */
  public TailInfo tail(String log, TailOptions options) {
    GetTailRequest.Builder request = GetTailRequest.newBuilder().setLog(log).setVisibility(options.visibility().proto());
    options.logId().ifPresent(request::setLogId);
    options.survivedSince().ifPresent(request::setRecoveryEpoch);
    return tail(request.build());
  }

  TailInfo tail(GetTailRequest request) {
    GetTailResponse answer = readOnly(WalServiceGrpc.getGetTailMethod(), request);
    if (!answer.hasFirstLsn() || !answer.hasTailLsn()) {
      throw Failure.brokenContract("GetTailResponse.first_lsn or tail_lsn").ofRead().exception();
    }
    return new TailInfo(answer.getFirstLsn(), answer.getTailLsn(), answer.getDurableLsn(),
        Protos.optional(answer.hasReplicatedLsn(), answer.getReplicatedLsn()), answer.getWriterEpoch(), answer.getRecoveryEpoch(),
        answer.getLogId(), Protos.optional(answer.hasSurvivedPosition(), answer.getSurvivedPosition()));
  }

  /**
   * Forgets the records below an lsn, durably, and returns the first lsn kept. A repeated trim changes nothing.
   *
   * @throws WaldException BEYOND_TAIL, LOG_NOT_FOUND
   */
  public long trim(String log, long beforeLsn) {
    // A repeat has no further effect, except on a log that was created later under the name.
    return trim(Repeat.HARMFUL, TrimRequest.newBuilder().setLog(log).setBeforeLsn(beforeLsn).build());
  }

  /** Trims as {@link #trim(String, long)} does. The log must have this number, or LOG_REPLACED. */
  public long trim(String log, long beforeLsn, long logId) {
    return trim(Repeat.HARMLESS, TrimRequest.newBuilder().setLog(log).setBeforeLsn(beforeLsn).setLogId(logId).build());
  }

  private long trim(Repeat repeat, TrimRequest request) {
    TrimResponse answer = write(repeat, WalServiceGrpc.getTrimMethod(), request);
    if (!answer.hasFirstLsn()) {
      throw Failure.brokenContract("TrimResponse.first_lsn").exception();
    }
    return answer.getFirstLsn();
  }

  /** Raises a log's writer epoch by 1. See {@link #fence(String, FenceOptions)}. */
  public FenceInfo fence(String log) {
    return fence(log, FenceOptions.DEFAULT);
  }

  /**
   * Raises a log's writer epoch, durably: from then on only appends with that epoch are applied. Creates the log where logs are created
   * automatically. Without an epoch and without a number of the log it is not repeated after a lost connection: the log could be another
   * one by then.
   *
   * @throws WaldException FENCED if the given epoch does not exceed the current one, EPOCH_JUMP, LOG_REPLACED
   */
  public FenceInfo fence(String log, FenceOptions options) {
    FenceRequest.Builder request = FenceRequest.newBuilder().setLog(log);
    options.writerEpoch().ifPresent(request::setWriterEpoch);
    options.logId().ifPresent(request::setLogId);
    FenceResponse answer = write(options.repeat(), WalServiceGrpc.getFenceMethod(), request.build());
    if (!answer.hasTailLsn() || !answer.hasWriterEpoch()) {
      throw Failure.brokenContract("FenceResponse.tail_lsn or writer_epoch").exception();
    }
    return new FenceInfo(answer.getTailLsn(), answer.getWriterEpoch(), answer.getLogId());
  }

  /** Waits until everything accepted before, of all logs, is flushed to the device. */
  public void sync() {
    sync("");
  }

  /**
   * Waits until everything accepted before, of one log or (with an empty name) of all, is flushed to the device.
   *
   * @throws WaldException LOG_NOT_FOUND, JOURNAL_FAILED
   */
  public void sync(String log) {
    write(Repeat.HARMLESS, WalServiceGrpc.getSyncMethod(), SyncRequest.newBuilder().setLog(log).build());
  }

  /** Makes a log with the server's default settings. See {@link #createLog(String, LogConfig)}. */
  public LogInfo createLog(String log) {
    return createLog(log, LogConfig.getDefaultInstance());
  }

  /**
   * Makes a log.
   *
   * @throws WaldException LOG_EXISTS, INVALID_LOG_NAME, QUOTA
   */
  public LogInfo createLog(String log, LogConfig config) {
    CreateLogRequest request = CreateLogRequest.newBuilder().setLog(log).setConfig(config).build();
    return info(write(Repeat.HARMFUL, LogServiceGrpc.getCreateLogMethod(), request).getLog());
  }

  /**
   * Returns a log: its configuration and its state.
   *
   * @throws WaldException LOG_NOT_FOUND
   */
  public LogInfo getLog(String log) {
    return info(readOnly(LogServiceGrpc.getGetLogMethod(), GetLogRequest.newBuilder().setLog(log).build()).getLog());
  }

  private static LogInfo info(dev.wald.v1.Log log) {
    if (log.getName().isEmpty()) {
      throw Failure.brokenContract("the log of an answer").exception();
    }
    return Protos.log(log);
  }

  /**
   * The logs whose names start with a prefix (empty: all), by name. Each page comes when the stream gets there, and may fail with a
   * {@link WaldException}. Logs that are made or deleted meanwhile may or may not be seen.
   */
  public Stream<LogInfo> listLogs(String prefix) {
    return Pages.stream(token -> {
      ListLogsRequest request = ListLogsRequest.newBuilder().setPrefix(prefix).setPageToken(token).build();
      ListLogsResponse answer = readOnly(LogServiceGrpc.getListLogsMethod(), request);
      return new Pages.Page<>(answer.getLogsList(), answer.getNextPageToken());
    }).map(Protos::log);
  }

  /**
   * Changes the configuration of a log: the fields that the paths name, such as {@code sync_mode} or {@code retention.max_age}. Without
   * paths: all fields that are set in the configuration.
   *
   * @throws WaldException LOG_NOT_FOUND, INVALID_UPDATE_MASK, INVALID_LOG_CONFIG
   */
  public LogInfo updateLog(String log, LogConfig config, String... paths) {
    UpdateLogRequest request = UpdateLogRequest.newBuilder().setLog(log).setConfig(config)
        .setUpdateMask(FieldMask.newBuilder().addAllPaths(List.of(paths))).build();
    return info(write(Repeat.HARMLESS, LogServiceGrpc.getUpdateLogMethod(), request).getLog());
  }

  /**
   * Forgets a log with all its records, cursors and producers.
   *
   * @throws WaldException LOG_NOT_FOUND
   */
  public void deleteLog(String log) {
    write(Repeat.HARMFUL, LogServiceGrpc.getDeleteLogMethod(), DeleteLogRequest.newBuilder().setLog(log).build());
  }

  /** Deletes as {@link #deleteLog(String)} does. The log must have this number, or LOG_REPLACED. */
  public void deleteLog(String log, long logId) {
    write(Repeat.HARMFUL, LogServiceGrpc.getDeleteLogMethod(), DeleteLogRequest.newBuilder().setLog(log).setLogId(logId).build());
  }

  /**
   * Deletes a log and destroys its key, so that no copy of its records can be read: in backups, archives and snapshots, too. The server needs
   * encryption with a key for each log; without one, it answers NO_OWN_KEY and deletes nothing.
   *
   * @throws WaldException LOG_NOT_FOUND, NO_OWN_KEY
   */
  public void shredLog(String log) {
    write(Repeat.HARMFUL, LogServiceGrpc.getDeleteLogMethod(), DeleteLogRequest.newBuilder().setLog(log).setShred(true).build());
  }

  /** Shreds as {@link #shredLog(String)} does. The log must have this number, or LOG_REPLACED. */
  public void shredLog(String log, long logId) {
    write(
        Repeat.HARMFUL,
        LogServiceGrpc.getDeleteLogMethod(),
        DeleteLogRequest.newBuilder().setLog(log).setLogId(logId).setShred(true).build());
  }

  /** The producers of a log. See {@link #listProducers(String, ListOptions)}. */
  public Stream<LogProducer> listProducers(String log) {
    return listProducers(log, ListOptions.DEFAULT);
  }

  /**
   * The producers of a log, by id. Each page comes when the stream gets there, and may fail with a {@link WaldException}. Producers that
   * begin or are forgotten meanwhile may or may not be seen.
   */
  public Stream<LogProducer> listProducers(String log, ListOptions options) {
    return Pages.stream(token -> {
      ListProducersRequest.Builder request = ListProducersRequest.newBuilder().setLog(log).setPageSize(options.pageSize()).setPageToken(token);
      options.logId().ifPresent(request::setLogId);
      ListProducersResponse answer = readOnly(LogServiceGrpc.getListProducersMethod(), request.build());
      return new Pages.Page<>(answer.getProducersList(), answer.getNextPageToken());
    }).map(found -> new LogProducer(found.getId(), found.getEpoch(), found.getNextSequence(), Times.of(found.getLastAppendTime())));
  }

  /**
   * Forgets a producer, durably, which makes room for another one. Its epoch is over: the server refuses later batches of this epoch
   * (PRODUCER_EXPIRED), and never appends them twice.
   *
   * @throws WaldException LOG_NOT_FOUND, PRODUCER_NOT_FOUND
   */
  public void forgetProducer(String log, String producerId) {
    forgetProducer(ForgetProducerRequest.newBuilder().setLog(log).setProducerId(producerId).build());
  }

  /** Forgets as {@link #forgetProducer(String, String)} does. The log must have this number, or LOG_REPLACED. */
  public void forgetProducer(String log, String producerId, long logId) {
    forgetProducer(ForgetProducerRequest.newBuilder().setLog(log).setProducerId(producerId).setLogId(logId).build());
  }

  private void forgetProducer(ForgetProducerRequest request) {
    write(Repeat.HARMFUL, LogServiceGrpc.getForgetProducerMethod(), request);
  }

  /**
   * Moves a cursor, durably, or makes it.
   *
   * @throws WaldException POSITION_MISMATCH, LOG_REPLACED, LOG_NOT_FOUND, BEYOND_TAIL, INVALID_CURSOR_NAME, QUOTA
   */
  public Cursor commitCursor(CursorCommit commit) {
    // A late repeat would undo another client's commit in between.
    Repeat repeat = commit.guards() ? Repeat.GUARDED : Repeat.HARMFUL;
    CommitCursorRequest request = CommitCursorRequest.newBuilder().setCommit(commit.proto()).build();
    return Protos.cursor(write(repeat, CursorServiceGrpc.getCommitCursorMethod(), request).getCursor());
  }

  /**
   * Returns a cursor.
   *
   * @throws WaldException LOG_NOT_FOUND, CURSOR_NOT_FOUND
   */
  public Cursor getCursor(String log, String cursor) {
    return getCursor(GetCursorRequest.newBuilder().setLog(log).setCursor(cursor).build());
  }

  /** Returns a cursor. The log must have this number, or LOG_REPLACED. */
  public Cursor getCursor(String log, String cursor, long logId) {
    return getCursor(GetCursorRequest.newBuilder().setLog(log).setCursor(cursor).setLogId(logId).build());
  }

  private Cursor getCursor(GetCursorRequest request) {
    return Protos.cursor(readOnly(CursorServiceGrpc.getGetCursorMethod(), request).getCursor());
  }

  /** The cursors of a log. See {@link #listCursors(String, ListOptions)}. */
  public Stream<Cursor> listCursors(String log) {
    return listCursors(log, ListOptions.DEFAULT);
  }

  /** The cursors of a log, by name. Each page comes when the stream gets there, and may fail with a {@link WaldException}. */
  public Stream<Cursor> listCursors(String log, ListOptions options) {
    return Pages.stream(token -> {
      ListCursorsRequest.Builder request = ListCursorsRequest.newBuilder().setLog(log).setPageSize(options.pageSize()).setPageToken(token);
      options.logId().ifPresent(request::setLogId);
      ListCursorsResponse answer = readOnly(CursorServiceGrpc.getListCursorsMethod(), request.build());
      return new Pages.Page<>(answer.getCursorsList(), answer.getNextPageToken());
    }).map(Protos::cursor);
  }

  /**
   * Forgets a cursor, durably. Retention no longer waits for it.
   *
   * @throws WaldException LOG_NOT_FOUND, CURSOR_NOT_FOUND
   */
  public void deleteCursor(String log, String cursor) {
    deleteCursor(DeleteCursorRequest.newBuilder().setLog(log).setCursor(cursor).build());
  }

  /** Forgets a cursor. The log must have this number, or LOG_REPLACED. */
  public void deleteCursor(String log, String cursor, long logId) {
    deleteCursor(DeleteCursorRequest.newBuilder().setLog(log).setCursor(cursor).setLogId(logId).build());
  }

  private void deleteCursor(DeleteCursorRequest request) {
    write(Repeat.HARMFUL, CursorServiceGrpc.getDeleteCursorMethod(), request);
  }
}

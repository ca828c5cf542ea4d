package dev.wald;

import io.grpc.ClientInterceptor;
import io.grpc.ManagedChannel;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.netty.shaded.io.netty.channel.ChannelOption;
import io.grpc.netty.shaded.io.netty.handler.ssl.SslContext;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.TimeUnit;

/** Settings of a client, checked. */
final class Settings {
  /** Answers stay below 1 MiB unless one record alone is larger. The server's limit on records can be raised, so leave room. */
  private static final int MAX_ANSWER_BYTES = 64 << 20;
  /** A scan's messages are up to 1 MiB: a few must be underway for full speed. */
  private static final int WINDOW_BYTES = 4 << 20;

  Duration connectTimeout = Duration.ofSeconds(5);
  Duration keepaliveInterval = Duration.ofSeconds(10);
  Duration keepaliveTimeout = Duration.ofSeconds(5);
  Duration silenceTimeout = Duration.ofSeconds(60);
  RetryPolicy retry = RetryPolicy.DEFAULT;
  List<ClientInterceptor> interceptors = List.of();
  boolean shareAppends = true;
  /** Null: calls carry no token. */
  TokenSource token;
  boolean allowInsecureToken;
  /** Null: plaintext. */
  SslContext tls;
  /** Null: the host of the endpoint. */
  String serverName;
  final LastTls lastTls = new LastTls();

  /** Makes a channel to a target; it connects with its first call. */
  ManagedChannel dial(String target) {
    NettyChannelBuilder builder = Endpoints.isGrpcName(target)
        ? NettyChannelBuilder.forTarget(target)
        : NettyChannelBuilder.forAddress(Endpoints.host(target), Endpoints.port(target));
    if (tls == null) {
      builder.usePlaintext();
    } else {
      builder.sslContext(tls);
      if (serverName != null) {
        builder.overrideAuthority(serverName.contains(":") ? "[" + serverName + "]" : serverName);
      }
    }
    return builder
        .userAgent("wald-client-java")
        .withOption(ChannelOption.CONNECT_TIMEOUT_MILLIS, (int) Math.min(connectTimeout.toMillis(), Integer.MAX_VALUE))
        .keepAliveTime(Times.nanos(keepaliveInterval), TimeUnit.NANOSECONDS)
        .keepAliveTimeout(Times.nanos(keepaliveTimeout), TimeUnit.NANOSECONDS)
        .keepAliveWithoutCalls(true)
        .flowControlWindow(WINDOW_BYTES)
        .maxInboundMessageSize(MAX_ANSWER_BYTES)
        // A policy of the method's name cannot know which appends are safe to repeat.
        .disableRetry()
        .disableServiceConfigLookUp()
        .intercept(interceptors)
        .build();
  }

  /** Refuses a target whose calls would carry the token over plaintext to another machine. */
  void mayCarryToken(String target) {
    if (token != null && tls == null && !allowInsecureToken && !Endpoints.isLoopback(target)) {
      throw Failure.badToken("a token must not cross plaintext to " + target + ": use https://, or allowInsecureToken").exception();
    }
  }

  /** The target of an owner that a server named as HOST:PORT. Fails if the client must not send its calls there. */
  String vetOwner(String owner) {
    if (Endpoints.isGrpcName(owner)) {
      throw Failure.invalid("it is not HOST:PORT").exception();
    }
    String target = Endpoints.completed(owner);
    mayCarryToken(target);
    return target;
  }
}

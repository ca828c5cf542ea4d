package dev.wald;

import io.grpc.CallOptions;
import io.grpc.ClientStreamTracer;
import io.grpc.Metadata;

/** One attempt of a call. It notes whether the call has left: a call that failed before may be repeated whatever it does. */
final class Attempt extends ClientStreamTracer.Factory {
  static final CallOptions.Key<Attempt> KEY = CallOptions.Key.create("dev.wald.attempt");

  /** A connection has taken the request's headers. */
  volatile boolean sent;
  /** The token that it carries; null: none. */
  volatile String token;
  /** The server that it goes to; null before it begins. */
  volatile Nodes.Node at;
  /** Its failure named the server that is the current one now. */
  volatile boolean named;

  /** The options of the call of this attempt. */
  CallOptions options() {
    return CallOptions.DEFAULT.withOption(KEY, this).withStreamTracerFactory(this);
  }

  @Override
  public ClientStreamTracer newClientStreamTracer(ClientStreamTracer.StreamInfo info, Metadata headers) {
    return new ClientStreamTracer() {
      @Override
      public void outboundHeaders() {
        sent = true;
      }
    };
  }
}

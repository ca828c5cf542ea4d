import static java.util.concurrent.TimeUnit.MILLISECONDS;

import com.google.protobuf.ByteString;
import dev.wald.v1.AppendBatchRequest;
import dev.wald.v1.AppendRequest;
import dev.wald.v1.AppendSessionRequest;
import dev.wald.v1.AppendSessionResponse;
import dev.wald.v1.LogBatch;
import dev.wald.v1.Record;
import dev.wald.v1.ScanRequest;
import dev.wald.v1.ScanResponse;
import dev.wald.v1.WalServiceGrpc;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientResponseObserver;
import io.grpc.stub.StreamObserver;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;

/**
 * Clients by grpc-java that behave, as .ci/checks/wire/go/clients.go has them by grpc-go: the same words, flags and results.
 *
 * <pre>
 * Clients sessions [-sessions N] [-messages N] [-bytes N] ADDRESS
 * Clients cancels [-calls N] [-group N] ADDRESS
 * Clients deadlines [-callers N] [-timeout MS] [-seconds S] ADDRESS
 * </pre>
 */
public final class Clients {
    private final WalServiceGrpc.WalServiceStub wal;
    private final WalServiceGrpc.WalServiceBlockingStub blocking;
    private final Map<String, String> flags = new HashMap<>();
    private final Map<String, Integer> failures = new HashMap<>();

    public static void main(String[] args) throws InterruptedException {
        ManagedChannel channel = ManagedChannelBuilder.forTarget(args[args.length - 1]).usePlaintext().build();
        Clients clients = new Clients(channel);
        for (int at = 1; at + 1 < args.length - 1; at += 2) {
            clients.flags.put(args[at].substring(1), args[at + 1]);
        }
        switch (args[0]) {
            case "sessions" -> clients.sessions();
            case "cancels" -> clients.cancels();
            case "deadlines" -> clients.deadlines();
            default -> throw new IllegalArgumentException(args[0]);
        }
        channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }

    private Clients(ManagedChannel channel) {
        wal = WalServiceGrpc.newStub(channel);
        blocking = WalServiceGrpc.newBlockingStub(channel);
    }

    private int flag(String name, int otherwise) {
        return Integer.parseInt(flags.getOrDefault(name, Integer.toString(otherwise)));
    }

    /** Counts errors by their text. */
    private synchronized void failed(Throwable error) {
        failures.merge(text(error), 1, Integer::sum);
    }

    private static String text(Throwable error) {
        Status status = Status.fromThrowable(error);
        String text = status.getCode() + " " + status.getDescription();
        return text.substring(0, Math.min(text.length(), 160)).replace("\\", "").replace("\"", "'").replace("\n", " ");
    }

    /** As JSON. */
    private synchronized String failures() {
        List<String> parts = new ArrayList<>();
        failures.forEach((text, count) -> parts.add("\"" + text + "\": " + count));
        return "{" + String.join(", ", parts) + "}";
    }

    private static Record record(int size) {
        return Record.newBuilder().setData(ByteString.copyFrom(new byte[size])).build();
    }

    private static AppendSessionRequest request(long id, String log, int size) {
        LogBatch batch = LogBatch.newBuilder().setLog(log).addRecords(record(size)).build();
        return AppendSessionRequest.newBuilder()
            .setRequestId(id).setBatch(AppendBatchRequest.newBuilder().addBatches(batch)).build();
    }

    /** A session that sends messages as fast as flow control lets it. */
    private final class Session implements ClientResponseObserver<AppendSessionRequest, AppendSessionResponse> {
        private final String log;
        private final int messages;
        private final int size;
        private final AtomicLong acked;
        private final CountDownLatch ended = new CountDownLatch(1);
        private long next = 0;
        private long expected = 0;

        Session(String log, int messages, int size, AtomicLong acked) {
            this.log = log;
            this.messages = messages;
            this.size = size;
            this.acked = acked;
        }

        @Override
        public void beforeStart(ClientCallStreamObserver<AppendSessionRequest> stream) {
            stream.setOnReadyHandler(() -> {
                while (next < messages && stream.isReady()) {
                    stream.onNext(request(next++, log, size));
                    if (next == messages) {
                        stream.onCompleted();
                    }
                }
            });
        }

        @Override
        public void onNext(AppendSessionResponse ack) {
            if (ack.getRequestId() != expected++) {
                failed(Status.INTERNAL.withDescription("an ack came out of order").asException());
            }
            acked.incrementAndGet();
        }

        @Override
        public void onError(Throwable error) {
            failed(error);
            ended.countDown();
        }

        @Override
        public void onCompleted() {
            ended.countDown();
        }
    }

    private void sessions() throws InterruptedException {
        AtomicLong acked = new AtomicLong();
        List<Session> all = new ArrayList<>();
        long began = System.nanoTime();
        for (int number = 0; number < flag("sessions", 1); number++) {
            Session session = new Session("session-" + number, flag("messages", 100_000), flag("bytes", 1), acked);
            all.add(session);
            wal.appendSession(session);
        }
        for (Session session : all) {
            session.ended.await();
        }
        System.out.printf("{\"acked\": %d, \"seconds\": %.3f, \"failures\": %s}%n", acked.get(), since(began), failures());
    }

    private static double since(long began) {
        return (System.nanoTime() - began) / 1e9;
    }

    /** Maximum time until a session that lives gets its next ack. A machine may stand still for seconds. */
    private static final long PATIENCE_MS = 20_000;

    /** A follower and a session that share a connection with other calls. */
    private final class Neighbours {
        private final AtomicLong acks = new AtomicLong();
        private final AtomicReference<String> session = new AtomicReference<>();
        private final AtomicReference<String> follower = new AtomicReference<>();

        Neighbours() throws InterruptedException {
            blocking.append(AppendRequest.newBuilder().setLog("shared").setRecord(record(1)).build());
            StreamObserver<AppendSessionRequest> requests = wal.appendSession(new Watch<>(session, acks));
            wal.scan(ScanRequest.newBuilder().setLog("shared").setFollow(true).build(), new Watch<>(follower, new AtomicLong()));
            Thread sender = new Thread(() -> {
                for (long id = 0; session.get() == null; id++) {
                    requests.onNext(request(id, "shared", 1));
                    try {
                        MILLISECONDS.sleep(5);
                    } catch (InterruptedException interrupted) {
                        return;
                    }
                }
            });
            sender.setDaemon(true);
            sender.start();
            MILLISECONDS.sleep(200);
        }

        void tell(long calls, long began) throws InterruptedException {
            double seconds = since(began);
            long before = acks.get();
            for (long waited = 0; waited < PATIENCE_MS && acks.get() == before && session.get() == null; waited += 20) {
                MILLISECONDS.sleep(20);
            }
            System.out.printf(
                "{\"calls\": %d, \"seconds\": %.3f, \"failures\": %s, \"acks\": %d, \"acks_after\": %d, \"session\": %s, \"follower\": %s}%n",
                calls, seconds, failures(), before, acks.get() - before, quoted(session), quoted(follower));
        }

        private static String quoted(AtomicReference<String> text) {
            return text.get() == null ? "null" : "\"" + text.get() + "\"";
        }
    }

    /** Counts what comes, and keeps why it ended. */
    private record Watch<T>(AtomicReference<String> end, AtomicLong count) implements StreamObserver<T> {
        @Override
        public void onNext(T value) {
            count.incrementAndGet();
        }

        @Override
        public void onError(Throwable error) {
            end.set(text(error));
        }

        @Override
        public void onCompleted() {
            end.set("completed");
        }
    }

    /** Opens followers a group at a time and cancels each group at one moment. */
    private void cancels() throws InterruptedException {
        Neighbours shared = new Neighbours();
        int calls = flag("calls", 1000);
        int group = flag("group", 100);
        long began = System.nanoTime();
        for (int done = 0; done < calls; done += group) {
            Context.CancellableContext all = Context.current().withCancellation();
            CountDownLatch ended = new CountDownLatch(group);
            for (int i = 0; i < group; i++) {
                all.run(() -> wal.scan(ScanRequest.newBuilder().setLog("shared").setFollow(true).build(), new StreamObserver<ScanResponse>() {
                    @Override
                    public void onNext(ScanResponse response) {}

                    @Override
                    public void onError(Throwable error) {
                        if (Status.fromThrowable(error).getCode() != Status.Code.CANCELLED) {
                            failed(error);
                        }
                        ended.countDown();
                    }

                    @Override
                    public void onCompleted() {
                        ended.countDown();
                    }
                }));
            }
            MILLISECONDS.sleep(20);
            all.cancel(null);
            ended.await();
        }
        shared.tell(calls, began);
    }

    /** Calls with a deadline that a pause of the daemon exceeds. */
    private void deadlines() throws InterruptedException {
        Neighbours shared = new Neighbours();
        AtomicLong calls = new AtomicLong();
        long began = System.nanoTime();
        List<Thread> callers = new ArrayList<>();
        for (int number = 0; number < flag("callers", 64); number++) {
            Thread caller = new Thread(() -> {
                while (since(began) < flag("seconds", 4)) {
                    calls.incrementAndGet();
                    try {
                        blocking.withDeadlineAfter(flag("timeout", 300), MILLISECONDS)
                            .append(AppendRequest.newBuilder().setLog("deadline").setRecord(record(100)).build());
                    } catch (StatusRuntimeException error) {
                        if (error.getStatus().getCode() != Status.Code.DEADLINE_EXCEEDED) {
                            failed(error);
                        }
                    }
                }
            });
            callers.add(caller);
            caller.start();
        }
        for (Thread caller : callers) {
            caller.join();
        }
        shared.tell(calls.get(), began);
    }
}

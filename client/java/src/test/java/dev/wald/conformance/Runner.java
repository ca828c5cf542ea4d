package dev.wald.conformance;

import dev.wald.WaldClient;
import dev.wald.WaldException;
import java.math.BigInteger;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.FutureTask;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

/**
 * Runs the cases in client/conformance with this package, as the README there describes, and takes part in the chaos run.
 *
 * <pre>
 * Runner
 * Runner chaos-producer LOG ID RATE
 * Runner chaos-follower PREFIX COUNT
 * </pre>
 */
public final class Runner {
  /** A case that takes longer has failed. */
  private static final long CASE_SECONDS = 60;

  private final Steps steps;
  private final Names names;
  private final Map<String, FutureTask<Void>> jobs = new ConcurrentHashMap<>();
  /** The step that began last, for the error of a case that takes too long. */
  private volatile String last = "nothing";

  private Runner(Steps steps, Names names) {
    this.steps = steps;
    this.names = names;
  }

  public static void main(String[] arguments) throws Exception {
    String mode = arguments.length == 0 ? "" : arguments[0];
    if (mode.isEmpty()) {
      System.exit(runCases() ? 0 : 1);
    } else if (mode.equals("chaos-producer") && arguments.length == 4) {
      Chaos.produce(arguments[1], arguments[2], Double.parseDouble(arguments[3]));
    } else if (mode.equals("chaos-follower") && arguments.length == 3) {
      Chaos.follow(arguments[1], Integer.parseInt(arguments[2]));
    } else {
      System.err.println("usage: Runner [chaos-producer LOG ID RATE | chaos-follower PREFIX COUNT]");
      System.exit(2);
    }
  }

  private static boolean runCases() throws Exception {
    String only = System.getenv().getOrDefault("WALD_ONLY", "");
    Set<String> wanted = new HashSet<>(Arrays.asList(only.split(",")));
    int passed = 0;
    int failed = 0;
    Object file = Json.parse(Files.readString(Path.of(System.getenv("WALD_CASES"))));
    for (Arguments one : Arguments.of(file).objects("cases")) {
      String name = one.text("name");
      if (!only.isEmpty() && !wanted.contains(name)) {
        continue;
      }
      String trouble = carryOut(name, one.list("steps"));
      if (trouble == null) {
        passed++;
        System.out.println("ok " + name);
      } else {
        failed++;
        System.out.println("FAIL " + name + ": " + trouble.replace('\n', ' '));
      }
    }
    System.out.println(passed + " passed, " + failed + " failed");
    return failed == 0 && passed > 0;
  }

  /** Runs a case with a client of its own. Null: it has passed. */
  private static String carryOut(String name, List<?> steps) {
    WaldClient client;
    try {
      client = WaldClient.fromEnv();
    } catch (WaldException failure) {
      return failure.getMessage();
    }
    Steps actions = new Steps(client);
    String prefix = "conformance/" + name + "/" + UUID.randomUUID().toString().substring(0, 8) + "/";
    Runner runner = new Runner(actions, new Names(prefix, given()));
    FutureTask<Void> task = start("case " + name, () -> {
      runner.steps(steps, runner.names);
      return null;
    });
    try {
      task.get(CASE_SECONDS, TimeUnit.SECONDS);
      return null;
    } catch (ExecutionException failed) {
      return explain(failed.getCause());
    } catch (TimeoutException late) {
      task.cancel(true);
      return "not done after " + CASE_SECONDS + " s; began last: " + runner.last;
    } catch (InterruptedException interrupted) {
      throw new IllegalStateException(interrupted);
    } finally {
      start("end of " + name, () -> {
        actions.close();
        client.close();
        return null;
      });
    }
  }

  private static String explain(Throwable failure) {
    if (!(failure instanceof Wrong) && !(failure instanceof WaldException)) {
      failure.printStackTrace();
    }
    String cause = failure.getCause() instanceof Wrong || failure.getCause() instanceof WaldException ? ": " + explain(failure.getCause()) : "";
    return (failure.getMessage() == null ? failure.toString() : failure.getMessage()) + cause;
  }

  private static FutureTask<Void> start(String name, java.util.concurrent.Callable<Void> work) {
    FutureTask<Void> task = new FutureTask<>(work);
    Thread thread = new Thread(task, name);
    thread.setDaemon(true);
    thread.start();
    return task;
  }

  /** The names that the harness gives to every case. */
  private static Map<String, Object> given() {
    Map<String, Object> given = new LinkedHashMap<>();
    for (String name : List.of("server", "plain_server", "expired_server", "other_ca", "other_cert", "other_key")) {
      String value = System.getenv("WALD_CASE_" + name.toUpperCase(java.util.Locale.ROOT));
      if (value != null) {
        given.put(name, value);
      }
    }
    return given;
  }

  private void steps(List<?> steps, Names names) throws Exception {
    int number = 0;
    for (Object raw : steps) {
      Arguments step = Arguments.of(raw);
      String what = "step " + ++number + " (" + step.text("do") + ")";
      last = what;
      try {
        step(step, names);
      } catch (Wrong | WaldException failure) {
        throw new Wrong(what, failure);
      }
    }
  }

  /** Does one step and compares its result. */
  private void step(Arguments raw, Names names) throws Exception {
    switch (raw.text("do")) {
      case "repeat" -> {
        int times = ((BigInteger) names.resolve(raw.members().get("times"))).intValueExact();
        for (int i = 0; i < times; i++) {
          names.keep("i", BigInteger.valueOf(i));
          steps(raw.list("steps"), names);
        }
      }
      case "background" -> {
        Names beside = names.with("i", names.value("i"));
        jobs.put(raw.text("as"), start("job", () -> {
          steps(raw.list("steps"), beside);
          return null;
        }));
      }
      case "join" -> {
        try {
          jobs.get(raw.text("job")).get();
        } catch (ExecutionException failed) {
          throw new Wrong("job " + raw.text("job"), failed.getCause());
        }
      }
      default -> {
        Arguments step = Arguments.of(names.resolve(raw.members()));
        Map<String, Object> result = judged(step);
        if (raw.has("as")) {
          names.keep(raw.text("as"), result);
        }
      }
    }
  }

  private Map<String, Object> judged(Arguments step) throws Exception {
    Map<String, Object> result = Map.of();
    WaldException failure = null;
    long began = System.nanoTime();
    try {
      result = steps.run(step.text("do"), step);
    } catch (WaldException failed) {
      failure = failed;
    }
    long took = TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - began);
    if (step.has("within_ms") && took > step.number("within_ms")) {
      throw new Wrong("took " + took + " ms, at most " + step.number("within_ms") + " ms are allowed");
    }
    if (!step.has("fails")) {
      if (failure != null) {
        throw failure;
      }
      compare(step.members().get("expect"), result);
    } else if (failure == null) {
      throw new Wrong("expected to fail with " + Json.show(step.members().get("fails")) + ", got " + Json.show(result));
    } else {
      try {
        compare(step.members().get("fails"), Describe.failure(failure));
      } catch (Wrong difference) {
        throw new Wrong(difference.getMessage() + " (" + failure.getMessage() + ")");
      }
    }
    return result;
  }

  private static void compare(Object expected, Object actual) {
    if (expected == null) {
      return;
    }
    String difference = Names.differ("", factsAsStrings(expected), actual);
    if (difference != null) {
      throw new Wrong(difference);
    }
  }

  /** ErrorInfo has nothing but strings, cases also numbers. */
  private static Object factsAsStrings(Object expected) {
    if (!(expected instanceof Map<?, ?> members)) {
      return expected;
    }
    Map<String, Object> changed = new LinkedHashMap<>();
    members.forEach((name, member) -> {
      if (name.equals("facts") && member instanceof Map<?, ?> facts) {
        Map<String, Object> texts = new LinkedHashMap<>();
        facts.forEach((fact, value) -> texts.put((String) fact, value instanceof BigInteger ? value.toString() : value));
        changed.put("facts", texts);
      } else {
        changed.put((String) name, factsAsStrings(member));
      }
    });
    return changed;
  }
}

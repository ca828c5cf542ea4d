package dev.wald;

import java.util.ArrayList;
import java.util.List;

/** Endpoints as programs give them, and the targets that they stand for: HOST:PORT, or a name of gRPC's own. */
final class Endpoints {
  private Endpoints() {}

  /** The targets of a list of endpoints with commas between them. The commas of a name of gRPC's own are its own. */
  static List<String> parse(String endpoints) {
    String[] parts = endpoints.split(",", -1);
    if (isGrpcName(parts[0])) {
      parts = new String[] {endpoints};
    }
    List<String> targets = new ArrayList<>();
    for (String part : parts) {
      if (parts.length > 1) {
        if (part.isEmpty()) {
          throw invalid("part " + (targets.size() + 1) + " of \"" + endpoints + "\" is empty, and must be an endpoint such as "
              + WaldClient.DEFAULT_ENDPOINT);
        }
        if (part.chars().anyMatch(Character::isWhitespace)) {
          throw invalid("\"" + part + "\" is not an endpoint such as " + WaldClient.DEFAULT_ENDPOINT + ": it has white space");
        }
        if (isGrpcName(part)) {
          throw invalid("\"" + part + "\" is a name of gRPC's own, which cannot be part of a list");
        }
      }
      if (isHttps(part) != isHttps(parts[0])) {
        throw invalid("\"" + part + "\" is not an endpoint such as " + parts[0] + ": all servers of a list have the same scheme");
      }
      targets.add(target(part));
    }
    return List.copyOf(targets);
  }

  static boolean isHttps(String endpoint) {
    return endpoint.startsWith("https://");
  }

  /** Whether gRPC has the name resolved by itself, such as dns:///wald:6925. */
  static boolean isGrpcName(String endpoint) {
    int scheme = endpoint.indexOf("://");
    boolean other = scheme >= 0 && !endpoint.startsWith("http://") && !isHttps(endpoint);
    return other || endpoint.startsWith("unix:") || endpoint.startsWith("dns:");
  }

  private static String target(String endpoint) {
    if (endpoint.startsWith("http://") || isHttps(endpoint)) {
      String rest = endpoint.substring(endpoint.indexOf("://") + 3);
      return completed(rest.endsWith("/") ? rest.substring(0, rest.length() - 1) : rest);
    }
    return isGrpcName(endpoint) ? endpoint : completed(endpoint);
  }

  /** HOST:PORT, with the default port if there is none. */
  static String completed(String target) {
    if (target.contains("@")) {
      throw invalid("an endpoint has no user name: give one such as " + WaldClient.DEFAULT_ENDPOINT);
    }
    String host = target;
    String port = String.valueOf(WaldClient.DEFAULT_PORT);
    int colon = target.lastIndexOf(':');
    if (target.startsWith("[")) {
      int end = target.indexOf(']');
      boolean whole = end == target.length() - 1;
      if (end < 0 || !whole && target.charAt(end + 1) != ':') {
        throw noEndpoint(target, "");
      }
      host = target.substring(1, end);
      port = whole ? port : target.substring(end + 2);
    } else if (colon >= 0 && colon == target.indexOf(':')) {
      host = target.substring(0, colon);
      port = target.substring(colon + 1);
    }
    if (host.isEmpty() || host.contains("/")) {
      throw noEndpoint(target, "");
    }
    int number;
    try {
      number = port.matches("[0-9]+") ? Integer.parseInt(port) : 0;
    } catch (NumberFormatException tooLarge) {
      number = 0;
    }
    if (number < 1 || number > 65_535) {
      throw noEndpoint(target, ": its port is not a number from 1 to 65535");
    }
    return (host.contains(":") ? "[" + host + "]" : host) + ":" + number;
  }

  /** The host of a target HOST:PORT, without brackets. */
  static String host(String target) {
    String host = target.substring(0, target.lastIndexOf(':'));
    return host.startsWith("[") ? host.substring(1, host.length() - 1) : host;
  }

  /** The port of a target HOST:PORT. */
  static int port(String target) {
    return Integer.parseInt(target.substring(target.lastIndexOf(':') + 1));
  }

  /** Whether a target stays on this machine. */
  static boolean isLoopback(String target) {
    if (target.startsWith("unix:")) {
      return true;
    }
    if (isGrpcName(target)) {
      return false;
    }
    String host = host(target);
    return host.equalsIgnoreCase("localhost") || host.matches("127(\\.[0-9]{1,3}){3}") || host.matches("(0*:)+0*1");
  }

  private static WaldException noEndpoint(String target, String why) {
    return invalid("\"" + target + "\" is not an endpoint such as " + WaldClient.DEFAULT_ENDPOINT + why);
  }

  private static WaldException invalid(String message) {
    return Failure.invalid(message).exception();
  }
}

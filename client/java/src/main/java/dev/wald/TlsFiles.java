package dev.wald;

import io.grpc.netty.shaded.io.grpc.netty.GrpcSslContexts;
import io.grpc.netty.shaded.io.netty.handler.ssl.SslContext;
import io.grpc.netty.shaded.io.netty.handler.ssl.SslContextBuilder;
import io.grpc.netty.shaded.io.netty.handler.ssl.SslProvider;
import java.io.IOException;
import java.net.Socket;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.security.KeyStore;
import java.security.Principal;
import java.security.PrivateKey;
import java.security.cert.CertPathBuilderException;
import java.security.cert.CertificateException;
import java.security.cert.CertificateExpiredException;
import java.security.cert.CertificateNotYetValidException;
import java.security.cert.CertificateParsingException;
import java.security.cert.X509Certificate;
import java.time.Instant;
import java.time.LocalDate;
import java.time.ZoneOffset;
import java.util.Arrays;
import java.util.Collection;
import java.util.Date;
import java.util.List;
import java.util.stream.Collectors;
import javax.net.ssl.SSLEngine;
import javax.net.ssl.SSLException;
import javax.net.ssl.TrustManager;
import javax.net.ssl.TrustManagerFactory;
import javax.net.ssl.X509ExtendedKeyManager;
import javax.net.ssl.X509ExtendedTrustManager;

/**
 * The files of TLS of a client, which each new connection reads again.
 *
 * <p>A certificate and its key are replaced one after the other, so a fault may last for a moment only: the earlier content stays in
 * force. TLS is that of the JDK, whose failures are the same on every platform.
 */
final class TlsFiles {
  /** Maximum size of a file. The CAs of a system take about 250 KB. */
  private static final int MAX_BYTES = 1 << 20;
  private static final String ALIAS = "client";

  /** Null: the CAs of the system. */
  private final Path ca;
  /** Null: the client has no certificate. */
  private final Path certificate;
  private final Path key;
  private Material material;

  /** The content of the files. Null within it: there is no such file. */
  private record Material(byte[][] contents, X509ExtendedTrustManager trust, X509Certificate[] chain, PrivateKey key) {}

  TlsFiles(Path ca, Path certificate, Path key) throws TlsProblem {
    this.ca = ca;
    this.certificate = certificate;
    this.key = key;
    this.material = parse(read());
  }

  SslContext context() throws TlsProblem {
    try {
      return GrpcSslContexts.configure(SslContextBuilder.forClient(), SslProvider.JDK)
          .trustManager(new Trust())
          .keyManager(new Identity())
          // A session that is resumed would not present the new certificate.
          .sessionTimeout(1)
          .build();
    } catch (SSLException failure) {
      throw TlsProblem.settings("TLS cannot be used: " + failure.getMessage());
    }
  }

  /** The content for the next connection. */
  private synchronized Material current() {
    try {
      byte[][] contents = read();
      if (!Arrays.deepEquals(contents, material.contents)) {
        material = parse(contents);
      }
    } catch (TlsProblem fault) {
      // The earlier content stays in force.
      return material;
    }
    return material;
  }

  private byte[][] read() throws TlsProblem {
    if ((certificate == null) != (key == null)) {
      throw TlsProblem.settings("a client certificate needs both its file and the file of its key");
    }
    byte[][] contents = new byte[3][];
    Path[] paths = {ca, certificate, key};
    for (int i = 0; i < paths.length; i++) {
      try {
        contents[i] = paths[i] == null ? null : SmallFiles.read(paths[i], MAX_BYTES);
      } catch (IOException fault) {
        throw TlsProblem.settings(fault.getMessage());
      }
    }
    return contents;
  }

  private Material parse(byte[][] contents) throws TlsProblem {
    X509ExtendedTrustManager trust = trust(contents[0]);
    if (certificate == null) {
      return new Material(contents, trust, null, null);
    }
    List<X509Certificate> chain = certificates(contents[1], certificate);
    PrivateKey privateKey = Pem.key(contents[2], chain.get(0).getPublicKey());
    if (privateKey == null) {
      throw TlsProblem.settings(key + ": no private key in PEM without a password");
    }
    if (!Pem.isPair(privateKey, chain.get(0).getPublicKey())) {
      throw TlsProblem.settings(key + " is not the key of the certificate " + certificate);
    }
    return new Material(contents, trust, chain.toArray(X509Certificate[]::new), privateKey);
  }

  private static List<X509Certificate> certificates(byte[] content, Path path) throws TlsProblem {
    List<X509Certificate> certificates;
    try {
      certificates = Pem.certificates(content);
    } catch (CertificateException damaged) {
      throw TlsProblem.settings(path + ": not a certificate: " + damaged.getMessage());
    }
    if (certificates.isEmpty()) {
      throw TlsProblem.settings(path + ": no certificate in PEM");
    }
    return certificates;
  }

  /** The JDK's check of servers, with the CAs of this file, or of the system. */
  private X509ExtendedTrustManager trust(byte[] content) throws TlsProblem {
    try {
      KeyStore store = null;
      if (content != null) {
        store = KeyStore.getInstance(KeyStore.getDefaultType());
        store.load(null, null);
        for (X509Certificate certificate : certificates(content, ca)) {
          store.setCertificateEntry("ca" + store.size(), certificate);
        }
      }
      TrustManagerFactory factory = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
      factory.init(store);
      for (TrustManager manager : factory.getTrustManagers()) {
        if (manager instanceof X509ExtendedTrustManager trust) {
          return trust;
        }
      }
    } catch (TlsProblem fault) {
      throw fault;
    } catch (GeneralSecurityException | IOException fault) {
      throw TlsProblem.settings("the CAs cannot be used: " + fault.getMessage());
    }
    throw TlsProblem.settings("this Java has no check of certificates");
  }

  /** Checks the server's certificate, and names the reason of a refusal. */
  private final class Trust extends X509ExtendedTrustManager {
    @Override
    public void checkServerTrusted(X509Certificate[] chain, String authType, SSLEngine engine) throws CertificateException {
      X509ExtendedTrustManager trust = current().trust;
      try {
        // Without the engine the names do not count yet.
        trust.checkServerTrusted(chain, authType);
      } catch (CertificateException refused) {
        throw refusal(refused, chain);
      }
      try {
        trust.checkServerTrusted(chain, authType, engine);
      } catch (CertificateException refused) {
        String said = String.valueOf(refused.getMessage());
        boolean wrongName = said.contains("subject alternative") || said.contains("name matching") || said.contains("No name");
        throw wrongName
            ? new TlsProblem(TlsFailure.WRONG_NAME,
                "the server's certificate is for " + names(chain[0]) + ", not for " + printable(engine.getPeerHost()))
            : refusal(refused, chain);
      }
    }

    @Override
    public void checkServerTrusted(X509Certificate[] chain, String authType, Socket socket) throws CertificateException {
      throw new CertificateException("connections have an engine");
    }

    @Override
    public void checkServerTrusted(X509Certificate[] chain, String authType) throws CertificateException {
      throw new CertificateException("connections have an engine");
    }

    @Override
    public void checkClientTrusted(X509Certificate[] chain, String authType, SSLEngine engine) throws CertificateException {
      throw new CertificateException("this is a client");
    }

    @Override
    public void checkClientTrusted(X509Certificate[] chain, String authType, Socket socket) throws CertificateException {
      throw new CertificateException("this is a client");
    }

    @Override
    public void checkClientTrusted(X509Certificate[] chain, String authType) throws CertificateException {
      throw new CertificateException("this is a client");
    }

    @Override
    public X509Certificate[] getAcceptedIssuers() {
      return new X509Certificate[0];
    }
  }

  private static TlsProblem refusal(CertificateException refused, X509Certificate[] chain) {
    for (Throwable cause = refused; cause != null; cause = cause.getCause()) {
      if (cause instanceof CertificateExpiredException || cause instanceof CertificateNotYetValidException) {
        return expired(chain);
      }
    }
    for (Throwable cause = refused; cause != null; cause = cause.getCause()) {
      if (cause instanceof CertPathBuilderException) {
        return new TlsProblem(TlsFailure.UNKNOWN_CA,
            "the server's certificate is not from a trusted CA; name the file with its CA (tlsCa)");
      }
    }
    return new TlsProblem(TlsFailure.CERTIFICATE, "the server's certificate is refused: " + printable(refused.getMessage()));
  }

  private static TlsProblem expired(X509Certificate[] chain) {
    Date now = Date.from(Instant.now());
    String whose = "the server's certificate";
    for (X509Certificate certificate : chain) {
      if (now.before(certificate.getNotBefore())) {
        return new TlsProblem(TlsFailure.EXPIRED, whose + " is not valid before " + day(certificate.getNotBefore()));
      }
      if (now.after(certificate.getNotAfter())) {
        return new TlsProblem(TlsFailure.EXPIRED, whose + " expired on " + day(certificate.getNotAfter()));
      }
      whose = "a CA of the server's certificate";
    }
    return new TlsProblem(TlsFailure.EXPIRED, whose + " expired");
  }

  private static LocalDate day(Date time) {
    return time.toInstant().atZone(ZoneOffset.UTC).toLocalDate();
  }

  /** The names of a certificate. */
  private static String names(X509Certificate certificate) {
    try {
      Collection<List<?>> names = certificate.getSubjectAlternativeNames();
      if (names != null && !names.isEmpty()) {
        return names.stream().map(name -> printable(String.valueOf(name.get(1)))).collect(Collectors.joining(", "));
      }
    } catch (CertificateParsingException damaged) {
      return "no name that can be read";
    }
    return "no name at all";
  }

  /** Replaces the characters that could act on a terminal. */
  private static String printable(String text) {
    return String.valueOf(text).replaceAll("[^ -~]", "?");
  }

  /** The client's certificate. It is sent whatever CAs the server names: the server then reports why it refuses the certificate. */
  private final class Identity extends X509ExtendedKeyManager {
    /** The content of the handshake of this thread: certificate and key must belong together. */
    private final ThreadLocal<Material> chosen = new ThreadLocal<>();

    @Override
    public String chooseEngineClientAlias(String[] keyTypes, Principal[] issuers, SSLEngine engine) {
      Material material = current();
      chosen.set(material);
      if (material.key == null) {
        return null;
      }
      String algorithm = material.chain[0].getPublicKey().getAlgorithm();
      return Arrays.stream(keyTypes).anyMatch(type -> type.equals(algorithm)) ? ALIAS : null;
    }

    @Override
    public X509Certificate[] getCertificateChain(String alias) {
      return material().chain;
    }

    @Override
    public PrivateKey getPrivateKey(String alias) {
      return material().key;
    }

    private Material material() {
      Material material = chosen.get();
      return material == null ? current() : material;
    }

    @Override
    public String[] getClientAliases(String keyType, Principal[] issuers) {
      return new String[] {ALIAS};
    }

    @Override
    public String chooseClientAlias(String[] keyTypes, Principal[] issuers, Socket socket) {
      return null;
    }

    @Override
    public String[] getServerAliases(String keyType, Principal[] issuers) {
      return null;
    }

    @Override
    public String chooseServerAlias(String keyType, Principal[] issuers, Socket socket) {
      return null;
    }
  }
}

package dev.wald;

import static org.junit.jupiter.api.Assertions.assertDoesNotThrow;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.ByteArrayOutputStream;
import java.io.InputStream;
import java.nio.channels.ClosedChannelException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.security.PrivateKey;
import java.security.cert.X509Certificate;
import java.util.Arrays;
import java.util.Base64;
import java.util.List;
import javax.net.ssl.SSLException;
import javax.net.ssl.SSLHandshakeException;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class TlsFilesTest {
  @TempDir static Path directory;

  /** A certificate that signs itself, and its key. */
  private record Pair(X509Certificate certificate, PrivateKey key) {}

  private static Pair rsa;
  private static Pair ec;

  @BeforeAll
  static void make() throws Exception {
    rsa = pair("RSA", "2048");
    ec = pair("EC", "256");
    write("rsa.pem", "CERTIFICATE", rsa.certificate.getEncoded());
    write("rsa.key", "PRIVATE KEY", rsa.key.getEncoded());
    write("ec.pem", "CERTIFICATE", ec.certificate.getEncoded());
    write("ec.key", "PRIVATE KEY", ec.key.getEncoded());
    // PKCS #8 ends with the key in PKCS #1, behind 26 bytes.
    byte[] encoded = rsa.key.getEncoded();
    write("rsa.pkcs1.key", "RSA PRIVATE KEY", Arrays.copyOfRange(encoded, 26, encoded.length));
    Files.writeString(directory.resolve("text"), "no PEM");
    write("locked.key", "ENCRYPTED PRIVATE KEY", encoded);
  }

  /** The JDK has no public class that makes certificates, but a tool. */
  private static Pair pair(String algorithm, String size) throws Exception {
    Path store = directory.resolve(algorithm);
    Process tool = new ProcessBuilder(Path.of(System.getProperty("java.home"), "bin", "keytool").toString(), "-genkeypair", "-keyalg", algorithm,
        "-keysize", size, "-dname", "CN=test", "-validity", "3650", "-storetype", "PKCS12", "-storepass", "secret", "-alias", "a",
        "-keystore", store.toString()).redirectErrorStream(true).redirectOutput(ProcessBuilder.Redirect.DISCARD).start();
    assertEquals(0, tool.waitFor());
    KeyStore keys = KeyStore.getInstance("PKCS12");
    try (InputStream file = Files.newInputStream(store)) {
      keys.load(file, "secret".toCharArray());
    }
    return new Pair((X509Certificate) keys.getCertificate("a"), (PrivateKey) keys.getKey("a", "secret".toCharArray()));
  }

  private static void write(String name, String type, byte[] content) throws Exception {
    String text = Base64.getMimeEncoder(64, new byte[] {'\n'}).encodeToString(content);
    Files.writeString(directory.resolve(name), "-----BEGIN " + type + "-----\n" + text + "\n-----END " + type + "-----\n");
  }

  private static Path file(String name) {
    return name == null ? null : directory.resolve(name);
  }

  @ParameterizedTest
  @CsvSource({"rsa.pem,rsa.key", "ec.pem,ec.key", "rsa.pem,rsa.pkcs1.key"})
  void certificatesAndKeysAreRead(String certificate, String key) {
    assertDoesNotThrow(() -> new TlsFiles(file("ec.pem"), file(certificate), file(key)).context());
  }

  @Test
  void keyOfSec1IsReadWithTheNameOfItsCurve() throws Exception {
    // PKCS #8 ends with the key in SEC 1, which begins with its version. The JDK leaves the curve out, and other tools name it there.
    byte[] encoded = ec.key.getEncoded();
    byte[] point = ec.certificate.getPublicKey().getEncoded();
    ByteArrayOutputStream key = new ByteArrayOutputStream();
    key.writeBytes(new byte[] {0x30, 119, 2, 1, 1});
    key.write(encoded, encoded.length - 34, 34);
    key.writeBytes(new byte[] {(byte) 0xa0, 10, 6, 8, 0x2a, (byte) 0x86, 0x48, (byte) 0xce, 0x3d, 3, 1, 7, (byte) 0xa1, 68, 3, 66, 0});
    key.write(point, point.length - 65, 65);
    write("ec.sec1.key", "EC PRIVATE KEY", key.toByteArray());
    assertDoesNotThrow(() -> new TlsFiles(null, file("ec.pem"), file("ec.sec1.key")));
  }

  @ParameterizedTest
  @CsvSource(delimiter = '|', value = {
      "missing |         |           | missing: no such file",
      "text    |         |           | text: no certificate in PEM",
      "rsa.key |         |           | rsa.key: no certificate in PEM",
      "        | ec.pem  |           | needs both",
      "        |         | ec.key    | needs both",
      "        | ec.pem  | rsa.key   | rsa.key is not the key of the certificate",
      "        | ec.pem  | text      | text: no private key in PEM",
      "        | ec.pem  | locked.key| locked.key: no private key in PEM without a password",
      "        | text    | ec.key    | text: no certificate in PEM"})
  void settingsThatCannotBeUsedAreNamed(String ca, String certificate, String key, String words) {
    TlsProblem problem = assertThrows(TlsProblem.class, () -> new TlsFiles(file(ca), file(certificate), file(key)));
    assertEquals(TlsFailure.SETTINGS, problem.failure);
    assertTrue(problem.getMessage().contains(words), problem.getMessage());
    Failure failure = problem.asFailure();
    assertEquals(FailureKind.TLS, failure.kind);
    assertEquals(Retry.NEVER, failure.retry);
  }

  @Test
  void handshakesThatFailAreNamed() {
    TlsProblem own = new TlsProblem(TlsFailure.EXPIRED, "it expired");
    assertEquals(own, TlsProblem.of(new SSLHandshakeException("x").initCause(own), true));
    List<Object[]> table = List.of(
        new Object[] {new SSLHandshakeException("Received fatal alert: certificate_required"), TlsFailure.CLIENT_CERTIFICATE_REQUIRED},
        new Object[] {new SSLHandshakeException("(unknown_ca) Received fatal alert: unknown_ca"), TlsFailure.CLIENT_CERTIFICATE_REFUSED},
        new Object[] {new SSLException("Unsupported or unrecognized SSL message"), TlsFailure.SERVER_WITHOUT_TLS},
        new Object[] {new SSLException("Received fatal alert: no_application_protocol"), TlsFailure.HANDSHAKE},
        new Object[] {new SSLException("Received fatal alert: internal_error"), TlsFailure.HANDSHAKE});
    for (Object[] row : table) {
      assertEquals(row[1], TlsProblem.of((Throwable) row[0], true).failure, row[0].toString());
    }
    assertEquals(null, TlsProblem.of(new ClosedChannelException(), true));
    assertEquals(null, TlsProblem.of(null, true));
    assertEquals(null, TlsProblem.of(new java.io.IOException("Connection reset by peer"), false));
    assertEquals(TlsFailure.SERVER_WITH_TLS,
        TlsProblem.of(new Exception("First received frame was not SETTINGS. Hex dump for first 5 bytes: 15"), false).failure);
  }
}

"""The server's certificate, tokens and rights change under the load of all five clients, over TLS. Each language has a
producer and a follower that keep their right, and a producer that loses it and gets it back, again and again. Rounds:
a new certificate through a `..data` link; for each principal a second token, its file, and the first token revoked; the
right to append taken and given. A reload follows SIGHUP; one round has no signal, and then takes at most 10 s. The audit
log has the times. Argument: SECONDS (600; 36 without --all).
"""

import datetime
import socket

from certificates import *
from loads import *

examples()

SECONDS = int(sys.argv[1]) if len(sys.argv) > 1 else sized(600, 36)
# Appends per second of each producer.
RATE = 50
PATIENCE = 120
EXPIRES = 'wald_tls_certificate_not_after_timestamp_seconds{kind="server"}'
KEEP = 'allow = [{ do = ["append", "create", "read", "list"], logs = "kept/" }]'
MAY = 'allow = [{ do = ["append", "create", "read", "list"], logs = "lost/" }]'
MUST_NOT = 'allow = [{ do = ["create", "read", "list"], logs = "lost/" }]'


class Secured:
    """A daemon with TLS and tokens, whose files change."""

    def __init__(self, directory):
        self.directory, self.generation = directory, 0
        self.authority = Authority(directory / "ca")
        (directory / "tls").mkdir()
        self.renew()
        for name in ("server.pem", "server.key"):
            (directory / "tls" / name).symlink_to(f"..data/{name}")
        self.auth, self.audit = directory / "auth.toml", directory / "audit.log"
        tables = [f'[principal.keep-{language}]\n{KEEP}\n\n[principal.lose-{language}]\n{MAY}\n' for language in BUILDERS]
        self.write("\n".join([*tables, '[principal.reader]\nallow = [{ do = ["read", "list"], logs = "" }]\n']))
        self.principals = [f"{deed}-{language}" for language in BUILDERS for deed in ("keep", "lose")] + ["reader"]
        self.tokens = {name: self.create(name, self.token_file(name)) for name in self.principals}
        tls = directory / "tls"
        self.daemon = Daemon(directory / "data", *files(tls / "server.pem", tls / "server.key"), "--auth-file", self.auth,
                             "--metrics-open", "--audit-log", self.audit)

    def token_file(self, name):
        return self.directory / f"{name}.token"

    def environment(self, name, **more):
        """The environment of a client."""
        return clean_environment(WALD_ENDPOINT=f"https://{self.daemon.grpc}", WALD_TLS_CA=str(self.authority.pem),
                                 WALD_TOKEN_FILE=str(self.token_file(name)), **more)

    def write(self, text):
        """Replaces auth_file in one step."""
        new = self.auth.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(text)
        new.rename(self.auth)

    def create(self, principal, to):
        """Draws a token; returns its id."""
        run(WALD, "token", "create", "--principal", principal, "--expires", "1d", "--to", to, "--auth-file", self.auth, check=True)
        return to.read_text()[6:14]

    def renew(self):
        """Puts a certificate with a new key in the place of the last one, as Kubernetes does."""
        self.generation += 1
        # Each has another expiry, which the metric shows.
        folder = f"..{self.generation}"
        self.pem, _ = self.authority.issue(self.directory / "tls" / folder, "server", days=30 + self.generation)
        link = self.directory / "tls" / "..new"
        link.symlink_to(folder)
        link.rename(self.directory / "tls" / "..data")

    def events(self):
        # The last line may still be on its way.
        return [json.loads(line) for line in self.audit.read_text().split("\n")[:-1]]

    def in_force(self, setting, path):
        """Time of the reload since when the contents of the file are in force; None if they are not."""
        digest = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
        last = [event for event in self.events() if event["event"] == "reload" and setting in event["in_force"]][-1]
        return moment(last) if last["in_force"][setting] == digest else None

    def reload(self, setting, path, signal_it=True):
        """Waits until the changed file is in force: the time of the reload, and its delay (s)."""
        changed = time.time()
        if signal_it:
            self.daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: self.in_force(setting, path), 15)
        at = self.in_force(setting, path)
        return at, (at - changed if at else float("inf"))

    def served(self):
        """The certificate that a new connection gets, in PEM."""
        host, port = self.daemon.grpc.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as sock:
            with self.authority.context("h2").wrap_socket(sock, server_hostname="localhost") as tls:
                return ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True))


def moment(event):
    return datetime.datetime.fromisoformat(event["time"].replace("Z", "+00:00")).timestamp()


def appended(secured, part):
    """Whether a producer has appended. Fails at once if it has ended."""
    if part.process.poll() is not None:
        raise SystemExit(f"{part.name}: {part.trouble()}")
    done = run(WALCTL, "read", part.log, "--last", "1", "--output", "raw", env=secured.environment("reader"))
    return done.returncode == 0 and part.name + ":" in done.stdout.decode()


def renew_certificate(secured, signal_it):
    secured.renew()
    _, delay = secured.reload("tls_cert", secured.pem, signal_it)
    same = secured.daemon.metric(EXPIRES) == not_after(secured.pem)
    return delay, same and secured.served().split() == secured.pem.read_text().split()


def replace_tokens(secured):
    """Gives each principal its next token, then revokes the first."""
    made = {name: secured.create(name, secured.directory / f"{name}.next") for name in secured.principals}
    secured.reload("auth_file", secured.auth)
    for name in secured.principals:
        (secured.directory / f"{name}.next").rename(secured.token_file(name))
        run(WALD, "token", "revoke", secured.tokens[name], "--auth-file", secured.auth, check=True)
    _, delay = secured.reload("auth_file", secured.auth)
    secured.tokens = made
    return delay


def take_and_give(secured, losers, signal_it):
    """Takes the right to append from the losers and gives it back. Returns the longest times (s) between reload and refusal,
    and between change and reload."""
    seen = len(secured.events())
    secured.write(secured.auth.read_text().replace(MAY, MUST_NOT))
    taken, delay = secured.reload("auth_file", secured.auth, signal_it)
    late = []
    for part in losers:
        ended = wait_until(lambda: part.process.poll() is not None, 30)
        refused = part.err.read_text(errors="replace")
        if not (ended and part.process.returncode != 0 and "NOT_ALLOWED" in refused):
            expect(f"{part.name} fails with NOT_ALLOWED", False, part.trouble())
    for language in BUILDERS:
        denials = [moment(event) for event in secured.events()[seen:]
                   if event["outcome"] == "denied" and event.get("principal") == f"lose-{language}"]
        late.append(min(denials, default=float("inf")) - taken)
    secured.write(secured.auth.read_text().replace(MUST_NOT, MAY))
    secured.reload("auth_file", secured.auth)
    return max(late), delay


@check("Certificate, tokens and rights change under the load of all clients: no error, no record lost or twice")
def rotation(directory):
    secured = Secured(directory)
    stop, parts, lost = directory / "stop", [], []
    with secured.daemon:
        try:
            followers = [follower(language, f"follower-{language}", "kept/", len(BUILDERS), secured.environment("reader"), directory)
                         for language in BUILDERS]
            producers = [producer(language, language, "kept/all", RATE, secured.environment(f"keep-{language}", WALD_STOP=str(stop)), directory)
                         for language in BUILDERS]
            parts += [*followers, *producers]
            began, rounds = time.monotonic(), 0
            reloads, refusals, alone, fresh = [], [], [], True
            while rounds < 3 or time.monotonic() - began < SECONDS:
                # A turn without a signal.
                signal_it = rounds != 1
                losers = [producer(language, f"loser-{language}-{rounds}", f"lost/{language}", RATE,
                                   secured.environment(f"lose-{language}", WALD_STOP=str(stop)), directory) for language in BUILDERS]
                parts += losers
                lost += losers
                if not wait_until(lambda: all(appended(secured, part) for part in losers), 60):
                    expect(f"round {rounds}: the losers append", False, [part.trouble() for part in losers])
                delay, same = renew_certificate(secured, signal_it)
                fresh = fresh and same
                (reloads if signal_it else alone).append(delay)
                reloads.append(replace_tokens(secured))
                refusal, delay = take_and_give(secured, losers, signal_it)
                refusals.append(refusal)
                (reloads if signal_it else alone).append(delay)
                for part in [*followers, *producers]:
                    if part.process.poll() is not None:
                        expect(f"{part.name} works until stopped", False, part.trouble())
                rounds += 1
            stop.touch()
            all_end(producers, PATIENCE)
            all_end(followers, PATIENCE)
            took = time.monotonic() - began
            truth = scanned(secured.environment("reader"), "kept/")
            rest = by_producer(scanned(secured.environment("reader"), "lost/"))
            failures = secured.daemon.metrics()
        finally:
            for part in parts:
                harness.end_group(part.process)
        expect("each new certificate is served", fresh, f"{rounds} certificates")
        expect("a reload by SIGHUP takes less than 1 s", max(reloads) < 1, f"{len(reloads)}, at most {max(reloads):.2f} s")
        expect("without a signal it takes at most 10 s", max(alone) <= 10.5, f"{len(alone)}, at most {max(alone):.2f} s")
        expect("a caller without its right is refused within 1 s", max(refusals) <= 1, f"{len(refusals)} times, at most {max(refusals):.3f} s")
        expect("no reload failed", not any(value for name, value in failures.items() if name.startswith("wald_reload_failures_total")))
        judge(producers, followers, truth)
        for part in lost:
            got = rest.pop((part.log, part.name), [])
            expect(f"{part.name}: a prefix of its records, each once", got == [f"{part.name}:{number}" for number in range(len(got))] and got, len(got))
        expect("no other record is there", not rest, list(rest)[:3])
        print(f"{took:.0f} s, {rounds} rounds, {len(truth)} records of producers that keep their right")

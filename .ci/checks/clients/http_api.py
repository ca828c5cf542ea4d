"""The HTTP API with real clients: curl and a browser follow a log while the daemon is killed over and over; the programs are
those in docs/src/http.md. Log shippers send as their documentation says.
"""

import contextlib
import http.server
import socket
import urllib.error

from common import *

PAGE = (ROOT / "docs" / "src" / "http.md").read_text()
EXAMPLE = "http://localhost:6926/v1/scan?log=orders&follow=true"
# Seconds for a follower to get everything after the last start.
PATIENCE = 60


def example(language):
    """The only example of a language on the page."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)
    return found


def post(url, data, kind="application/x-ndjson", **headers):
    """Status and body of the answer."""
    request = urllib.request.Request(url, data, {"content-type": kind, **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


class Restarted:
    """A daemon on fixed ports that is killed and started again, while a producer appends. Requests of the producer are sent again
    until they are answered; their numbers tell repeats."""

    def __init__(self, directory, *settings):
        self.directory, self.settings = directory, settings
        self.http = free_port()
        self.sent = 0
        self.daemon = None
        self.start()

    def start(self):
        self.daemon = subprocess.Popen(
            [WALD, "--data-dir", self.directory / "data", "--listen", "127.0.0.1:0", "--http-listen", f"127.0.0.1:{self.http}",
             "--heartbeat-interval", "200ms", *self.settings], env=clean_environment(), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end(self):
        self.daemon.kill()
        self.daemon.wait()

    def url(self, path):
        return f"http://localhost:{self.http}{path}"

    def append(self, records):
        """Appends batches of numbered records, each as long as it takes."""
        for _ in range(records):
            number = self.sent
            query = f"?condition.producer.id=till&condition.producer.sequence={number}"
            answered = lambda: self.answers(query, b"tea %d" % number)
            if not wait_until(answered, PATIENCE):
                raise SystemExit(f"record {number} is not appended")
            self.sent += 1

    def answers(self, query, data):
        try:
            return post(self.url("/v1/logs/orders/records" + query), data, "text/plain")[0] == 200
        except OSError:
            return False

    def rounds(self, kills, records, got):
        """Appends while the daemon is killed that many times, at a moment of the follower's own: once it has got something
        of the round. Returns whether the follower got everything."""
        for _ in range(kills):
            before = len(got())
            self.append(records)
            wait_until(lambda: len(got()) > before, PATIENCE)
            self.end()
            self.start()
        self.append(records)
        return wait_until(lambda: len(got()) >= self.sent, PATIENCE)


def free_port():
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def expect_each_once(who, got, sent):
    wanted = [f"{number} tea {number}" for number in range(sent)]
    expect(f"{who} has each of {sent} records once and in order", got == wanted,
           "" if got == wanted else f"{len(got)}: {[text for text in wanted if got.count(text) != 1][:5]}")


@check("curl follows a log over kills of the daemon without a record lost or twice")
def curl(directory):
    kills, records = sized((40, 25), (8, 25))
    restarted = Restarted(directory)
    output = directory / "events"
    script = f"{example('bash')}\nfollow '{restarted.url('/v1/scan?log=orders&follow=true')}'\n"
    follower = subprocess.Popen(["bash", "-c", script.replace("sleep 1", "sleep 0.1")], stdin=subprocess.DEVNULL, stdout=output.open("w"),
                                start_new_session=True)

    def got():
        messages = [json.loads(line) for line in output.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [f"{record['lsn']} {record['text']}" for message in messages for batch in message.get("batches", []) for record in batch["records"]]

    try:
        restarted.append(1)
        expect(f"all records come over {kills} kills", restarted.rounds(kills, records, got))
        expect_each_once("curl", got(), restarted.sent)
    finally:
        os.killpg(follower.pid, signal.SIGKILL)
        follower.wait()
        restarted.end()


class PageServer(http.server.BaseHTTPRequestHandler):
    """Serves the page of the docs from an origin of its own, and takes the page's items."""

    # Of the class that each server makes.
    page, got = b"", []

    def do_GET(self):
        self.send_response(200 if self.path == "/" else 404)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.page if self.path == "/" else b"")

    def do_POST(self):
        self.got.append(self.rfile.read(int(self.headers["content-length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


# Reports each item that the page of the docs shows, and that the browser has given the stream up.
REPORT = """<script>
let queue = Promise.resolve();
const report = (text) => { queue = queue.then(() => fetch("/item", { method: "POST", body: text })); };
new MutationObserver((changes) => {
  for (const change of changes) for (const item of change.addedNodes) report(item.textContent);
}).observe(document.getElementById("orders"), { childList: true });
source.addEventListener("error", () => { if (source.readyState === EventSource.CLOSED) report("given up"); });
</script>"""


class Origin:
    """The server of a page, and a browser that shows the page; a context that ends both."""

    def __init__(self):
        self.handler = type("Server", (PageServer,), {"got": []})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self.name = f"http://127.0.0.1:{self.server.server_port}"
        self.browser = None
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def open(self, page, profile):
        self.handler.page = page.encode()
        self.browser = subprocess.Popen(
            [shutil.which("chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             f"--user-data-dir={profile}", f"{self.name}/"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def got(self):
        return self.handler.got

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.browser:
            os.killpg(self.browser.pid, signal.SIGKILL)
            self.browser.wait()
        self.server.shutdown()


@check("A page in a browser follows a log over kills of the daemon, from an allowed origin alone")
def browser(directory):
    kills, records = sized((20, 25), (3, 25))
    with Origin() as stranger, Origin() as allowed:
        restarted = Restarted(directory, "--http-api-origins", allowed.name)
        try:
            expect("the page follows the address of the docs", EXAMPLE in example("html"))
            page = example("html").replace(EXAMPLE, restarted.url("/v1/scan?log=orders&follow=true")) + REPORT
            restarted.append(1)
            stranger.open(page, directory / "stranger")
            wait_until(stranger.got, PATIENCE)
            expect("a page of another origin gets nothing", stranger.got() == ["given up"], stranger.got())
            allowed.open(page, directory / "allowed")
            expect(f"all records come over {kills} kills", restarted.rounds(kills, records, allowed.got))
            expect_each_once("the page", allowed.got(), restarted.sent)
        finally:
            restarted.end()


@check("Vector and Fluent Bit send as their documentation says, and each line is a record")
def shippers(directory):
    with Daemon(directory / "data") as daemon:
        url = f"http://{daemon.start['http']}/v1/logs/app/records"
        lines = [json.dumps({"message": f"line {number}", "host": "a"}) for number in range(1000)]
        text = "\n".join(lines).encode()
        # Vector: framing newline_delimited, no newline at the end. Fluent Bit: json_lines, one behind each line.
        for agent, body in ("Vector/0.49.0", text), ("Fluent-Bit", text + b"\n"):
            status, answer = post(url, body, **{"user-agent": agent})
            expect(f"{agent}: a batch of 1,000 lines is appended", status == 200, "" if status == 200 else answer)
        status, answer = post(url, text + b"\nmore")
        refused = status == 400 and b"NOT_APPLIED" in answer
        expect("one line more is refused for good", refused, "" if refused else answer)
        last = json.loads(run("curl", "-sf", f"{url}?lsn=1999&max_records=1").stdout)["batch"]["records"][0]["text"]
        expect("each line is a record", last == lines[-1], "" if last == lines[-1] else last)
        status, answer = post(url, b"[" + b",".join(line.encode() for line in lines[:2]) + b"]", "application/json")
        refused = status == 400 and b"NOT_APPLIED" in answer
        expect("an array of JSON is refused", refused, "" if refused else answer)


@check("The description of the API is valid OpenAPI, and the page lists its requests")
def description(directory):
    with Daemon(directory / "data") as daemon:
        text = urllib.request.urlopen(f"http://{daemon.start['http']}/v1/openapi.json", timeout=30).read()
    document = directory / "openapi.json"
    document.write_bytes(text)
    valid = run(SCRATCH / "deploy" / "bin" / "openapi-spec-validator", document)
    expect("a validator accepts it", valid.returncode == 0, "" if valid.returncode == 0 else valid.stdout + valid.stderr)
    documented = re.findall(r"^\| `(\w+) (/v1/\S+)` \|", PAGE, re.M)
    described = [(method.upper(), path) for path, methods in json.loads(text)["paths"].items() for method in methods]
    expect("the page lists every request and no other", sorted(documented) == sorted(described), set(documented) ^ set(described) or "")

"""An object store for checks, in threads of this process: the part of S3 that a client of backups uses. Objects are files.
It verifies the signature and the digest of each request. A condition and its write are one step. Checks can make the server
ignore conditions, check them without a lock, or fail.
"""

import email.utils
import hashlib
import hmac
import os
import re
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

KEY, SECRET = "test1234", "test12345678"
# Small, so that every list has several pages.
PAGE = 50


class Objects(ThreadingHTTPServer):
    """The server; a context that ends it. `conditions` is "atomic", "racy" or "ignored". `fault` gets each request and returns
    None, the status of a refusal, or "lost": the request is done, and its answer is not sent."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, objects, conditions="atomic", host="127.0.0.1"):
        super().__init__((host, 0), Request)
        self.objects, self.conditions = objects, conditions
        self.fault = lambda request: None
        self.lock, self.uploads, self.metadata = threading.Lock(), {}, {}
        # Next to the objects, on the same file system.
        self.unfinished = objects.with_name("unfinished")
        self.unfinished.mkdir()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """Clients that are killed close their connections."""


class Refused(Exception):
    def __init__(self, status, code):
        super().__init__(code)
        self.status, self.code = status, code


def xml(text):
    """The elements of a body, without their namespaces."""
    return ElementTree.fromstring(re.sub(rb' xmlns="[^"]*"', b"", text))


def tag(content):
    return f'"{hashlib.md5(content).hexdigest()}"'


class Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_):
        pass

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(self)
        try:
            if isinstance(fault, int):
                raise Refused(fault, "Fault")
            self.authenticate(body)
            status, headers, content = self.perform(body)
        except Refused as refused:
            status, headers = refused.status, {"Content-Type": "application/xml"}
            content = f"<Error><Code>{refused.code}</Code><Message>a sentence</Message></Error>".encode()
        if fault == "lost":
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def authenticate(self, body):
        """Signature Version 4."""
        fields = dict(re.findall(r"(\w+)=([^,]+)", self.headers.get("Authorization", "")))
        if fields.keys() != {"Credential", "SignedHeaders", "Signature"}:
            raise Refused(403, "AccessDenied")
        key, *scope = fields["Credential"].split("/")
        url = urlsplit(self.path)
        query = sorted((quote(name, safe=""), quote(value, safe="")) for name, value in parse_qsl(url.query, keep_blank_values=True))
        digest = self.headers["x-amz-content-sha256"]
        canonical = "\n".join([self.command, url.path, "&".join(map("=".join, query)),
                               *(f"{name}:{self.headers[name].strip()}" for name in fields["SignedHeaders"].split(";")),
                               "", fields["SignedHeaders"], digest])
        text = "\n".join(["AWS4-HMAC-SHA256", self.headers["x-amz-date"], "/".join(scope), hashlib.sha256(canonical.encode()).hexdigest()])
        signing = f"AWS4{SECRET}".encode()
        for part in scope:
            signing = hmac.digest(signing, part.encode(), "sha256")
        if key != KEY or hmac.digest(signing, text.encode(), "sha256").hex() != fields["Signature"]:
            raise Refused(403, "SignatureDoesNotMatch")
        if digest != hashlib.sha256(body).hexdigest():
            raise Refused(400, "XAmzContentSHA256Mismatch")

    def perform(self, body):
        """The result of the request: status, headers, content."""
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        bucket = self.server.objects / bucket
        if not bucket.is_dir():
            raise Refused(404, "NoSuchBucket")
        path, uploads = bucket / key, self.server.uploads
        match self.command, key:
            case "GET", "":
                return 200, {}, self.listed(bucket, query)
            case "POST", "":
                keys = [element.text for element in xml(body).iter("Key")]
                for one in keys:
                    (bucket / one).unlink(missing_ok=True)
                return 200, {}, f"<DeleteResult>{''.join(f'<Deleted><Key>{escape(one)}</Key></Deleted>' for one in keys)}</DeleteResult>".encode()
            case "POST", _ if "uploads" in query:
                uploads[upload := uuid.uuid4().hex] = {}
                return 200, {}, f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>".encode()
            case _ if "uploadId" in query and query["uploadId"] not in uploads:
                raise Refused(404, "NoSuchUpload")
            case "POST", _:
                # A repeated end finds its parts again, as in S3.
                parts = [uploads[query["uploadId"]][element.text] for element in xml(body).iter("PartNumber")]
                done = self.write(path, b"".join(parts))
                return 200, {}, f"<CompleteMultipartUploadResult><ETag>{escape(done)}</ETag></CompleteMultipartUploadResult>".encode()
            case "PUT", _ if "uploadId" in query:
                uploads[query["uploadId"]][query["partNumber"]] = body
                return 200, {"ETag": tag(body)}, b""
            case "DELETE", _ if "uploadId" in query:
                del uploads[query["uploadId"]]
                return 204, {}, b""
            case "PUT", _:
                return 200, {"ETag": self.write(path, body, self.metadata_sent())}, b""
            case "DELETE", _:
                path.unlink(missing_ok=True)
                return 204, {}, b""
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise Refused(404, "NoSuchKey") from None
        changed = email.utils.formatdate(path.stat().st_mtime, usegmt=True)
        headers = {"ETag": tag(content), "Last-Modified": changed, **self.server.metadata.get(path, {})}
        if self.command == "HEAD":
            return 200, {**headers, "Content-Length": len(content)}, b""
        if (span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))) is None:
            return 200, headers, content
        first, last = int(span[1]), min(int(span[2]), len(content) - 1)
        if first > last:
            raise Refused(416, "InvalidRange")
        return 206, {**headers, "Content-Range": f"bytes {first}-{last}/{len(content)}"}, content[first:last + 1]

    def metadata_sent(self):
        return {name: value for name, value in self.headers.items() if name.lower().startswith("x-amz-meta-")}

    def write(self, path, content, metadata=None):
        """Writes an object if its condition holds; returns its tag."""
        server, new = self.server, self.server.unfinished / uuid.uuid4().hex

        def holds():
            there = tag(path.read_bytes()) if path.exists() else None
            wanted = self.headers.get("If-Match")
            if wanted and there is None:
                raise Refused(404, "NoSuchKey")
            return there is None if self.headers.get("If-None-Match") == "*" else wanted in (None, there)

        if server.conditions == "racy" and not holds():
            raise Refused(412, "PreconditionFailed")
        if server.conditions == "racy":
            time.sleep(0.02)
        with server.lock:
            if server.conditions == "atomic" and not holds():
                raise Refused(412, "PreconditionFailed")
            # Readers see the old object or the new one.
            new.write_bytes(content)
            path.parent.mkdir(parents=True, exist_ok=True)
            server.metadata[path] = metadata or {}
            os.replace(new, path)
        return tag(content)

    def listed(self, bucket, query):
        """One page of the second version of lists."""
        after, prefix = query.get("continuation-token") or query.get("start-after", ""), query.get("prefix", "")
        # Only the directory of the prefix can have its keys. No file needs a request of its own to the file system.
        directory = bucket / prefix.rpartition("/")[0]
        found = [f"{os.path.relpath(folder, bucket)}/{name}".removeprefix("./") for folder, _, names in os.walk(directory) for name in names]
        found = sorted(key for key in found if key.startswith(prefix) and key > after)
        more = f"<NextContinuationToken>{escape(found[PAGE - 1])}</NextContinuationToken>" if len(found) > PAGE else ""
        entries = []
        for key in found[:PAGE]:
            try:
                status = (bucket / key).stat()
            except FileNotFoundError:
                continue  # removed meanwhile
            changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
            entries.append(f"<Contents><Key>{escape(key)}</Key><Size>{status.st_size}</Size><LastModified>{changed}</LastModified></Contents>")
        return f"<ListBucketResult>{''.join(entries)}{more}</ListBucketResult>".encode()

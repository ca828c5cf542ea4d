"""A server for tests: `wald --ephemeral`, which ends with the test.

```python
with EphemeralServer() as server:
    async with wald.Client(server.endpoint) as client:
        await client.append("orders", "first")
```
"""

from __future__ import annotations

import os
import subprocess
from types import TracebackType


class EphemeralServer:
    """A server with an empty store of its own. It ends with `close`, with the block of `with`, or with the process of the test.

    The program is the one of the variable `WALD_BINARY`, or else the `wald` of PATH. `arguments` are further ones of it,
    such as `"--sync-mode", "async"`. Its errors go to the standard error of the test; the variable `WALD_LOG_FILTER` shows
    more. Raises RuntimeError if it does not serve.
    """

    endpoint: str
    """Address of the gRPC service: HOST:PORT."""
    http: str
    """Address of metrics, probes and the console: HOST:PORT."""

    def __init__(self, *arguments: str):
        binary = os.environ.get("WALD_BINARY") or "wald"
        environment = {"WALD_LOG_FILTER": "error", **os.environ}
        try:
            self._process = subprocess.Popen(
                [binary, "--ephemeral", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment
            )
        except OSError as error:
            raise RuntimeError(f"cannot start {binary}: {error.strerror}; install wald, or set WALD_BINARY") from error
        assert self._process.stdout is not None
        # Empty if it ends.
        line = self._process.stdout.readline()
        addresses = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if not {"grpc", "http"} <= addresses.keys():
            self._process.kill()
            self.close()
            status = self._process.returncode
            raise RuntimeError(f"{binary} --ephemeral does not serve: status {status}; its own error is above")
        self.endpoint, self.http = addresses["grpc"], addresses["http"]

    def close(self) -> None:
        """Ends the server, and removes its store."""
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> EphemeralServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

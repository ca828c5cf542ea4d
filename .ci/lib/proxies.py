"""Ways to a server that can be cut and delayed, each for one client."""

import asyncio
import contextlib
import threading
from urllib.parse import urlsplit


class Way:
    """A port that leads to the server. `delay` (s) holds each piece of a request and of an answer. `mode` is

    - None: everything passes.
    - "refused": connections are closed, and no new one is taken.
    - "silent": nothing passes. The bytes arrive once the mode has ended.
    - "unanswered": requests arrive, and answers are lost. Such connections are closed once the mode has ended.
    """

    def __init__(self, target):
        self.target, self.delay = target, 0
        self.current, self.writers = None, set()

    async def open(self):
        self.loop = asyncio.get_running_loop()
        self.free = asyncio.Event()
        self.free.set()
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    @property
    def mode(self):
        return self.current

    @mode.setter
    def mode(self, mode):
        self.loop.call_soon_threadsafe(self.change, mode)

    def change(self, mode):
        before, self.current = self.current, mode
        if mode == "silent":
            self.free.clear()
        else:
            self.free.set()
        if mode == "refused" or before == "unanswered":
            for writer in list(self.writers):
                writer.transport.abort()

    async def serve(self, reader, writer):
        if self.current == "refused":
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self.target)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        both = {writer, server_writer}
        self.writers |= both
        pumps = [asyncio.ensure_future(self.pump(reader, server_writer, False)), asyncio.ensure_future(self.pump(server_reader, writer, True))]
        # When one side has closed, the connection is of no use to the other.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        self.writers -= both
        for pump in pumps:
            pump.cancel()
        for one in both:
            one.close()

    async def pump(self, reader, writer, answers):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.delay:
                    await asyncio.sleep(self.delay)
                await self.free.wait()
                if answers and self.current == "unanswered":
                    continue
                writer.write(data)
                await writer.drain()


class Proxies:
    """Makes ways to one server, in a thread of their own; `close` ends them."""

    def __init__(self, base):
        address = urlsplit(base)
        self.target, self.loop = (address.hostname, address.port), asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def way(self):
        way = Way(self.target)
        asyncio.run_coroutine_threadsafe(way.open(), self.loop).result(10)
        return way

    async def end(self):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self):
        asyncio.run_coroutine_threadsafe(self.end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

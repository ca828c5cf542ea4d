"""Reports system calls of a process one by one as they begin, and makes them fail.

A filter of the kernel (seccomp) stops the selected calls before they do anything, and
lets this program decide on each. It replaces strace, whose `when=` counts separately for each thread: here
the n-th call on a file is the n-th of all threads, and a call that is not selected costs
nothing.

Run as a program it sets the filter on itself, hands it over, and becomes the command.
"""

import array
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import threading
import time

# x86_64. With the place of the path or the descriptor among the arguments.
PATH, DESCRIPTOR = "path", "descriptor"
CALLS = {
    "read": (0, DESCRIPTOR, 0), "write": (1, DESCRIPTOR, 0), "open": (2, PATH, 0), "fstat": (5, DESCRIPTOR, 0),
    "mmap": (9, DESCRIPTOR, 4), "pread64": (17, DESCRIPTOR, 0), "pwrite64": (18, DESCRIPTOR, 0),
    "flock": (73, DESCRIPTOR, 0), "fsync": (74, DESCRIPTOR, 0), "fdatasync": (75, DESCRIPTOR, 0),
    "ftruncate": (77, DESCRIPTOR, 0), "rename": (82, PATH, 0), "mkdir": (83, PATH, 0), "unlink": (87, PATH, 0),
    "readlink": (89, PATH, 0), "statfs": (137, PATH, 0), "fstatfs": (138, DESCRIPTOR, 0),
    "getdents64": (217, DESCRIPTOR, 0), "openat": (257, PATH, 1), "newfstatat": (262, PATH, 1),
    "mkdirat": (258, PATH, 1), "unlinkat": (263, PATH, 1), "renameat": (264, PATH, 1), "fallocate": (285, DESCRIPTOR, 0),
    "preadv": (295, DESCRIPTOR, 0), "pwritev": (296, DESCRIPTOR, 0), "renameat2": (316, PATH, 1),
    "preadv2": (327, DESCRIPTOR, 0), "statx": (332, PATH, 1),
}
NAMES = {number: name for name, (number, _, _) in CALLS.items()}

# linux/seccomp.h, linux/audit.h, linux/filter.h
X86_64 = 0xC000003E
SET_FILTER, NEW_LISTENER = 1, 1 << 3
USER_NOTIF, ALLOW = 0x7FC00000, 0x7FFF0000
RECV, SEND = 0xC0502100, 0xC0182101
CONTINUE = 1
NOTIFICATION, RESPONSE = struct.Struct("QIIiIQ6Q"), struct.Struct("QqiI")
NO_NEW_PRIVS = 38
SECCOMP = 317


def program(numbers):
    """The filter: calls of these numbers are reported, all others pass."""
    load, equal, give = 0x20, 0x15, 0x06
    code = [(load, 0, 0, 4), (equal, 1, 0, X86_64), (give, 0, 0, ALLOW), (load, 0, 0, 0)]
    for number in numbers:
        code += [(equal, 0, 1, number), (give, 0, 0, USER_NOTIF)]
    code.append((give, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in code), len(code)


def become(path, numbers, command):
    """Sets the filter on this process, hands it to the listener at the path, and runs the command."""
    code, length = program(numbers)
    buffer = ctypes.create_string_buffer(code)
    prog = struct.pack("HxxxxxxQ", length, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    with socket.socket(socket.AF_UNIX) as hand:
        hand.connect(path)
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        listener = libc.syscall(SECCOMP, SET_FILTER, NEW_LISTENER, prog)
        if listener < 0:
            raise OSError(ctypes.get_errno(), "seccomp")
        # sendmsg is never among the reported calls.
        hand.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))])
    os.close(listener)
    os.execv(command[0], command)


class Told:
    """One call as it begins."""

    def __init__(self, name, path, number, at, flags=0, span=None):
        self.name, self.path, self.number, self.at = name, path, number, at
        # Of an open.
        self.creates, self.direct = bool(flags & os.O_CREAT), bool(flags & os.O_DIRECT)
        # Start and end of a read or write at an offset.
        self.span = span

    @property
    def key(self):
        return self.name, self.path, self.number


class Interposer:
    """Listens to the calls of one process on files below a directory. A context.

    `decide` gets each call and returns None or an action: ("error", errno),
    ("kill",) or ("short",), which writes only half. `command` is the prefix of the daemon's command.
    """

    def __init__(self, directory, names, decide=lambda call: None):
        self.root = os.path.realpath(directory)
        self.numbers = [CALLS[name][0] for name in names]
        self.decide = decide
        self.calls, self.counts = [], {}
        self.socket_path = f"{self.root}.seccomp"
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(self.socket_path)
        self.server.listen(1)
        self.command = [sys.executable, "-I", "-S", __file__, self.socket_path, ",".join(map(str, self.numbers))]
        self.over = False
        self.pid = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over = True
        self.thread.join()
        self.server.close()
        os.unlink(self.socket_path)

    def kill(self):
        """Ends the process."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def _run(self):
        self.server.settimeout(0.2)
        while not self.over:
            try:
                hand, _ = self.server.accept()
                break
            except TimeoutError:
                continue
        else:
            return
        with hand:
            (self.pid, *_) = struct.unpack("3i", hand.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            _, fds, _, _ = socket.recv_fds(hand, 1, 1)
        (listener,) = fds
        try:
            self._listen(listener)
        finally:
            os.close(listener)

    def _listen(self, listener):
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while not self.over:
            for _, event in poll.poll(200):
                if event & select.POLLHUP:
                    return
                buffer = bytearray(NOTIFICATION.size)
                try:
                    fcntl.ioctl(listener, RECV, buffer)
                    answer = self._answer(NOTIFICATION.unpack(buffer))
                    if answer:
                        fcntl.ioctl(listener, SEND, answer)
                except (FileNotFoundError, ProcessLookupError):
                    pass  # it was killed meanwhile

    def _answer(self, notification):
        id_, pid, _, number, _, _, *arguments = notification
        go_on = RESPONSE.pack(id_, 0, 0, CONTINUE)
        name = NAMES[number]
        path = self._path(pid, name, arguments)
        if path is None:
            return go_on
        place = name, path
        self.counts[place] = self.counts.get(place, 0) + 1
        flags = arguments[2] if name == "openat" else 0
        span = (arguments[3], arguments[3] + arguments[2]) if name in ("pread64", "pwrite64") else None
        call = Told(name, path, self.counts[place], time.time(), flags, span)
        self.calls.append(call)
        match self.decide(call):
            case None:
                return go_on
            case ("error", errno):
                return RESPONSE.pack(id_, 0, -errno, 0)
            case ("kill",):
                # The process is stopped in this call, which then does nothing.
                os.kill(pid, signal.SIGKILL)
                return None
            case ("short",):
                return RESPONSE.pack(id_, half_written(pid, arguments), 0, 0)

    def _path(self, pid, name, arguments):
        """The file of a call, below the directory; None if it is elsewhere."""
        _, kind, place = CALLS[name]
        try:
            if kind == DESCRIPTOR:
                path = os.readlink(f"/proc/{pid}/fd/{arguments[place] & 0xFFFFFFFF}")
            else:
                path = string_of(pid, arguments[place])
                if not path.startswith("/") and place == 1:
                    # Relative to the open directory, or the descriptor itself.
                    directory = os.readlink(f"/proc/{pid}/fd/{arguments[0] & 0xFFFFFFFF}")
                    path = f"{directory}/{path}"
        except OSError:
            return None
        path = path.rstrip("/")
        if path == self.root:
            return "."
        return path[len(self.root) + 1:] if path.startswith(f"{self.root}/") else None


def string_of(pid, address):
    """The string at an address of a process."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        # Page by page: the next page may not be mapped.
        text = b""
        while b"\0" not in text and len(text) < 8192:
            text += memory.read(4096 - (address + len(text)) % 4096)
    return text.partition(b"\0")[0].decode()


def half_written(pid, arguments):
    """Writes half of a pwrite64, and returns its number of bytes."""
    descriptor, address, length, offset, *_ = arguments
    half = max(1, length // 2)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        data = memory.read(half)
    with open(f"/proc/{pid}/fd/{descriptor}", "r+b", buffering=0) as file:
        return os.pwrite(file.fileno(), data, offset)


if __name__ == "__main__":
    become(sys.argv[1], [int(number) for number in sys.argv[2].split(",")], sys.argv[3:])

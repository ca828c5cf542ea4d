"""A network of Linux's network namespaces: one for each place, and a router between them that can drop the packets of a direction.

The namespaces are descriptors of this process and have no names, so nothing remains of them, however this process ends.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
from pathlib import Path

CLONE_NEWNET = 0x40000000
ROUTER = "the router"
libc = ctypes.CDLL(None, use_errno=True)


def done(what, result):
    if result != 0:
        raise SystemExit(f"{what}: {os.strerror(ctypes.get_errno())}: network namespaces need root, with CAP_SYS_ADMIN and CAP_NET_ADMIN")


class Network:
    """Places with an address each; a context that ends it."""

    def __init__(self, places):
        self.addresses, self.descriptors, self.rules = {}, {}, []
        self.outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        for name in [ROUTER, *places]:
            done("a network cannot be made", libc.unshare(CLONE_NEWNET))
            self.descriptors[name] = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            done("this process does not get back its network", libc.setns(self.outside, CLONE_NEWNET))
            self.ip(name, "link set dev lo up")
        with self.inside(ROUTER):
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
            # A reverse check would make each cut a cut of both directions.
            for kind in "all", "default":
                Path(f"/proc/sys/net/ipv4/conf/{kind}/rp_filter").write_text("0")
        for number, name in enumerate(places, 1):
            port, there = f"port{number}", f"/proc/{os.getpid()}/fd/{self.descriptors[name]}"
            self.ip(ROUTER, f"link add name {port} type veth peer name eth0 netns {there}")
            self.ip(ROUTER, f"address add 10.225.{number}.1/24 dev {port}")
            self.ip(ROUTER, f"link set dev {port} up")
            self.addresses[name] = f"10.225.{number}.2"
            self.ip(name, f"address add {self.addresses[name]}/24 dev eth0")
            self.ip(name, "link set dev eth0 up")
            self.ip(name, f"route add default via 10.225.{number}.1")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for descriptor in (*self.descriptors.values(), self.outside):
            os.close(descriptor)

    @contextlib.contextmanager
    def inside(self, name):
        """Sockets and processes that this thread makes meanwhile are in this place."""
        done(f"no way into {name}", libc.setns(self.descriptors[name], CLONE_NEWNET))
        try:
            yield
        finally:
            done("this process does not get back its network", libc.setns(self.outside, CLONE_NEWNET))

    def ip(self, name, command):
        with self.inside(name):
            ended = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"ip {command}: {ended.stderr.strip()}")

    def cut(self, one, other):
        """From now on, all packets from one place to the other are lost. Packets of the other direction arrive."""
        rule = f"from {self.addresses[one]} to {self.addresses[other]} blackhole"
        self.ip(ROUTER, f"rule add {rule}")
        self.rules.append(rule)

    def heal(self):
        """All packets arrive again."""
        while self.rules:
            self.ip(ROUTER, f"rule del {self.rules.pop()}")

    def passes(self, one, other):
        """Whether a packet from one place arrives at the other within 0.5 s."""
        with self.inside(other):
            target = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with self.inside(one):
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with target, sender:
            target.bind((self.addresses[other], 0))
            target.settimeout(0.5)
            sender.sendto(b"x", target.getsockname())
            try:
                return target.recv(1) == b"x"
            except TimeoutError:
                return False

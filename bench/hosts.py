"""Several hosts on one machine: a network namespace for each, joined by pairs of virtual Ethernet.

The first host is the hub, which every other one reaches; they reach nothing else. It needs Linux, root and
`ip`. Where one of these is missing the hosts are plain processes on the loopback, and `kind` says so.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Hosts:
    kind: str
    """`network namespaces`, or why there are none."""
    num_spokes: int
    names: list[str]
    """Of the namespaces, the hub's first; empty where there are none."""

    def on_spoke(self, number: int, *command: str) -> list[str]:
        """A command as it runs on a spoke."""
        return ["ip", "netns", "exec", self.names[number + 1], *command] if self.names else list(command)

    def hub_seen_from(self, number: int) -> str:
        """The hub's address for a spoke."""
        return f"10.77.{number + 1}.1" if self.names else "127.0.0.1"


@contextmanager
def hosts(num_spokes: int) -> Iterator[Hosts]:
    """Hosts for the time of the block, in which this thread and what it starts are on the hub."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        yield Hosts("plain processes: no root, or no `ip`", num_spokes, [])
        return
    names = [f"longleaf-{os.getpid()}-{number}" for number in range(num_spokes + 1)]
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        _build(names)
    except subprocess.CalledProcessError as error:
        _remove(names)
        os.close(home)
        yield Hosts(f"plain processes: {' '.join(error.cmd)} fails", num_spokes, [])
        return
    try:
        _enter(os.open(Path("/run/netns") / names[0], os.O_RDONLY))
        yield Hosts("network namespaces", num_spokes, names)
    finally:
        _enter(home)
        _remove(names)


def _build(names: list[str]) -> None:
    hub, *spokes = names
    for name in names:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
    for number, spoke in enumerate(spokes, 1):
        end = f"spoke{number}"
        _ip("link", "add", end, "netns", hub, "type", "veth", "peer", "name", "hub", "netns", spoke)
        for name, device, host in ((hub, end, 1), (spoke, "hub", 2)):
            _ip("-n", name, "address", "add", f"10.77.{number}.{host}/30", "dev", device)
            _ip("-n", name, "link", "set", device, "up")


def _remove(names: list[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True)


def _enter(namespace: int) -> None:
    """Take this thread into a namespace, of which the descriptor is closed."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.setns(namespace, _NETWORK)
    os.close(namespace)
    if failed:
        raise OSError(ctypes.get_errno(), "setns")

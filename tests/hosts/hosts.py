"""Several hosts on one machine: Linux namespaces with a network between them.

A host has its own name, network, process numbers, ``/dev/shm`` and boot id: all by which ranks can tell hosts apart.
Disks are shared, except for the directories that are named ``local``::

    host-a 192.0.2.1 ── eth0 ═══ veth pair ═══ eth0 ── host-b 192.0.2.2
    host-a 192.0.2.1 ── eth0 ═══ veth pair ═══ port0 ── bridge ── port1, port2 ...      of more than two hosts

Nothing has a name outside of these namespaces, and they end with the process that made them, even if that is killed. So
there is nothing to clean up. Packets cannot leave the namespaces.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parent.parent.parent
NAMES = tuple(f"host-{letter}" for letter in "abcdefgh")
#: Addresses for documentation (RFC 5737), which no real host has.
ADDRESSES = tuple(f"192.0.2.{number}" for number in range(1, 9))
INTERFACE, PORT = "eth0", 29400
#: Its child ends when this process does, even if this process is killed.
_UNSHARE = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--pid", "--mount", "--fork", "--mount-proc"]
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")

#: Makes the processes below a host. Its arguments are the name, the text of /etc/hosts and the local directories.
_SET_UP = """
set -e
hostname "$1"
mount -t tmpfs none /mnt
printf "$2" > /mnt/hosts
cat /proc/sys/kernel/random/uuid > /mnt/boot_id
mount --bind /mnt/hosts /etc/hosts
mount --bind /mnt/boot_id /proc/sys/kernel/random/boot_id
umount /mnt
mount -t tmpfs none /dev/shm
shift 2
for directory; do mount -t tmpfs none "$directory"; done
ip link set lo up
echo ready
exec sleep infinity
"""


class HostsError(Exception):
    """The hosts cannot be made. The text says why, and what to do."""


class Host:
    """A host, and the processes that were started on it. Made by :class:`Hosts`, of which there are ``count``."""

    def __init__(self, number: int, known: Mapping[str, str], local: Sequence[Path], count: int) -> None:
        self.name, self.address, self._count = NAMES[number], ADDRESSES[number], count
        lines = [f"{address} {name}\\n" for name, address in {"localhost": "127.0.0.1", **known}.items()]
        arguments = [self.name, "".join(lines), *map(str, local)]
        self._holder = subprocess.Popen(
            [*_UNSHARE, "--kill-child", "sh", "-c", _SET_UP, "sh", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the programs, which end before their host
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != b"ready\n":
            self._holder.wait()
            raise HostsError(f"{self.name} cannot be made: {self._holder.stderr.read().decode().strip()}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self.process = int(children.split()[0])

    def start(self, *command: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command. Its standard output and its errors come in one pipe."""
        return subprocess.Popen(
            ["nsenter", "--target", str(self.process), "--all", "env", f"--chdir={ROOT}", *command],
            env={**_environment(), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def run(self, *command: str) -> str:
        """Run a command, and return what it printed."""
        started = self.start(*command)
        printed, _ = started.communicate(timeout=60)
        if started.returncode:
            raise HostsError(f"'{shlex.join(command)}' failed on {self.name}: {printed.strip().rstrip('.')}")
        return printed

    def torchrun(
        self,
        *program: str,
        ranks: int = 1,
        options: Sequence[str] = (),
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program on ``ranks`` ranks of this host, as part of a job on all. The command ``before`` starts
        torchrun."""
        command = [*before, sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        command += [f"--nnodes={self._count}", "--rdzv-backend=c10d", f"--rdzv-endpoint={NAMES[0]}:{PORT}"]
        command += ["--rdzv-id=rehearsal", *options]
        return self.start(*command, *program, environment=environment)

    def kill(self) -> None:
        """Kill all processes on this host, as if it ran out of memory. The host stays."""
        self.run("sh", "-c", "kill -KILL -1")

    def disconnect(self) -> None:
        """Cut the network. The hosts are not told: packets vanish."""
        self.run("ip", "link", "set", INTERFACE, "down")

    def end(self) -> None:
        """End the host with all its processes."""
        self._holder.kill()
        self._holder.communicate()


class Hosts:
    """Hosts, as a context manager: two to eight.

    Args:
        count: of the hosts.
        rate: limits the bandwidth in each direction, in the words of ``tc``: ``1gbit``.
        delay: delays each packet: ``1ms``. Needs the kernel module ``sch_netem``.
        local: directories that each host has for itself.
        known: the names and addresses in ``/etc/hosts`` of each host.

    Raises:
        HostsError: they cannot be made here.
    """

    def __init__(
        self,
        count: int = 2,
        rate: str = "",
        delay: str = "",
        local: Sequence[Path] = (),
        known: Sequence[Mapping[str, str]] = (dict(zip(NAMES, ADDRESSES, strict=True)),) * len(NAMES),
    ) -> None:
        if reason := why_impossible():
            raise HostsError(reason)
        self._hosts: list[Host] = []
        self._switch: Host | None = None  # between more than two hosts
        try:
            for number in range(count):
                self._hosts.append(Host(number, known[number], local, count))
            if count > 2:
                self._switch = Host(count - 1, {}, (), count)
            self._connect(rate, delay)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> tuple[Host, ...]:
        return tuple(self._hosts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End all hosts."""
        for host in [*self._hosts, *([self._switch] if self._switch else [])]:
            host.end()

    def _connect(self, rate: str, delay: str) -> None:
        first, second, *_ = self._hosts
        cards = [(host, INTERFACE) for host in self._hosts]
        if self._switch is None:
            _join(first, INTERFACE, second, INTERFACE)
        else:
            self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
            self._switch.run("ip", "link", "set", "bridge", "up")
            for number, host in enumerate(self._hosts):
                _join(host, INTERFACE, self._switch, f"port{number}")
                self._switch.run("ip", "link", "set", f"port{number}", "master", "bridge", "up")
                cards.append((self._switch, f"port{number}"))  # limits what the host receives
        for host in self._hosts:
            host.run("ip", "addr", "add", f"{host.address}/28", "dev", INTERFACE)
            host.run("ip", "link", "set", INTERFACE, "up")
        for host, interface in cards:
            limit = ["tc", "qdisc", "add", "dev", interface, "root"]
            try:
                if delay and interface == INTERFACE:
                    host.run(*limit, "netem", "delay", delay, *(["rate", rate] if rate else []))
                elif rate:
                    host.run(*limit, "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            except HostsError as error:
                advice = "A delay needs a kernel with the module sch_netem, a rate one with sch_tbf: leave it out"
                raise HostsError(f"{error}. {advice}") from None


def _join(one: Host, interface: str, other: Host, name: str) -> None:
    """Put a cable between two hosts."""
    pair = f"{interface} netns {one.process} type veth peer name {name} netns {other.process}"
    made = subprocess.run(["ip", "link", "add", *pair.split()], capture_output=True, text=True)
    if made.returncode:
        raise HostsError(f"no network can be made between the hosts: {made.stderr.strip()}")


def why_impossible() -> str:
    """Why this machine and user cannot make hosts, and what to do; empty if they can."""
    if sys.platform != "linux":
        return "hosts are made of Linux namespaces, and this is another system: use a machine with Linux"
    if os.geteuid() != 0:
        return "making network namespaces needs root: run it with sudo, or as root in a virtual machine"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} is missing: install iproute2 and util-linux"
    if (tried := subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True)).returncode:
        reason = tried.stderr.strip()
        return f"this system forbids namespaces ({reason}): use a virtual machine, or docker run --privileged"
    return ""


def wait_for_line(running: subprocess.Popen[str], text: str, seconds: float = 120.0) -> str:
    """Read what a process prints up to a line with ``text``. Raises AssertionError if there is none."""
    assert running.stdout is not None
    read, deadline = [], time.monotonic() + seconds
    for line in running.stdout:
        read.append(line)
        if text in line:
            return "".join(read)
        assert time.monotonic() < deadline, f"no line with {text!r} in {seconds:.0f} s: {''.join(read)}"
    raise AssertionError(f"ended without a line with {text!r}: {''.join(read)}")


def _environment() -> dict[str, str]:
    """The environment without settings for the network of the real machine."""
    kept = {name: value for name, value in os.environ.items() if name not in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR")}
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}

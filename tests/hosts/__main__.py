"""Run a program on several hosts, and print what each of them prints: ``make hosts``, or ``python -m tests.hosts``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading

from tests.hosts.hosts import Host, Hosts, HostsError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, help="hosts, at most 8 (2)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each host (1)")
    parser.add_argument("--rate", default="", help="bandwidth between the hosts: 1gbit")
    parser.add_argument("--delay", default="", help="latency in each direction: 1ms")
    parser.add_argument("program", nargs="+", help="what torchrun starts: -- examples/train.py --steps 20")
    options = parser.parse_args(arguments)
    try:
        with Hosts(options.hosts, options.rate, options.delay) as hosts:
            started = [host.torchrun(*options.program, ranks=options.ranks) for host in hosts]
            readers = [threading.Thread(target=_print, args=each) for each in zip(hosts, started, strict=True)]
            for reader in readers:
                reader.start()
            try:
                statuses = [each.wait() for each in started]
            except KeyboardInterrupt:
                return 130  # the hosts end, with all that runs on them
            for reader in readers:
                reader.join()
    except HostsError as error:
        print(f"make hosts: {error}.", file=sys.stderr)
        return 2
    return next(filter(None, statuses), 0)


def _print(host: Host, running: subprocess.Popen[str]) -> None:
    assert running.stdout is not None
    for line in running.stdout:
        print(f"{host.name} | {line}", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())

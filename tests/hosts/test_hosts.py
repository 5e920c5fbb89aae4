"""What hosts do that are one machine: they train as one host does, and name a rank or a host that was lost in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts.hosts import ADDRESSES, NAMES, ROOT, Host, Hosts, wait_for_line, why_impossible

needs_hosts = pytest.mark.skipif(bool(why_impossible()), reason=why_impossible())
PROGRAM = "tests/hosts/program.py"
#: For longer than a test takes.
LONG = (PROGRAM, "--steps=1000000", "--seconds=0.2")
#: Seconds after which docs/how-to/several-hosts.md promises an error, and some for a busy machine.
KILLED, CUT, SLACK = 10.0, 75.0, 15.0
#: The time limit of tests of ranks that hang.
HANG = 12


def losses_of(printed: str) -> dict[tuple[int, int], float]:
    """The losses that ranks printed, by rank and step."""
    found = re.findall(r"^rank (\d+) step (\d+) loss (\S+)$", printed, re.MULTILINE)
    return {(int(rank), int(step)): float(loss) for rank, step, loss in found}


def finish(running: Sequence[subprocess.Popen[str]]) -> str:
    """What processes print until they end well."""
    printed = "".join(each.communicate(timeout=180)[0] for each in running)
    assert [each.returncode for each in running] == [0] * len(running), printed
    return printed


def on_one_host(host: Host, *program: str, ranks: int = 2) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program]
    return finish([host.start(*command)])


def end_of(running: subprocess.Popen[str], seconds: float) -> str:
    """What a job prints until it fails, which it must in so many seconds."""
    begin = time.monotonic()
    printed = wait_for_line(running, "PeerFailureError", seconds + SLACK)
    assert time.monotonic() - begin < seconds + SLACK
    return printed


def errors_after(
    counts: Sequence[int], rank: int, place: str, fault: str, *options: str, within: float = KILLED
) -> dict[int, str]:
    """What the other ranks print after a rank has failed, which all must in time. ``counts`` has the ranks of each
    host. Without torchrun, which ends the ranks of a host before they can tell."""
    command = [sys.executable, *LONG, f"--fault={fault}", f"--place={place}", f"--rank={rank}", *options]
    world = {"WORLD_SIZE": str(sum(counts)), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29400"}
    world["FULLSHARD_HANG_TIMEOUT"] = str(HANG)
    printed: dict[int, str] = {}
    with Hosts(len(counts)) as hosts:
        where = [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]
        running = [host.start(*command, environment={**world, "RANK": str(at)}) for at, host in enumerate(where)]

        def read(at: int) -> None:
            printed[at] = wait_for_line(running[at], "PeerFailure", 60)

        readers = [threading.Thread(target=read, args=[at], daemon=True) for at in range(len(where)) if at != rank]
        for reader in readers:
            reader.start()
        wait_for_line(running[rank], f"rank {rank} fails")
        deadline = time.monotonic() + within + SLACK
        for reader in readers:
            reader.join(deadline - time.monotonic())
    assert not any(reader.is_alive() for reader in readers), printed
    assert printed.keys() == {*range(len(where))} - {rank}
    return printed


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "rank", "place", "fault", "options"),
    [
        ((2, 2), 3, "step", "kill", ["--at=0"]),
        ((2, 2), 3, "forward", "raise", []),
        ((2, 2), 1, "save", "kill", ["--checkpoints="]),
        ((2, 2), 1, "forward", "kill", ["--mesh", "2", "2"]),
        ((2, 1), 2, "backward", "kill", []),
        ((2, 2, 1), 3, "optimizer", "kill", []),
    ],
)
def test_a_rank_that_ended_is_named_by_all_with_its_host(
    tmp_path: Path, counts: Sequence[int], rank: int, place: str, fault: str, options: list[str]
) -> None:
    """One that is alone on its host has nobody who sees that its process has ended."""
    options = [f"{each}{tmp_path}" if each.endswith("=") else each for each in options]
    host = NAMES[[at for at, count in enumerate(counts) for _ in range(count)][rank]]
    how = r"has ended in the forward of step 4 .*: ValueError: bad batch" if fault == "raise" else "was killed or has"
    expected = rf"Rank {rank} \(process \d+ on {host}\) {how}"
    if (counts, rank) == ((2, 1), 2):
        expected = rf"Rank {rank} on {host} has not reported for \d+ s: it may have been killed"
    for printed in errors_after(counts, rank, place, fault, *options).values():
        assert len(re.findall(expected, printed)) == 1, printed  # not also in what others said


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "rank", "fault", "state"),
    [
        ((2, 1), 1, "stop", r"has not reported for \d+ s \(the process is stopped\), and was"),
        ((2, 2), 3, "sleep", "is in the forward of step 4 .*, and waits for nobody"),
        ((2, 2), 0, "stop", "has not reported"),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_host_and_not_those_that_wait_for_it(
    counts: Sequence[int], rank: int, fault: str, state: str
) -> None:
    """Rank 0 has the store: what others do is not known when it is stopped."""
    why, host = f": the others wait for rank {rank}", NAMES[rank // 2]
    if rank == 0:
        why = ", and the store, at rank 0 on host-a, does not answer: look there first"
    for printed in errors_after(counts, rank, "forward", fault, within=HANG + KILLED).values():
        error = printed[printed.index("PeerFailureError") :]
        assert f"Nothing arrived in {HANG} s{why}. " in error
        assert re.search(rf"\. (Rank {rank}|Each of ranks {rank}, \d) on {host} {state}", error)
        assert "may have been killed" not in error


@needs_hosts
@pytest.mark.slow
def test_two_hosts_train_as_one_and_one_goes_on_from_their_checkpoint(tmp_path: Path) -> None:
    with Hosts() as hosts:
        whole = on_one_host(hosts[0], PROGRAM, "--steps=6")
        options = [PROGRAM, f"--checkpoints={tmp_path}"]
        printed = finish([host.torchrun(*options, "--steps=3") for host in hosts])
        later = on_one_host(hosts[1], *options, "--steps=6")
    assert "2 ranks use the transport 'shm': all of them share a host" in whole
    chosen = "2 ranks use the transport 'p2p': every rank runs on a host of its own. FULLSHARD_TRANSPORT="
    assert chosen in printed
    expected = losses_of(whole)
    assert losses_of(printed).keys() == {(rank, step) for rank in range(2) for step in range(3)}
    assert losses_of(later).keys() == {(rank, step) for rank in range(2) for step in range(3, 6)}
    assert losses_of(printed) | losses_of(later) == pytest.approx(expected, rel=1e-5)


@needs_hosts
@pytest.mark.slow
def test_four_ranks_of_two_hosts_train_as_those_of_one() -> None:
    with Hosts() as hosts:
        whole = on_one_host(hosts[0], PROGRAM, "--steps=4", ranks=4)
        printed = finish([host.torchrun(PROGRAM, "--steps=4", ranks=2) for host in hosts])
    assert "4 ranks use the transport 'hosts': they run on 2 hosts, on each of which 2 share memory" in printed
    assert losses_of(printed) == pytest.approx(losses_of(whole), rel=1e-5)


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(("count", "stage", "most"), [(2, 3, 1.40), (2, 0, 1.02), (4, 3, 2.1)])
def test_what_a_card_sends_does_not_grow_with_the_ranks_of_its_host(count: int, stage: int, most: float) -> None:
    name = f"zero_stage={stage}"
    command = [sys.executable, "-m", "benchmarks.hosts", "--rounds=1", f"--hosts={count}", "--ranks=2", "--only", name]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert printed.returncode == 0, printed.stderr
    sent = float(printed.stdout.splitlines()[-1].removeprefix(name).split()[0])
    assert 0.95 * most < sent <= most


@needs_hosts
@pytest.mark.slow
def test_checkpoints_on_local_disks_are_refused_by_name(tmp_path: Path) -> None:
    with Hosts(local=[tmp_path]) as hosts:
        running = [host.torchrun(PROGRAM, f"--checkpoints={tmp_path / 'saves'}") for host in hosts]
        printed = [each.communicate(timeout=120)[0] for each in running]
        on_one_host(hosts[0], PROGRAM, f"--checkpoints={tmp_path / 'saves'}", "--steps=1")
        running = [host.torchrun(PROGRAM, f"--checkpoints={tmp_path / 'saves'}") for host in hosts]
        resumed = [each.communicate(timeout=120)[0] for each in running]
    for text in printed:
        assert re.search(r"CheckpointError: rank 1: host-b does not see \S+, which rank 0 created: ", text)
        assert f"{tmp_path / 'saves'} must be on a disk that all hosts share" in text
    for text in resumed:
        assert re.search(r"CheckpointError: .*rank 1: ", text)


@needs_hosts
@pytest.mark.slow
def test_replicas_are_on_two_hosts_of_which_one_may_lose_them(tmp_path: Path) -> None:
    """The replica of a step that no checkpoint on the shared disk has."""
    saves, replicas = tmp_path / "saves", Path("/dev/shm/job")
    options = [PROGRAM, f"--checkpoints={saves}", f"--replicas={replicas}"]
    with Hosts() as hosts:
        finish([host.torchrun(*options, "--steps=3") for host in hosts])
        hosts[1].run("rm", "-r", str(replicas))  # as on a new host
        printed = finish([host.torchrun(*options, "--steps=4") for host in hosts])
    assert losses_of(printed).keys() == {(0, 3), (1, 3)}


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ranks_of_a_killed_host_are_named(ranks: int) -> None:
    with Hosts() as hosts:
        running = [host.torchrun(*LONG, ranks=ranks) for host in hosts]
        wait_for_line(running[0], "rank 0 step 3")
        hosts[1].kill()
        printed = end_of(running[0], KILLED)
        running[0].communicate(timeout=60)
    for rank in range(ranks, 2 * ranks):
        named = rf"(Rank {rank}|Each of ranks 2, 3) on host-b has not reported for \d+ s: it may"
        assert re.search(rf"PeerFailureError: rank \d lost .* {named}", printed)
    assert running[0].returncode != 0


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "lost"), [(1, "Rank 0"), (2, "Each of ranks 0, 1")])
def test_the_ranks_of_a_killed_host_that_had_the_store_are_named(ranks: int, lost: str) -> None:
    """With static rendezvous: with c10d torchrun may end its ranks before they can say anything."""
    with Hosts() as hosts:
        static = ["--rdzv-backend=static", f"--master-addr={NAMES[0]}", "--master-port=29400"]
        numbers = [[*static, f"--node-rank={at}"] for at in range(2)]
        running = [host.torchrun(*LONG, ranks=ranks, options=at) for at, host in zip(numbers, hosts, strict=True)]
        wait_for_line(running[1], f"rank {ranks} step 3")
        hosts[0].kill()
        printed = end_of(running[1], KILLED)
    gone = "the store in which ranks report their end has gone"
    assert re.search(rf"PeerFailureError: rank \d lost .* {lost} on host-a may have ended: {gone}", printed)
    assert "host-b has not reported" not in printed  # to a store that has gone


@needs_hosts
@pytest.mark.slow
def test_a_network_that_is_cut_is_named_on_both_sides() -> None:
    with Hosts() as hosts:
        running = [host.torchrun(*LONG, ranks=2) for host in hosts]
        for host, each in enumerate(running):
            wait_for_line(each, f"rank {2 * host} step 3")
        hosts[1].disconnect()
        printed = [end_of(each, CUT) for each in running]
    for here, there, ranks, text in zip(NAMES, NAMES[1::-1], ("2, 3", "0, 1"), printed, strict=False):
        assert f"{there}, the host of ranks {ranks}, has not answered {here} for 6" in text
        assert "it is down, or the network between them is" in text


@needs_hosts
@pytest.mark.slow
def test_names_of_the_loopback_interface_need_the_name_of_the_network() -> None:
    """Debian's /etc/hosts gives a host's own name the address 127.0.1.1, which gloo takes. The rank that connects first
    fails, and the other one may wait for long."""
    known = [{NAMES[at]: "127.0.1.1", NAMES[1 - at]: ADDRESSES[1 - at]} for at in range(2)]
    printed, is_advised = list[str](), threading.Event()

    def read(running: subprocess.Popen[str]) -> None:
        assert running.stdout is not None
        for line in running.stdout:
            printed.append(line)
            if "Set GLOO_SOCKET_IFNAME to the interface that connects the hosts" in line:
                is_advised.set()

    with Hosts(known=known) as hosts:
        doctor = [sys.executable, "-m", "fullshard", "doctor", "--"]
        for host in hosts:
            threading.Thread(target=read, args=[host.torchrun(PROGRAM, before=doctor)], daemon=True).start()
        assert is_advised.wait(120), "".join(printed)
    with Hosts(known=known) as hosts:
        finish([host.torchrun(PROGRAM, environment={"GLOO_SOCKET_IFNAME": "eth0"}) for host in hosts])


@needs_hosts
@pytest.mark.slow
def test_make_hosts_trains_the_example(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.hosts", "--rate=10gbit", "--", "examples/train.py", "--steps=2"]
    command += [f"--directory={tmp_path}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^host-a \| .*loss \d", ended.stdout, re.MULTILINE)


@needs_hosts
def test_nothing_is_left_of_hosts_whose_process_was_killed() -> None:
    code = "import time; from tests.hosts.hosts import Hosts\nwith Hosts() as hosts:\n"
    code += " print(*(host.process for host in hosts), flush=True); time.sleep(600)"
    making = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert making.stdout is not None
    processes = [int(each) for each in making.stdout.readline().split()]
    assert all(Path(f"/proc/{process}").exists() for process in processes)
    making.send_signal(signal.SIGKILL)
    making.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@needs_hosts
@pytest.mark.slow
def test_an_interrupt_ends_the_hosts() -> None:
    """As Ctrl-C does, which goes to all processes of a terminal."""
    command = [sys.executable, "-m", "tests.hosts", "--", *LONG]
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which shells ignore in the background
    )
    wait_for_line(running, "host-b | rank 1 step 1")
    os.killpg(running.pid, signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode == 130


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can become somebody else")
def test_without_root_one_sentence_says_what_to_do() -> None:
    source = (
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); import tests.hosts.__main__ as hosts; os.seteuid(65534); "
        f"sys.exit(hosts.main(['examples/train.py']))"
    )
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == (
        "make hosts: making network namespaces needs root: run it with sudo, or as root in a virtual machine.\n"
    )

"""What a preemption leaves behind: a process that saved in time goes on."""

from __future__ import annotations

import os
import signal
import threading

from fullshard import checkpoint


def test_a_process_that_saved_in_time_is_not_ended_later() -> None:
    before = set(threading.enumerate())
    with checkpoint.PreemptionHandler(grace_period=300) as preempted:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preempted()
        (timer,) = set(threading.enumerate()) - before
        assert preempted.seconds_left is not None
        assert 0 < preempted.seconds_left <= 300
    timer.join(10)
    assert not timer.is_alive()

"""What processes tell each other (:mod:`fullshard.elastic.messages`)."""

from __future__ import annotations

from multiprocessing import Pipe

import torch

from fullshard.elastic.connections import _receive, _send
from fullshard.elastic.messages import Followed, RunOrder, Square
from fullshard.elastic.packed import pack


def test_messages_arrive_as_they_were_sent() -> None:
    followed = Followed(2, pack([torch.ones(3)]), (True, False), (Square(1, 2, 0, 1.5),), back=0)
    ours, theirs = Pipe()
    for message in (RunOrder((0, 1), 3, 1, 2), followed):
        _send(ours, message)
        arrived = _receive(theirs, lambda: None)
        assert arrived == message
        assert type(arrived) is type(message)

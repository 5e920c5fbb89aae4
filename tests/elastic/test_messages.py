"""What processes tell each other (:mod:`fullshard.elastic.messages`)."""

from __future__ import annotations

import pickle

from fullshard.elastic.messages import Followed, RunOrder, Square


def test_messages_arrive_as_they_were_sent() -> None:
    followed = Followed(2, b"gradients", (True, False), (Square(1, 2, 0, 1.5),), back=0)
    for message in (RunOrder((0, 1), 3, 1, 2), followed):
        arrived = pickle.loads(pickle.dumps(message))
        assert arrived == message
        assert type(arrived) is type(message)

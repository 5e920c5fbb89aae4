"""A pretended accelerator: lanes are streams with an order of their own, on tensors of the CPU.

`pretended("checked")` and `pretended("late")` let the library take the CPU for a device with streams, as an accelerator
has them. It replaces :mod:`fullshard.device` alone: the kernels that a lane would run are the operations of torch that
are called while it is current.

- *checked*: every operation runs at once, and a vector clock for each lane says what it may count on. Two accesses to
  the same bytes, of which one writes, without an order between them are an error with both stacks; so are memory that
  is freed while another lane may use it, and results that the host reads before the device has them.
- *late*: what a lane other than the computation's is given runs only when somebody waits for it, so that a wait that is
  missing shows in the numbers.

Both run in the tests of parity (`pytest --all tests/parity -k "W2-checked or W2-late"`). A third one, in
:mod:`tests.pretend.graphs`, captures steps in graphs and replays them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.pretend.checked import AccessError, Checker
from tests.pretend.device import Model, PretendedStreams, pretend
from tests.pretend.late import Late

__all__ = ["AccessError", "Checker", "Late", "pretend", "pretended"]


def pretended(kind: str) -> AbstractContextManager[PretendedStreams]:
    """The pretended device of a kind: "checked" or "late"."""
    models: dict[str, Callable[[], Model]] = {"checked": Checker, "late": Late}
    return pretend(models[kind]())

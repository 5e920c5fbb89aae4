"""A simulated accelerator: lanes are streams with an order of their own, on tensors of the CPU.

`simulated("checked")` and `simulated("late")` let the library take the CPU for a device with streams, as an accelerator
has them. It replaces :mod:`fullshard.device` alone: the kernels that a lane would run are the operations of torch that
are called while it is current.

- *checked*: every operation runs at once, and a vector clock for each lane says what it may count on. Two accesses to
  the same bytes, of which one writes, without an order between them are an error with both stacks; so are memory that
  is freed while another lane may use it, and results that the host reads before the device has them.
- *late*: what a lane other than the computation's is given runs only when somebody waits for it, so that a wait that is
  missing shows in the numbers.

Both run in the tests of parity (`pytest --all tests/parity -k "W2-checked or W2-late"`). A third one, in
:mod:`tests.simulated.graphs`, captures steps in graphs and replays them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.simulated.checked import AccessError, Checker
from tests.simulated.device import Model, SimulatedStreams, simulate
from tests.simulated.late import Late

__all__ = ["AccessError", "Checker", "Late", "simulate", "simulated"]


def simulated(kind: str) -> AbstractContextManager[SimulatedStreams]:
    """The simulated device of a kind: "checked" or "late"."""
    models: dict[str, Callable[[], Model]] = {"checked": Checker, "late": Late}
    return simulate(models[kind]())

"""The names of version 0.1. They give the object that has a new name, and warn. The next release removes them."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Set
from typing import Any, ParamSpec, TypeVar

from fullshard.policies import warn

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: New names by old names, for each module or class that had them.
NAMES = {
    "fullshard": {
        "LostRankError": "PeerFailureError",
        "NonFiniteDetector": "NanDetector",
        "NonFiniteError": "NanError",
        "Recording": "Trace",
        "detect_non_finite": "detect_nan",
        "leave_out": "skip_module",
        "record": "profile",
    },
    "fullshard.checkpoint": {
        "BrokenCheckpoint": "CorruptCheckpointError",
        "Preemption": "PreemptionHandler",
        "checkpoints": "list_checkpoints",
        "finish": "wait_until_finished",
        "forget": "forget_replicas",
        "newest": "latest",
    },
    "fullshard.checkpoint.reader": {
        "BrokenCheckpoint": "CorruptCheckpointError",
        "checkpoints": "list_checkpoints",
        "newest": "latest",
    },
    "fullshard.checkpoint.PreemptionHandler": {"left": "seconds_left"},
}
#: New keywords by old keywords, for each function that had them. ``not`` says that the new one means the opposite.
KEYWORDS = {
    "fullshard.report.explain.Explanation.estimate": {"flops": "peak_flops"},
    "fullshard.checkpoint.PreemptionHandler": {"within": "grace_period"},
    "fullshard.checkpoint.forget_replicas": {"near": "replicas"},
    "fullshard.checkpoint.load": {"near": "replicas"},
    "fullshard.checkpoint.save": {"frozen": "not trainable_only", "near": "replicas"},
}
#: New values by old values, for each environment variable that had them.
VALUES = {"FULLSHARD_TRANSPORT": {"host": "shm"}}


def renamed(owner: str, name: str) -> object:
    """Returns the object of a module that had the name ``name`` in version 0.1, and warns.

    Raises:
        AttributeError: ``name`` is not the old name of anything in the module.
    """
    return getattr(sys.modules[owner], new_name(owner, name))


def new_name(owner: str, name: str) -> str:
    """Returns the new name of ``name``, a name of version 0.1 in ``owner`` (a module or a class), and warns."""
    new = NAMES.get(owner, {}).get(name)
    if new is None:
        raise AttributeError(f"{owner!r} has no attribute {name!r}")
    _warn(f"{owner}.{name}", new)
    return new


def renamed_keywords(function: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Lets callers of a function use the old names of its keywords, with a warning. If the function has a keyword
    ``state``, it also gets the keywords that it does not know, as version 0.1 took state by keywords."""

    def decorate(called: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        options = inspect.signature(called).parameters.keys()

        @functools.wraps(called)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            for old in KEYWORDS.get(function, {}).keys() & kwargs.keys():
                _, negated, new = KEYWORDS[function][old].rpartition("not ")
                if new in kwargs:
                    raise TypeError(f"{function} got both {new!r} and {old!r}, its old name")
                _warn(f"{old!r} of {function}", repr(KEYWORDS[function][old]))
                value = kwargs.pop(old)
                kwargs[new] = not value if negated else value
            if "state" in options and kwargs.keys() - options:
                _move_to_state(function, options, kwargs)
            return called(*args, **kwargs)

        return call

    return decorate


@functools.cache
def renamed_value(variable: str, value: str) -> str:
    """The value of an environment variable, by its new name. Warns of an old one, once in a process."""
    new = VALUES[variable].get(value, value)
    if new != value:
        _warn(f"{variable}={value}", f"{variable}={new}")
    return new


def _move_to_state(function: str, options: Set[str], kwargs: dict[str, Any]) -> None:
    names = sorted(kwargs.keys() - options)
    for name in names:
        if similar := difflib.get_close_matches(name, options, 1, cutoff=0.7):
            raise TypeError(
                f"{function} has no keyword {name!r}; is it {similar[0]!r}? "
                f"State of this name is given as state={{{name!r}: ...}}"
            )
    warn(f"{function} takes {', '.join(names)} in the dict 'state' since 0.2.0, not as keywords", DeprecationWarning)
    kwargs["state"] = {**(kwargs.get("state") or {}), **{name: kwargs.pop(name) for name in names}}


def _warn(old: str, new: str) -> None:
    warn(f"{old} is called {new} since 0.2.0", DeprecationWarning)

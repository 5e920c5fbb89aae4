"""What the plugin needs of pytest and finds under private names only, since pytest 8."""

from __future__ import annotations

from typing import Any

import pytest


def scopes(item: pytest.Function) -> dict[str, str]:
    """The fixtures that a test uses, in the order in which they are made, and the scope of each."""
    found = item._fixtureinfo.name2fixturedefs
    return {name: found[name][-1].scope for name in item.fixturenames if name in found}


def value_of(item: pytest.Function, fixture: str) -> Any:
    """The value of a test's fixture, which is made if it has not been yet."""
    return item._request.getfixturevalue(fixture)


def skip(reason: str) -> BaseException:
    """What to raise to skip a test, as if at its first line."""
    return pytest.skip.Exception(reason, _use_item_location=True)


def leave_for(item: pytest.Item) -> None:
    """Tear down whatever was set up and the test does not need: of a test that another was said to follow."""
    item.session._setupstate.teardown_exact(item)

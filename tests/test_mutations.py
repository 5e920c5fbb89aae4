"""The list of deliberate bugs fits the source and the tests; `python -m tests.mutations` plants them."""

from __future__ import annotations

import ast

from tests.mutants import PACKAGES, drawn
from tests.mutations import MUTATIONS, NEAREST, ROOT, nearest


def test_each_change_has_one_place_in_the_source() -> None:
    for each in MUTATIONS:
        text = (ROOT / "src" / "fullshard" / each.file).read_text()
        assert text.count(each.before) == 1, f"{each.before!r} stands {text.count(each.before)} times in {each.file}"


def test_each_names_a_test_that_there_is() -> None:
    for each in MUTATIONS:
        file, _, name = each.test.partition("[")[0].partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), f"there is no {each.test}: say which finds {each.before!r}"


def test_the_tests_that_stand_nearest_are_there() -> None:
    assert all((ROOT / test).exists() for tests in NEAREST.values() for test in tests)


def test_random_changes_are_the_same_for_a_seed_and_leave_a_program() -> None:
    changes = drawn(list(PACKAGES), 200, 7)
    assert changes == drawn(list(PACKAGES), 200, 7)
    for each in changes:
        source = (ROOT / "src" / "fullshard" / each.file).read_bytes()
        changed = ast.parse(source[: each.start] + each.after.encode() + source[each.end :])
        assert ast.dump(changed) != ast.dump(ast.parse(source)), each
        assert nearest(each.file)

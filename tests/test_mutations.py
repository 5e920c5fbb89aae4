"""The list of deliberate bugs fits the source and the tests; `python -m tests.mutations` plants them."""

from __future__ import annotations

import re

from tests.mutants import settings
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


def test_each_file_of_the_library_has_tests_that_stand_nearest_to_it() -> None:
    for prefix in ("checkpoint", "report", "compat"):
        for file in (ROOT / "src" / "fullshard" / prefix).glob("[!_]*.py"):
            assert nearest(f"{prefix}/{file.name}")[0] == f"tests/{prefix}/test_{file.name}"


def test_what_pyproject_says_of_changes_leaves_some_of_each_kind() -> None:
    skips = re.compile("|".join(settings()["exclude-operators"]))
    made = ("ReplaceBinaryOperator_Add_Sub", "ReplaceComparisonOperator_Lt_LtE", "ReplaceUnaryOperator_Delete_Not")
    left = ("ReplaceBinaryOperator_Add_Pow", "ReplaceComparisonOperator_Lt_Is", "RemoveDecorator", "VariableInserter")
    assert not any(skips.match(f"core/{name}") for name in (*made, "AddNot", "NumberReplacer", "ReplaceAndWithOr"))
    assert all(skips.match(f"core/{name}") for name in left)

"""Wrap policies choose what PyTorch's choose, and ``targets`` says it in the order that both front ends need."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from fullshard import wrap as our_wrap
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    targets,
    transformer_auto_wrap_policy,
    wrap,
)


class Mlp(nn.Module):
    def __init__(self, width: int = 4, out: int | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, out or width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """A transformer's outline: embedding, blocks, norm, head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def names(root: nn.Module, modules: Any) -> list[str]:
    found = {module: name for name, module in reversed(list(root.named_modules()))}
    return [found[module] for module in modules]


def torchs_choice(
    root: nn.Module, policy: Callable[..., bool], ignored_modules: set[nn.Module]
) -> tuple[list[nn.Module], list[tuple[Any, ...]]]:
    """What PyTorch wraps, in its order, and what it asked."""
    wrapped: list[nn.Module] = []
    asked: list[tuple[Any, ...]] = []

    def record(module: nn.Module) -> nn.Module:
        wrapped.append(module)
        return module

    torch_wrap._recursive_wrap(
        root,
        partial(ask_and_record, asked, policy),
        record,
        ignored_modules,
        {param for module in ignored_modules for param in module.parameters()},
        only_wrap_children=True,
    )
    return wrapped, asked


def ask_and_record(
    asked: list[tuple[Any, ...]], policy: Callable[..., bool], module: nn.Module, recurse: bool, nonwrapped_numel: int
) -> bool:
    asked.append((module, recurse, nonwrapped_numel))
    return policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)


def test_names_arguments_and_defaults_are_torchs() -> None:
    assert set(torch_wrap.__all__) <= set(our_wrap.__all__)
    functions = ("always_wrap_policy", "lambda_auto_wrap_policy", "transformer_auto_wrap_policy", "enable_wrap", "wrap")
    private = ("size_based_auto_wrap_policy", "_or_policy", "_module_wrap_policy")
    for name in ("ModuleWrapPolicy", "CustomPolicy", *functions, *private):
        ours, theirs = (
            [(parameter.name, parameter.kind, parameter.default) for parameter in signature.parameters.values()]
            for signature in (inspect.signature(getattr(module, name)) for module in (our_wrap, torch_wrap))
        )
        assert ours == theirs, name


def test_the_size_policys_default_classes_are_torchs() -> None:
    for name in ("FORCE_LEAF_MODULES", "EXCLUDE_WRAP_MODULES"):
        assert getattr(size_based_auto_wrap_policy, name) == getattr(torch_wrap.size_based_auto_wrap_policy, name)


module_trees = st.recursive(
    st.one_of(
        st.builds(lambda n: nn.Linear(n, n), st.integers(1, 4)),
        st.builds(nn.ReLU),
        st.builds(nn.LayerNorm, st.integers(1, 4)),
        st.just(8).map(lambda width: nn.MultiheadAttention(width, 2)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda modules: nn.Sequential(*modules)),
        st.lists(inner, max_size=4).map(nn.ModuleList),
    ),
    max_leaves=12,
)

FUNCTIONS = {
    "always": lambda module: module.always_wrap_policy,
    "lambda": lambda module: partial(
        module.lambda_auto_wrap_policy, lambda_fn=lambda inner: isinstance(inner, nn.Linear)
    ),
    "transformer": lambda module: partial(
        module.transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential, nn.LayerNorm}
    ),
    "size": lambda module: partial(module.size_based_auto_wrap_policy, min_num_params=20),
    "size with classes": lambda module: partial(
        module.size_based_auto_wrap_policy,
        min_num_params=10,
        force_leaf_modules={nn.ModuleList},
        exclude_wrap_modules={nn.Linear},
    ),
    "or": lambda module: partial(
        module._or_policy,
        policies=[
            partial(module._module_wrap_policy, module_classes={nn.ModuleList}),
            partial(module.size_based_auto_wrap_policy, min_num_params=20),
        ],
    ),
    "object called": lambda module: partial(module.ModuleWrapPolicy({nn.Sequential, nn.MultiheadAttention}).__call__),
}


@pytest.mark.parametrize("policy", FUNCTIONS.values(), ids=FUNCTIONS)
@settings(deadline=None, max_examples=40)
@given(root=module_trees, ignore=st.sets(st.integers(0, 30), max_size=2))
def test_functions_are_asked_and_choose_as_in_torch(
    policy: Callable[[Any], Any], root: nn.Module, ignore: set[int]
) -> None:
    ignored = {module for i, module in enumerate(root.modules()) if i in ignore and module is not root}
    ignored |= {inner for module in ignored for inner in module.modules()}
    expected, expected_questions = torchs_choice(root, policy(torch_wrap), ignored)
    questions: list[tuple[Any, ...]] = []
    assert list(targets(root, partial(ask_and_record, questions, policy(our_wrap)), ignored)) == expected
    assert questions == expected_questions


POLICIES = {
    "classes": lambda module: module.ModuleWrapPolicy({nn.Linear, nn.Sequential}),
    "custom": lambda module: module.CustomPolicy(
        lambda inner: {"bits": 8} if isinstance(inner, nn.Linear) else isinstance(inner, nn.ModuleList)
    ),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@settings(deadline=None, max_examples=40)
@given(root=module_trees)
def test_policy_objects_choose_as_in_torch(policy: Callable[[Any], Any], root: nn.Module) -> None:
    ours = policy(our_wrap)._run_policy(root, set(), {"bits": 16, "other": 1})
    assert ours == policy(torch_wrap)._run_policy(root, set(), {"bits": 16, "other": 1})
    assert targets(root, policy(our_wrap)) == targets(root, policy(torch_wrap))


class TestTargets:
    def test_children_come_before_their_parents_and_the_root_not_at_all(self) -> None:
        model = Model(Block(), Block())
        assert names(model, targets(model, always_wrap_policy)) == [
            "embed",
            *(f"blocks.{i}{part}" for i in (0, 1) for part in (".norm", ".mlp.up", ".mlp.down", ".mlp", "")),
            "blocks",
            "norm",
            "head",
        ]

    def test_the_order_is_the_same_for_policy_objects(self) -> None:
        model = Model(Block(), Block())
        everything = CustomPolicy(lambda module: True)
        assert list(targets(model, everything)) == list(targets(model, always_wrap_policy))

    def test_overrides_are_what_a_custom_policy_says(self) -> None:
        model = Model(Block(), Block())
        said = {"reshard_after_forward": False}
        policy = CustomPolicy(lambda module: said if module is model.head else isinstance(module, Block))
        found = targets(model, policy)
        assert found == {model.blocks[0]: {}, model.blocks[1]: {}, model.head: said}
        found[model.head]["changed"] = True
        assert "changed" not in said

    def test_overrides_of_different_modules_are_different_dicts(self) -> None:
        model = Model(Block(), Block())
        for policy in (ModuleWrapPolicy({Block}), torch_wrap.ModuleWrapPolicy({Block}), always_wrap_policy):
            found = list(targets(model, policy).values())
            assert len({id(overrides) for overrides in found}) == len(found)

    def test_a_shared_module_is_chosen_once(self) -> None:
        shared = Block()
        model = nn.Sequential(nn.Sequential(shared, Block()), nn.ModuleList([shared]))
        for policy in (ModuleWrapPolicy({Block}), partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})):
            assert names(model, targets(model, policy)) == ["0.0", "0.1"]

    def test_elements_of_shared_parameters_count_once(self) -> None:
        first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        second.weight = first.weight
        model = nn.Sequential(nn.Sequential(first, second, nn.Linear(4, 5, bias=False)))
        asked: list[tuple[Any, ...]] = []
        by_class = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in (first, second))
        targets(model, partial(ask_and_record, asked, by_class))
        assert asked[-1] == (model[0], False, 20)

    def test_nothing_below_an_ignored_module_is_chosen(self) -> None:
        model = Model(Block(), Block())
        for policy in (always_wrap_policy, CustomPolicy(lambda module: True), ModuleWrapPolicy({Block, Mlp})):
            chosen = names(model, targets(model, policy, [model.blocks[0]]))
            assert "blocks.1.mlp" in chosen
            assert not [name for name in chosen if name.startswith("blocks.0")]

    def test_ignored_parameters_do_not_count(self) -> None:
        model = Model(Block())
        policy = partial(size_based_auto_wrap_policy, min_num_params=32)
        assert "embed" in names(model, targets(model, policy))
        assert "embed" not in names(model, targets(model, policy, ignored_params=[model.embed.weight]))

    def test_overridden_classes_are_chosen_whatever_the_policy_says(self) -> None:
        model = Model(Block(), Block())
        override = {nn.LayerNorm: {"mixed_precision": None}}
        never = partial(size_based_auto_wrap_policy, min_num_params=10**9)
        for policy in (never, ModuleWrapPolicy({nn.LayerNorm}), CustomPolicy(lambda module: False)):
            found = targets(model, policy, [model.norm], class_overrides=override)
            assert names(model, found) == ["blocks.0.norm", "blocks.1.norm"]
            assert list(found.values()) == [{"mixed_precision": None}] * 2

    def test_overridden_classes_go_before_what_the_policy_says(self) -> None:
        model = Model(Block())
        policy = CustomPolicy(lambda module: {"mixed_precision": 1, "bits": 2} if module is model.norm else False)
        found = targets(model, policy, class_overrides={nn.LayerNorm: {"mixed_precision": None}})
        assert found[model.norm] == {"mixed_precision": None, "bits": 2}

    def test_elements_of_overridden_classes_do_not_count(self) -> None:
        model = nn.Sequential(Block())
        asked: list[tuple[Any, ...]] = []
        leaf = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: False)
        targets(model, partial(ask_and_record, asked, leaf), class_overrides={nn.LayerNorm: {}})
        assert asked[-1] == (model[0], False, sum(param.numel() for param in model[0].mlp.parameters()))

    def test_a_policy_is_not_asked_below_where_it_stopped_even_for_overridden_classes(self) -> None:
        model = nn.Sequential(nn.Sequential(Block()), nn.Linear(4, 4))
        asked: list[tuple[Any, ...]] = []

        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            asked.append((module, recurse, nonwrapped_numel))
            return module is model

        found = targets(model, policy, class_overrides={nn.LayerNorm: {}})
        assert names(model, found) == ["0.0.norm"]
        assert [module for module, _, _ in asked] == [model, model[0], model[1]]

    @pytest.mark.parametrize("policy", [None, {Block}, ModuleWrapPolicy, "auto"])
    def test_what_is_no_policy_is_refused(self, policy: Any) -> None:
        with pytest.raises(TypeError, match=r"auto_wrap_policy is .*expected a ModuleWrapPolicy"):
            targets(Model(), policy)


class TestPolicies:
    @pytest.mark.parametrize("answer", [None, 1, "yes"])
    def test_a_custom_policys_function_must_return_a_bool_or_a_dict(self, answer: Any) -> None:
        for module in (our_wrap, torch_wrap):
            with pytest.raises(ValueError, match="returned"):
                targets(Model(), module.CustomPolicy(lambda module: answer))

    def test_the_error_of_a_custom_policy_names_the_module(self) -> None:
        model = Model(Block())
        policy = CustomPolicy(lambda module: None if module is model.blocks[0].mlp else False)  # type: ignore[arg-type,return-value]
        with pytest.raises(ValueError, match=r"returned None for module 'blocks\.0\.mlp' \(Mlp\)"):
            targets(model, policy)

    @pytest.mark.parametrize("classes", [Block, Block(), [Block, "Block"], 3])
    def test_a_module_wrap_policy_needs_classes(self, classes: Any) -> None:
        with pytest.raises(TypeError, match="ModuleWrapPolicy takes a set of module classes"):
            ModuleWrapPolicy(classes)

    def test_a_module_wrap_policy_takes_derived_classes(self) -> None:
        class Special(Block):
            pass

        model = Model(Block(), Special())
        assert names(model, targets(model, ModuleWrapPolicy([Block]))) == ["blocks.0", "blocks.1"]

    def test_a_module_wrap_policy_shows_its_classes(self) -> None:
        assert "Block" in repr(ModuleWrapPolicy({Block}))

    def test_a_custom_policys_empty_dict_means_no(self) -> None:
        assert targets(Model(Block()), CustomPolicy(lambda module: {})) == {}

    def test_changed_default_classes_of_the_size_policy_are_honoured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ask = partial(size_based_auto_wrap_policy, nn.Linear(4, 4), nonwrapped_numel=20, min_num_params=10)
        assert (ask(recurse=True), ask(recurse=False)) == (True, True)
        monkeypatch.setattr(size_based_auto_wrap_policy, "FORCE_LEAF_MODULES", {nn.Linear})
        assert (ask(recurse=True), ask(recurse=False)) == (False, True)
        monkeypatch.setattr(size_based_auto_wrap_policy, "EXCLUDE_WRAP_MODULES", {nn.Linear})
        assert (ask(recurse=True), ask(recurse=False)) == (False, False)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.kwargs = kwargs


class TestEnableWrap:
    def test_outside_wrap_returns_the_module(self) -> None:
        module = nn.Linear(1, 1)
        assert wrap(module, anything=1) is module

    def test_inside_wrap_constructs_the_wrapper_and_overrides_go_first(self) -> None:
        with enable_wrap(wrapper_cls=Wrapper, a=1, b=2):
            wrapped = wrap(nn.Linear(1, 1), b=3, c=4)
        assert isinstance(wrapped, Wrapper)
        assert isinstance(wrapped.module, nn.Linear)
        assert wrapped.kwargs == {"a": 1, "b": 3, "c": 4}

    def test_an_error_inside_ends_the_context(self) -> None:
        with pytest.raises(KeyError), enable_wrap(wrapper_cls=Wrapper):
            raise KeyError
        module = nn.Linear(1, 1)
        assert wrap(module) is module

    @pytest.mark.parametrize("module", [our_wrap, torch_wrap], ids=["ours", "torchs"])
    def test_contexts_do_not_nest(self, module: Any) -> None:
        with (
            module.enable_wrap(wrapper_cls=Wrapper),
            pytest.raises(NotImplementedError),
            module.enable_wrap(wrapper_cls=Wrapper),
        ):
            pass

    def test_it_decorates_functions(self) -> None:
        @enable_wrap(wrapper_cls=Wrapper)
        def build() -> nn.Module:
            return wrap(nn.Linear(1, 1))

        assert isinstance(build(), Wrapper)
        assert isinstance(build(), Wrapper)

    def test_other_threads_are_not_affected(self) -> None:
        built: list[nn.Module] = []
        with enable_wrap(wrapper_cls=Wrapper):
            thread = threading.Thread(target=lambda: built.append(wrap(nn.Linear(1, 1))))
            thread.start()
            thread.join()
        assert isinstance(built[0], nn.Linear)

    def test_a_wrapper_that_cannot_be_called_is_refused(self) -> None:
        with pytest.raises(TypeError, match="wrapper_cls=None"), enable_wrap(wrapper_cls=None):  # type: ignore[arg-type]
            pass


def test_a_module_that_is_shared_comes_before_an_override_that_encloses_it_where_the_policy_does_not_look() -> None:
    class Passed(nn.Sequential):
        pass

    shared = nn.Linear(2, 2)
    forced = nn.ModuleDict({"inner": shared})

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return not isinstance(module, Passed) if recurse else module is shared

    root = nn.Sequential(Passed(forced), nn.Sequential(shared))
    assert list(targets(root, policy, class_overrides={nn.ModuleDict: {}})) == [shared, forced]

"""Which submodules become groups of their own: the auto-wrap policies, and blocks found without one.

A policy is an object with ``_run_policy`` (:class:`ModuleWrapPolicy`, :class:`CustomPolicy`, PyTorch's own) or a
function ``(module, recurse, nonwrapped_numel) -> bool``. :func:`targets` evaluates it, for both front ends. As in
PyTorch, a function is called twice for a module. First, with ``recurse=True`` and the number of elements in the module:
shall its children be considered? After the children, with ``recurse=False`` and the number of elements that they left:
shall the module itself be wrapped? ::

    root (recurse? 100)            a, b and d are targets, in the order b, a, d
     |- a    (recurse? 60)
     |   |- b   (recurse? 40)  ->  (40?) yes
     |   '- c   (recurse? 10)  ->  (10?) no, stays with a        a  ->  (60 - 40 = 20?) yes
     '- d    (recurse? 40)     ->  (40?) yes                     the root is not asked: its caller handles it
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

__all__ = ["CustomPolicy", "ModuleWrapPolicy", "always_wrap_policy", "enable_wrap", "lambda_auto_wrap_policy"]
__all__ += ["repeated_blocks", "size_based_auto_wrap_policy", "targets", "transformer_auto_wrap_policy", "wrap"]

Overrides = dict[str, Any]
Chosen = dict[nn.Module, Overrides]
Predicate = Callable[[nn.Module], bool]


class _Policy(ABC):
    """A policy that sees the whole tree at once. Has the name of PyTorch's base, from which users derive policies."""

    @abstractmethod
    def _run_policy(self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Overrides) -> Chosen:
        """The modules of the tree to wrap, in any order, each with its keywords: ``root_kwargs``, changed or not."""


class CustomPolicy(_Policy):
    """Wraps the modules that a function chooses, with the keywords that it returns.

    ::

        CustomPolicy(lambda module: {"reshard_after_forward": False} if module is model.head else type(module) is Block)

    Args:
        lambda_fn: returns ``False`` (or an empty dict) to leave a module alone, ``True`` to wrap it with the root's
            keywords, or a dict of keywords that differ from the root's.

    Raises:
        ValueError: when the policy is run, if the function returns anything else.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Overrides]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Overrides) -> Chosen:
        chosen = {}
        for name, module in root_module.named_modules():
            answer = self._lambda_fn(module) if module not in ignored_modules else False
            if not isinstance(answer, (bool, dict)):
                raise ValueError(
                    f"the function of a CustomPolicy returned {answer!r} for module '{name}' "
                    f"({type(module).__name__}); expected True, False or a dict of keywords"
                )
            if answer:
                chosen[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return chosen


class ModuleWrapPolicy(CustomPolicy):
    """Wraps every module of the given classes, or of classes derived from them.

    Args:
        module_classes: the classes.

    Raises:
        TypeError: ``module_classes`` is not an iterable of classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        is_set = isinstance(module_classes, Iterable) and not isinstance(module_classes, type)
        self._module_classes = set(module_classes) if is_set else set()
        if not is_set or not all(isinstance(cls, type) for cls in self._module_classes):
            raise TypeError(f"ModuleWrapPolicy takes a set of module classes, got {module_classes!r}")
        super().__init__(partial(self, recurse=False))

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return _module_wrap_policy(module, recurse, -1, self._module_classes)

    def __repr__(self) -> str:
        return f"{super().__repr__()}({self._module_classes})"


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wraps every module.

    Ranks: each for itself, alike.
    """
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wraps every module for which a function is true.

    Args:
        module: the module to decide on.
        recurse: ``True`` asks whether its children are considered, ``False`` whether it is wrapped itself.
        nonwrapped_numel: the number of elements that its wrapped children left.
        lambda_fn: the function; give it with ``functools.partial``.

    Ranks: each for itself, alike.
    """
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Wraps every module of the given classes.

    What is outside of them, such as an embedding and the head tied to it, stays together in the root.

    Args:
        module: the module to decide on.
        recurse: ``True`` asks whether its children are considered, ``False`` whether it is wrapped itself.
        nonwrapped_numel: the number of elements that its wrapped children left.
        transformer_layer_cls: the classes; give them with ``functools.partial``.

    Ranks: each for itself, alike.
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wraps a module if it has enough parameters beside those of its wrapped children.

    Args:
        module: the module to decide on.
        recurse: ``True`` asks whether its children are considered, ``False`` whether it is wrapped itself.
        nonwrapped_numel: the number of elements that its wrapped children left.
        min_num_params: how many elements are enough.
        force_leaf_modules: classes whose children are never wrapped. ``None`` for the function's attribute
            ``FORCE_LEAF_MODULES``: attention reads its children's weights without calling them.
        exclude_wrap_modules: classes that are never wrapped themselves. ``None`` for the function's attribute
            ``EXCLUDE_WRAP_MODULES``: containers that have no forward.

    Ranks: each for itself, alike.
    """
    default = "FORCE_LEAF_MODULES" if recurse else "EXCLUDE_WRAP_MODULES"
    given = force_leaf_modules if recurse else exclude_wrap_modules
    barred = vars(size_based_auto_wrap_policy)[default] if given is None else given
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(barred))


cast(Any, size_based_auto_wrap_policy).EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}
cast(Any, size_based_auto_wrap_policy).FORCE_LEAF_MODULES = {nn.MultiheadAttention}


# Not exported by PyTorch either, but public training code imports this one and the next.
def _module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: set[type[nn.Module]]
) -> bool:
    return recurse or isinstance(module, tuple(module_classes))


def _or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Any]) -> bool:
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


def targets(
    root_module: nn.Module,
    policy: Any,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    class_overrides: Mapping[type[nn.Module], Overrides] | None = None,
) -> Chosen:
    """The submodules that ``policy`` chooses, children before their parents, each with the keywords that differ for it.

    A shared module appears once. The root is left out, because the caller wraps it.

    Args:
        root_module: the module whose submodules are searched.
        policy: a policy object, also PyTorch's, or a function ``(module, recurse, nonwrapped_numel) -> bool``. It is
            called twice for a module. First, with ``recurse=True`` and the number of elements in the module: are its
            children considered? After the children, with the number of elements that they left: is it wrapped?
        ignored_modules: modules that are skipped, with everything inside. Their parameters do not count as elements.
        ignored_params: further parameters that do not count.
        class_overrides: classes whose modules are always wrapped, with these keywords in addition: this is how mixed
            precision leaves out batch norm.

    Raises:
        TypeError: ``policy`` is neither such an object nor a function.

    Ranks: each for itself, alike.
    """
    if isinstance(policy, type) or not (hasattr(policy, "_run_policy") or callable(policy)):
        raise TypeError(
            f"auto_wrap_policy is {policy!r}; expected a ModuleWrapPolicy, a CustomPolicy, or a function "
            "(module, recurse, nonwrapped_numel) -> bool"
        )
    skipped = {inner for module in ignored_modules for inner in module.modules()}
    uncounted = set(ignored_params).union(*(module.parameters() for module in skipped))
    chosen, found, ended = Chosen(), Chosen(), Chosen()
    if hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(root_module, skipped, {})
        policy = partial(lambda_auto_wrap_policy, lambda_fn=chosen.__contains__)
    visited: dict[tuple[nn.Module, bool], set[nn.Parameter]] = {}  # parameters of targets inside

    def is_wanted(module: nn.Module, recurse: bool, params: set[nn.Parameter]) -> bool:
        numel = sum(param.numel() for param in params if not is_lazy(param))
        return bool(policy(module=module, recurse=recurse, nonwrapped_numel=numel))

    def visit(module: nn.Module, asks: bool) -> set[nn.Parameter]:
        if (module, asks) in visited:
            return visited[module, asks]
        visited[module, asks] = taken = set()
        own = set(module.parameters()) - uncounted
        asks = asks and is_wanted(module, True, own)
        for child in module.children():  # overrides apply even where the policy does not recurse
            if child not in skipped:
                taken |= visit(child, asks)
        overrides = [keywords for cls, keywords in (class_overrides or {}).items() if isinstance(module, cls)]
        if module is not root_module and ((asks and is_wanted(module, False, own - taken)) or overrides):
            taken |= own
            found[module] = dict(chosen.get(module, {})) | {key: kw[key] for kw in overrides for key in kw}
        ended[module] = {}  # a second visit does not move it behind what encloses it
        return taken

    visit(root_module, True)
    return {module: found[module] for module in ended if module in found}


_wrapping: ContextVar[Callable[..., nn.Module] | None] = ContextVar("fullshard_wrap", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """A context in which :func:`wrap` wraps modules.

    ::

        with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=0):
            self.layer = wrap(nn.Linear(5, 5))

    Args:
        wrapper_cls: called with the module and ``wrapper_kwargs``; returns the wrapped module.
        **wrapper_kwargs: more arguments of ``wrapper_cls``.

    Raises:
        TypeError: ``wrapper_cls`` cannot be called.
        NotImplementedError: it is used inside another such context.

    Ranks: each for itself, alike.
    """
    if not callable(wrapper_cls):
        raise TypeError(f"enable_wrap was given wrapper_cls={wrapper_cls!r}; expected a class to wrap modules with")
    if _wrapping.get() is not None:
        raise NotImplementedError("enable_wrap inside enable_wrap: give wrap() the keywords that differ")
    token = _wrapping.set(partial(wrapper_cls, **wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wraps ``module`` as :func:`enable_wrap` says, except for these keywords. Outside of that context it returns
    ``module`` unchanged.

    Ranks: each for itself, unless the wrapper communicates.
    """
    wrapper = _wrapping.get()
    return module if wrapper is None else wrapper(module, **wrap_overrides)


# Models keep the layers that they repeat in a ModuleList, Sequential or ModuleDict. So a *candidate* is a child of such
# a container, found from the root without looking inside other candidates, and it is a *block* if another candidate is
# of its class. Some details make this what a person would choose:
#
# - What cannot be called is looked through (lists of lists), and what does not repeat is looked into.
# - A list may mix classes (attention and state-space layers): if one of its members repeats, all of them are blocks.
# - A *stage*, hardly more than a list of blocks itself, is looked into. Vision models are built of stages, no two of
#   them of one width; layers of a mixture-of-experts model are hardly more than a list of experts, but all alike.
# - So is a Sequential without a class of its own if some of its members are equal (experts do not follow each other),
#   and what a ModuleDict keeps under names that are no numbers (two towers) if there are blocks inside.
# - Plain layers (Linear, Conv2d, Embedding) and norms are blocks only if nothing better is found. So a stem, a head or
#   a dict of embeddings beside the layers is no block; the layers of a small perceptron are blocks.

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_STAGE_SHARE = 2 / 3  # of a stage's parameters are in its blocks; the rest changes the width between stages


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, such as the layers of a transformer or the bottlenecks of a ResNet.

    They are the outermost that repeat: neither the experts of a layer nor its sub-layers. Both stacks of an
    encoder-decoder are found.

    Args:
        model: the model, sharded or not.

    Returns:
        the blocks in the order of registration, none inside another, each once. Empty if nothing repeats.

    Ranks: each for itself.
    """
    kinds = (2, False), (2, True), (0, True)
    return next(filter(None, (_find_blocks(model, partial(_may_be_block, *kind)) for kind in kinds)), [])


def _find_blocks(model: nn.Module, may_be_block: Predicate) -> list[nn.Module]:
    opened: set[nn.Module] = set()
    while True:
        families: dict[nn.Module, list[nn.Module]] = {}  # containers, each with its candidates
        waiting, seen = [model], {model}
        for module in waiting:  # waiting grows in the loop
            for child in _children(module):
                if child not in seen:
                    seen.add(child)
                    is_candidate = isinstance(module, _CONTAINERS) and child not in opened and may_be_block(child)
                    (families.setdefault(module, []) if is_candidate else waiting).append(child)
        counts = Counter(_class_tree(member) for members in families.values() for member in members)
        to_open = {each for family in families.items() for each in _members_to_open(*family, counts, may_be_block)}
        if not to_open:
            blocks = {member for members in families.values() for member in members}
            return [module for module in model.modules() if module in blocks]
        opened |= to_open


def _members_to_open(
    container: nn.Module, members: list[nn.Module], counts: Counter[tuple[object, ...]], may_be_block: Predicate
) -> set[nn.Module]:
    """The candidates of a container that are not blocks, and must be searched inside."""
    repeating = [member for member in members if counts[_class_tree(member)] > 1]
    is_mixed_list = repeating and not isinstance(container, nn.Sequential)
    to_open = set() if is_mixed_list else set(members).difference(repeating)
    for class_tree in set(map(_class_tree, members)):
        alike = [member for member in members if _class_tree(member) == class_tree]
        if _are_stages(alike, may_be_block):
            to_open.update(alike)
    has_names = isinstance(container, nn.ModuleDict) and len({re.sub(r"\d+", "", name) for name in container}) > 1
    for member in members:
        inside = map(_signature, filter(may_be_block, _children(member)))
        is_chain = type(member) is nn.Sequential and max(Counter(inside).values(), default=0) > 1
        if is_chain or (has_names and _find_blocks(member, may_be_block)):
            to_open.add(member)
    return to_open


def _are_stages(alike: list[nn.Module], may_be_block: Predicate) -> bool:
    """Whether members of one class are stages: each is little more than a list of blocks, and their widths differ."""
    widths: list[set[object]] = []
    numel_inside, is_chain = 0, False
    for stage in alike:
        lists = [module for module in (stage, *_children(stage)) if isinstance(module, _CONTAINERS)]
        inside = [child for module in lists for child in _children(module) if may_be_block(child)]
        if not inside:
            return False
        widths.append({_signature(child) for child in inside})
        is_chain |= max(Counter(map(_class_tree, inside)).values()) > 1
        numel_inside += sum(map(_numel, inside))
    are_disjoint = len(set().union(*widths)) == sum(map(len, widths))
    return is_chain and are_disjoint and numel_inside >= _STAGE_SHARE * sum(map(_numel, alike))


def _class_tree(module: nn.Module) -> tuple[object, ...]:
    """A key that is equal for modules that repeat: their class, or for a bare Sequential its members."""
    cls = type_before_parametrizations(module)
    return (cls, *map(_class_tree, _children(module))) if cls is nn.Sequential else (cls,)


def _signature(module: nn.Module) -> tuple[object, ...]:
    return (*_class_tree(module), *((name, param.shape) for name, param in module.named_parameters()))


def _children(module: nn.Module) -> list[nn.Module]:
    """The children, without those that ``register_parametrization`` put below the module."""
    parametrizations = getattr(module, "parametrizations", None) if is_parametrized(module) else None
    return [child for child in module.children() if child is not parametrizations]


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _may_be_block(ndim: int, plain: bool, module: nn.Module) -> bool:
    """Whether a module may be a block: it has a forward, and a parameter of ``ndim`` dims or more. A layer of torch.nn
    may be one only if ``plain``."""
    is_from_torch = type_before_parametrizations(module).__module__.startswith("torch.nn.")
    if type(module).forward is nn.Module.forward or (is_from_torch and not plain and not _children(module)):
        return False
    return any(param.ndim >= ndim for param in module.parameters())

"""Random programs: a model, how it is sharded, where it runs, and what its user does, all from one seed.

What is drawn here is meant to be right: a combination that is documented as refused is not drawn, or it stands in
`tests.fuzz.refusals` with its message.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from fullshard import Ragged
from fullshard.wrap import repeated_blocks
from tests.fuzz import actions as do
from tests.fuzz.checkpoints import COMPOSABLE, WRAPPED
from tests.fuzz.models import CHECKPOINTS, KINDS, PACKS, Cell, Layer, ModelSpec, build
from tests.fuzz.sharding import GroupSpec, Sharding
from tests.fuzz.steps import ELEMENTWISE, LOW_BIT, PATTERNS

Weights = dict[Any, float]
_TIED = ("linear", "linear without bias", "dropout", "written")
_FROZEN_INSIDE = ("odd", "adapter", "two dtypes")
_SINGLE = {"two dtypes", "two precisions"}  # compute in fp32
_NOT_BROADCAST = ("orthogonal",)  # torch's broadcast of a state dict turns buffers that lie column by column, and
# knows a module that stands in two places by one of its names: plain models fail in the same way
_NOT_FLAT = ("two dtypes", "complex")  # the wrapper takes floating-point parameters only, as torch's
_MIXED = (*_NOT_FLAT, "two precisions")
_IN_FULL_PRECISION = (*_MIXED, "batch norm", "instance norm", "orthogonal", "spectral norm", "weight norm")
_RAGGED: Weights = {
    Ragged(): 2,
    Ragged(rows=2): 1,
    Ragged(rows=3): 1,
    Ragged(block=6): 1,
    Ragged(tile=(2, 3)): 1,
    Ragged(block=4096): 2,
}
#: The optimizers that need these layouts, which may begin with them.
_BY_BLOCKS: dict[Ragged | None, tuple[str, ...]] = {Ragged(): ("muon",), Ragged(block=4096): LOW_BIT}


@dataclass(frozen=True)
class Program:
    """Everything about a program."""

    seed: int
    world: int
    transport: str
    model: ModelSpec
    sharding: Sharding
    optimizer: str
    actions: tuple[do.Action, ...]

    @property
    def tolerance(self) -> float:
        """The largest difference of two tensors that is allowed, as a fraction of the largest entry."""
        dtypes = {self.model.dtype, self.sharding.param_dtype, self.sharding.reduce_dtype, self.sharding.output_dtype}
        if "bfloat16" in dtypes or any(isinstance(action, do.Train) and action.autocast for action in self.actions):
            return 3e-1  # whether anything is grossly wrong
        if any(isinstance(action, do.Train) and action.clip for action in self.actions):
            return 1e-4  # norms are fp32
        return 1e-3 if "float32" in dtypes or kinds_of(self.model.layers) & _SINGLE else 1e-8

    @property
    def rounding(self) -> float:
        """The part of the largest gradient that rounding leaves of one that is zero in exact arithmetic."""
        return 8e-3 if self.tolerance == 3e-1 else 1e-7

    def text(self) -> str:
        """The program as a person reads it; the same text is a Python expression."""
        return "\n".join(_lines(self, ""))


def _lines(value: Any, indent: str) -> Iterator[str]:
    yield f"{indent}{type(value).__name__}("
    for field in fields(value):
        each = getattr(value, field.name)
        if each == field.default:
            continue
        if isinstance(each, tuple) and each and not isinstance(each[0], (str, int)):
            yield f"{indent}    {field.name}=("
            for item in each:
                yield f"{indent}        {_short(item)},"
            yield f"{indent}    ),"
        elif isinstance(each, (ModelSpec, Sharding)):
            first, *rest = _lines(each, indent + "    ")
            yield f"{indent}    {field.name}={first.strip()}"
            yield from rest
        else:
            yield f"{indent}    {field.name}={each!r},"
    yield f"{indent})" + ("," if indent else "")


def _short(value: Any) -> str:
    """A `repr` without the fields that have their defaults."""
    if isinstance(value, tuple):
        return "(" + "".join(f"{_short(each)}, " for each in value).strip() + ")"
    if not hasattr(value, "__dataclass_fields__"):
        return repr(value)
    told = [
        f"{field.name}={_short(each)}"
        for field in fields(value)
        if (each := getattr(value, field.name)) != field.default
    ]
    return f"{type(value).__name__}({', '.join(told)})"


def read(text: str) -> Program:
    """The program of a text."""
    names = {kind.__name__: kind for kind in (Program, ModelSpec, Layer, Sharding, GroupSpec, Ragged)}
    program = eval(text, {**names, **do.ACTIONS})
    assert isinstance(program, Program)
    return program


def kinds_of(layers: tuple[Layer, ...]) -> set[str]:
    """The kinds of all cells, with those of nests."""
    return {layer.kind for layer in layers}.union(*(kinds_of(layer.inner) for layer in layers))


def all_layers(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    """All cells, with those of nests."""
    for layer in layers:
        yield layer
        yield from all_layers(layer.inner)


def generate(seed: int) -> Program:
    """The program of a seed."""
    return _Generator(seed).program()


class _Generator:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.by_blocks: tuple[str, ...] = ()  # the optimizers for which a layout is made

    def choose(self, weights: Weights) -> Any:
        return self.random.choices(list(weights), list(weights.values()))[0]

    def chance(self, of: float) -> bool:
        return self.random.random() < of

    def program(self) -> Program:
        world = self.choose({1: 12, 2: 55, 3: 25, 4: 8})
        transport = self.choose({"shm": 4 if world > 1 else 0, "p2p": 3, "collective": 3})
        wraps = self.chance(0.35)
        original = wraps and self.chance(0.6)
        low = self.choose({"": 8, "float32": 1, "bfloat16": 1})
        may_freeze = not wraps or original
        ragged = self.choose(_RAGGED) if not wraps and self.chance(0.4) else None
        self.by_blocks = _BY_BLOCKS.get(ragged, ()) if not low and self.chance(0.8) else ()
        model = self.model(wraps, may_freeze, low)
        sharding = self.sharding(model, world, wraps, original, low, ragged)
        self.optimizers = [*ELEMENTWISE, *self.by_blocks]
        self.optimizers.remove("temporary")
        if "complex" in kinds_of(model.layers):  # which fused steps do not take
            self.optimizers.remove("fused adamw")
        optimizer = self.random.choice(self.by_blocks if self.by_blocks and self.chance(0.7) else self.optimizers)
        actions = self.actions(model, sharding, may_freeze, optimizer)
        # Drawn apart, so that the programs of old seeds stay alike.
        later = random.Random(f"between passes of {self.seed}")
        if optimizer == "sgd" and later.random() < 0.4:
            optimizer = "temporary"
        if not any(layer.checkpoint.startswith("outside") or layer.same is not None for layer in model.layers):
            # The reference casts what a list holds in a list of its own, and parameters before they are returned.
            layers = [replace(layer, collects=not low and later.random() < 0.15) for layer in model.layers]
            for at, layer in enumerate(layers):
                paths = [path for group in sharding.groups for path in group.paths]
                if any(path.startswith(f"cells.{at}.core") for path in paths):  # its weight is a shard by then
                    continue
                if layer.pack == "plain" and not layer.inner and not low and (original or not wraps):
                    layers[at] = replace(layer, pack="hidden weight")
            model = replace(model, layers=tuple(layers))
        actions = tuple(self.between_passes(action, later, wraps) for action in actions)
        if transport in ("shm", "p2p") and world > 1 and random.Random(f"hosts of {self.seed}").random() < 0.3:
            transport = "hosts"
        return Program(self.seed, world, transport, model, sharding, optimizer, actions)

    def between_passes(self, action: do.Action, later: random.Random, wraps: bool) -> do.Action:
        """An action, or one like it that comes after an evaluation, or writes in another way."""
        if isinstance(action, do.Train) and later.random() < 0.2:
            return replace(action, after=later.choice(["no_grad", "inference"]))
        if isinstance(action, do.Write) and not wraps and later.random() < 0.3:
            return replace(action, how="new data")
        return action

    @property
    def quantizes(self) -> bool:
        """Whether optimizers may quantize state, which torchao does in fp64 on local tensors only, not on DTensors."""
        return self.by_blocks == LOW_BIT != ()

    # -- the model ---------------------------------------------------------------------------------------------------

    def model(self, wraps: bool, may_freeze: bool, low: str) -> ModelSpec:
        kinds = [kind for kind in KINDS if may_freeze or kind not in _FROZEN_INSIDE]
        if low:
            kinds = [kind for kind in kinds if kind not in _IN_FULL_PRECISION]
        if wraps:
            kinds = [kind for kind in kinds if kind not in _NOT_FLAT]
        if self.by_blocks:
            kinds = [kind for kind in kinds if kind not in _MIXED]
        layers: list[Layer] = []
        for _ in range(self.random.randint(1, 4)):
            layers.append(self.layer(kinds, layers, may_freeze, 0))
        if self.quantizes:
            layers.append(Layer("wide mlp"))  # what is smaller is not quantized
        embedding = self.chance(0.4)
        return ModelSpec(
            seed=self.seed % 1000,
            width=self.random.choice([4, 6]),
            layers=tuple(layers),
            dtype="float32" if low == "bfloat16" or not (low or self.by_blocks or self.chance(0.9)) else "float64",
            embedding=embedding,
            head=self.choose({"none": 5, "plain": 2, "tied": 3 if embedding else 0}),
            pack=self.choose({"tensor": 5, "tuple": 1, "dict": 1, "dataclass": 1, "list": 0.5, "namedtuple": 0.5}),
            scale=self.chance(0.3),
            spare=self.chance(0.1),
        )

    def layer(self, kinds: list[str], before: list[Layer], may_freeze: bool, depth: int) -> Layer:
        if before and depth == 0 and self.chance(0.08):
            number = self.random.randrange(len(before))
            if before[number].same is None:
                branch = self.random.randrange(4) if self.chance(0.2) else None
                return replace(before[number], same=number, branch=branch, tie=None)
        inner: tuple[Layer, ...] = ()
        kind = self.random.choice(kinds)
        if depth == 0 and self.chance(0.12):
            kind = "nest"
            inner = tuple(self.layer(kinds, [], may_freeze, 1) for _ in range(self.random.randint(1, 2)))
        checkpoint = self.random.choice(CHECKPOINTS) if self.chance(0.2) else ""
        if depth and checkpoint.startswith("outside"):
            checkpoint = ""
        pack = self.random.choice(PACKS) if self.chance(0.3) else "tensor"
        if (checkpoint == "outside reentrant" and pack not in ("tensor", "tuple")) or (
            pack == "weight" and (inner or not may_freeze)
        ):
            pack = "tensor"
        tie = None
        if kind in _TIED and depth == 0 and self.chance(0.25):
            places = [number for number, layer in enumerate(before) if layer.kind in _TIED and layer.same is None]
            tie = self.random.choice(places) if places else None
        frozen = before[tie].frozen if tie is not None else may_freeze and self.chance(0.12)
        return Layer(
            kind=kind,
            pack=pack,
            frozen=frozen,
            checkpoint=checkpoint,
            repeat=2 if self.chance(0.08) else 1,
            branch=self.random.randrange(4) if depth == 0 and self.chance(0.12) else None,
            tie=tie,
            inner=inner,
        )

    # -- sharding ----------------------------------------------------------------------------------------------------

    def sharding(
        self, model: ModelSpec, world: int, wraps: bool, original: bool, low: str, ragged: Ragged | None = None
    ) -> Sharding:
        mesh: tuple[int, ...] = ()
        if world > 1 and self.chance(0.3):
            mesh = self.random.choice([(1, world), (world, 1), *([(2, 2)] * 3 if world == 4 else [])])
        strategy = self.choose({"FULL_SHARD": 5, "SHARD_GRAD_OP": 3, "NO_SHARD": 1.5})
        if wraps and mesh:
            strategy = self.random.choice(["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
        by = self.choose({"calls": 75, "policy": 15, "blocks": 0 if wraps else 10})
        if by == "blocks" and _reads_weights_of_blocks(model):
            by = "policy"
        groups = self.groups(model, wraps, by)
        resting: list[Any] = [2] if world == 4 and not mesh and not wraps else []
        stage = 3 if wraps else self.choose({3: 6, 2: 1, 1: 2, 0: 0 if self.quantizes else 2})
        reshard = [None, None, None, True, True, False, *resting] if stage == 3 else [None, False]
        if by == "calls":
            groups = [replace(group, reshard=self.random.choice(reshard)) for group in groups]
        else:
            groups[-1] = replace(groups[-1], reshard=self.random.choice(reshard))
        reduce = {"": ["", ""], "float32": ["", "float32", "float64"], "bfloat16": ["", "float32", "float32"]}[low]
        plain = any(layer.pack == "plain" for layer in all_layers(model.layers))
        casts = self.chance(0.7)
        output = not wraps and low and casts and not plain and len(groups) == 1 and by != "blocks" and self.chance(0.5)
        sharding = Sharding(
            api="wrapper" if wraps else "fully_shard",
            groups=tuple(groups),
            by=by,
            mesh=mesh,
            cut="first" if wraps or self.by_blocks else self.choose({"first": 6, "last": 1, "largest": 1, "mixed": 1}),
            param_dtype=low,
            reduce_dtype=self.random.choice(reduce),
            output_dtype="float32" if output else "",
            cast_inputs=casts,
            override=not wraps and self.chance(0.3),
            offload=self.chance(0.1),
            original=original,
            stage=stage,
            outer=int(bool(mesh) and not wraps and stage > 0 and ragged is None and self.chance(0.5)),
            ragged=ragged,
            strategy=strategy if wraps else "FULL_SHARD",
            settings=() if wraps else self.settings(model),
            options=self.options() if wraps else (),
        )
        # Drawn apart, so that the programs of old seeds stay alike.
        may_encode = not wraps and stage > 0 and not any(name.startswith("set_custom") for name, _ in sharding.settings)
        sharding = replace(sharding, wire=may_encode and random.Random(f"wire of {self.seed}").random() < 0.25)
        later = random.Random(f"disk of {self.seed}")
        if not wraps and not sharding.outer and not self.by_blocks and not sharding.offload and later.random() < 0.2:
            sharding = replace(sharding, disk=later.choice([1.0, 1.0, 0.5, 0.0]))
        if not wraps and later.random() < 0.2:
            sharding = replace(sharding, persists=later.choice([64, 512, 10**6]))
        if not wraps and later.random() < 0.1:
            settings = (*sharding.settings, ("prefetch_bytes", later.choice([0, 300, 3000])))
            sharding = replace(sharding, settings=settings)
        return sharding

    def groups(self, model: ModelSpec, wraps: bool, by: str) -> list[GroupSpec]:
        """Calls from the inside out; a call of several modules has modules of one depth."""
        if by == "blocks":
            return [GroupSpec(("",))]
        cells = [(number, layer) for number, layer in enumerate(model.layers) if layer.same is None]
        if by != "calls":
            paths = [path for number, layer in cells for path in _cells_of(f"cells.{number}", layer)]
            return [GroupSpec((path,)) for path in [*paths, ""]]
        wanted: list[str] = []
        for number, layer in cells:
            of_core = [f"{path}.core" for path in _cells_of(f"cells.{number}", layer)]
            wanted += [path for path in _cells_of(f"cells.{number}", layer) if self.chance(0.55)]
            if layer.pack != "weight" and all(each.pack != "weight" for each in layer.inner):
                wanted += [path for path in of_core if self.chance(0.15)]
                if layer.kind == "mlp" and self.chance(0.3):
                    wanted.append(f"cells.{number}.core.up")
        wanted += ["embedding"] * (model.embedding and self.chance(0.4))
        wanted += ["head"] * (model.head != "none" and self.chance(0.4))
        depths: dict[int, list[str]] = {}
        for path in wanted:
            depths.setdefault(path.count("."), []).append(path)
        groups: list[GroupSpec] = []
        for depth in sorted(depths, reverse=True):
            paths = depths[depth]
            self.random.shuffle(paths)
            while paths:
                count = 2 if not wraps and self.chance(0.15) else 1
                groups.append(GroupSpec(tuple(paths[:count])))
                del paths[:count]
        return [*groups, GroupSpec(("",))]

    def settings(self, model: ModelSpec) -> tuple[tuple[str, Any], ...]:
        drawn: list[tuple[str, Callable[[], Any]]] = [
            ("set_prefetch_limit", lambda: self.random.choice([0, 2, 3])),
            ("set_reduce_scatter_max_input_buffers", lambda: self.random.choice([1, 2, 3])),
            ("set_force_sum_reduction_for_comms", lambda: True),
            ("set_gradient_divide_factor", lambda: self.random.choice([1.0, 3.0])),
            ("set_separate_reduce_scatter_group", lambda: True),
            ("set_keep_unsharded_storage", lambda: True),
            ("set_manual_backward_finalization", lambda: True),
            ("forward_prefetch", lambda: self.random.choice([1, 2])),
            ("backward_prefetch", lambda: self.random.choice([1, 2])),
            ("set_reduce_scatter_unused_params", lambda: True),
            ("set_all_reduce_hook", lambda: True),
            ("set_custom_all_gather", lambda: True),
            ("set_custom_reduce_scatter", lambda: True),
        ]
        if model.head != "tied":  # an embedding's backward does not need its table
            drawn.append(("set_unshard_in_backward", lambda: False))
        return tuple((name, value()) for name, value in drawn if self.chance(0.06))

    def options(self) -> tuple[tuple[str, Any], ...]:
        """Arguments of the wrapper that change no number."""
        drawn: list[tuple[str, list[Any]]] = [
            ("backward_prefetch", [None, "BACKWARD_PRE", "BACKWARD_POST"]),
            ("forward_prefetch", [True]),
            ("limit_all_gathers", [False]),
            ("sync_module_states", [True]),
        ]
        return tuple((name, self.random.choice(values)) for name, values in drawn if self.chance(0.15))

    # -- what is done ------------------------------------------------------------------------------------------------

    def actions(self, model: ModelSpec, sharding: Sharding, may_freeze: bool, optimizer: str) -> tuple[do.Action, ...]:
        wraps = sharding.wraps
        complete = not model.spare and all(
            layer.branch is None
            and layer.checkpoint != "outside reentrant"
            and not layer.frozen
            and layer.kind not in (*_FROZEN_INSIDE, "halves")
            for layer in all_layers(model.layers)
        )
        frozen: set[int] = set()
        kinds: dict[str, float] = {
            "train": 8,
            "evaluate": 2,
            "write": 2,
            "summon": 2,
            "freeze": 1 if may_freeze else 0,
            "rate": 0.4,
            "swap": 0.7,
            "raise": 1,
            "unshard": 0 if wraps else 1,
            "free": 0.4,
            "set": 0 if wraps else 1,
            "touch": 0.7,
            "copy": 1,
            "average": 0.5,
            "functional": 0 if wraps else 0.7,
            "rewind": 1,
            "resume": 1,
        }
        every = list(all_layers(model.layers))
        unique = all(layer.tie is None and layer.same is None and layer.kind != "listed" for layer in every)
        self.may_assign = unique and model.head != "tied"
        # Of quantized state nobody has a whole tensor.
        self.may_broadcast = not self.quantizes and all(
            layer.same is None and layer.kind not in _NOT_BROADCAST for layer in every
        )
        self.is_once_differentiable = any(
            layer.kind in ("sdpa", "encoder") or layer.checkpoint.endswith(" reentrant")
            for layer in all_layers(model.layers)
        )
        stateless = False  # torch's functions want a state of every parameter
        recomputes = any(layer.checkpoint for layer in every)  # after the values that stood in have gone
        self.may_stand_in = not self.is_once_differentiable and not recomputes
        done: list[do.Action] = [self.train(sharding)]
        for _ in range(self.random.randint(2, 6)):
            kind = self.choose(kinds)
            if kind == "freeze":
                cell = self.random.randrange(len(model.layers))
                trained = cell in frozen
                frozen ^= {cell}
                done.append(do.Freeze(cell, trained))
                kinds["rewind"] = kinds["resume"] = 0
            else:
                known = complete and isinstance(done[-1], do.Train) and done[-1].step
                dropped = any(isinstance(each, do.Train) and each.edit == "drop" for each in done)
                if stateless:
                    known = False
                stateless = kind == "swap" or stateless
                done.append(self.action(kind, model, sharding, known and not dropped))
        if not isinstance(done[-1], do.Train):
            done.append(self.train(sharding))
        skips = random.Random(f"skipped step of {self.seed}")  # apart, so that the programs of old seeds stay alike
        unscaled = "complex" in kinds_of(model.layers) or model.dtype == "bfloat16"  # which no scaler takes
        if skips.random() < 0.25 and not (sharding.disk is not None or unscaled):
            done.insert(skips.choice([at for at, each in enumerate(done) if isinstance(each, do.Train)]), do.SkipStep())
        writes = random.Random(f"lost write of {self.seed}")
        if writes.random() < 0.2 and not wraps:
            done.insert(writes.choice(range(1, len(done))), do.Unshard(9, write=True))
        return tuple(done)

    def action(self, kind: str, model: ModelSpec, sharding: Sharding, complete: bool) -> do.Action:
        pick = self.random.choice
        if kind == "train":
            return self.train(sharding)
        if kind == "evaluate":
            return do.Evaluate(pick(["no_grad", "inference", "grad"]), self.chance(0.4), pick([1, 1, 2]))
        if kind == "write":
            return do.Write(
                pick(
                    [
                        "in place",
                        "data",
                        "local",
                        "copy",
                        "data copy",
                        "foreach",
                        *(["new data"] if sharding.wraps else []),
                    ]
                )
            )
        if kind == "summon":
            rank0_only = self.chance(0.15)
            with_grads = not rank0_only and sharding.original and self.chance(0.2)
            return do.Summon(
                not rank0_only and self.chance(0.6), not rank0_only and self.chance(0.8), with_grads, rank0_only
            )
        if kind == "rate":
            return do.LearningRate(pick([0.5, 2.0]))
        if kind == "swap":
            return do.SwapOptimizer(pick(self.optimizers))
        if kind == "raise":
            where = ["in cell", "late in cell", "between cells", "backward in cell", "backward", "gather"]
            return do.Raise(pick(where), self.random.randrange(len(model.layers)))
        if kind == "unshard":
            return do.Unshard(pick([1, 2, 9]), self.chance(0.4), self.chance(0.4), self.chance(0.7))
        if kind == "free":
            return do.FreeBuffers()
        if kind == "set":
            return do.Set(*pick([
                ("set_reshard_after_forward", False),
                ("set_reshard_after_forward", True),
                ("set_reshard_after_backward", False),
                ("set_reshard_after_backward", True),
                ("set_keep_unsharded_storage", True),
                ("set_keep_unsharded_storage", False),
                ("set_prefetch_limit", 0),
                ("set_prefetch_limit", 2),
                ("set_reduce_scatter_max_input_buffers", 2),
                ("set_force_sum_reduction_for_comms", True),
            ]))  # fmt: skip
        if kind == "touch":
            return do.Touch(pick(["to", "requires_grad", "state dict"]))
        if kind == "copy":
            return do.Copy()
        if kind == "average":
            return do.Average(pick([1, 2]))
        if kind == "functional":
            return do.Functional(self.chance(0.5)) if self.may_stand_in else do.Evaluate()
        refused = () if complete and self.may_broadcast else ("dcp full",) if complete else ("dcp", "dcp full")
        ways = [way for way in (WRAPPED if sharding.wraps else COMPOSABLE) if way not in refused]
        way = pick(ways)
        if kind == "rewind":
            return do.Rewind(way, way == "plain" and self.may_assign and self.chance(0.4))
        return do.Resume(way)

    def train(self, sharding: Sharding) -> do.Train:
        wraps = sharding.wraps
        pattern = "one" if self.chance(0.5) else self.random.choice(list(PATTERNS))
        if pattern in ("penalty", "input gradients") and self.is_once_differentiable:
            pattern = "two losses"
        micro = self.choose({1: 6, 2: 2, 3: 1})
        hybrid = len(sharding.mesh) == 2 and not wraps
        sync = "each"
        if micro > 1:
            sync = self.choose({"each": 3, "last": 5, "kept": 0 if wraps else 2, "all-reduce": 2 if hybrid else 0})
        between = ""
        if self.chance(0.2):
            between = self.random.choice(
                ["evaluate", "infer", *([] if wraps else ["state dict", "reshard", "unshard"])]
            )
        edit = self.random.choice(["scale", "replace", "drop"]) if self.chance(0.15) else ""
        if edit == "drop" and wraps and not sharding.original:
            edit = "scale"
        return do.Train(
            pattern=pattern,
            micro=micro,
            sync=sync,
            between=between,
            edit=edit,
            clip=0.05 if not self.by_blocks and self.chance(0.15) else 0.0,  # norms are fp32
            step=self.chance(0.9),
            zero=self.choose({"none": 7, "zeros": 2, "keep": 1}),
            autocast=not self.by_blocks and self.chance(0.02),
        )


def _reads_weights_of_blocks(model: ModelSpec) -> bool:
    """Whether a cell reads a parameter after the forward of the block that has it, where it is a shard, as in torch."""
    plain = build(model)
    readers = [module for module in plain.modules() if isinstance(module, Cell) and module.layer.pack == "weight"]
    inside = {inner for reader in readers for inner in reader.modules() if inner is not reader}
    return not inside.isdisjoint(repeated_blocks(plain))


def _cells_of(path: str, layer: Layer) -> list[str]:
    """The paths of a cell and of those inside of it, the inner ones first."""
    inner = [each for number, one in enumerate(layer.inner) for each in _cells_of(f"{path}.core.cells.{number}", one)]
    return [*inner, path]

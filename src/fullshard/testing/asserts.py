"""What tests of distributed training assert again and again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.comm.process_group import gather_objects
from fullshard.testing.pool import RankPool, failure_report, failures
from fullshard.testing.rank import World

_FULL = StateDictOptions(full_state_dict=True)


def _mean_square(model: nn.Module, batch: Any) -> Tensor:
    output: Tensor = model(batch)
    return output.square().mean()


def _sgd(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def assert_trains_like(
    unsharded: nn.Module,
    sharded: nn.Module,
    batch: Callable[[int, int], Any],
    *,
    loss: Callable[[nn.Module, Any], Tensor] = _mean_square,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = _sgd,
    steps: int = 3,
    data_rank: int | None = None,
    data_size: int | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Train a model in both forms, and compare them; all ranks must call it.

    Compared are the losses of each step, and the parameters after the first and after the last.

    The unsharded model sees the batches of all data-parallel ranks on each rank and takes the mean of their gradients:
    data parallelism as arithmetic, without communication. The sharded one may be that of any library whose parameters
    ``torch.distributed.checkpoint`` makes whole: of this one, of torch's FSDP, DDP or tensor parallelism.

    Ranks: all.

    Args:
        unsharded: A whole copy of the model, the same on every rank.
        sharded: The model as it is trained, with the same values.
        batch: ``batch(step, rank)`` is the batch of a data-parallel rank, the same on whichever rank it is called.
        loss: ``loss(model, batch)`` is a scalar. By default the mean square of what the model returns.
        optimizer: Makes the optimizer of each, from its parameters. By default SGD with momentum.
        steps: How many steps to train.
        data_rank: This rank's number among the data-parallel ranks. By default its rank in the world.
        data_size: The number of data-parallel ranks; 1 where all ranks see the same batch, as with tensor parallelism
            alone. By default the size of the world.
        tolerance: How far a tensor may differ: its largest difference as a part of its largest entry.

    Raises:
        AssertionError: names the step and the parameter, and says by how much it differs, on which rank.
    """
    rank = dist.get_rank() if data_rank is None else data_rank
    size = dist.get_world_size() if data_size is None else data_size
    optimizers = optimizer(unsharded.parameters()), optimizer(sharded.parameters())
    for step in range(steps):
        losses = [loss(unsharded, batch(step, each)) for each in range(size)]
        torch.stack(losses).mean().backward()
        found = loss(sharded, batch(step, rank))
        found.backward()
        _assert_close(f"step {step}: the loss", _whole(found), losses[rank].detach(), tolerance)
        for each in optimizers:
            each.step()
            each.zero_grad()
        if 0 < step < steps - 1:
            continue  # the next loss shows whether parameters differ
        expected = get_model_state_dict(unsharded)
        values = get_model_state_dict(sharded, options=_FULL)
        if missing := expected.keys() ^ values.keys():
            raise AssertionError(f"step {step}: only one of the models has {', '.join(sorted(missing))}")
        for name, value in expected.items():
            if isinstance(value, Tensor):
                _assert_close(f"step {step}: '{name}'", _whole(values[name]), value, tolerance)


def _whole(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach()


def _assert_close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    if found.shape != expected.shape:
        raise AssertionError(f"{what} has shape {tuple(found.shape)}; expected {tuple(expected.shape)}")
    if not expected.numel():
        return
    found, expected = (each.to("cpu", torch.float64) for each in (found, expected))
    difference, most = (found - expected).abs().max().item(), expected.abs().max().item()
    if not difference <= tolerance * most:  # NaN is a difference
        raise AssertionError(
            f"{what} differs by {difference:.3g} on rank {dist.get_rank()}, where its largest entry is {most:.3g}; "
            f"expected {tolerance:g} of that at most"
        )


def assert_same_on_all_ranks(value: Any, what: str = "value") -> None:
    """Assert that all ranks have the same, to the bit; all must call it.

    Ranks: all.

    Args:
        value: A tensor, a module, an optimizer, or dicts, lists and tuples of them and of other objects, which are
            compared by their ``repr``. A DTensor counts as the whole tensor.
        what: What to call it in the error.

    Raises:
        AssertionError: on every rank, names the first entry that differs, and what two ranks have.
    """
    entries = dict(_entries(value, what))
    found = gather_objects({name: _digest(entry) for name, entry in entries.items()}, None)
    for name in found[0]:
        for rank, theirs in enumerate(found):
            if theirs.get(name) == found[0][name]:
                continue
            pair = gather_objects(entries.get(name, "nothing"), None)
            raise AssertionError(f"{name} differs: {_difference(pair[0], pair[rank], rank)}")
    for rank, theirs in enumerate(found):
        if extra := theirs.keys() - found[0].keys():
            raise AssertionError(f"rank {rank} has {', '.join(sorted(extra))}, and rank 0 has not")


def _entries(value: Any, name: str) -> Iterable[tuple[str, Any]]:
    """The leaves of a value with their names, in one order on all ranks."""
    if isinstance(value, nn.Module):
        tensors = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        for key, tensor in tensors.items():
            yield from _entries(tensor, f"{name} '{key}'")
    elif isinstance(value, Optimizer):
        yield from _entries(value.state_dict(), name)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _entries(each, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _entries(each, f"{name}[{number}]")
    elif isinstance(value, Tensor):
        yield name, _whole(value).cpu()
    else:
        yield name, repr(value)


def _digest(entry: Any) -> tuple[Any, ...]:
    if not isinstance(entry, Tensor):
        return (entry,)
    content = entry.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return tuple(entry.shape), entry.dtype, hashlib.sha256(content).digest()


def _difference(first: Any, other: Any, rank: int) -> str:
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        if first.shape == other.shape and first.dtype == other.dtype:
            most = (first.double() - other.double()).abs().max().item()
            return f"rank {rank} has other values than rank 0, by up to {most:.3g}"
        first, other = (f"shape {tuple(each.shape)} and {each.dtype}" for each in (first, other))
    return f"rank 0 has {first}, and rank {rank} has {other}"


def assert_checkpoint_round_trip(
    pool: RankPool,
    build: Callable[[World], tuple[nn.Module, Optimizer]],
    save: Callable[[Path, nn.Module, Optimizer], object],
    load: Callable[[Path, nn.Module, Optimizer], object],
    path: Path,
    sizes: Sequence[int] = (1, 2, 3),
) -> None:
    """Save a checkpoint on each number of ranks, load it on every one, and compare all state, to the bit.

    Call it in the test process, in a test without ranks: the fixture ``rank_pool`` is the pool. The three functions are
    called on ranks, so they must stand at the top level of a module.

    Ranks: the test process.

    Args:
        pool: Where to run.
        build: Makes the sharded model and its optimizer, with another seed for loading than for saving. Where the
            optimizer's state is to be compared, it has made a step.
        save: Saves both into a folder; :func:`fullshard.checkpoint.save`, for example.
        load: Loads both from it.
        path: An empty folder.
        sizes: The numbers of ranks.

    Raises:
        AssertionError: names the two numbers of ranks, and what differs.
    """
    for before in sizes:
        folder = path / f"of-{before}"
        folder.mkdir(parents=True)
        saved = _on_ranks(pool, before, "saving", _save, build, save, folder)
        for after in sizes:
            loaded = _on_ranks(pool, after, f"loading what {before} ranks saved", _load, build, load, folder)
            different = [name for name in saved if saved[name] != loaded.get(name)]
            if different or saved.keys() != loaded.keys():
                names = different or sorted(saved.keys() ^ loaded.keys())
                raise AssertionError(
                    f"{before} ranks saved what {after} ranks did not load: {len(names)} entries differ, such as "
                    f"{names[0]}"
                )


def _on_ranks(pool: RankPool, size: int, doing: str, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    outcomes = pool.run(function, size, *args)
    if failures(outcomes):
        raise AssertionError(f"{doing} on {size} ranks: {failure_report(outcomes)}")
    state: dict[str, Any] = outcomes[0].value
    return state


def _save(world: World, build: Any, save: Any, path: Path) -> dict[str, Any]:
    model, optimizer = build(world)
    save(path, model, optimizer)
    return _state_of(model, optimizer)


def _load(world: World, build: Any, load: Any, path: Path) -> dict[str, Any]:
    torch.manual_seed(1)
    model, optimizer = build(world)
    load(path, model, optimizer)
    return _state_of(model, optimizer)


def _state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What all state is, by name."""
    state = get_model_state_dict(model, options=_FULL), get_optimizer_state_dict(model, optimizer, options=_FULL)
    return {name: _digest(entry) for name, entry in _entries({"model": state[0], "optimizer": state[1]}, "state")}

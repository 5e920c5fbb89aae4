"""State of optimizers as frameworks give it: from the first rank alone, and in ShardedTensors; and who is warned."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

from tests.checkpoint.cases import (
    LIBRARIES,
    OURS,
    TORCHS,
    assert_same,
    both_ways,
    choose,
    libraries,
    quiet,
    to_dict,
    to_load,
    with_optimizer,
    wrapped,
)
from tests.harness import World, ranks


@ranks(2, 3)
@both_ways
def test_sharded_optimizer_states_that_dcp_reads_are_loaded(
    world: World, use_orig_params: bool, tmp_path: Path
) -> None:
    model, optimizer = with_optimizer(wrapped(use_orig_params=use_orig_params), "AdamW", 2)
    choose(OURS, model, "SHARDED")
    before = optimizer.state_dict()
    dcp.save({"model": model.state_dict(), "optimizer": to_dict(model, optimizer)}, checkpoint_id=tmp_path)
    other, other_optimizer = with_optimizer(wrapped(use_orig_params=use_orig_params), "AdamW")
    choose(OURS, other, "SHARDED")
    with quiet():
        read = load_sharded_optimizer_state_dict(other.state_dict(), "optimizer", dcp.FileSystemReader(tmp_path))
    other_optimizer.load_state_dict(to_load(other, other_optimizer, read["optimizer"]))
    assert_same(other_optimizer.state_dict()["state"], before["state"])


@ranks(2, 3)
@both_ways
def test_sharded_state_dicts_of_torchs_wrapper_are_loaded(world: World, use_orig_params: bool) -> None:
    trained, optimizer = with_optimizer(wrapped(TORCHS, use_orig_params=use_orig_params), "AdamW", 2)
    model, other = with_optimizer(wrapped(use_orig_params=use_orig_params), "AdamW")
    choose(TORCHS, trained, "SHARDED")
    with quiet():
        saved: Any = trained.state_dict(), TORCHS.methods.optim_state_dict(trained, optimizer)
    assert any(hasattr(value, "local_shards") for value in saved[0].values())
    model.load_state_dict(saved[0])
    other.load_state_dict(to_load(model, other, saved[1]))
    choose(OURS, model, "FULL")
    with quiet():  # torch's values with original parameters are not those of the optimizer, but they are what it gave
        assert_same(to_dict(model, other)["state"], saved[1]["state"])
        assert_same(model.state_dict(), saved[0])


@ranks(1)
@libraries
def test_deprecated_settings_warn_when_they_are_set(world: World, name: str) -> None:
    library = LIBRARIES[name]
    model, kind = wrapped(library), library.settings.StateDictType.SHARDED_STATE_DICT

    def warned(call: Any) -> list[tuple[type[Warning], bool]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        return [(each.category, each.filename == __file__) for each in caught]

    context = library.wrap.state_dict_type(model, kind)
    assert warned(lambda: library.wrap.state_dict_type(model, kind)) == []
    of_this_line = library is OURS  # torch's is of a line of torch, and so shown once in a program
    assert warned(context.__enter__) == [(FutureWarning, of_this_line)]
    assert warned(lambda: library.wrap.get_state_dict_type(model)) == []
    assert warned(lambda: library.wrap.set_state_dict_type(model, kind)) == [(FutureWarning, True)]

"""What we expect of torch's private names: each test fails if a release of torch changes what one of them means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard import torch_private as private
from tests.harness import fake_world


@pytest.mark.skipif(not private.CAN_SWAP_MEMORY, reason="torch before 2.12 cannot: buffers are allocated when taken")
def test_two_storages_exchange_their_memory_and_tensors_follow() -> None:
    one, other = torch.zeros(4), torch.ones(4)
    addresses, view = (one.data_ptr(), other.data_ptr()), one[1:3]
    private.swap_memory(one.untyped_storage(), other.untyped_storage())
    assert (other.data_ptr(), one.data_ptr()) == addresses
    assert view.tolist() == [1, 1]
    assert other.tolist() == [0] * 4


def test_an_alias_reads_the_same_memory() -> None:
    tensor = torch.arange(4.0)
    alias = torch.empty(0).set_(private.alias_storage(tensor.untyped_storage()))
    tensor[2] = 9
    assert alias.tolist() == [0, 1, 9, 3]
    assert private.storage_id(alias) != private.storage_id(tensor) == private.storage_id(tensor[1:])
    assert private.storage_id(torch.eye(2).to_sparse()) == 0


def test_versions_count_writes_and_can_be_set() -> None:
    tensor = torch.zeros(2)
    tensor.add_(1)
    assert private.version_of(tensor) == 1
    private.set_versions((tensor,), (7,))
    assert private.version_of(tensor) == 7
    weight = nn.Parameter(torch.ones(2))
    saved = weight.exp()
    private.set_versions((saved,), (99,))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_memory_that_others_read_is_told_from_ones_own() -> None:
    tensor = torch.zeros(2)
    assert not private.shares_memory(tensor)
    view = tensor[:1]
    assert private.shares_memory(tensor)
    del view
    assert not private.shares_memory(tensor)
    assert private.base_of(tensor[:1]) is tensor
    assert private.base_of(tensor) is None


def test_a_dtensor_holds_the_local_tensor_itself() -> None:
    with fake_world(2) as world:
        made = distribute_tensor(torch.zeros(4, 3), world.mesh(), [Shard(0)], src_data_rank=None)
        local = torch.ones(2, 3)
        found = private.make_dtensor(local, private.spec_of(made))
        assert private.local_of(found) is local
        assert (found.shape, found.placements) == ((4, 3), (Shard(0),))
        other = torch.full((2, 3), 2.0)
        private.set_local(found, other)
        assert private.local_of(found) is other
        altered = private.altered_spec(private.spec_of(made), placements=[Replicate()], dtype=torch.bfloat16)
        assert altered.placements == (Replicate(),)
        assert altered.tensor_meta is not None
        assert (altered.tensor_meta.dtype, altered.tensor_meta.shape) == (torch.bfloat16, (4, 3))


def test_gradients_are_lent_as_they_lie_and_refused_if_they_lie_otherwise() -> None:
    with fake_world(2) as world:
        param = nn.Parameter(distribute_tensor(torch.zeros(4, 3), world.mesh(), [Shard(0)], src_data_rank=None))
        local, spec = private.local_of(param), private.spec_of(param)  # type: ignore[arg-type]
        twin = nn.Parameter(torch.zeros(2, 3))
        twin.grad = torch.ones(2, 3)
        assert private.lend_gradients([(param, local, twin, spec)])
        assert twin.grad is None
        grad = private.make_dtensor(torch.ones(2, 3), spec)
        param.grad = grad
        assert private.lend_gradients([(param, local, twin, spec)])
        assert twin.grad is private.local_of(grad)
        assert not private.lend_gradients([(param, local.clone(), twin, spec)])
        param.grad = distribute_tensor(torch.ones(4, 3), world.mesh(), [Replicate()], src_data_rank=None)
        assert not private.lend_gradients([(param, local, twin, spec)])


def test_the_data_of_a_parameter_is_replaced_in_place() -> None:
    param = nn.Parameter(torch.zeros(2))
    data = torch.ones(3, dtype=torch.float64)
    private.set_data(param, data)
    assert (param.data_ptr(), param.dtype, param.shape) == (data.data_ptr(), torch.float64, (3,))


def test_a_grad_dtype_that_was_assigned_is_told_from_the_own_one() -> None:
    plain, chosen, free = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    private.choose_grad_dtype(plain, "own")
    private.choose_grad_dtype(chosen, torch.bfloat16)
    private.choose_grad_dtype(free, "any")
    assert list(map(private.chosen_grad_dtype, (plain, chosen, free))) == ["own", torch.bfloat16, "any"]


def test_a_backward_is_noticed_and_calls_back_at_its_end() -> None:
    seen = list[Any]()
    weight = nn.Parameter(torch.ones(1))

    def hook(grad: torch.Tensor) -> None:
        seen.append(private.running_backward() >= 0)
        private.call_after_backward(lambda: seen.append("ended"))

    product = weight * 2
    product.register_hook(hook)
    assert private.running_backward() == -1
    product.sum().backward()
    assert seen == [True, "ended"]
    assert private.running_backward() == -1


def test_hooks_and_optimizers_that_wait_for_a_gradient_are_run() -> None:
    param, seen = nn.Parameter(torch.ones(2)), list[torch.Tensor]()
    assert not private.after_accumulation([param])
    param.register_post_accumulate_grad_hook(seen.append)
    assert private.after_accumulation([param])
    private.run_after_accumulation(param)
    assert seen == [param]
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    setattr(other, private.IN_BACKWARD_OPTIMIZERS, [torch.optim.SGD([other], lr=1.0)])
    assert private.after_accumulation([other])
    private.run_after_accumulation(other)
    assert other.grad is None
    assert other.tolist() == [0, 0]


def test_a_hook_of_an_optimizer_can_be_moved_to_either_end() -> None:
    optimizer, seen = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), list[str]()
    hooks = {
        name: optimizer.register_step_pre_hook(lambda *_, name=name: seen.append(name))  # type: ignore[misc]
        for name in "abc"
    }
    private.reorder(hooks["a"], last=True)
    private.reorder(hooks["c"], last=False)
    optimizer.step()
    assert "".join(seen) == "cba"
    assert all(hasattr(optimizer, name) for name in private.STEP_HOOKS)


def test_a_world_can_be_simulated_and_is_gone_afterwards() -> None:
    with private.simulated_world(100, 7):
        assert (dist.get_world_size(), dist.get_rank()) == (100, 7)
        assert private.timeout_of(dist.group.WORLD) == 1800
    assert not dist.is_initialized()


def test_the_chunks_of_tensors_are_written_end_to_end() -> None:
    out = torch.full((2, 8), -1.0)
    private.chunk_cat([torch.arange(3.0), torch.arange(8.0).view(4, 2)], num_chunks=2, out=out)
    assert out.tolist() == [[0, 1, 0, 1, 2, 3], [2, 0, 4, 5, 6, 7]]


def test_buffers_that_no_state_dict_has_are_known() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("left", torch.zeros(1), persistent=False)
    assert private.non_persistent_buffers(module) == {"left"}


def test_the_port_of_a_store_is_found_below_its_prefixes() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert private.port_of(dist.PrefixStore("a", dist.PrefixStore("b", store))) == store.port
    assert private.port_of(dist.HashStore()) == 0  # type: ignore[attr-defined]


def test_a_plain_tensor_is_its_own_part_and_no_sharded_tensor() -> None:
    tensor = torch.zeros(2)
    assert list(private.plain_parts(tensor)) == [tensor]
    assert not private.is_sharded_tensor(tensor)
    assert not isinstance(tensor, DTensor)

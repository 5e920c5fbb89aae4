"""Where gradients lie until they are reduced: what is written, added and read again, and what ranks are sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.buffer.plan import make_plan
from fullshard.buffer.sections import Section
from fullshard.group.gradient_buffer import MessageViews
from fullshard.group.mesh import DataMesh
from fullshard.group.parameter import Location, ShardedParameter
from fullshard.torch_private import foreach_add
from tests.comm.cases import ODD, ZERO_COPY, Shapes
from tests.fully_shard.cases import first_of
from tests.harness import fake_world

ROWS: Shapes = (((8, 3), 0), ((5,), 0), ((4, 2, 2), 0), ((1, 3), 0), ((0, 4), 0))


@first_of("size", 3, 2, 64)
@pytest.mark.parametrize("shapes", [ROWS, ODD, ZERO_COPY], ids=["rows", "odd", "zero-copy"])
@first_of("dtype", torch.bfloat16, torch.float32)
def test_messages_have_what_each_rank_reduces(size: int, shapes: Shapes, dtype: torch.dtype) -> None:
    with fake_world(size):
        params = sharded(shapes)
        shown = [param.plan_shape for param in params]
        plan = make_plan(shown, size)
        full = torch.full((plan.messages.full_numel,), torch.nan)
        places = MessageViews(params, [Section(torch.float32, tuple(range(len(params))), plan.messages)], [full])
        grads = {i: torch.randn(param.shape).to(dtype) for i, param in enumerate(params)}
        kept = {i: grad.clone() for i, grad in grads.items()}
        places.write(grads)
        expected = {i: grad.float() for i, grad in kept.items()}
        check(places, expected)
        places.write({i: grad.clone() for i, grad in kept.items()}, foreach_add)
        check(places, {i: 2 * grad for i, grad in expected.items()})
        places.zero(1)
        assert not places.read(1).any()
        some = {i: grad.float() for i, grad in kept.items() if i % 2 == 0}
        places.zero_copy.clear()
        places.write({i: grad.clone() for i, grad in some.items()})  # a part of them, one by one
        check(places, some)
        # What a rank is sent lies where its shard has it.
        for rank in range(size):
            message = full.view(size, -1)[rank] if full.numel() else full
            for i in some.keys() - places.kept:
                start, shape = plan.locate_chunk(i, rank)
                chunk = params[i].view(message[start : start + torch.Size(shape).numel()], shape)
                dim = params[i].dim
                chunks = [some[i]] * size if dim is None else some[i].chunk(size, dim)
                if rank < len(chunks):
                    assert torch.equal(chunk, chunks[rank])


def check(places: MessageViews, expected: dict[int, torch.Tensor]) -> None:
    for index, grad in expected.items():
        assert torch.equal(places.read(index), grad), index


def sharded(shapes: Shapes) -> list[ShardedParameter]:
    mesh = DataMesh(init_device_mesh("cpu", (dist.get_world_size(),)), dist.group.WORLD)
    found = []
    for shape, dim in shapes:
        if dim is None and shape:
            continue  # which only extensions have
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(shape))
        placement = None if dim is None else torch.distributed.tensor.Shard(dim)
        found.append(ShardedParameter(module.weight, [Location(module, "weight")], mesh, placement))
    return found

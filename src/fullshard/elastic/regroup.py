"""How a model goes on over another process group: that of the row in which its process is now.

Owns what a group of parameters must be for that, how processes of a row find each other, what the engine uses of a
process group, and what becomes of one that lost a process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.backends import comes_from_backend
from fullshard.comm.hosts import HostsTransport
from fullshard.comm.point_to_point import PointToPointTransport
from fullshard.comm.select import select_transport
from fullshard.comm.waits import PeerFailureError
from fullshard.elastic.entry import PATIENCE, ElasticError
from fullshard.elastic.job import Job, RepeatStep
from fullshard.elastic.messages import RowValue
from fullshard.elastic.rows import Row
from fullshard.group.param_group import ParamGroup
from fullshard.schedule.schedule import Schedule
from fullshard.torch_private import forget_meshes, init_fake_group, init_with_gloo, set_rank
from fullshard.watch.connections import connected_sockets
from fullshard.wire_policy import EXACT

_CONNECTING = timedelta(seconds=10)  # in which processes of a row connect, once each has its address


class RowStore(dist.Store):  # type: ignore[name-defined]
    """The store of a row: values travel over the connections of the job, so that no wait outlives a process."""

    def __init__(
        self,
        set_value: Callable[[str, bytes], None],
        get_value: Callable[[str, float], bytes],
        has_value: Callable[[str], bool],
    ) -> None:
        super().__init__()
        self._set_value, self._get_value, self._has_value = set_value, get_value, has_value
        self.is_connected = False  # until then processes wait for each other, however long

    def set(self, key: str, value: bytes | str) -> None:
        self._set_value(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._get_value(key, math.inf)

    def check(self, keys: list[str]) -> bool:
        return all(map(self._has_value, keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._get_value(key, timeout.total_seconds() if timeout and self.is_connected else math.inf)


def problem_of(group: ParamGroup) -> str:
    """Why a group cannot be trained by an elastic job; empty if it can."""
    options = group.options
    if group.data.replicate_size > 1:
        return (
            "its parameters are on several ranks. Shard without a mesh, with zero_stage 1 to 3: `replicas` replicates"
        )
    if {options.wire, options.outer_wire} != {EXACT}:
        return "its wire_policy encodes messages between hosts only, and bits would depend on the hosts of a row"
    if options.post_forward_mesh is not None:
        return "reshard_after_forward is a number of ranks, whose process group is not made anew"
    return "its parameters are on a disk" if group.offloaded.disk is not None else ""


def use_process_group(schedule: Schedule, process_group: Any, step: int, is_first: bool) -> None:
    """Lets the model shard over another process group of the same size."""
    checks = schedule.checks if is_first else []
    for group in schedule.groups:
        transport = select_transport(process_group, group.device)
        if isinstance(transport, HostsTransport):  # it adds up inside of hosts first, in an order of its own
            transport = PointToPointTransport()
        if group.data.shard_group is not None:
            group.data.shard_group = group.reduce_process_group = process_group
        else:  # of one process
            group.data.replicate_group = process_group
        group.may_share = True
        group.first_values = group.first_values if is_first else None
        group.reduce_transport = transport
        group.use_transport(transport)
    schedule.begin_over(process_group, step)
    schedule.checks = checks


def use_shard(schedule: Schedule, rank: int) -> None:
    """Lets the model have the shard of a different rank, of zeros until its values are loaded."""
    init_fake_group(schedule.groups[0].data.shard_size, rank)
    for group in schedule.groups:
        group.reshard()
        group.data.shard_group, group.data.shard_rank = dist.group.WORLD, rank
        set_rank(group.data.mesh, rank)
        group.lay_out()
        for param in group.params:
            if param.extends:  # its chunk is as large as the largest, see set_extension_chunk()
                rows = param.rows[1] - param.rows[0]
                param.set_chunk(param.values.new_zeros(param.cut.chunk_shape(0)).narrow(param.dim or 0, 0, rows))
            else:
                shape = param.chunk_of(torch.empty(param.shape, device="meta")).shape
                param.set_chunk(torch.zeros(shape, dtype=param.dtype, device=param.values.device))
        group.rebuild()
    dist.destroy_process_group()
    forget_meshes()


class Regrouping(Job):
    """A job whose processes change their rows."""

    def _row_in(self, step: int) -> Row:
        """The row in which this process is to run a step, if it has one: others may wait for it in the steps before."""
        with self._changed:
            row = self._find_row()
            return row if row and self._agreement.row_from[row] <= step else ()

    def follow_membership(self, step: int) -> None:
        """Makes the process group of the row in which this process is to run a step, if that has changed."""
        while (row := self._row_in(step)) != self._row:
            self._leave_row()
            if self._agreement.goes_back:  # processes of a row connect only once
                raise RepeatStep
            try:
                if row:
                    self._enter_row(row)
                    self._row = row
                self._times["joined"] = time.monotonic()
                return
            except ElasticError:
                raise
            except RuntimeError as error:  # a process of the row has ended meanwhile: the next membership says so
                if not self._finds_other_row(row):
                    raise ElasticError(f"process {self.rank} could not connect with {row}: {error}") from error

    def _finds_other_row(self, row: Row) -> bool:
        """Waits for a membership without a process of ``row`` that is lost. Returns whether there is one."""
        deadline = time.monotonic() + PATIENCE

        def is_known() -> bool:  # while a change is under way, wait_for() says what it lacks
            late = time.monotonic() > deadline and not self._agreement.is_frozen
            return self._is_in_other_row(row) or late

        with self._changed:
            self.wait_for(is_known, "news of a lost process")
            return self._is_in_other_row(row)

    def _leave_row(self) -> None:
        self._row = ()
        with self._changed:
            self._orders.clear()
            self._ordered.clear()
        if dist.is_initialized():
            if self._schedule is not None:
                self._schedule.reset()
            with suppress(Exception):
                dist.destroy_process_group()

    def _enter_row(self, row: Row) -> None:
        before = {ends for _, ends in connected_sockets()}
        # It is kept, because torch does not keep what is written in Python of a store.
        access = partial(self._set_value, row), partial(self._get_value, row), partial(self._has_value, row)
        store = self._store = RowStore(*access)
        assert self._schedule is not None
        kinds = {group.device.type for group in self._schedule.groups}
        init_with_gloo(store, self.shard, self.shards, _CONNECTING, kinds)
        store.is_connected = True
        self._row_connections = {ends for _, ends in connected_sockets()} - before
        use_process_group(self._schedule, dist.group.WORLD, self.step, is_first=self._number == 0)

    def _set_value(self, row: Row, key: str, value: bytes) -> None:
        with self._changed:
            self._row_values[row, key] = value
            for process in row:
                self._connections.send(process, RowValue(row, key, value))

    def _is_broken(self, row: Row) -> bool:
        """Whether a row no longer exists, or one of its processes has ended."""
        return self._is_in_other_row(row) or not self._agreement.lost.isdisjoint(row)

    def _has_value(self, row: Row, key: str) -> bool:
        return (row, key) in self._row_values

    def _get_value(self, row: Row, key: str, patience: float = math.inf) -> bytes:
        """Waits for a value. Raises RuntimeError if the row is broken first, or after ``patience`` seconds."""
        deadline = time.monotonic() + patience

        def is_known() -> bool:
            return self._has_value(row, key) or self._is_broken(row) or time.monotonic() > deadline

        with self._changed:
            self.wait_for(is_known, "its row")
            if not self._has_value(row, key):
                raise RuntimeError(f"a process of row {row} has ended, or has not answered in time")
            return self._row_values[row, key]

    def survives(self, error: BaseException, has_stepped: bool) -> bool:
        """Whether an error in a step says that a process was lost, and the job goes on without that process."""
        if isinstance(error, RepeatStep):
            return True
        is_loss = isinstance(error, PeerFailureError) or (isinstance(error, RuntimeError) and comes_from_backend(error))
        if not is_loss or has_stepped or isinstance(error, ElasticError):  # which may quote the backend
            return False
        if not self._finds_other_row(self._row):
            return False
        self._leave_row()
        return True

"""The helper that other tests trust: see ``tests/ranks.py``."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.ranks import RankError, run_ranks


def sum_of_ranks(rank, world_size, offset):
    x = torch.tensor([rank + offset])
    dist.all_reduce(x)
    return rank, dist.get_world_size(), x


def process_id(rank, world_size):
    return os.getpid()


def temporary_folder(rank, world_size):
    return tempfile.gettempdir()


def leave_others_in_a_collective(rank, world_size, culprit):
    dist.barrier()  # all of them are here
    if rank == culprit:
        raise KeyError("the culprit")
    dist.all_reduce(torch.zeros(1))


def forget_handlers(rank, world_size):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def die_in_a_collective(rank, world_size, culprit):
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def refuse(rank, world_size):
    raise ValueError(f"rank {rank} will not")


def wait_for_ever(rank, world_size):
    signal.pause()


def return_the_unpicklable(rank, world_size):
    return lambda: None


def set_environment(rank, world_size):
    os.environ["NARROWBAND_TEST_MARK"] = "set"
    return os.getpid()


def read_environment(rank, world_size):
    return os.environ.get("NARROWBAND_TEST_MARK")


def has_a_group(rank, world_size):
    return dist.is_initialized()


def threads_and_random_number(rank, world_size):
    return torch.get_num_threads(), torch.rand(()).item()


def test_temporary_files_lie_in_the_folder_of_pytest(tmp_path_factory):
    folders = {tempfile.gettempdir(), *run_ranks(temporary_folder, 2)}
    assert all(Path(folder).is_relative_to(tmp_path_factory.getbasetemp()) for folder in folders)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_in_rank_order(world_size):
    results = run_ranks(sum_of_ranks, world_size, 10)
    total = sum(range(world_size)) + 10 * world_size
    assert results == [(rank, world_size, torch.tensor([total])) for rank in range(world_size)]


def test_processes_are_separate_and_used_again():
    first = run_ranks(process_id, 3)
    assert len({os.getpid(), *first}) == 4
    assert run_ranks(process_id, 3) == first
    assert run_ranks(process_id, 2) == first[:2]


def test_every_call_starts_from_the_same_threads_and_seed():
    first = run_ranks(threads_and_random_number, 2)
    assert first[0] == first[1]
    assert first[0][0] == 1
    assert run_ranks(threads_and_random_number, 2) == first


def test_fresh_processes_leave_no_trace():
    kept = run_ranks(process_id, 2)
    thrown_away = run_ranks(set_environment, 2, fresh=True)
    assert not set(kept) & set(thrown_away)
    assert not any(Path(f"/proc/{pid}").exists() for pid in thrown_away)
    assert run_ranks(read_environment, 2) == [None, None]
    assert run_ranks(process_id, 2) == kept


def test_a_function_may_be_left_to_make_its_own_group():
    assert run_ranks(has_a_group, 2, group=False) == [False, False]
    assert run_ranks(has_a_group, 2) == [True, True]


def total_over_a_mesh(rank, world_size, groups_before):
    """A distributed tensor's norm, whose reduction DTensor remembers together with the name of the mesh's group."""
    for _ in range(groups_before):
        dist.new_group(list(range(world_size)))
    mesh = init_device_mesh("cpu", (2, 2))
    return torch.linalg.vector_norm(DTensor.from_local(torch.ones(4), mesh, [Shard(0), Shard(0)])).full_tensor().item()


def test_a_call_sees_nothing_of_the_meshes_of_earlier_calls():
    for groups_before in (3, 0):
        assert run_ranks(total_over_a_mesh, 4, groups_before) == pytest.approx([4.0] * 4)


@pytest.mark.parametrize("culprit", [0, 2])
def test_an_exception_on_one_rank_ends_the_ranks_that_wait_for_it(culprit):
    with pytest.raises(RankError, match=rf"failed on rank {culprit} of 3") as caught:
        run_ranks(leave_others_in_a_collective, 3, culprit)
    assert set(caught.value.reports) == {0, 1, 2}
    assert "KeyError: 'the culprit'" in caught.value.reports[culprit]
    for rank in {0, 1, 2} - {culprit}:
        assert "still running" in caught.value.reports[rank]
        assert "leave_others_in_a_collective" in caught.value.reports[rank]
    assert [r for r, _, _ in run_ranks(sum_of_ranks, 3, 0)] == [0, 1, 2]


def test_ranks_that_wait_say_where_though_an_earlier_call_changed_how_signals_are_taken():
    run_ranks(forget_handlers, 3)
    with pytest.raises(RankError) as caught:
        run_ranks(leave_others_in_a_collective, 3, 1)
    assert all("leave_others_in_a_collective" in caught.value.reports[rank] for rank in (0, 2))


def test_an_exception_on_all_ranks_is_reported_by_all():
    with pytest.raises(RankError) as caught:
        run_ranks(refuse, 2)
    assert [f"rank {rank} will not" in caught.value.reports[rank] for rank in range(2)] == [True, True]
    assert [r for r, _, _ in run_ranks(sum_of_ranks, 2, 0)] == [0, 1]


def test_a_rank_that_dies_is_named_with_its_signal():
    with pytest.raises(RankError) as caught:
        run_ranks(die_in_a_collective, 2, 1)
    assert "SIGKILL" in caught.value.reports[1]
    assert [r for r, _, _ in run_ranks(sum_of_ranks, 2, 0)] == [0, 1]


def test_a_rank_that_died_between_two_calls_is_replaced_after_one_error():
    os.kill(run_ranks(process_id, 2)[1], signal.SIGKILL)
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(sum_of_ranks, 2, 0)
    assert [r for r, _, _ in run_ranks(sum_of_ranks, 2, 0)] == [0, 1]


def test_a_hang_is_ended_and_shows_where_it_was():
    with pytest.raises(RankError, match="timed out after 1 s") as caught:
        run_ranks(wait_for_ever, 2, timeout_s=1)
    assert all("wait_for_ever" in text for text in caught.value.reports.values())
    assert [r for r, _, _ in run_ranks(sum_of_ranks, 2, 0)] == [0, 1]


def test_a_result_that_cannot_travel_is_an_error():
    with pytest.raises(RankError, match="return_the_unpicklable"):
        run_ranks(return_the_unpicklable, 1)


def test_a_world_needs_a_rank():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        run_ranks(process_id, 0)

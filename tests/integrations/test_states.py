"""What the adapters share, without any trainer: every rank's state in a checkpoint, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from narrowband.errors import UnsupportedError, need
from narrowband.integrations import states
from narrowband.integrations.wrapped import check_clipping, ddp_in
from tests.gradients.training import heard, mlp, refusal, residuals, train, wrap
from tests.integrations.direct import OPTIONS, SPEC
from tests.ranks import run_ranks


def handle_of(model):
    return nb.compress_gradients(model, SPEC, **OPTIONS)


def written(rank, world_size, folder):
    """Save after two steps, as files and as a list; load both."""
    model = wrap(mlp())
    handle = handle_of(model)
    train(model, rank, range(2))
    states.write(handle, folder)
    own, gathered = residuals(handle), states.gather(handle)
    assert len(gathered) == (2 if rank == 0 else 0)
    train(model, rank, range(2, 3))
    dist.barrier()
    states.load(handle, states.read(folder), folder, strict=True)
    assert handle.step == 2
    assert all(torch.equal(own[name], each) for name, each in residuals(handle).items())
    return own, [(state["rank"], state["feedback"]) for state in gathered]


def loaded_by_three(rank, world_size, folder):
    """The states of two ranks, read by three: as files, and as a list."""
    handle = handle_of(wrap(mlp()))
    found = states.read(folder)
    refused = refusal(lambda: states.load(handle, found, "here", strict=True))
    states.load(handle, found, "here", strict=False)
    shared = residuals(handle)
    states.write(handle, folder)
    dist.barrier()
    return refused, handle.step, shared, sorted(path.name for path in Path(folder).iterdir())


def test_every_rank_has_a_state_of_its_own_and_other_ranks_share_them_out_if_asked_to(tmp_path):
    before = run_ranks(written, 2, str(tmp_path))
    for place, (rank, feedback) in enumerate(before[0][1]):
        assert rank == place
        assert all(torch.equal(before[rank][0][name], each) for name, each in feedback.items())
    after = run_ranks(loaded_by_three, 3, str(tmp_path))
    for (kind, text), step, shared, files in after:
        assert kind == "ValueError"
        assert "here has the compression states of 2 ranks, and here are 3" in text
        assert "strict=False shares their residuals out" in text
        assert step == 2
        assert files == [f"narrowband-rank{rank}-of-3.pt" for rank in range(3)]
        for name in shared:
            of_all = sum(own[name].double() for own, _ in before) / 2
            assert of_all.any()
            torch.testing.assert_close(sum(each[2][name].double() for each in after) / 3, of_all, rtol=1e-6, atol=1e-7)


def what_is_lacking(rank, world_size, folder):
    model = wrap(mlp())
    handle = handle_of(model)
    train(model, rank, range(2))
    nothing = refusal(lambda: states.load(handle, states.read(folder), "here", strict=True))
    states.load(handle, states.read(folder), "here", strict=False)
    unchanged = handle.step == 2
    path = states.write(handle, folder)
    dist.barrier()
    if rank == 1:
        whole = path.read_bytes()
    torn = []
    for content in (lambda: path.write_bytes(whole[: len(whole) // 2]), lambda: torch.save(torch.ones(2), path)):
        if rank == 1:
            content()
        dist.barrier()
        torn.append(refusal(lambda: states.load(handle, states.read(folder), "here", strict=True)))
    if rank == 1:
        path.unlink()
    one = [refusal(lambda s=s: states.load(handle, states.read(folder), "here", strict=s)) for s in (True, False)]
    return nothing, unchanged and handle.step == 2, torn, one


def test_a_checkpoint_without_states_or_without_that_of_one_rank_is_refused_on_all(tmp_path):
    for nothing, unchanged, torn, one in run_ranks(what_is_lacking, 2, str(tmp_path)):
        assert nothing[0] == "ValueError"
        assert "here has no state of compression; strict=False begins with empty residuals" in nothing[1]
        assert unchanged
        for (kind, text), why in zip(torn, ("", "ValueError: expected a state, got Tensor"), strict=True):
            assert kind == "ValueError"
            assert f"here has a state of compression that cannot be read (narrowband-rank1-of-2.pt: {why}" in text
        for kind, text in one:
            assert kind == "ValueError"
            assert "is incomplete: it has states of compression, but none for rank 1" in text


def saved_when_removed(rank, world_size, folder):
    """What is saved and loaded after the end of compression, and what a later handle makes of that."""
    model = wrap(mlp())
    handle = handle_of(model)
    train(model, rank, range(1))
    gathered = states.gather(handle)
    states.write(handle, folder)
    handle.remove()
    with heard() as messages:
        states.load(handle, gathered[0] if gathered else [], folder, strict=True)
        saved = states.write(handle, folder), states.gather(handle)
    dist.barrier()
    left = sorted(path.name for path in Path(folder).iterdir())
    later = handle_of(model)
    return messages, saved, left, refusal(lambda: states.load(later, states.read(folder), "here", strict=True))


def test_a_handle_that_was_removed_puts_nothing_into_checkpoints_and_leaves_nothing_old_there(tmp_path):
    for messages, saved, left, later in run_ranks(saved_when_removed, 2, str(tmp_path)):
        assert messages == ["compression was removed, so checkpoints are saved and loaded without its state"]
        assert saved == (None, [])
        assert left == []
        assert later[0] == "ValueError"
        assert "here has no state of compression; strict=False begins with empty residuals" in later[1]


def found_and_clipped(rank, world_size):
    ddp = wrap(mlp())
    assert ddp_in(nn.Sequential(nn.Sequential(ddp)), "") is ddp
    handle = nb.compress_gradients(ddp, "dgc:density=0.01", min_numel=64)
    check_clipping(handle, None, "clip_val")
    check_clipping(handle, 0.0, "clip_val")
    ef = handle_of(wrap(mlp()))
    check_clipping(ef, 0.5, "clip_val")
    return [
        refusal(lambda: check_clipping(handle, 0.5, "clip_val")),
        refusal(lambda: ddp_in(mlp(), "wrap it")),
        refusal(lambda: ddp_in(nn.Sequential(ddp, wrap(mlp())), "wrap one")),
        refusal(lambda: ddp_in([ddp], "wrap it")),
    ]


def test_a_model_that_is_not_wrapped_and_sums_that_would_be_clipped_are_refused():
    for clipped, bare, several, no_model in run_ranks(found_and_clipped, 2):
        assert no_model == ("TypeError", "compression needs the model that the trainer has wrapped, not list; wrap it")
        assert clipped[0] == bare[0] == several[0] == "UnsupportedError"
        assert "clip_val=0.5 would clip the averages, which with dgc are sums of many gradients" in clipped[1]
        assert "has a Sequential without one; wrap it" in bare[1]
        assert "has a Sequential with 2 of them; wrap one" in several[1]


def test_a_package_that_is_not_there_or_of_another_version_is_named_with_what_to_install():
    need("torch", "2.11", "2", extra="plots")
    with pytest.raises(ImportError, match=r"no-such-trainer is not installed: install the extra 'plots' of narrowband"):
        need("no-such-trainer", "1.0", "2", extra="plots")
    for oldest, newest in (("1.0", "1"), ("2.9999", "2"), ("3.0", "3")):
        with pytest.raises(
            UnsupportedError, match=rf"torch .* works with {oldest} and later, up to version {newest}: pip"
        ):
            need("torch", oldest, newest, extra="plots")

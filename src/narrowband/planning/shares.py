"""Compute what one rank of a machine averages on two levels: its shards of the parameters, by the rules of training.

The bytes of a shard are not simply a part of the bytes of its parameter: low-rank factors do not shrink in proportion
to its rows, and a shard with few elements is not compressed at all. The ranks of a machine have shards of different
sizes, so the rank that sends most represents all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from narrowband.averaging.parameters import Parameters
from narrowband.averaging.settings import EARLY_NBYTES
from narrowband.collectives import LayerCollectives, all_reduce_nbytes
from narrowband.feedback import Compression
from narrowband.gradients.levels import own_shards
from narrowband.planning.profile import Bucket, Content, Piece, Profile, Share, Trained

__all__ = ["MIN_NUMEL", "contents", "of_a_round", "parameters_of", "sent_whole", "share_of"]

#: As in :func:`narrowband.compress_gradients`.
MIN_NUMEL = 1024


def sent_whole(chosen: Compression) -> bool:
    """Return whether gradients are sent unchanged, so that there is nothing to measure.

    That takes an exact codec without feedback: feedback takes time even if the codec loses nothing.
    """
    return chosen.codec.exact and chosen.feedback is None


def parameters_of(trained: Sequence[Trained], ranks: int = 1, place: int = 0) -> Parameters:
    """Decide which parameters are layers and which are small, as training does.

    Args:
        trained: all parameters, in the model's order.
        ranks: number of ranks of a machine that share them.
        place: which of these ranks.
    """
    shards = _shards(trained, ranks, place)
    return Parameters(
        [(each.name, shard) for each, shard in shards],
        [shard for each, shard in shards if each.norm],
        min_numel=MIN_NUMEL,
        fuse_small=False,
        early_nbytes=EARLY_NBYTES,
    )


def _shards(trained: Sequence[Trained], ranks: int, place: int) -> list[tuple[Trained, torch.Tensor]]:
    """Return the parameters that the rank has a shard of, with that shard."""
    whole = [
        (each, torch.empty(each.shape, dtype=torch.float32, device="meta", requires_grad=True)) for each in trained
    ]
    shards = own_shards([p for _, p in whole], ranks, place)
    return [(each, shards[p]) for each, p in whole if p in shards]


def contents(buckets: Sequence[Sequence[str]], parameters: Parameters) -> Iterator[Content]:
    """Yield, for each bucket, its layers and the vectors of small parameters that it completes.

    Args:
        buckets: the names of the parameters that DDP puts into each bucket.
        parameters: which of them are layers. Names that are not among these parameters are left out.
    """
    of, missing = parameters.by_name, dict(parameters.vectors)
    for at, names in enumerate(buckets):
        last, own = at == len(buckets) - 1, [of[name] for name in names if name in of]
        for parameter in own:
            if not parameter.compressed:
                missing[parameter.vector] -= parameter.shape.numel()
        done = [vector for vector in missing if vector.early and (last or not missing[vector])]
        late = [vector for vector in missing if last and not vector.early]
        sizes = [parameters.vectors[vector] * vector.dtype.itemsize for vector in (*done, *late)]
        yield Content(
            tuple((parameter.name, tuple(parameter.shape)) for parameter in own if parameter.compressed),
            sum(parameter.shape.numel() for parameter in own),
            tuple(sizes if late or not last else [*sizes, 0]),
        )
        for vector in done:
            del missing[vector]


def of_a_round(profile: Profile) -> Profile:
    """Return the profile of a round, which averages all parameters and buffers at once, as one bucket."""
    averaged = (*profile.trained, *profile.buffers)
    (content,) = contents([[each.name for each in averaged]], parameters_of(averaged))
    names = tuple(name for bucket in profile.buckets for name in bucket.names)
    bucket = Bucket(
        0.0,
        content.layers,
        content.numel,
        sum(each.divide_s for each in profile.buckets),
        sum(each.copy_s for each in profile.buckets),
        content.vectors,
        names,
    )
    codecs = tuple(replace(codec, pieces=(Piece.together(codec.pieces),)) for codec in profile.codecs)
    return replace(profile, buckets=(bucket,), trained=averaged, codecs=codecs)


@dataclass(frozen=True)
class _Share:
    """The part of each bucket that a rank averages."""

    place: int
    contents: tuple[Content, ...]

    def sent_nbytes(self, chosen: Compression, nodes: int) -> int:
        """Return the bytes that the rank sends in a step, without the few bytes that each message adds."""
        if sent_whole(chosen):
            return all_reduce_nbytes(4 * sum(each.numel for each in self.contents), nodes)
        shapes = [shape for each in self.contents for _, shape in each.layers]
        collectives = LayerCollectives([(chosen, shape) for shape in shapes], nodes)
        small = sum(nbytes for each in self.contents for nbytes in each.vectors)
        return sum(collectives.sent_nbytes(chosen, shape) for shape in shapes) + all_reduce_nbytes(small, nodes)


@functools.lru_cache(maxsize=32)
def _shares(trained: tuple[Trained, ...], buckets: tuple[tuple[str, ...], ...], ranks: int) -> tuple[_Share, ...]:
    return tuple(
        _Share(place, tuple(contents(buckets, parameters_of(trained, ranks, place)))) for place in range(ranks)
    )


def share_of(profile: Profile, chosen: Compression, nodes: int, per_node: int) -> Profile:
    """Return the profile of the rank of a machine that sends most, with its shards.

    Args:
        profile: of the model.
        chosen: the compression of its layers.
        nodes: number of machines.
        per_node: ranks on each machine.
    """
    shares = _shares(profile.trained, tuple(bucket.names for bucket in profile.buckets), per_node)
    most = max(shares, key=lambda share: share.sent_nbytes(chosen, nodes))
    buckets = tuple(
        replace(
            bucket,
            layers=own.layers,
            numel=own.numel,
            vectors=own.vectors,
            divide_s=bucket.divide_s * own.numel / max(1, bucket.numel),
        )
        for bucket, own in zip(profile.buckets, most.contents, strict=True)
    )
    shards = _shards(profile.trained, per_node, most.place)
    trained = tuple(each._replace(shape=tuple(shard.shape)) for each, shard in shards)
    return replace(profile, buckets=buckets, trained=trained, share=Share(most.place, per_node))

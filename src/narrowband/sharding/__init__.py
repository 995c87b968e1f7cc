"""Compress the collectives of FSDP2: the reduce-scatter of gradients and the all-gather of parameters."""

from narrowband.sharding.handle import ShardCompression, ShardStats
from narrowband.sharding.setup import compress_shards

__all__ = ["ShardCompression", "ShardStats", "compress_shards"]

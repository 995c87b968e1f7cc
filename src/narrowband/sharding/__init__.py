"""Inside FSDP2: the shards of gradients that are reduced, and of parameters that are gathered, compressed."""

from narrowband.sharding.handle import ShardCompression, ShardStats
from narrowband.sharding.setup import compress_shards

__all__ = ["ShardCompression", "ShardStats", "compress_shards"]

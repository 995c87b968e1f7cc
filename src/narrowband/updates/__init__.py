"""Average updates instead of gradients: each replica steps its own optimizer, and all apply the mean of the changes."""

from __future__ import annotations

from narrowband.updates.elastic import ElasticUpdateCompression
from narrowband.updates.rendezvous import Rendezvous, RendezvousError
from narrowband.updates.rounds import UpdateCompression
from narrowband.updates.setup import compress_updates

__all__ = ["ElasticUpdateCompression", "Rendezvous", "RendezvousError", "UpdateCompression", "compress_updates"]

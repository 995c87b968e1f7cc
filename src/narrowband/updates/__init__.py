"""Updates instead of gradients: every replica steps its own optimizer, and the mean of what they changed is applied."""

from __future__ import annotations

from narrowband.updates.elastic import ElasticUpdateCompression
from narrowband.updates.rendezvous import Rendezvous, RendezvousError
from narrowband.updates.rounds import UpdateCompression
from narrowband.updates.setup import compress_updates

__all__ = ["ElasticUpdateCompression", "Rendezvous", "RendezvousError", "UpdateCompression", "compress_updates"]

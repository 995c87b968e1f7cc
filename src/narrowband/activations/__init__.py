"""What backward needs of forward's activations, kept in few bits: the fourth place where compression is used.

A forward pass goes through these files from bottom to top; each imports only from those below it.

=====================  ===============================================================================
:mod:`.context`        ``nb.compress_activations``, the context around a forward pass; its state
:mod:`.warmup`         compiles the loops that a model needs, at set-up
:mod:`.regions`        calls of compiled modules, and of those that backward computes again
:mod:`.operators`      operators that keep a bit or a byte per element
:mod:`.recorder`       decides for each tensor that autograd saves how it is kept
:mod:`.modules`        names of modules, their attention heads, which are computed again
:mod:`.calls`          which operator is at work, and where its groups are
:mod:`.storages`       the memory that tensors share
:mod:`.recompute`      results that are computed again from a packed input
:mod:`.scores`         attention whose scores are too large for codes
:mod:`.packed`         one packed tensor: its codes, and the way back
:mod:`.ranges`         running estimates of ranges
:mod:`.outliers`       tensors that codes would not represent
:mod:`.layout`         a tensor's order in memory, and its groups
:mod:`.compiled`       what a compiled graph packs, as graphs; its codes are those of :mod:`.graph_codes`
:mod:`.dynamo`         which modules are compiled
:mod:`.stats`          what was saved: bytes by operator and by module
:mod:`.policy`         what is kept in how many bits
=====================  ===============================================================================

Source: Pan et al. 2021, Mesa (arXiv 2111.11124).
"""

from narrowband.activations.context import ActivationCompression, compress_activations
from narrowband.activations.policy import OPERATORS, ActivationPolicy
from narrowband.activations.stats import Saved, SavedBytes, SavedStats

__all__ = [
    "OPERATORS",
    "ActivationCompression",
    "ActivationPolicy",
    "Saved",
    "SavedBytes",
    "SavedStats",
    "compress_activations",
]

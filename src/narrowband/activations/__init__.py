"""Compression of saved activations: what autograd saves in forward for backward is kept in 8, 4 or 2 bits.

The files from the interface down; each imports only from those below it.

==========================  =============================================================================
:mod:`.context`             ``nb.compress_activations``, the context around a forward pass; its state
:mod:`.warmup`              compiles at set-up the loops that a model needs
:mod:`.regions`             calls of compiled modules, and of modules that backward recomputes
:mod:`.evaluation`          the fast paths of PyTorch's transformer layers, which evaluation takes
:mod:`.operators`           replacements of PyTorch's operators that save a bit or a byte per element
:mod:`.recorder`            decides how each tensor that autograd saves is kept
:mod:`.sites`               what is known beforehand of the tensors that are saved at each place
:mod:`.modules`             names of modules, their attention heads, and which are recomputed
:mod:`.scores`              attention whose scores are too large for codes
:mod:`.calls`               the operator that is running, and where the groups of its saved tensors are
:mod:`.storages`            the memory that tensors share
:mod:`.normalization`       inputs and results of normalization, from the normalized form that is packed
:mod:`.log_probabilities`   log-probabilities over a vocabulary, from the roots that are packed
:mod:`.recompute`           results that backward recomputes from a packed input
:mod:`.packed`              one packed tensor: its codes, and how it is restored
:mod:`.ranges`              running estimates of ranges
:mod:`.outliers`            tensors with outliers, which codes cannot represent
:mod:`.arena`               memory for codes
:mod:`.layout`              a tensor's order in memory, and its groups
:mod:`.compiled`            packing inside of compiled graphs; the codes are in :mod:`.graph_codes`
:mod:`.graph_products`      products that compiled graphs compute again in backward
:mod:`.graph_attention`     fused attention, which compiled graphs run again in backward
:mod:`.dynamo`              which modules are compiled
:mod:`.stats`               bytes that were saved, by operator and by module
:mod:`.policy`              which tensors are kept in how many bits
==========================  =============================================================================

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

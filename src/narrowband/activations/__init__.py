"""What backward keeps of forward's activations, in few bits: the fourth place where compression is used.

=====================  ===============================================================================
:mod:`.policy`         what is kept in how many bits
:mod:`.saved`          the context around a forward pass, and its report
:mod:`.kept`           one tensor: its order in memory, its groups, their ranges, its codes
:mod:`.derived`        results that are computed again from what is kept of an input
:mod:`.operators`      which operator is at work, and operators that keep a bit or a byte per element
:mod:`.regions`        calls of compiled modules, and of those that are computed again
:mod:`.compiled`       what a compiled graph packs, as graphs
=====================  ===============================================================================

Source: Pan et al. 2021, Mesa (arXiv 2111.11124).
"""

from narrowband.activations.policy import OPERATORS, ActivationPolicy
from narrowband.activations.saved import ActivationCompression, Kept, Saved, compress_activations

__all__ = ["OPERATORS", "ActivationCompression", "ActivationPolicy", "Kept", "Saved", "compress_activations"]

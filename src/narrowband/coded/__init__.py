"""Coded data parallelism: nodes compute blocks redundantly to send less. Averages are exact.

=====================  ===============================================================================
:mod:`.assignment`     which node computes what: blocks, samplers, loads
:mod:`.shares`         how many samples blocks have, for nodes of different speed
:mod:`.coding`         packets, which are sums of slices, and how they are decoded
:mod:`.fixed_point`    contributions as whole numbers
:mod:`.header`         the header that each node sends in a step, and what follows from all headers
:mod:`.exchange`       one exchange: packets are filled, sent, and decoded
:mod:`.recovery`       what to do when a node is lost, or returns
:mod:`.average`        a step: from the gradients of blocks to the average
:mod:`.blocks`         one forward and backward, block by block
:mod:`.checks`         checks of models, arguments and ranks at set-up
:mod:`.parallel`       the wrapper around a model that is used like DDP
:mod:`.choose`         how much redundancy pays: two times measured, all others predicted
:mod:`.stats`          bytes and seconds of steps
=====================  ===============================================================================

Source: Li, Xie, Mao et al. 2021, CSSGD (DOI 10.19678/j.issn.1000-3428.0057340); the idea is Coded Distributed Computing
(Li, Maddah-Ali, Yu, Avestimehr 2018, IEEE Trans. IT 64(1), DOI 10.1109/TIT.2017.2756959).
"""

from __future__ import annotations

from narrowband.coded.assignment import Assignment, CodedSampler
from narrowband.coded.choose import Candidate, Choice, choose_redundancy, predict
from narrowband.coded.parallel import CodedDataParallel
from narrowband.coded.stats import CodedStepStats

__all__ = [
    "Assignment",
    "Candidate",
    "Choice",
    "CodedDataParallel",
    "CodedSampler",
    "CodedStepStats",
    "choose_redundancy",
    "predict",
]

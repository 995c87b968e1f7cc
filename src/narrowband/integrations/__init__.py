"""Gradient compression in other libraries' trainers: one module per trainer, which imports it.

:mod:`~narrowband.integrations.accelerate`, :mod:`~narrowband.integrations.lightning` and
:mod:`~narrowband.integrations.transformers` find the DistributedDataParallel model that the trainer made, pass it to
:func:`narrowband.compress_gradients`, and save every rank's state in the trainer's own checkpoints. The handle is the
same as in a custom training loop, and a run has the same results, bit for bit.
"""

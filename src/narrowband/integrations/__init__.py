"""Compression in the trainers that people use: one module for each, which imports that trainer.

:mod:`~narrowband.integrations.accelerate`, :mod:`~narrowband.integrations.lightning` and
:mod:`~narrowband.integrations.transformers` find the model in DistributedDataParallel that the trainer made, give it to
:func:`narrowband.compress_gradients`, and put every rank's state into the trainer's own checkpoints. The handle is the
same, and so are the bits of a run: those of a loop of one's own.
"""

"""Measurements that a user repeats with one command.

``kernels.py`` holds each hot loop against a plain copy, ``ddp.py`` a training step behind an emulated link against the
same step without communication, ``demo.py`` trains a model on real text with and without compression. ``ranks.py``
starts their processes, ``models.py`` and ``text.py`` are what they train and on what. ``gpu.py`` runs what there is for
a GPU, and makes one record of it.
"""

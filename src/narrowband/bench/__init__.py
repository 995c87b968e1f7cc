"""Measurements that users can repeat with one command.

``kernels.py`` compares each hot loop with a plain copy, and ``ddp.py`` a training step behind an emulated link with the
same step without communication; ``ddp_rows.py`` makes the models that it trains. ``demo.py`` trains a model on real
text with and without compression. ``ranks.py`` starts the processes, and ``models.py`` and ``text.py`` have the models
and the data. ``gpu.py`` runs all measurements of a GPU, and makes one record of them.
"""

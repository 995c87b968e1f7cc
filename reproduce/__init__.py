"""The papers' experiments at a size that a laptop can repeat: real data, real training, four real ranks.

One module per paper: :mod:`reproduce.dgc`, :mod:`reproduce.powersgd`. Each trains small models with and without
compression, writes every finished row to disk, and at the end says which of the paper's claims held here.
"""

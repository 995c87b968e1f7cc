"""The papers' experiments at a size that a laptop can repeat: real data, real training, four real ranks.

Each module repeats a paper, such as :mod:`reproduce.dgc`, :mod:`reproduce.lgreco` and :mod:`reproduce.mesa`, or answers
a question of its own, such as :mod:`reproduce.optimizers`. It trains small models with and without compression, writes
every finished row to disk, and at the end says which claims held here.
"""

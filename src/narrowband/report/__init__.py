"""What the benchmarks and the demo say about themselves: units, tables, plots, verdicts, and files that can be
repeated.

``units.py`` writes numbers for people, ``record.py`` says on what machine and with what code a result was made and
writes JSON, ``estimate.py`` turns measured steps into estimates for other links and into a verdict, ``tables.py`` and
``plots.py`` draw. Nothing here measures anything.
"""

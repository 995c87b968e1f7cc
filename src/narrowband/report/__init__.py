"""What the benchmarks and the demo say about themselves: tables, plots, verdicts, and files that can be repeated.

``record.py`` says on what machine and with what code a result was made, and writes and reads JSON, ``estimate.py``
turns measured steps into estimates for other links and into a verdict, ``tables.py`` and ``plots.py`` draw. Nothing
here measures anything.
"""

"""What runs, benchmarks and the demo say about themselves: records, tables, plots, pages, verdicts.

``recorder.py`` writes down a run as it goes, and ``page.py`` makes a page of that. ``record.py`` says on what machine
and with what code a result was made, and writes and reads JSON, ``estimate.py`` turns measured steps into estimates for
other links and into a verdict, ``tables.py`` and ``plots.py`` draw.
"""

from __future__ import annotations

from narrowband.report.recorder import Recorder

__all__ = ["Recorder"]

"""Report on runs, benchmarks and the demo: records, tables, plots, pages, verdicts.

``recorder.py`` records a run while it trains, and ``page.py`` makes an HTML page of the record. ``record.py`` states on
what machine and with what code a result was made, and writes and reads JSON. ``estimate.py`` turns measured steps into
estimates for other links and into a verdict. ``tables.py`` and ``plots.py`` draw.
"""

from __future__ import annotations

from narrowband.report.recorder import Recorder

__all__ = ["Recorder"]

from __future__ import annotations

import pytest

from narrowband.cli import main


@pytest.fixture
def narrow(capsys, monkeypatch):
    """Run a command line; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NARROWBAND_DEBUG", raising=False)

    def run(*words):
        try:
            code = main(words)
        except SystemExit as end:  # tyro ends a command line that it cannot read, or --help
            code = end.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run

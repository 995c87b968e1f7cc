from __future__ import annotations

import pytest

from narrowband.cli import main


@pytest.fixture
def narrow(capsys, monkeypatch):
    """Run a command line; returns (exit code, stdout, stderr), the latter without the line that loops are compiled, as
    on a machine that has not run them yet.
    """
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NARROWBAND_DEBUG", raising=False)

    def run(*words):
        try:
            code = main(words)
        except SystemExit as end:  # tyro ends a command line that it cannot read, or --help
            code = end.code
        said = capsys.readouterr()
        lines = said.err.splitlines(keepends=True)
        return code, said.out, "".join(line for line in lines if not line.startswith("narrowband: compiling loops"))

    return run

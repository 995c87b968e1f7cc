"""What tests of the papers read."""

from __future__ import annotations

import pytest

from tests.reproduce.synthetic import write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data folder, and the cache beside it."""
    there = tmp_path_factory.mktemp("data")
    write_all(there)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(there / "cache"))
        yield there

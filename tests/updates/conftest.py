"""Where peers meet."""

from __future__ import annotations

import pytest

from narrowband.updates.stores import serve


@pytest.fixture
def store():
    held = serve(0, "127.0.0.1")
    yield f"127.0.0.1:{held.port}"
    del held

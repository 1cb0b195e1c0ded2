import gc

import pytest


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """mmengine's data sets collect garbage: a quarter of a second each, with all of torch and mmdet to look at."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)

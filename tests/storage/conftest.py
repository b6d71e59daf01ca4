import pytest
from remote_checks import hub_in_use


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_in_use(monkeypatch, tmp_path) as hub:
        yield hub

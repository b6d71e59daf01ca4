import orbax_calls
import pytest


@pytest.fixture
def installed():
    with orbax_calls.installed():
        yield

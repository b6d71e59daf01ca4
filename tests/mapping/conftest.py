import pytest


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Makes each model once."""

    from family_models import make

    class Models(dict):
        def __missing__(self, name):
            self[name] = make(name, tmp_path_factory.mktemp(name))
            return self[name]

    return Models()

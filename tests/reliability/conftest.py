import pytest
from conversions import model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Two experts and a norm."""
    return model(tmp_path_factory.mktemp("tiny") / "model", 1, 2, 512, 256)


@pytest.fixture(scope="session")
def many(tmp_path_factory):
    """A hundred and twenty experts and a norm."""
    return model(tmp_path_factory.mktemp("many") / "model", 2, 60, 128, 128, shards=5)

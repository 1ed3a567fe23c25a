import csv

import ktforge_example
import pytest

from ktforge import Pipeline, Registry
from ktforge.testing import MemoryWriter, tiny_model


class FullDisk(MemoryWriter):
    name = "full-disk"

    def open(self, plan, **options):
        raise OSError("no room")


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """What a function that reads the file gives."""
    monkeypatch.setenv(ktforge_example.VARIABLE, str(tmp_path / "units.csv"))
    return lambda: list(csv.reader((tmp_path / "units.csv").read_text().splitlines()))


def run(writer):
    Pipeline(loader=tiny_model(), writer=writer).run(registry=Registry(ktforge_example))


def test_a_line_a_unit(rows):
    run(MemoryWriter())
    begun, *written, finished = rows()
    assert begun[:2] == ["begun", "4"] and finished[:2] == ["finished", "4"]
    assert {row[0] for row in written} == {"written"} and len(written) == 4
    assert "model.layers.0.mlp.experts.1" in [row[1] for row in written]


def test_a_run_that_failed(rows):
    with pytest.raises(Exception, match="no room"):
        run(FullDisk())
    assert rows()[-1][0] == "failed"


def test_nothing_is_written_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv(ktforge_example.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    run(MemoryWriter())
    assert list(tmp_path.iterdir()) == []

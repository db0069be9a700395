"""Pictures and a finished vision run that the tests of training share. None of them may change these."""

import pytest

import tiny
import tiny_vision
from vision_runs import TRAIN, flags


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """78 training JPEGs in 3 classes, 27 of validation."""
    return tiny_vision.write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def uninterrupted(pictures, tmp_path_factory):
    """The whole run, by the command one would type."""
    out = tmp_path_factory.mktemp("uninterrupted")
    done = tiny.call(TRAIN, *flags(pictures, out))
    assert "finished, top-1" in done.stdout
    (out / "stdout").write_text(done.stdout)
    return out

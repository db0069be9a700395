"""A finished language run that the tests of training share. None of them may change it."""

import pytest

import gpt_runs
import tiny


@pytest.fixture(scope="session")
def uninterrupted(packed, tmp_path_factory):
    """The whole run, by the command one would type."""
    out = tmp_path_factory.mktemp("uninterrupted")
    done = tiny.call(gpt_runs.MODULE, *gpt_runs.flags(packed, out))
    assert "finished, validation bpb" in done.stdout
    return out

"""Plugin of pytest: a module whose tests leave processes behind fails, and a run that is killed leaves none.

The root's `conftest.py` loads it.
"""

import contextlib

import pytest

import leftovers

RUN, TIMEOUT = pytest.StashKey[str](), pytest.StashKey()


def pytest_configure(config):
    """Make the processes of this run recognizable, and have them ended if the run is killed."""
    config.stash[RUN] = leftovers.begin()
    leftovers.watch(config.stash[RUN])


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item, settings):
    """Keep the settings of a test's timeout if it includes the fixtures."""
    if not settings.func_only:
        item.stash[TIMEOUT] = settings
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node):
    """Let the timeout also end what hangs in the fixtures of a failed test: pytest-timeout stops its timer there."""
    if TIMEOUT in node.stash and not node.config.option.usepdb:
        node.ihook.pytest_timeout_set_timer(item=node, settings=node.stash[TIMEOUT])


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    """Keep the processes of fixtures for the whole run."""
    with leftovers.keeping() if fixturedef.scope == "session" else contextlib.nullcontext():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _processes_of_the_run(pytestconfig):
    """Fail the last test if fixtures for the whole run have left processes."""
    yield
    fail_for(leftovers.end_leftovers(pytestconfig.stash[RUN], kept=True))


@pytest.fixture(scope="module", autouse=True)
def _processes_of_the_module(_processes_of_the_run, pytestconfig):
    """Fail the last test of a module if tests of the module have left processes."""
    yield
    fail_for(leftovers.end_leftovers(pytestconfig.stash[RUN]))


def fail_for(processes):
    """Fail if there are processes, which have been ended."""
    if processes:
        pytest.fail("\n".join(map(str, processes)), pytrace=False)

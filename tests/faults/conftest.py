"""The suite of faults: `make test-faults`. Everything in it is marked, and left out of `make test`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.fault import import_all
from tests.faults.living import Living
from tests.faults.scenarios import World

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("sample"):
            item.add_marker("faults")


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of all that is drawn; `GNNLM_FAULTS_SEED` replays one that failed."""
    return int(os.environ.get("GNNLM_FAULTS_SEED", "0"))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    import_all()
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def living(world: World) -> Living:
    return Living(world.folder / "living", world.straight("coded"))

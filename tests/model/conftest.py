"""The exact target and its judge, opened once for all tests of losslessness, and steady links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import id_law
import pytest
from lossless_parts import EXACT, N_CTX, Judge, let_batches_be_cheap, write_f32
from sampler_parts import opened, without_drafts

from lab.options import engine_options
from offload.device import DeviceChoice
from offload.engine import open_engine
from offload.stream.link_speed import LinkSpeeds
from specoffload.session.session import Session


@pytest.fixture(scope="session", autouse=True)
def checked_ids() -> Iterator[id_law.Found]:
    """The uploads of ids in this test run, which are all checked."""
    with id_law.watched() as found:
        yield found


@pytest.fixture(autouse=True)
def ids_keep_the_law(checked_ids: id_law.Found) -> Iterator[None]:
    """Fail if a path hands ids to a backend that a GPU's kernels cannot take."""
    yield
    broken, checked_ids.broken = checked_ids.broken, []
    assert not broken


@pytest.fixture(scope="session")
def exact(models: Path) -> Path:
    """The embedded target with its weights in f32."""
    return write_f32(models / "target-f32.gguf")


@pytest.fixture(scope="session")
def judge(exact: Path) -> Iterator[Judge]:
    """The judge: the target without drafts, which chooses the right token for each prefix."""
    with open_engine(exact, engine_options(device="cpu", n_ctx=N_CTX, **EXACT)) as engine:
        yield Judge(engine)


@pytest.fixture
def steady_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan and a start measure links once more each, until several measurements agree."""

    def speeds(choices: Sequence[DeviceChoice]) -> LinkSpeeds:
        return LinkSpeeds((5e9,) * len(choices), (4e9,) * len(choices))

    monkeypatch.setattr("specoffload.kept_machine.link_speeds", speeds)


@pytest.fixture
def batches_are_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that ask for a profile get one in which every draft pays."""
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    let_batches_be_cheap(monkeypatch)


@pytest.fixture(scope="module")
def matching() -> Iterator[Session]:
    """The embedded pair, which accepts drafted tokens that the sampler chooses as well."""
    with opened() as session:
        yield session


@pytest.fixture(scope="module")
def rejecting() -> Iterator[Session]:
    """The embedded pair, with rejection sampling."""
    with opened(**{"--spec-accept": "reject"}) as session:
        yield session


@pytest.fixture(scope="module")
def plain() -> Iterator[Session]:
    """The embedded target without drafts."""
    with without_drafts() as session:
        yield session

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKED = sorted(Path(__file__).parent.glob("check_*.py"))


def mypy(file: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "--cache-dir", cache, file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.parametrize("file", CHECKED, ids=lambda file: file.stem)
def test_mypy_finds_every_promised_type_and_every_expected_error(file: Path, cache: Path) -> None:
    done = mypy(file, cache)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_does_find_a_wrong_type(cache: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from alkstore_sa import Store\n"
        "async def wrong(store: Store) -> None:\n"
        "    (job,) = await store.queue('q', payload_type=str).claim('w')\n"
        "    job.payload + 1\n"
    )
    done = mypy(wrong, cache)
    assert done.returncode == 1
    assert "[operator]" in done.stdout

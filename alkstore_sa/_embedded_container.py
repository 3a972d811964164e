"""PostgreSQL in a container, through testcontainers, when a Docker daemon answers."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["IMAGE", "run"]

IMAGE = "postgres:18"

_ANSWER_WITHIN = 2


def run(user: str, settings: Mapping[str, str], tried: list[str]) -> tuple[str, str, Callable[[], None]] | None:
    """Start a container; return its DSN, a description and the function that removes it.

    Returns None, with the reason in `tried`, when Docker or testcontainers is not there or the image can't be had. An
    error of the server inside is raised as testcontainers puts it: the daemon works, so the user should see it.
    """
    try:
        # Loaded by name, for they are optional and docker has no types.
        docker: Any = importlib.import_module("docker")
    except ImportError as error:
        tried.append(f"container: {error}")
        return None
    try:
        # The constructor of testcontainers waits a minute for a daemon that does not answer.
        client: Any = docker.from_env(timeout=_ANSWER_WITHIN)
        with contextlib.closing(client):
            client.ping()
        # The poll is 1 s by default. testcontainers' reaper is left on: it removes the container of a killed owner.
        os.environ.setdefault("TC_POOLING_INTERVAL", "0.1")
        postgres: Any = importlib.import_module("testcontainers.community.postgres")
        password = secrets.token_urlsafe(24)
        command = ["postgres", *(f"--{name}={value}" for name, value in settings.items())]
        container: Any = postgres.PostgresContainer(
            IMAGE, username=user, password=password, dbname="postgres", driver=None, command=command
        )
        with contextlib.ExitStack() as undo:
            undo.callback(container.stop)
            container.start()
            dsn = str(container.get_connection_url())
            undo.pop_all()
    except (ImportError, docker.errors.DockerException) as error:
        tried.append(f"container: {error}")
        return None
    return dsn, f"PostgreSQL of the image {IMAGE} in a container", container.stop

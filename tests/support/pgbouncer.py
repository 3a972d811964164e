"""A PgBouncer in front of the test server, gone with the test or with the process that runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import make_url

from alkstore_sa._embedded_cluster import _free_port, _identity, _reachable_folder
from support.databases import Database

if TYPE_CHECKING:
    from collections.abc import Iterator

START_WITHIN: Final = 20.0
ATTEMPTS: Final = 5

# The shell reads its standard input, whose other end only this process holds: when that is gone, however it went, the
# reading ends and so does the pooler, and its folder goes.
GUARD: Final = 'folder=$1; shift; "$@" & read -r _; kill -KILL $! 2>/dev/null; wait $!; rm -rf -- "$folder"'

CONFIGURATION: Final = """
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = {auth_type}
auth_file = {users}
pool_mode = {mode}
default_pool_size = 20
ignore_startup_parameters = extra_float_digits
logfile = {log}
"""


def find_pgbouncer() -> str | None:
    """Return the path of the program, None if it is not installed."""
    return shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


@contextmanager
def pgbouncer(program: str, database: Database, mode: str) -> Iterator[Database]:
    """Yield the database by way of a PgBouncer in one of its modes: `transaction` or `session`."""
    for _ in range(ATTEMPTS):
        with _started(program, database, mode, _free_port()) as pooled:
            if pooled is not None:
                yield pooled
                return
    raise AssertionError(f"others took each of {ATTEMPTS} free ports before pgbouncer had it")


@contextmanager
def _started(program: str, database: Database, mode: str, port: int) -> Iterator[Database | None]:
    """Yield the database by way of the port, None if somebody has taken that meanwhile."""
    identity = _identity()
    folder = Path(tempfile.mkdtemp(prefix="alkstore-pgbouncer-", dir=_reachable_folder(identity, in_memory=False)))
    try:
        _configure(folder, database, mode, port)
        if identity.user is not None and identity.group is not None:  # as root it refuses to run
            for path in (*folder.iterdir(), folder):
                os.chown(path, identity.user, identity.group)
        process = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "sh", folder, program, "-q", folder / "pgbouncer.ini"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            user=identity.user,
            group=identity.group,
            extra_groups=identity.extra_groups,
        )
        try:
            url = make_url(database.dsn).set(host="127.0.0.1", port=port)
            is_up = _is_up(folder / "log")
            yield Database(url.render_as_string(hide_password=False)) if is_up else None
        finally:
            process.communicate()  # which closes its standard input
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path, database: Database, mode: str, port: int) -> None:
    url = make_url(database.dsn)
    (folder / "users").write_text(f'"{url.username}" "{url.password or ""}"\n')
    (folder / "users").chmod(0o600)
    (folder / "log").touch()
    settings = CONFIGURATION.format(
        host=url.host,
        port=url.port or 5432,
        listen_port=port,
        auth_type="scram-sha-256" if url.password else "trust",
        users=folder / "users",
        mode=mode,
        log=folder / "log",
    )
    (folder / "pgbouncer.ini").write_text(settings)


def _is_up(log: Path) -> bool:
    """Wait until the pooler says that it is up; tell whether it is, or did not get its port."""
    deadline = time.monotonic() + START_WITHIN
    while "process up" not in (text := log.read_text()):
        if "FATAL" in text and "listen" in text:
            return False
        assert time.monotonic() < deadline, f"pgbouncer does not start:\n{text}"
        time.sleep(0.005)
    return True

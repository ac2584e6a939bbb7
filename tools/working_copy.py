"""Copy the repository, for tools that modify it or its environment."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def copy_working_tree(folder: Path, root: Path = ROOT) -> None:
    """Copy all files that git tracks or would track, with uncommitted changes, and share the virtual environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in os.fsdecode(listed.stdout).split("\0"):
        source = root / name
        if name and source.is_file() and not source.is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    _share_environment(folder, root)


def copy_commit(commit: str, folder: Path, root: Path = ROOT) -> None:
    """Copy the files of a commit, and share the virtual environment."""
    archive = subprocess.run(["git", "archive", "--format=tar", commit], cwd=root, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    _share_environment(folder, root)


def _share_environment(folder: Path, root: Path) -> None:
    (folder / ".venv").symlink_to(root / ".venv", target_is_directory=True)

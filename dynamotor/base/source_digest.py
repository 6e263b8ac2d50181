"""Digest of the C sources of an extension: the setup script, which runs this file by its path, builds it into
the extension, and the import compares it with the sources beside it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def source_digest(folder: str | Path) -> str:
    """Digest of the names and texts of a folder's C and C++ files; empty if there are none."""
    files = sorted(path for path in Path(folder).iterdir() if path.suffix in (".c", ".cpp", ".h"))
    sha = hashlib.sha256()
    for path in files:
        text = path.read_bytes()
        sha.update(f"{path.name} {len(text)}\n".encode() + text)
    return sha.hexdigest()[:16] if files else ""

"""Keys files for tests."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any


def entry(tenant: str, key: str, **fields: Any) -> dict[str, Any]:
    return {"id": tenant, "sha256": sha256(key.encode()).hexdigest(), **fields}


def write_keys(path: Path, *entries: dict[str, Any]) -> str:
    """Write these entries to the file, and return its path."""
    path.write_text(json.dumps({"keys": list(entries)}))
    path.chmod(0o600)
    return str(path)

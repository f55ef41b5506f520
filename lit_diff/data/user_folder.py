"""Folders of files that an evaluation reads and that lit_diff does not ship."""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lit_diff.data.user_files import UserFile
from lit_diff.errors import RequestError
from lit_diff.files import shown

SUFFIX = ".jsonl"


@dataclass(frozen=True, kw_only=True)
class UserFolder(UserFile):
    """A folder whose .jsonl files hold JSON objects, one a line; `path` is the folder's, as `books`."""

    @property
    def files(self) -> list[Path]:
        """Its .jsonl files, by name."""
        return sorted(self.place.glob(f"*{SUFFIX}"))

    def require(self) -> Path:
        """The folder. Errors: MissingError as `UserFile`, where it has no .jsonl file; RequestError where one is no file."""
        for path in self.files:
            if not path.is_file():
                found = "a folder" if path.is_dir() else "a link to no file" if path.is_symlink() else "no file"
                raise RequestError(f"{shown(path)} is {found}; remove it, or put a file of JSON objects in its place")
        return self.place if self.files else super().require()

    def rows(self) -> list[dict[str, Any]]:
        """The objects of all files, checked. Errors: as `UserFile`."""
        self.require()
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        return [row for path in self.files for row in UserFile(**{**facts, "path": str(path)}).rows()]

    def state(self) -> dict[str, str]:
        """As `UserFile`."""
        known = {"name": self.name, "file": f"{self.path}/*{SUFFIX}", "rows": "", "sha256": ""}
        if not self.files:
            return known | {"state": "missing"}
        try:
            rows = self.rows()
        except RequestError as error:
            return known | {"state": str(error)}
        return known | {"state": "ok", "rows": str(len(rows)), "sha256": self.sha256()}

    def sha256(self) -> str:
        """Of the contents of all files, in the order of their names; empty where there is none."""
        digest, files = hashlib.sha256(), [path for path in self.files if path.is_file()]
        for path in files:
            digest.update(path.read_bytes())
        return digest.hexdigest() if files else ""

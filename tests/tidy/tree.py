"""The checked files and how a check answers."""

import os
import subprocess
from dataclasses import dataclass, field

SKIPPED_FOLDERS = {".git", ".venv", "__pycache__", "node_modules"}


@dataclass
class Result:
    """problems fail the test, reports are printed, skipped says what could not be checked here."""

    problems: list = field(default_factory=list)
    reports: list = field(default_factory=list)
    skipped: list = field(default_factory=list)


class Tree:
    """A checkout: what git tracks or would track, or every file where there is no git."""

    def __init__(self, root):
        self.root = os.path.abspath(root)
        self.files = self._list()

    def _list(self):
        if os.path.exists(os.path.join(self.root, ".git")):
            command = ["git", "-c", "safe.directory=*", "-C", self.root, "ls-files", "-co", "--exclude-standard"]
            listed = subprocess.run(command, capture_output=True, text=True, check=False)
            if listed.returncode == 0:
                return sorted(f for f in set(listed.stdout.splitlines()) if os.path.isfile(self.path(f)))
        found = []
        for folder, folders, names in os.walk(self.root):
            folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("build")]
            found += [os.path.relpath(os.path.join(folder, name), self.root) for name in names]
        return sorted(found)

    def path(self, name):
        return os.path.join(self.root, name)

    def read(self, name):
        """Text of a file; "" for one that is not text."""
        with open(self.path(name), "rb") as file:
            data = file.read()
        if b"\0" in data[:8000]:
            return ""
        return data.decode("utf-8", "replace")

    def select(self, endings, under=("",)):
        return [f for f in self.files if f.endswith(tuple(endings)) and f.startswith(tuple(under))]

    def has(self, name):
        return name in self.files

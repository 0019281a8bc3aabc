"""Generates the protobuf code before setuptools looks for packages. Everything else is in pyproject.toml."""

import pathlib
import sys

from setuptools import setup

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from generate import generate  # noqa: E402

generate()
setup()

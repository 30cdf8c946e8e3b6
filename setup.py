"""What is installed: every folder with code but the laboratory (`scripts/lab`). All else stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=["flockstep", *(f"flockstep.{name}" for name in find_packages(exclude=["scripts.lab", "scripts.lab.*"]))],
    script_name="setup.py",  # Its folder is that of the package, of which it is no module.
)

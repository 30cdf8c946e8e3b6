"""What is installed: every folder with code but the laboratory, and the network in memory that it and the tests run on."""

from setuptools import find_packages, setup

LEFT_OUT = ["scripts.lab", "scripts.lab.*", "peer.memory"]

setup(
    packages=["flockstep", *(f"flockstep.{name}" for name in find_packages(exclude=LEFT_OUT))],
    script_name="setup.py",  # Its folder is that of the package, of which it is no module.
)

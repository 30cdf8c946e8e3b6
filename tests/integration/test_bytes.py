"""The bytes of a round, counted on the network interface."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ALONE = ["unshare", "--net", "--map-root-user"]


def test_int4_both_ways_sends_no_more_than_its_parts_take() -> None:
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("no network namespace of one's own here, so no interface without other traffic")
    program = Path(__file__).with_name("wire_bytes.py")
    run = subprocess.run([*ALONE, sys.executable, str(program), "2000000"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    bits = json.loads(run.stdout)["bits_per_parameter"]
    # 4.25 bits each way are the codec's own; less would mean that something was not sent. Messages add 0.1 at this size.
    assert 8.5 <= bits <= 8.8

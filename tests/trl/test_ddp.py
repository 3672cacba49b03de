"""Data parallelism on two CPU processes: replay holds on each rank and the ranks stay together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tolerances import EXACT, FLOAT32

TESTS = Path(__file__).parents[1]


def test_two_processes_replay_and_stay_together(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(TESTS / "trl" / "ddp_worker.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["world"] == 2
    assert result["spread"] == EXACT
    gaps = [row["sampling_gap/max"] for row in result["rows"] if "sampling_gap/max" in row]
    assert gaps and max(gaps) <= FLOAT32
    assert all(row["information_gap/max"] > FLOAT32 for row in result["rows"])

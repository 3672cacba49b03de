"""A stand-in for ``shadowmask train`` that ends as its settings say, in a twentieth of a second."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import shadowmask.compare.processes as processes
import shadowmask.compare.runner as runner

# what a cell does hangs on its learning rate; a file counts how often it was started
FAKE = """
import json, os, pathlib, sys, time
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
folder = pathlib.Path(flags["--output_dir"])
seed, rate = int(flags["--seed"]), flags["--learning_rate"]
with open("started.txt", "a") as file:
    file.write(f"{flags['--method']} {seed}\\n")
folder.mkdir(parents=True)
loss = None if rate == "nan" else 0.5
rows = [{"step": n + 1, "reward": n / 60 + seed, "loss": loss, "grad_norm": 1.0} for n in range(60)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
if rate == "slow":
    time.sleep(60)
if rate == "crash" and not os.path.exists("repaired"):
    sys.exit("shadowmask train: the cache is on fire")
base = {"dense": 0.9, "naive": 0.4, "smd": 0.7}[flags["--method"]]
caches = ["dense", "evicted", *json.loads(flags["--eval_caches"])]
found = {name: {"mean": base + seed / 100, "standard_error": 0.0, "prompts": 200} for name in caches}
(folder / "accuracy_after.json").write_text(json.dumps(found))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory in which cells are fakes."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, str(tmp_path / "fake.py")])
    monkeypatch.setattr(runner, "POLL", 0.01)
    monkeypatch.chdir(tmp_path)
    return tmp_path

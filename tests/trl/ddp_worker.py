"""Two processes of ``test_ddp`` run this: train three steps, compare weights over ranks, write the log."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shadowmask.trl import SMDTrainer
from tiny_models import make_model
from tiny_trl import letters, make_config, make_dataset, make_tokenizer

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = make_config(folder, per_device_train_batch_size=4, num_iterations=2, ddp_backend="gloo")
    trainer = SMDTrainer(
        make_model("llama-gqa", torch.float32),
        letters,
        config,
        make_dataset(),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    others = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights)
    if dist.get_rank() == 0:
        spread = max(float((other - weights).abs().max()) for other in others)
        rows = [row for row in trainer.state.log_history if "loss" in row]
        (folder / "result.json").write_text(
            json.dumps({"world": dist.get_world_size(), "spread": spread, "rows": rows})
        )
    trainer.end()

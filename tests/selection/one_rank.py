"""One of the processes of test_sharded_selection.py: does its share of every case and saves what it then has.

Run with its rank, the number of ranks, and a folder in which `inputs<rank>.pt` holds the example's path and the cases.
"""

from __future__ import annotations

import datetime
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def load(path: str) -> Any:
    """The example as a module: its functions are what is tested."""
    spec = importlib.util.spec_from_file_location("sharded_selection", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    inputs = torch.load(folder / f"inputs{rank}.pt", weights_only=False)
    example, results = load(inputs["example"]), {}
    for name, case in inputs["cases"].items():
        plan, own_plan, cuts = case["plan"], case["own_plan"], case["cuts"]
        over_rows = example.select_over_rows(case["index_q"], case["cache"], plan, case["bounds"])
        over_contexts = example.select_over_contexts(case["index_q"], case["own_cache"], own_plan, plan, cuts)
        attended = example.attend_over_contexts(
            case["q"], case["gate"], case["own_cache"], own_plan, over_contexts, plan, cuts
        )
        results[name] = {"rows": over_rows, "contexts": over_contexts, "attended": attended}
    torch.save(results, folder / f"results{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

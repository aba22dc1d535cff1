"""One rank of test_tensor_parallel.py: loads a checkpoint with tp_plan="auto", says what it says with and without us.

Run by torchrun with the folder of a model, a file with a prompt, and a folder for the results.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers

from flashqsa.integrations import hf


def stable_topk(scores: torch.Tensor, count: int, dim: int = -1) -> Any:
    """In place of `Tensor.topk`, which leaves ties undefined."""
    values, ids = scores.sort(dim=dim, descending=True, stable=True)
    return SimpleNamespace(values=values.narrow(dim, 0, count), indices=ids.narrow(dim, 0, count))


@torch.no_grad()
def say(model: Any, prompt: torch.Tensor) -> dict[str, torch.Tensor]:
    out = model.generate(prompt, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return {"text": out.sequences, "logits": torch.stack(out.logits, dim=1)}


def main(folder: str, prompt_file: str, results: str) -> None:
    dist.init_process_group("gloo")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto").eval()
    prompt = torch.load(prompt_file)
    hf.enable(model)
    said = {"ours": say(model, prompt)}
    rows = [layer.rows for layer in hf.report(model)]
    hf.disable(model)
    torch.Tensor.topk = stable_topk  # type: ignore[method-assign]
    said["stock"] = say(model, prompt)
    sharded = [name for name, parameter in model.named_parameters() if hasattr(parameter, "to_local")]
    torch.save(said | {"sharded": sharded, "rows": rows}, Path(results) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

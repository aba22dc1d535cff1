"""One engine: reads a job, generates, writes tokens and calls. Run by the tests, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    exec(job["before"])
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["checkpoint"], skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
        **({"max_model_len": 3072} | job["options"]),
    )  # fmt: skip
    from vllm.models.qwen4_exp.nvidia.model import Qwen4ExpForCausalLM

    from flashqsa.integrations import vllm_plugin

    steps = [0]
    forward = Qwen4ExpForCausalLM.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        return forward(self, *args, **kwargs)

    Qwen4ExpForCausalLM.forward = counting
    before = vllm_plugin.report()
    sampling = SamplingParams(max_tokens=job["max_tokens"], temperature=0, detokenize=False, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    groups = [[prompt] for prompt in prompts] if job["one_by_one"] else [prompts]
    outputs = [output for group in groups for output in llm.generate(group, sampling, use_tqdm=False)]
    calls = {name: calls - before.get(name, 0) for name, calls in vllm_plugin.report().items()}
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    Path(sys.argv[2]).write_text(json.dumps({"tokens": tokens, "calls": calls, "steps": steps[0]}))


if __name__ == "__main__":
    main()

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
    from vllm.v1.core.sched.scheduler import Scheduler

    from flashqsa.integrations import vllm_plugin

    steps, preemptions = [0], [0]
    preempt = Scheduler._preempt_request

    def counting_preempt(self: Any, *args: Any, **kwargs: Any) -> Any:
        preemptions[0] += 1
        return preempt(self, *args, **kwargs)

    Scheduler._preempt_request = counting_preempt
    forward = Qwen4ExpForCausalLM.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps[0] += 1
        return forward(self, *args, **kwargs)

    Qwen4ExpForCausalLM.forward = counting
    before = vllm_plugin.report()
    sampling = SamplingParams(
        max_tokens=job["max_tokens"], temperature=0, detokenize=False, ignore_eos=True, logprobs=1
    )
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    groups = [[prompt] for prompt in prompts] if job["one_by_one"] else [prompts]
    outputs = [output for group in groups for output in llm.generate(group, sampling, use_tqdm=False)]
    calls = {name: calls - before.get(name, 0) for name, calls in vllm_plugin.report().items()}
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    chosen = [output.outputs[0] for output in outputs]
    result = {
        "tokens": tokens,
        "logprobs": [
            [row[token].logprob for row, token in zip(one.logprobs, one.token_ids, strict=True)] for one in chosen
        ],
        "cached_tokens": [output.num_cached_tokens for output in outputs],
        "preemptions": preemptions[0],
        "calls": calls,
        "steps": steps[0],
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

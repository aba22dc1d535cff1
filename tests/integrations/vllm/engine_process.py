"""One engine: reads a job, generates, writes tokens and calls. Run by the tests, in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    exec(job["before"])
    from vllm import LLM

    llm = LLM(
        job["checkpoint"], skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
        **({"max_model_len": 3072} | job["options"]),
    )  # fmt: skip
    from vllm.v1.core.sched.scheduler import Scheduler

    steps, preemptions, drafted = [0], [0], [0]
    preempt, schedule = Scheduler._preempt_request, Scheduler.schedule

    def counting_preempt(self: Any, *args: Any, **kwargs: Any) -> Any:
        preemptions[0] += 1
        return preempt(self, *args, **kwargs)

    def counting_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled = schedule(self, *args, **kwargs)
        steps[0] += scheduled.total_num_scheduled_tokens > 0
        drafted[0] += sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        return scheduled

    Scheduler._preempt_request, Scheduler.schedule = counting_preempt, counting_schedule
    before = llm.collective_rpc(calls_of_rank)
    groups = [list(range(len(job["prompts"])))]
    if job["one_by_one"]:
        groups = [[index] for index in groups[0]]
    if job["then_one_by_one"]:
        groups += [[index] for index in groups[0]]
    outputs = [output for group in groups for output in generate(llm, job, group)]
    after = llm.collective_rpc(calls_of_rank)
    chosen = [output.outputs[0] for output in outputs]
    result = {
        "tokens": [list(one.token_ids) for one in chosen],
        "logprobs": [
            [row[token].logprob for row, token in zip(one.logprobs, one.token_ids, strict=True)] for one in chosen
        ],
        "cached_tokens": [output.num_cached_tokens for output in outputs],
        "preemptions": preemptions[0],
        "rank_calls": [
            {name: calls - first.get(name, 0) for name, calls in last.items()}
            for first, last in zip(before, after, strict=True)
        ],
        "steps": steps[0],
        "drafted": drafted[0],
        "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


def calls_of_rank(worker: Any) -> dict[str, int]:
    """Runs in the process of each rank."""
    from flashqsa.integrations import vllm_plugin

    return vllm_plugin.report()


def generate(llm: Any, job: dict[str, Any], group: list[int]) -> list[Any]:
    """Outputs of some prompts together; those to abort end after their second token."""
    from vllm import SamplingParams

    engine, latest, aborted = llm.llm_engine, {}, set()
    for index in group:
        seeded = {"temperature": 1.0, "seed": job["seeds"][index]} if job["seeds"] else {"temperature": 0}
        sampling = SamplingParams(
            max_tokens=job["max_tokens"], detokenize=False, ignore_eos=True, logprobs=1, **seeded
        )  # fmt: skip
        engine.add_request(str(index), {"prompt_token_ids": job["prompts"][index]}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            latest[output.request_id] = output
        ending = [
            str(index) for index in job["abort"]
            if str(index) in latest and str(index) not in aborted and len(latest[str(index)].outputs[0].token_ids) >= 2
        ]  # fmt: skip
        engine.abort_request(ending)
        aborted |= set(ending)
    return [latest[str(index)] for index in group]


if __name__ == "__main__":
    main()

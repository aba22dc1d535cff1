"""Speculative decoding on `PagedPool`: drafts reuse a selection, one step verifies them, rejected ones go."""

import torch
from paged_engine import CONFIG, VOCAB, Model

import flashqsa

DRAFTS, NEW = 3, 48


def open_pool(prompt_tokens: int) -> flashqsa.PagedPool:
    pages = -(-(prompt_tokens + NEW + DRAFTS) // 16)
    pool = flashqsa.PagedPool.from_config(
        CONFIG, page_tokens=16, num_pages=pages, num_rings=1, speculative_rows=DRAFTS, dtype=torch.float32
    )
    pool.open("r")
    return pool


def decode(model: Model, prompt: list[int]) -> list[int]:
    """One token a step."""
    pool, tokens, begin = open_pool(len(prompt)), list(prompt), 0
    while len(tokens) < len(prompt) + NEW:
        logits, _ = model(tokens[begin:], pool, pool.plan_step({"r": len(tokens) - begin}))
        begin = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    return tokens


def speculate(model: Model, prompt: list[int]) -> tuple[list[int], int]:
    """The same tokens in fewer verified steps, and how many steps that took."""
    pool = open_pool(len(prompt))
    logits, selections = model(prompt, pool, pool.plan_step({"r": len(prompt)}))
    tokens, row, steps = [*prompt, int(logits[-1].argmax())], len(prompt) - 1, 0
    while len(tokens) < len(prompt) + NEW:
        # Drafts score nothing: they attend what the last accepted row selected, and everything after it as tail.
        reused = [selection.take(torch.tensor([row])) for selection in selections]
        drafted = tokens[-1:]
        for _ in range(DRAFTS):
            logits, _ = model(drafted[-1:], pool, pool.plan_step({"r": 1}), reused)
            drafted.append(int(logits[-1].argmax()))
        pool.rollback("r", rows=DRAFTS)
        # The last token and all drafts in one step; each row selects for itself and writes its caches anew.
        logits, selections = model(drafted, pool, pool.plan_step({"r": len(drafted)}))
        wanted = logits.argmax(-1).tolist()
        row = next((n for n in range(DRAFTS) if wanted[n] != drafted[n + 1]), DRAFTS)
        pool.rollback("r", rows=DRAFTS - row)
        tokens += wanted[: row + 1]
        steps += 1
    return tokens[: len(prompt) + NEW], steps


torch.manual_seed(0)
model, prompt = Model().eval(), torch.randint(VOCAB, (500,)).tolist()
tokens, steps = speculate(model, prompt)
print(f"{NEW} tokens in {steps} verified steps of {1 + DRAFTS} rows")
print(f"one token a step: {'the same' if decode(model, prompt) == tokens else 'other'} tokens")

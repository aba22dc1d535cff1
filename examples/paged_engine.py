"""A paged engine on `PagedPool`: requests come and go, prompts in chunks and decode rows share the steps."""

import torch
from torch import nn

import flashqsa

CONFIG = flashqsa.QSAConfig(
    hidden_size=128, q_heads=4, kv_heads=2, head_dim=32, rotary_dim=16, index_heads=2, index_head_dim=16,
    budget_tokens=64, block_tokens=4, qsa_layer_ids=(0, 1),
)  # fmt: skip
VOCAB, PAGE, CHUNK = 200, 16, 96


class Model(nn.Module):
    """Embedding, QSA layers, head: the rest of a real model would stand between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, CONFIG.hidden_size), nn.Linear(CONFIG.hidden_size, VOCAB)
        self.layers = nn.ModuleList(flashqsa.QSAAttention(CONFIG, layer_id) for layer_id in CONFIG.qsa_layer_ids)
        self.norm = nn.RMSNorm(CONFIG.hidden_size)
        self.rope = flashqsa.RopeTable.build(CONFIG.rope_parameters, rotary_dim=CONFIG.rotary_dim, num_positions=2048)

    @torch.no_grad()
    def forward(self, token_ids, pool, plan, reused=None):
        """Logits of the rows of a step, and what each layer selected; `reused` are selections of an earlier step."""
        hidden, selections = self.embed(torch.tensor(token_ids)), []
        for layer, cache, earlier in zip(self.layers, pool.caches, reused or [None] * len(pool.caches), strict=True):
            output, selection = layer(self.norm(hidden), plan.positions, self.rope, cache, plan, selection=earlier)
            hidden = hidden + 10 * output
            selections.append(selection)
        return self.head(self.norm(hidden)), selections


class Engine:
    """Serves what is submitted; whoever does not fit waits."""

    def __init__(self, model: Model, pages: int, requests: int) -> None:
        self.model, self.waiting, self.running, self.done = model, [], {}, {}  # waiting: (name, prompt, end)
        self.pool = flashqsa.PagedPool.from_config(
            CONFIG, page_tokens=PAGE, num_pages=pages, num_rings=requests, dtype=torch.float32
        )

    def step(self) -> None:
        while self.waiting and self.pool.free_rings and -(-self.waiting[0][2] // PAGE) <= self.pool.free_pages:
            name, prompt, end = self.waiting.pop(0)
            self.pool.open(name)
            self.pool.extend(name, end)  # reserves all its pages, so that it never has to stop
            self.running[name] = list(prompt), end
        new = {name: tokens[self.pool.length(name) :][:CHUNK] for name, (tokens, _) in self.running.items()}
        plan = self.pool.plan_step({name: len(rows) for name, rows in new.items()})
        logits, _ = self.model([token for rows in new.values() for token in rows], self.pool, plan)
        last_rows = plan.query_starts[1:].to(torch.int64) - 1
        for name, token in zip(new, logits[last_rows].argmax(-1).tolist(), strict=True):
            tokens, end = self.running[name]
            if self.pool.length(name) == len(tokens):  # else its prompt goes on
                tokens.append(token)
            if len(tokens) == end:
                self.done[name], _ = self.running.pop(name)
                self.pool.close(name)


def serve(work: dict[str, list[int]], requests: int) -> tuple[dict[str, list[int]], int]:
    """Prompts with twelve tokens more, and how many steps that took."""
    engine, steps = Engine(model, pages=40, requests=requests), 0
    engine.waiting.extend((name, prompt, len(prompt) + 12) for name, prompt in work.items())
    while engine.waiting or engine.running:
        engine.step()
        steps += 1
    return engine.done, steps


if __name__ == "__main__":
    torch.manual_seed(0)
    model, work = Model().eval(), {f"r{n}": torch.randint(VOCAB, (40 * n,)).tolist() for n in range(1, 8)}
    (together, steps), (alone, longer) = serve(work, requests=4), serve(work, requests=1)
    print(f"{len(together)} requests in {steps} steps, {longer} for one after the other")
    print("the same tokens" if together == alone else "other tokens")

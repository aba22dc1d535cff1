"""A selection study on a tiny random model: what is selected, what other selections cost, and a recording replayed."""

import torch
from torch.nn.functional import kl_div
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

import flashqsa
from flashqsa import analysis
from flashqsa.integrations import hf
from flashqsa.testing import tiny_config

torch.manual_seed(0)
torch.set_grad_enabled(False)
model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**tiny_config())).eval()
prompt = torch.randint(2, 512, (1, 900))

with flashqsa.record(model) as recording:  # works with any prompt, checkpoint and device that the model runs on
    own = model(prompt).logits
for layer_id in recording.layer_ids:
    rows = analysis.layer_rows(recording, layer_id)
    overlap, chance = analysis.neighbour_overlap(rows)[rows.sparse].mean(), rows.block_share[rows.sparse].mean()
    print(f"layer {layer_id}: {len(rows)} rows attend {analysis.context_share(rows).mean():.0%} of their context;")
    print(f"  neighbours share {overlap:.0%} of their blocks, {chance:.0%} by chance")


def newest(context):
    """Selector: the newest blocks within the model's budget."""
    visible = context.plan.visible_blocks[:, None]
    ids = (visible - context.plan.topk_blocks).clamp(min=0) + torch.arange(context.plan.topk_blocks, dtype=torch.int32)
    return torch.where(ids < visible, ids, -1)


with hf.enabled(model, budget_tokens=1024):  # more than there is: dense attention
    dense = model(prompt).logits.log_softmax(-1)
choices = {f"budget {tokens}": {"budget_tokens": tokens} for tokens in (16, 64, 256)} | {"newest": {"selector": newest}}
for name, choice in choices.items():
    with hf.enabled(model, **choice):
        logits = model(prompt).logits.log_softmax(-1)
    print(f"{name}: KL {kl_div(logits, dense, log_target=True, reduction='sum') / prompt.numel():.2e} from dense")

with recording.replay(model):  # the same selections, whatever computed them
    same = torch.equal(model(prompt).logits, own)
print(f"replayed: {'the same' if same else 'other'} logits")

"""A transformers model with its QSA layers on FlashQSA: generate, look at what was attended, compare with stock."""

import torch
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from flashqsa.integrations import hf
from flashqsa.testing import tiny_config

torch.manual_seed(0)
model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**tiny_config())).eval()
prompt = torch.randint(2, 512, (1, 300))
options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(prompt)}

hf.enable(model)  # or hf.enable() for every qwen4_exp model of the process
tokens = model.generate(prompt, **options)
for layer in hf.report(model):
    print(
        f"layer {layer.layer_id}: {layer.rows} rows, {layer.dense_rows} of them within the budget; "
        f"{layer.share_selected:.0%} of the visible blocks attended"
    )

hf.disable(model)
stock = model.generate(prompt, **options)
same = int((tokens == stock).cumprod(dim=1).sum()) - prompt.shape[1]
print(f"{same} of {options['max_new_tokens']} new tokens are those of stock transformers")

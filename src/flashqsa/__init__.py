"""FlashQSA: Qwen Sparse Attention (qwen4_exp) for PyTorch."""

__version__ = "0.1.0.dev0"

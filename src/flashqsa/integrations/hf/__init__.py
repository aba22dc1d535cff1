"""Drop-in for Hugging Face transformers: ``hf.enable(model)``, and its QSA layers run on FlashQSA."""

from flashqsa.integrations.hf.patch import disable, enable, enabled, observed, qsa_layers
from flashqsa.integrations.hf.report import LayerReport, report
from flashqsa.integrations.hf.selector import SelectorContext

__all__ = ["LayerReport", "SelectorContext", "disable", "enable", "enabled", "observed", "qsa_layers", "report"]

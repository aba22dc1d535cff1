"""Recording which blocks a model selects, step by step, and replaying it."""

from flashqsa.recording.contents import LayerRecord, Recording, StepRecord
from flashqsa.recording.recorder import record

__all__ = ["LayerRecord", "Recording", "StepRecord", "record"]

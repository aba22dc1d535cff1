"""The step plan: who is in the batch, where every row reads and writes. Built once a step, shared by all layers."""

from flashqsa.plan.build import plan_step
from flashqsa.plan.step import RowGroup, StepPlan

__all__ = ["RowGroup", "StepPlan", "plan_step"]

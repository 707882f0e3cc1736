"""What people look at: plans, runs as they go, runs as they are."""

from rbdc.report.plan import plan_table, readable_flops, save_plan_plot

__all__ = ["plan_table", "readable_flops", "save_plan_plot"]

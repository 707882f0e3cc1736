"""What people look at: tables, plots, pages."""

from rbdc.report.plan import plan_table, readable_flops, save_plan_plot

__all__ = ["plan_table", "readable_flops", "save_plan_plot"]

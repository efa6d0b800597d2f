"""Measuring: prompts, timing, reports."""

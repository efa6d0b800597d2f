"""Drafters: what proposes trees. Each is a frozen dataclass of settings over pure functions."""

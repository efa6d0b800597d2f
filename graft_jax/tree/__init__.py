"""Draft trees: fixed-capacity arrays, and the ways to build them."""

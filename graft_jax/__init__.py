"""Lossless speculative decoding in JAX and Pallas."""

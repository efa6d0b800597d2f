"""Retrieval: successor tables on the device, and templates filled from them."""

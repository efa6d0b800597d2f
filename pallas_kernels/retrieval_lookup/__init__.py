"""`api.retrieval_lookup`: a template filled from the successor table."""

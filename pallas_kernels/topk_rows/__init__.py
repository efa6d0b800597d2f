"""`api.topk_rows`: the k best entries of each row."""

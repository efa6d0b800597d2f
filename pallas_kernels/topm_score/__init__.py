"""`api.topm_score`: corrected scores of candidates and the best of them."""

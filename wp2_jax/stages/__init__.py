"""The stages of the curriculum: what each trains, from which weights, on which data (spec section 5)."""

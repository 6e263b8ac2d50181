"""Shape rules: pointwise."""

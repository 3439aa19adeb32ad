"""Search, measures, statistics and evaluation in both galleries."""

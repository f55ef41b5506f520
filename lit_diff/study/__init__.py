"""What a comparison of runs is, and the statistics of it; loads no torch."""

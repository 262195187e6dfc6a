"""What the multi-rank tests share: rank processes, exact data, comparisons that say where."""

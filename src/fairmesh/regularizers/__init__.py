"""[regularizer] What the adversary may choose, and its exact worst case."""

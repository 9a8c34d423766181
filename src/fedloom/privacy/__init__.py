"""What it costs: mechanisms that turn per-example losses into the gradient a silo may learn from."""

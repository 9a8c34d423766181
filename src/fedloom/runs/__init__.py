"""What remains of a run: its folder, checkpoints from which it goes on exactly, and the records of what happened."""

"""What people look at: one self-contained HTML page about a run, or about several side by side."""

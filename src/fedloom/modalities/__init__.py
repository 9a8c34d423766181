"""What a record may be: one file for each kind, which carries all that depends on it."""

"""Who gives what to whom: scopes, sharing plans, updates, merging, and the guard at the one door."""

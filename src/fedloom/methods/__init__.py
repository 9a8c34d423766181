"""The recipes: one file a method, headed by its citation."""

"""Groups that nobody named: what each silo releases once, and which silos belong together by it."""

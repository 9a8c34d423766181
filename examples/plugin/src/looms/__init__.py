"""A method and a prior that fedloom finds by this package's entry points."""

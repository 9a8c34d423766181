"""The papers' tables, obtained beside published: declared as data, run as sweeps, rendered from result files alone."""

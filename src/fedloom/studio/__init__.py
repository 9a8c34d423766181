"""A local web page over a folder of runs: look, compare, explore; it reads and never writes."""
